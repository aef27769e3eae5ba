"""Compile every Triton kernel without a GPU, and collect ptxas' reports.

    python benchmarks/studies/gpu_static.py

All variants (dtypes, head sizes, bits, autotune configurations) are compiled for the cards of
`gpu_compiler`. A row has registers, spills and shared memory by ptxas, the resulting occupancy, and
bytes per FLOP of the main loop. An existing file is updated: only new variants and changed kernels
are compiled. The exit status is 1 if a kernel does not compile, spills, does not fit, or has the
fault of `left_under_way`. `--check` compares the file with the variants, and compiles only
`--sample` of them.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # Triton reads it when it is imported

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_compiler import CARDS, Card, KernelLaunch, Variant, compiled, identity, launches  # noqa: E402

from flexgen_h2o.cli.entry_point import exit_status  # noqa: E402
from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout, IndexLayout  # noqa: E402
from flexgen_h2o.config.weight_layout import MatrixLayout  # noqa: E402
from flexgen_h2o.files.rows import check_header, format_cell  # noqa: E402
from flexgen_h2o.kernels.arguments import (  # noqa: E402
    DEFAULT_ARGUMENTS,
    EvictionArguments,
    QuantizedMatrix,  # noqa: E402
)
from flexgen_h2o.kernels.triton import decode as triton_decode  # noqa: E402
from flexgen_h2o.kernels.triton import groups as triton_groups  # noqa: E402
from flexgen_h2o.kernels.triton import hot_set as triton_hot_set  # noqa: E402
from flexgen_h2o.kernels.triton import matrix as triton_matrix  # noqa: E402
from flexgen_h2o.kernels.triton import prefill as triton_prefill  # noqa: E402
from flexgen_h2o.kernels.triton import recall as triton_recall  # noqa: E402
from flexgen_h2o.kernels.triton import select as triton_select  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from csv_files import write_csv

COLUMNS = ("architecture", "card", "kernel", "operation", "dtype", "size", "bits", "constants",
           "triton", "source", "registers", "spill_stores", "spill_loads", "shared",
           "shared_limit", "programs", "occupancy", "bytes_per_flop", "left_under_way")
KEY = COLUMNS[:8]
"""Columns that identify a row."""
SAVED_EVERY = 60.0
"""Seconds between saves."""


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
HEAD_SIZES = (64, 80, 96, 128, 256)
"""Of published shapes: OPT 64, 80, 128; LLaMA 64, 128; GPT-NeoX 96; Pythia 64 to 256."""
BITS = (16, 8, 4)
GROUP = 4
"""Query heads of a KV head, if more than one."""
ROWS = (1, 2, 16, 32, 64, 65)
"""Rows of matmuls: few (without tensor cores), more, and unpacked."""
FEW_ROWS = (1, 2, 4, 8)
"""Rows for 12-bit and MXFP4 weights, without tensor cores."""
RECENT = 416
MANY_SLOTS = 16384
"""Slots of a decode step whose scores are reduced in parts."""
LENGTHS = (300, 1000, 2000, 4096, 8192, 16384, 32768, 65536)
"""Prompt lengths, up to the longest whose scores fit registers and one beyond. Strides are
multiples of 16, which Triton specializes."""


def variants() -> Iterator[Variant]:
    """Yield all variants in a fixed order."""
    for dtype in (HALF, BRAIN, FULL):
        for size in HEAD_SIZES:
            for scored in (True, False):
                yield Variant("prefill", dtype, size, 16, partial(_prefill, dtype, size, scored))
            for bits in BITS:
                for group, rotary in _decodes(dtype, size):
                    yield Variant("decode", dtype, size, bits,
                                  partial(_decode, dtype, size, bits, group, rotary))
                    if bits == 16:
                        yield Variant("decode", dtype, size, bits, partial(
                            _decode, dtype, size, bits, group, rotary, slots=MANY_SLOTS))
                yield Variant("select", dtype, size, bits,
                              partial(_select, dtype, size, bits, 4096, RECENT))
                if dtype == BRAIN or bits == 16:
                    yield Variant("recall", dtype, size, bits, partial(
                        _recall, dtype, size, bits, GROUP if dtype == BRAIN else 1, 4096))
                if bits < 16:
                    yield Variant("groups", dtype, size, bits, partial(_groups, dtype, size, bits))
        for bits in (8, 4):
            for rows in ROWS:
                yield Variant("product", dtype, rows, bits,
                              partial(_product, dtype, rows, MatrixLayout(256, 512, bits)))
                yield Variant("cut_product", dtype, rows, bits,
                              partial(_product, dtype, rows, MatrixLayout(256, 576, bits)))
            yield Variant("unpack", dtype, 3, bits,
                          partial(_unpack, dtype, MatrixLayout(256, 512, bits)))
        for operation, layout in (("", MatrixLayout(256, 512, 12)),
                                  ("mxfp4_", MatrixLayout(256, 512, 4, 32, mxfp4=True))):
            for rows in FEW_ROWS:
                yield Variant(f"{operation}product", dtype, rows, layout.bits,
                              partial(_product, dtype, rows, layout))
            yield Variant(f"{operation}unpack", dtype, 3, layout.bits,
                          partial(_unpack, dtype, layout))
    for length in LENGTHS:
        for mean in (False, True):
            yield Variant("select", HALF, 128, 16,
                          partial(_select, HALF, 128, 16, length, length // 64 * 16, mean=mean))
        yield Variant("recall", BRAIN, 128, 16,
                      partial(_recall, BRAIN, 128, 16, 8, length, index_bits=2))
    yield Variant("select", HALF, 128, 16, partial(_select, HALF, 128, 16, 4096, 0))
    for bits in BITS:
        for dtype, group in ((HALF, 1), (BRAIN, GROUP)):
            yield Variant("decode", dtype, 128, bits,
                          partial(_decode, dtype, 128, bits, group, 0, scored=False))
        if bits < 16:
            yield Variant("recall", HALF, 128, bits, partial(_recall, HALF, 128, bits, 1, 4096))


def _decodes(dtype: torch.dtype, size: int) -> list[tuple[int, int]]:
    """Return (query heads of a KV head, rotary dimensions) pairs, which differ by dtype."""
    if dtype == FULL:
        return [(1, size)]
    if dtype == BRAIN:
        return [(GROUP, size)]
    return [(1, 0), *([(1, size // 4)] if size in (80, 96) else [])]  # GPT-NeoX turns a quarter


def _eviction(*shape: int, rotary: int = 0, mean: bool = False) -> EvictionArguments:
    positions, ranks = torch.empty((2, *shape), dtype=torch.int32)
    cos, sin = torch.empty(2, shape[-1] + 1, max(1, rotary // 2))
    tables = (ranks, cos, sin) if rotary else (None, None, None)
    return EvictionArguments(torch.empty(shape), positions, *tables, mean=mean)


def _slots(dtype: torch.dtype, size: int, bits: int, *shape: int) -> torch.Tensor:
    if bits == 16:
        return torch.empty(2, *shape, size, dtype=dtype)
    return torch.empty(2, *shape, GroupLayout(size, bits).nbytes, dtype=torch.uint8)


def _decode(dtype: torch.dtype, size: int, bits: int, group: int, rotary: int, *,
            slots: int = 1024, scored: bool = True) -> None:
    shape = (1, 4, slots)
    q, k = torch.empty(1, 4 * group, size, dtype=dtype), torch.empty(1, 4, size, dtype=dtype)
    triton_decode.decode_attention(
        q, k, k, slots=_slots(dtype, size, bits, *shape),
        metadata=torch.empty(4, 1, dtype=torch.int32), layout=CacheLayout.from_bits(size, bits),
        eviction=_eviction(*shape, rotary=rotary, mean=rotary == 0) if scored
        else EvictionArguments.from_state(None))


def _prefill(dtype: torch.dtype, size: int, scored: bool) -> None:
    q, k = torch.empty(600, 4, size, dtype=dtype), torch.empty(600, 2, size, dtype=dtype)
    scores = torch.empty(2, 600) if scored else None
    triton_prefill.prefill_attention(q, k, k, [600], [600], scores, 0.98 if scored else 1.0)


def _select(dtype: torch.dtype, size: int, bits: int, length: int, heavy: int, *,
            mean: bool = False) -> None:
    """Select tokens; without heavy hitters there are no scores."""
    k = torch.empty(length, 1, size, dtype=dtype)
    shape, scores = (1, 1, heavy or RECENT), torch.empty(1, length) if heavy else None
    triton_select.select_heavy_hitters(
        k, k, scores, cuts=[length, heavy, 0 if heavy else RECENT],
        layout=CacheLayout.from_bits(size, bits),
        slots=_slots(dtype, size, bits, *shape), eviction=_eviction(*shape, mean=mean))


def _recall(dtype: torch.dtype, size: int, bits: int, group: int, length: int, *,
            index_bits: int = 4) -> None:
    """Run a decode step with recall that selects a fifth of `length` tokens."""
    layout = IndexLayout(size, index_bits)
    q, k = torch.empty(1, 4 * group, size, dtype=dtype), torch.empty(1, 4, size, dtype=dtype)
    slots = _slots(dtype, size, bits, 1, 4, length)
    index = torch.empty(1, 4, layout.tiles(length), layout.tile_bytes, dtype=torch.uint8)
    metadata = torch.empty(2, 1, dtype=torch.int32)
    selected = triton_recall.select_keys(
        q, k, index=index, metadata=metadata, layout=layout, top_k=length // 80 * 16,
        log_weights=None, variant=DEFAULT_ARGUMENTS)
    triton_recall.recall_attention(q, k, k, slots=slots, selected=selected, metadata=metadata,
                                   layout=CacheLayout.from_bits(size, bits),
                                   variant=DEFAULT_ARGUMENTS)
    triton_recall.index_keys(slots[0], index, torch.tensor([[length - 1], [length - 1], [1]]),
                             layout=layout,
                             key_layout=None if bits == 16 else GroupLayout(size, bits))
    slot_of, token_of, weights = (torch.empty(4, count, dtype=torch.int32)
                                  for count in (length, length // 40 * 16, length))
    _, moves, counts = triton_hot_set.claim_slots(selected, slot_of=slot_of, token_of=token_of,
                                                  log_weights=weights)
    triton_hot_set.copy_tokens(slots, slots, moves, counts)


def _groups(dtype: torch.dtype, size: int, bits: int) -> None:
    layout = GroupLayout(size, bits)
    records = triton_groups.quantize_groups(torch.empty(64, size, dtype=dtype), layout)
    triton_groups.dequantize_groups(records, layout)


def _product(dtype: torch.dtype, rows: int, layout: MatrixLayout) -> None:
    """Run a matmul of 512 inputs, or of 576, which are not divisible into whole parts."""
    x, out = (torch.empty(rows, size, dtype=dtype) for size in (layout.inputs, layout.outputs))
    triton_matrix.linear_quantized(x, _matrix(layout), out[0].clone(), out, layout.inputs > 512)


def _unpack(dtype: torch.dtype, layout: MatrixLayout) -> None:
    triton_matrix.unpack_rows(_matrix(layout), torch.zeros(3, dtype=torch.int64), dtype)


def _matrix(layout: MatrixLayout) -> QuantizedMatrix:
    return QuantizedMatrix(torch.empty(layout.nbytes, dtype=torch.uint8), layout)


def key(row: dict) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def read(path: Path) -> dict[tuple[str, ...], dict]:
    """Return the rows of a file by key; none without a file. Raises `UserError`."""
    if not path.exists():
        return {}
    check_header(path, COLUMNS)
    with path.open(newline="", encoding="utf-8") as file:
        return {key(row): row for row in csv.DictReader(file)}


def stale(row: dict | None, wanted: dict) -> bool:
    """Return whether a row is missing, or of another kernel or compiler version."""
    return row is None or any(row[name] != wanted[name] for name in ("triton", "source"))


def faults(row: dict) -> str:
    """Return the faults of a row as text; empty without faults."""
    problems = []
    if int(row["spill_stores"]) or int(row["spill_loads"]):
        problems.append(f"spills {row['spill_stores']} + {row['spill_loads']} bytes")
    if int(row["shared"]) > int(row["shared_limit"]):
        problems.append(f"takes {row['shared']} of {row['shared_limit']} bytes of shared memory")
    if int(row["left_under_way"]):
        problems.append("may write registers that a product has not read yet")
    return ", ".join(problems)


def compile_all(pairs: list[tuple[Card, KernelLaunch]], path: Path) -> int:
    """Write a row for each launch. Returns the number of faults."""
    recorded = read(path)
    rows: dict[tuple[str, ...], dict] = {}
    saved, wrong = time.monotonic(), 0
    for number, (card, launch) in enumerate(pairs, 1):
        row = identity(card, launch)
        place = key(row)
        previous = recorded.get(place)
        rows[place] = row = compiled(card, launch) if stale(previous, row) else previous
        if fault := faults(row):
            wrong += 1
            print(f"{number}/{len(pairs)} {' '.join(place)}: {fault}", flush=True)
        if time.monotonic() - saved > SAVED_EVERY:
            write_csv(path, COLUMNS, (recorded | rows).values(), digits=6)
            saved = time.monotonic()
    write_csv(path, COLUMNS, rows.values(), digits=6)
    return wrong


def check(pairs: list[tuple[Card, KernelLaunch]], path: Path, sample: int) -> list[str]:
    """Return the differences between a file and the variants; compile `sample` rows."""
    recorded = read(path)
    expected = {key(row): (row, card, launch) for card, launch in pairs
                for row in [identity(card, launch)]}
    problems = [f"missing: {' '.join(place)}" for place in expected.keys() - recorded.keys()]
    problems += [f"not a variant: {' '.join(place)}" for place in recorded.keys() - expected.keys()]
    problems += [f"{' '.join(place)}: {fault}" for place, row in recorded.items()
                 if (fault := faults(row))]
    both = [place for place in expected if place in recorded]
    problems += [f"of an older kernel: {' '.join(place)}" for place in both
                 if recorded[place]["source"] != expected[place][0]["source"]]
    is_current = all(row["triton"] == triton.__version__ for row in recorded.values())
    for place in both[:: max(1, len(both) // sample)] if sample else ():
        _, card, launch = expected[place]
        row = {name: str(format_cell(value)) for name, value in compiled(card, launch).items()}
        if is_current and any(row[name] != recorded[place][name] for name in COLUMNS):
            problems.append(f"compiles to something else: {' '.join(place)}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/gpu_static.csv"))
    parser.add_argument("--architectures", nargs="+", type=int, default=list(CARDS),
                        choices=list(CARDS), help="only these; other rows are dropped")
    parser.add_argument("--check", action="store_true", help="check the file and write nothing")
    parser.add_argument("--sample", type=int, default=6, help="rows that --check compiles")
    args = parser.parse_args()
    all_launches = [(CARDS[one], launch) for one in args.architectures
                    for launch in launches(CARDS[one], variants())]
    if args.check:
        problems = check(all_launches, args.csv, args.sample)
        print("\n".join(problems[:20]) or f"{len(all_launches)} variants, as {args.csv} has them")
        sys.exit(bool(problems))
    wrong = compile_all(all_launches, args.csv)
    print(f"{len(all_launches)} variants, {wrong} with a fault; {args.csv}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    sys.exit(exit_status(main))
