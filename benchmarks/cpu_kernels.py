"""Time the CPU kernels against PyTorch's and against the machine's limits.

    python benchmarks/cpu_kernels.py

Each operation is checked against `kernels.reference` on a small random case, then timed.
Contestants take turns within each repeat, with eight successive calls if these are short; figures
are medians of all calls. A contestant that has taken 6 seconds is done after three calls. Our
decode attention is captured first, as in a run. Memory-bound operations rotate through at least
1 GB of copies, so that no cache holds them. The roofline is the bytes to move over the memory rate
(the median of a 1 GB read in each repeat), or the FLOPs (of the causal half for prefill) over
PyTorch's matmul rate at 2048 rows, in the faster of bfloat16 and float32, before or after the case.
`extra_mb` is the peak memory of a scored prefill in a fresh process, without its output.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from kernel_timing import (
    DTYPE,
    INDEXED,
    INVARIANT,
    OURS,
    OURS_4,
    OURS_4_8,
    OURS_8,
    OURS_8_8,
    OURS_12,
    OURS_MXFP4,
    PLAIN,
    RANGE,
    SCORELESS,
    SDPA,
    TimedRows,
    check,
    copies,
    error,
    plain_decode,
    plain_prefill,
    recall,
    sdpa_decode,
    sdpa_prefill,
    select_by_gather,
    select_by_index,
)

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.files.writing import check_folder
from flexgen_h2o.h2o.eviction import Cut, Eviction, EvictionState
from flexgen_h2o.kernels import dispatch, ops
from flexgen_h2o.kernels.arguments import EvictionArguments, QuantizedMatrix
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.metrics.provenance import cpu_model
from flexgen_h2o.models import layers

HEADS, DIM = 32, 128
DECODES = [(16, 32, 205), (16, 32, 1024), (16, 8, 205), (16, 8, 1024), (1, 8, 32768)]
"""Sequences, KV heads, slots."""
PREFILLS = [(4, 2048), (1, 8192)]
"""Sequences, tokens of each."""
SELECTION = (16, Cut(2048, heavy=205, recent=204))
GROUPED = (16, 32, 1024, DIM)
MATRIX, ROWS = (16384, 4096), (1, 2, 4, 8, 16, 32, 64, 256, 1024)
"""Outputs and inputs of the matrix, and rows of the matmul."""
COMPARED_ROWS = (1, 2, 4, 8, 16, 20, 24, 32, 48, 64)
"""Rows for which each implementation of a matmul is timed."""
INVARIANT_ROWS = (1, 2, 4, 8, 16, 64, 256)
"""Rows for which batch-invariant matmuls are timed."""
READING_ROWS = 16
"""Most rows for which the roofline is reading the matrix; for more it is FLOPs."""
ROUNDED = [(8, 64), (4, 64), (4, 32)]
"""Bits and group size."""


def decode_step(slots: torch.Tensor, bits: int) -> dict:
    """Return random arguments of a decode step over full slots."""
    _, sequences, kv_heads, n, _ = slots.shape
    shape = (sequences, kv_heads, n)
    # Scores far apart, so that rounding changes no evicted slot.
    state = EvictionState(Eviction(), torch.rand(shape).argsort(-1) * 0.25,
                          torch.rand(shape).argsort(-1).to(torch.int32))
    metadata = torch.tensor([n, n + 1, n // 2, 1], dtype=torch.int32)[:, None].repeat(1, sequences)
    q, k, v = (torch.randn(sequences, heads, DIM, dtype=DTYPE)
               for heads in (HEADS, kv_heads, kv_heads))
    return {"q": q, "k": k, "v": v, "slots": slots, "metadata": metadata, "state": state,
            "layout": CacheLayout.from_bits(DIM, bits)}


def successive(steps: list[dict]) -> Iterator[dict]:
    """Yield the steps cyclically, each a token later than the last."""
    for count, step in enumerate(itertools.cycle(steps)):
        step["metadata"][1] = step["slots"].shape[3] + 1 + count
        yield step


DECODERS = {OURS: (16, ops.decode_attention), OURS_8: (8, ops.decode_attention),
            OURS_4: (4, ops.decode_attention), SDPA: (16, sdpa_decode),
            PLAIN: (16, plain_decode)}


def check_decode(kv_heads: int) -> None:
    for name, (bits, function) in DECODERS.items():
        if name == SDPA:  # computes no scores
            continue
        slots = torch.randn(2, 3, kv_heads, 93, DIM, dtype=DTYPE)
        if bits < 16:
            slots = reference.quantize_groups(slots, GroupLayout(DIM, bits))
        step = decode_step(slots, bits)
        state, other = step["state"], step | {"slots": slots.clone()}
        other["state"] = EvictionState(state.eviction, state.scores.clone(),
                                       state.positions.clone())
        (out, written), (expected, victims) = function(**step), reference.decode_attention(**other)
        check(f"decode: {name}, {kv_heads} KV heads", error(out, expected),
              error(state.scores, other["state"].scores),
              same=torch.equal(written, victims) and torch.equal(slots, other["slots"])
              and torch.equal(state.positions, other["state"].positions))


def captured_decode(step: dict) -> CapturedCalls:
    """Return the captured step, as in a run."""
    program = CapturedCalls()
    native.decode_attention(
        step["q"], step["k"], step["v"], slots=step["slots"], metadata=step["metadata"],
        layout=step["layout"],
        eviction=EvictionArguments.from_state(step["state"]), capture=program)
    return program


def decode(rows: TimedRows, quick: bool) -> None:
    for kv_heads in sorted({kv_heads for _, kv_heads, _ in DECODES}):
        check_decode(kv_heads)
    for sequences, kv_heads, n in DECODES:
        n = n // 16 if quick else n
        block = torch.randn(2, sequences, kv_heads, n, DIM, dtype=DTYPE)
        blocks = {16: block} | {bits: ops.quantize_groups(block, GroupLayout(DIM, bits))
                                for bits in (8, 4)}
        steps = {bits: [decode_step(slots, bits) for slots in copies(slots, quick)]
                 for bits, slots in blocks.items()}
        programs = {id(step): captured_decode(step) for group in steps.values() for step in group}
        # Contestants with 16-bit slots share one iterator over them, so that none is in a cache.
        rounds = {bits: successive(group) for bits, group in steps.items()}
        functions = {name: function for name, (_, function) in DECODERS.items()}
        inputs = {name: rounds[bits] for name, (bits, _) in DECODERS.items()}
        for name in (OURS, OURS_8, OURS_4):
            functions[name] = CapturedCalls.replay
            inputs[name] = ({"self": programs[id(step)]} for step in inputs[name])
        rows.measure("decode", f"batch {sequences}, {kv_heads} KV heads, {n} slots", functions,
                     inputs,
                     nbytes={name: blocks[bits].nbytes for name, (bits, _) in DECODERS.items()})


def scoreless(q, k, v, lengths, *, scores):
    return ops.prefill_attention(q, k, v, lengths)


PREFILLERS = {OURS: ops.prefill_attention, SCORELESS: scoreless, SDPA: sdpa_prefill,
              PLAIN: plain_prefill}


def prefill_case(sequences: int, length: int) -> dict:
    rows = sequences * length
    q, k, v = torch.randn(3, rows, HEADS, DIM, dtype=DTYPE)
    return {"q": q, "k": k, "v": v, "lengths": [length] * sequences,
            "scores": torch.rand(HEADS, rows)}


def prefill(rows: TimedRows, quick: bool) -> None:
    case = prefill_case(2, 301)
    scores = case["scores"].clone()
    expected = reference.prefill_attention(**case | {"scores": scores})
    for name, function in PREFILLERS.items():
        twin = case | {"scores": case["scores"].clone()}
        check(f"prefill: {name}", error(function(**twin), expected),
              error(twin["scores"], scores) if name in (OURS, PLAIN) else 0)
    for sequences, length in PREFILLS:
        length = length // 8 if quick else length
        shape = f"batch {sequences}, {length} tokens"
        functions = dict(PREFILLERS)
        if sequences == 1:
            del functions[PLAIN]  # takes many seconds a call
        cases = itertools.cycle([prefill_case(sequences, length) for _ in range(2)])
        rows.measure("prefill", shape, functions, dict.fromkeys(functions, cases),
                     flops=2 * HEADS * DIM * sequences * length * (length + 1))
        command = [sys.executable, __file__, "--extra-memory", str(sequences), str(length)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = next(row for row in rows.rows if (row["shape"], row["contestant"]) == (shape, OURS))
        row["extra_mb"] = float(done.stdout.split()[-1])
        print(f"prefill     {shape:33}  {OURS:15} extra memory {row['extra_mb']:.1f} MB")


def extra_memory(sequences: int, length: int) -> float:
    """Return the MB that a scored prefill adds to this process's peak, without its output."""
    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))

    PREFILLERS[OURS](**prefill_case(1, 2))  # loads code and starts threads
    case = prefill_case(sequences, length)
    ctypes.CDLL(None).malloc_trim(0)  # freed memory could hide new allocations
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    out = PREFILLERS[OURS](**case)
    return (status("VmHWM") - before - out.nbytes) / 1e6


def selection_case(sequences: int, cut: Cut) -> dict:
    rows, shape = sequences * cut.length, (sequences, HEADS, cut.heavy + cut.recent)
    k, v = torch.randn(2, rows, HEADS, DIM, dtype=DTYPE)
    state = EvictionState(Eviction(), torch.ones(shape), torch.ones(shape, dtype=torch.int32))
    return {"k": k, "v": v, "scores": torch.randn(HEADS, rows).exp(), "cuts": [cut] * sequences,
            "slots": torch.ones(2, *shape, DIM, dtype=DTYPE), "state": state}


def select(rows: TimedRows, quick: bool) -> None:
    functions = {OURS: ops.select_heavy_hitters, PLAIN: select_by_gather,
                 INDEXED: select_by_index}
    sequences, cut = SELECTION
    sequences = 1 if quick else sequences
    for case in (selection_case(2, Cut(333, 40, 31)), selection_case(sequences, cut)):
        reference.select_heavy_hitters(**case)
        for name, function in functions.items():
            twin = case | {"slots": torch.ones_like(case["slots"]), "state": EvictionState(
                Eviction(), *(torch.ones_like(x) for x in (case["state"].scores,
                                                           case["state"].positions)))}
            function(**twin)
            # Ties may be resolved differently; the kept scores must be equal.
            differ = (twin["state"].positions != case["state"].positions).float().mean().item()
            check(f"select: {name}, {case['cuts'][0].length} tokens, other positions", differ,
                  same=torch.equal(*(x["state"].scores.sort(-1).values for x in (case, twin)))
                  and (differ > 0 or torch.equal(case["slots"], twin["slots"])), bound=1e-3)
    nbytes = case["scores"].nbytes + 2 * case["slots"].nbytes  # kept K and V: read and written
    cases = itertools.cycle([case, selection_case(sequences, cut)])  # 1.3 GB
    rows.measure("select", f"batch {sequences}, {case['slots'].shape[3]} of {cut.length} tokens",
                 functions, dict.fromkeys(functions, cases),
                 nbytes=dict.fromkeys(functions, nbytes))


def groups(rows: TimedRows, quick: bool) -> None:
    shape = (1, *GROUPED[1:]) if quick else GROUPED
    for bits, operation in itertools.product((8, 4), ("quantize", "dequantize")):
        layout, name = GroupLayout(DIM, bits), f"{operation}_groups"
        functions = {OURS: getattr(ops, name), PLAIN: getattr(reference, name)}

        def inputs(*shape: int, bits=bits, operation=operation) -> torch.Tensor:
            x = torch.randn(shape, dtype=DTYPE)
            return x if operation == "quantize" else ops.quantize_groups(x, GroupLayout(DIM, bits))

        small, block = inputs(77, DIM), inputs(*shape)
        results = [function(small, layout) for function in functions.values()]
        check(f"{operation}: {OURS}, {bits} bits", error(*results), bound=1e-6)
        nbytes = block.nbytes + block[..., 0].numel() * results[0][0].nbytes
        key = "x" if operation == "quantize" else "packed"
        blocks = itertools.cycle([{key: x, "layout": layout} for x in copies(block, quick)])
        rows.measure(operation, f"{bits} bits, {' x '.join(map(str, shape))}", functions,
                     dict.fromkeys(functions, blocks), nbytes=dict.fromkeys(functions, nbytes))


def random_weight(quick: bool) -> torch.Tensor:
    return torch.randn(MATRIX[0] // 16 if quick else MATRIX[0], MATRIX[1], dtype=DTYPE) * 0.02


def cycled(weights: Sequence) -> Iterator[dict]:
    return itertools.cycle({"weight": weight} for weight in weights)


def quantized(weight: torch.Tensor, **options) -> QuantizedMatrix:
    layout = MatrixLayout(*weight.shape, **options)
    return QuantizedMatrix(ops.quantize_matrix(weight, layout), layout)


def linear(rows: TimedRows, quick: bool, counts: Sequence[int] = ROWS) -> None:
    """Time matmuls with one matrix in 16, 12, 8 and 4 bits and in MXFP4, and with 8-bit
    activations."""
    weight = random_weight(quick)
    matrices = {OURS_12: quantized(weight, bits=12), OURS_8: quantized(weight, bits=8),
                OURS_4: quantized(weight, bits=4),
                OURS_MXFP4: quantized(weight, bits=4, group=32, mxfp4=True)}
    matrices |= {name: replace(matrices[plain], activation_bits=8)
                 for name, plain in ((OURS_8_8, OURS_8), (OURS_4_8, OURS_4))}
    nbytes = {PLAIN: weight.nbytes, OURS: weight.nbytes} | {
        name: matrix.data.nbytes for name, matrix in matrices.items()}
    plain = copies(weight, quick)
    inputs = {PLAIN: plain, OURS: plain} | {
        name: [replace(matrix, data=data) for data in copies(matrix.data, quick)]
        for name, matrix in matrices.items()}
    for count in counts:
        x = torch.randn(count, MATRIX[1], dtype=DTYPE)
        out = torch.full((count, len(weight)), float("nan"), dtype=DTYPE)
        functions = {PLAIN: lambda weight, x=x, out=out: torch.mm(x, weight.t(), out=out)}
        for name in (OURS, *matrices):
            functions[name] = lambda weight, x=x, out=out: layers.linear(x, weight, out=out)
        if ops.linear_kernel(x, weight) is None:
            del functions[OURS]
        for name, function in functions.items():
            first = inputs[name][0]
            expected = torch.empty(count, len(weight))
            if isinstance(first, QuantizedMatrix):
                reference_matrix.linear_quantized(x, first, None, expected)
            else:
                expected = F.linear(x.float(), first.float())
            function(first)
            check(f"linear: {name}, {count} rows", error(out, expected))
        flops = 2 * count * weight.numel() if count > READING_ROWS else 0
        endless = {name: cycled(inputs[name]) for name in functions}
        rows.measure("linear", f"{count} x {MATRIX[1]} x {len(weight)}", functions, endless,
                     nbytes=nbytes, flops=flops)


def choices(rows: TimedRows, quick: bool) -> None:
    """Time every implementation of a matmul with 16-bit weights, for `dispatch.CPU_TABLE`."""
    weights = copies(random_weight(quick), quick)
    for count in COMPARED_ROWS:
        x = torch.randn(count, MATRIX[1], dtype=DTYPE)
        out = torch.empty(count, len(weights[0]), dtype=DTYPE)
        expected, functions = F.linear(x.float(), weights[0].float()), {}
        for name in dispatch.available("linear", count, DTYPE):
            functions[name] = functools.partial(linear_by, name, x=x, out=out)
            functions[name](weights[0])
            check(f"choices: {name}, {count} rows", error(out, expected))
            out.fill_(float("nan"))
        endless = {name: cycled(weights) for name in functions}
        rows.measure("choices", f"{count} x {MATRIX[1]} x {len(weights[0])}", functions, endless,
                     nbytes=dict.fromkeys(functions, weights[0].nbytes),
                     flops=2 * count * weights[0].numel() if count > READING_ROWS else 0)


def linear_by(implementation: str, weight: torch.Tensor, *, x: torch.Tensor,
              out: torch.Tensor) -> None:
    """Multiply by a given implementation."""
    with dispatch.use_autotune_table({"linear": {16: {len(x): implementation}}}):
        layers.linear(x, weight, out=out)


def invariance(rows: TimedRows, quick: bool) -> None:
    """Time matmuls with and without batch invariance, with weights in 16 and 4 bits."""
    weight = random_weight(quick)
    matrix = quantized(weight, bits=4)
    weights = {OURS: copies(weight, quick),
               OURS_4: [replace(matrix, data=data) for data in copies(matrix.data, quick)]}
    for count in INVARIANT_ROWS:
        x = torch.randn(count, MATRIX[1], dtype=DTYPE)
        out = torch.empty(count, len(weight), dtype=DTYPE)
        functions, endless = {}, {}
        for default, name in INVARIANT.items():
            functions[default] = functools.partial(layers.linear, x, out=out)
            functions[name] = functools.partial(linear_invariant, x=x, out=out)
            functions[default](weights[default][0])
            expected = out.clone()
            functions[name](weights[default][0])
            check(f"invariant: {name}, {count} rows", error(out, expected))
            endless |= dict.fromkeys((default, name), cycled(weights[default]))
        nbytes = {OURS: weight.nbytes, OURS_4: matrix.data.nbytes}
        rows.measure("invariant", f"{count} x {MATRIX[1]} x {len(weight)}", functions, endless,
                     nbytes=nbytes | {name: nbytes[default]
                                      for default, name in INVARIANT.items()},
                     flops=2 * count * weight.numel() if count > READING_ROWS else 0)


def linear_invariant(weight: torch.Tensor | QuantizedMatrix, *, x: torch.Tensor,
                     out: torch.Tensor) -> None:
    """Multiply as `LLM` does with `batch_invariant`."""
    with dispatch.batch_invariant():
        layers.linear(x, weight, out=out)


def rounding(rows: TimedRows, quick: bool) -> None:
    """Time quantization of a matrix with and without a search for scales, and its error.

    The error is relative to the weights in the 2-norm. The expected error is that of steps over
    each group's range. Groups of 32 without a search are llama.cpp's Q4_1.
    """
    weight = random_weight(quick)
    outputs = torch.arange(len(weight))
    endless = cycled(copies(weight, quick))
    for bits, group in ROUNDED:
        layout, shape = MatrixLayout(*weight.shape, bits, group), f"{bits} bits, groups of {group}"
        functions = {name: functools.partial(ops.quantize_matrix, layout=layout, search=search)
                     for name, search in ((OURS, True), (RANGE, False))}
        rows.measure("round", shape, functions, dict.fromkeys(functions, endless),
                     nbytes=dict.fromkeys(functions, weight.nbytes + layout.nbytes))
        parts = weight.float().unflatten(1, (-1, group))
        steps = (parts.amax(-1) - parts.amin(-1)) / layout.levels
        expected = (steps.square().mean() / 12).sqrt() / weight.float().square().mean().sqrt()
        for row in rows.rows[-2:]:
            rounded = QuantizedMatrix(functions[row["contestant"]](weight), layout)
            row["error"] = error(ops.unpack_rows(rounded, outputs, torch.float32), weight)
            row["expected_error"] = expected.item()
            print(f"round       {shape:33}  {row['contestant']:15} error {row['error']:.4f}, "
                  f"expected without a search {expected:.4f}", flush=True)


OPERATIONS = {"decode": decode, "prefill": prefill, "select": select, "groups": groups,
              "linear": linear, "choices": choices, "invariant": invariance, "round": rounding,
              "recall": recall}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS),
                        help="rows of the operation linear")
    parser.add_argument("--quick", action="store_true",
                        help="small shapes, which caches hold: only to try this script")
    parser.add_argument("--out", default="benchmarks/results/kernels.csv",
                        help="the CSV file")
    parser.add_argument("--extra-memory", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.extra_memory:
        print(extra_memory(*args.extra_memory))
        return
    if why := cpu_library.missing():
        parser.error(f"nothing to measure: {why}")
    check_int("--repeats", args.repeats, ge=1)
    for rows in args.rows:
        check_int("--rows", rows, ge=1)
    out = Path(args.out)
    check_folder("--out", str(out.parent), [str(out)])
    torch.manual_seed(0)
    print(f"{platform.node()}, {cpu_model()}, {torch.get_num_threads()} threads, torch "
          f"{torch.__version__}, {cpu_library.instruction_set()}", flush=True)
    rows = TimedRows(args.repeats, out)
    for name in args.only:
        options = {"counts": args.rows} if name == "linear" else {}
        OPERATIONS[name](rows, args.quick, **options)
        rows.write(out)


if __name__ == "__main__":
    sys.exit(exit_status(main))
