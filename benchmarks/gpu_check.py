"""The GPU's kernels on a real GPU: first that they are right, then how fast they are.

    make gpu-check

Then one comparison with Accelerate and DeepSpeed: OPT-6.7B's shape within 16 GB. Results are in a
folder for each card, below benchmarks/results.

Right: each operation at real shapes against the reference in float32, on the same GPU. Fast:
device time between CUDA events, medians, each beside its roofline: bytes over the copy bandwidth
measured in the same run, or PyTorch's own flash attention. Whatever is timed is larger than the
caches. Ends with status 1 if a kernel is wrong or there is no GPU; a missed goal is only reported.

Most of the time goes to Triton's compiler and tuner: checks run side by side, each in a process of
its own, so that what breaks in one (a GPU's context, too) leaves the others alone. Timings come
after them, alone. All of it stays below 9 minutes: what no time is left for is left out, and a row
says so. A check that is left out has failed, and so has one that raised an error.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from compare import summary
from kernel_timing.gpu_comparison import (
    CheckStep,
    Deadline,
    WrittenModel,
    compare,
    run_side_by_side,
    run_steps,
)
from kernel_timing.gpu_matrices import (
    BRAIN,
    FULL,
    GPU,
    HALF,
    MATRICES,
    check_matrix,
    check_rows,
    time_matrices,
)
from kernel_timing.gpu_recall import RECALLS, check_claims, check_recall, time_recall

from flexgen_h2o.config.formats import GroupLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, EvictionState
from flexgen_h2o.kernels import ops, reference
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.models.convert import cache_dir

COLUMNS = ("date", "commit", "host", "device", "torch", "triton", "kind", "operation", "shape",
           "dtype", "measured", "unit", "limit", "roofline_ms", "passed")
BOUND = {HALF: 3e-3, BRAIN: 2e-2, FULL: 2e-5}
"""Bounds of the relative error of outputs, by dtype. Scores come from the same logits, before any
rounding to 16 bits but that of products with rotated or quantized keys."""
SCORES_BOUND = {HALF: 2e-3, BRAIN: 2e-3, FULL: 2e-5}

# dtype, head_dim, group, bits, rotary dimensions, slots: every value of each, not every tuple.
DECODES = [
    (HALF, 128, 1, 16, 0, 1024), (HALF, 64, 4, 16, 0, 1000), (BRAIN, 80, 1, 16, 0, 513),
    (BRAIN, 96, 8, 16, 0, 2048), (HALF, 256, 8, 16, 0, 777), (BRAIN, 128, 4, 16, 128, 1024),
    (HALF, 80, 1, 16, 20, 600), (HALF, 128, 1, 4, 0, 1024), (BRAIN, 128, 4, 4, 0, 1024),
    (BRAIN, 64, 8, 8, 0, 640), (HALF, 96, 1, 8, 0, 900), (BRAIN, 256, 1, 4, 0, 300),
    (HALF, 80, 4, 4, 80, 511), (FULL, 128, 1, 16, 0, 700), (FULL, 64, 4, 16, 64, 700),
    (BRAIN, 128, 1, 16, 0, 32768), (HALF, 128, 8, 16, 0, 32768),
]
# dtype, head_dim, group, decay, rows of each sequence, keys of each.
PREFILLS = [
    (HALF, 128, 1, 1.0, [4096], [4096]), (BRAIN, 128, 4, 0.98, [4096, 77, 1, 2049], None),
    (HALF, 64, 8, 1.0, [1025, 3000], None), (BRAIN, 80, 1, 1.0, [2048], None),
    (HALF, 96, 4, 0.9, [1500, 600], [1500, 4096]), (BRAIN, 256, 1, 1.0, [1100], None),
    (FULL, 128, 1, 1.0, [1024], None), (HALF, 128, 4, 0.98, [512, 1], [4096, 4000]),
]
# dtype, head_dim, bits, length, heavy, recent, mean.
SELECTIONS = [
    (HALF, 128, 16, 32768, 1024, 128, False), (BRAIN, 64, 4, 4096, 409, 409, True),
    (HALF, 96, 8, 20000, 8192, 1000, False), (BRAIN, 256, 16, 131072, 8192, 64, True),
    (FULL, 80, 16, 777, 100, 600, False), (HALF, 80, 4, 1000, 0, 200, False),
]
CHECK_BYTES = 3 << 30
"""Of the GPU's memory for each check that runs beside others."""
COMPARISON = 240.0
"""Seconds that are kept for the comparison; timings that would come later are left out."""


class GpuRows:
    """Collects rows of the CSV file, and prints each as it comes."""

    def __init__(self):
        import triton

        self.rows: list[dict] = []
        self.begun = time.perf_counter()
        self.common = {
            "commit": source_commit(), "host": platform.node(),
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": triton.__version__}

    def add(self, kind: str, operation: str, shape: str, dtype, measured: float, unit: str, *,
            limit: float | None = None, roofline_ms: float | None = None) -> None:
        """One figure; passed if it is no larger than its limit (a NaN is not)."""
        passed = "" if limit is None else measured <= limit
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.rows.append(self.common | {
            "date": now, "kind": kind, "operation": operation, "shape": shape,
            "dtype": str(dtype).removeprefix("torch."), "measured": measured, "unit": unit,
            "limit": limit, "roofline_ms": roofline_ms, "passed": passed})
        verdict = {True: "pass", False: "FAIL", "": "    "}[passed]
        bound = "" if limit is None else f"(limit {limit:.3g})"
        roofline = "" if roofline_ms is None else f"roofline {roofline_ms:.4g} ms"
        print(f"{time.perf_counter() - self.begun:6.1f} s  {verdict}  {operation:10} {shape:44} "
              f"{measured:10.4g} {unit} {bound} {roofline}", flush=True)

    def skip(self, step: CheckStep, why: str = "no time left") -> None:
        """A row for what was left out, or broke: of a check one that has failed."""
        self.add(step.kind, step.name, "left out", "", math.nan, why,
                 limit=0 if step.kind == "check" else None)

    def write(self, path: str) -> None:
        write_csv(path, COLUMNS, self.rows)


def normal(*shape: int, dtype=FULL) -> torch.Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def error(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error in the 2-norm; NaN if there is a NaN."""
    return ((x.double() - wanted.double()).norm() / wanted.double().norm()).item()


def decode_case(dtype, dim, group, bits, rotary, slots, *, sequences=3, kv_heads=4, full=True,
                free=5) -> dict:
    """Arguments of a decode step; scores lie so far apart that rounding changes no victim."""
    layout = None if bits == 16 else GroupLayout(dim, bits)
    shape = (sequences, kv_heads, slots)
    held = normal(2, *shape, dim, dtype=dtype)
    held = held if layout is None else reference.quantize_groups(held, layout)
    cached = torch.tensor([slots - free * s for s in range(sequences)], device=GPU)
    empty = (torch.arange(slots, device=GPU) >= cached[:, None])[:, None]
    held.masked_fill_(empty[..., None], float("nan") if layout is None else 255)
    order = torch.rand(shape, device=GPU).argsort(-1)
    positions = order.argsort(-1).int().masked_fill_(empty, EMPTY)
    ranks = positions.argsort(-1).argsort(-1).int().masked_fill_(empty, 0) if rotary else None
    scores = torch.rand(shape, device=GPU).argsort(-1) * 0.25
    angles = torch.rand(slots + 1, max(1, rotary // 2), device=GPU) * 6
    state = EvictionState(Eviction(sinks=2), scores.masked_fill_(empty, 0), positions, ranks,
                          (angles.cos(), angles.sin()) if rotary else None)
    metadata = torch.stack([cached, cached * 0 + slots + 1, cached * 0 + 9,
                            cached * 0 + int(full)]).int()
    k, v = normal(2, sequences, kv_heads, dim, dtype=dtype)
    return {"q": normal(sequences, kv_heads * group, dim, dtype=dtype), "k": k, "v": v,
            "slots": held, "metadata": metadata, "layout": layout, "state": state}


def twin(case: dict) -> dict:
    """The same arguments, those that change copied."""
    state = case["state"]
    copy = EvictionState(state.eviction, state.scores.clone(), state.positions.clone(),
                         None if state.ranks is None else state.ranks.clone(), state.rope)
    return case | {"slots": case["slots"].clone(), "state": copy}


def check_decode(rows: GpuRows, dtype, dim, group, bits, rotary, slots) -> None:
    shape = f"d {dim}, group {group}, {bits} bits, rotary {rotary}, {slots} slots"
    for full in (True, False):
        case = decode_case(dtype, dim, group, bits, rotary, slots, full=full, free=5 if full else 7)
        if not full:
            case["metadata"][0] -= 1  # room for the new token
            case["state"].scores[:, :, -1] = 0
            case["state"].positions[:, :, -1] = EMPTY
        other = twin(case)
        before = case["state"].scores.clone()
        wanted, place = reference.decode_attention(**case)
        out, taken = ops.decode_attention(**other)
        state, right = other["state"], case["state"]
        same = torch.equal(taken, place) and torch.equal(state.positions, right.positions)
        same &= bool((other["slots"].nan_to_num() == case["slots"].nan_to_num()).all())
        same &= state.ranks is None or torch.equal(state.ranks, right.ranks)
        rows.add("check", "decode", shape, dtype, error(out, wanted) if same else float("nan"),
                 "error", limit=BOUND[dtype])
        gained = state.scores - before, right.scores - before
        held = torch.ones_like(before, dtype=torch.bool).scatter_(-1, place[..., None], False)
        # A attention score of thousands, as many slots have here, leaves few digits for what one
        # query adds.
        largest = (gained[0] - gained[1])[held].abs().max().item()
        rows.add("check", "scores", shape, dtype, largest, "largest error",
                 limit=SCORES_BOUND[dtype] * group + 2e-3 * (slots > 8192) + 2e-4)


def check_prefill(rows: GpuRows, dtype, dim, group, decay, lengths, keys) -> None:
    keys, kv_heads = keys or lengths, 2
    q = normal(sum(lengths), kv_heads * group, dim, dtype=dtype)
    k, v = normal(2, kv_heads, sum(keys), dim, dtype=dtype).transpose(1, 2)
    scores = torch.rand(kv_heads, sum(keys), device=GPU)
    right = scores.clone()
    wanted = reference.prefill_attention(q.float(), k.float(), v.float(), lengths,
                                         key_lengths=keys, scores=right, decay=decay)
    results = []
    for _ in range(2):
        received = scores.clone()
        results.append((ops.prefill_attention(q, k, v, lengths, key_lengths=keys, scores=received,
                                              decay=decay), received))
    same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    out, received = results[0]
    shape = f"d {dim}, group {group}, decay {decay}, rows {'+'.join(map(str, lengths))}"
    rows.add("check", "prefill", shape, dtype, error(out, wanted) if same else float("nan"),
             "error", limit=BOUND[dtype])
    rows.add("check", "scores", shape, dtype, error(received, right), "error",
             limit=SCORES_BOUND[dtype])


def check_selection(rows: GpuRows, dtype, dim, bits, length, heavy, recent, mean) -> None:
    layout, kv_heads = None if bits == 16 else GroupLayout(dim, bits), 2
    cuts = [Cut(length, heavy, recent), Cut(5, heavy, recent), Cut(length // 2, heavy // 2, 3)]
    total = sum(cut.length for cut in cuts)
    k, v = normal(2, total, kv_heads, dim, dtype=dtype)
    scores = torch.rand(kv_heads, total, device=GPU).mul(5000).round() / 7  # with ties
    slots = max(Eviction(sinks=4).kept(cut) for cut in cuts) + 3
    cases = []
    for module in (reference, ops):
        shape = (len(cuts), kv_heads, slots)
        state = EvictionState(Eviction(mean, sinks=4), torch.full(shape, float("nan"), device=GPU),
                              *torch.full((2, *shape), -7, dtype=torch.int32, device=GPU))
        held = torch.full((2, *shape, dim if layout is None else layout.nbytes), 77, device=GPU,
                          dtype=dtype if layout is None else torch.uint8)
        module.select_heavy_hitters(k, v, scores, cuts=cuts, slots=held, state=state, layout=layout)
        cases.append((held, state.scores, state.positions, state.ranks))
    wrong = sum((a != b).sum().item() for a, b in zip(*cases, strict=True))
    rows.add("check", "select", f"d {dim}, {bits} bits, {heavy} of {length}, mean {mean}", dtype,
             wrong, "differences", limit=0)


def check_groups(rows: GpuRows) -> None:
    for dtype in (HALF, BRAIN, FULL):
        for dim in (64, 80, 96, 128, 256):
            for bits in (8, 4):
                layout = GroupLayout(dim, bits)
                x = normal(1000, 3, dim, dtype=dtype) * torch.tensor([1, 1e-6, 1e4], device=GPU)[
                    :, None].to(dtype)
                right = reference.quantize_groups(x, layout)
                wrong = (ops.quantize_groups(x, layout) != right).sum() + (
                    ops.dequantize_groups(right, layout)
                    != reference.dequantize_groups(right, layout)).sum()
                rows.add("check", "groups", f"d {dim}, {bits} bits", dtype, wrong.item(),
                         "differences", limit=0)


def timed(calls: list[Callable], rounds: int = 21) -> float:
    """Median milliseconds on the device of one call; the calls take turns, each with its data."""
    for call in calls:
        for _ in range(2):
            call()
    times = []
    for number in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # while the device waits, the host queues the whole call
        start.record()
        calls[number % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second, read and written together, of a copy on the device."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    pairs = [torch.empty(2, size, dtype=torch.uint8, device=GPU) for _ in range(2)]
    return 2 * size / timed([lambda x=x: x[0].copy_(x[1]) for x in pairs]) * 1e3


def gemm_rate() -> float:
    """Float16 operations per second of a large product."""
    a, b = normal(2, 8192, 8192, dtype=HALF)
    return 2 * 8192**3 / timed([lambda: a @ b], 7) * 1e3


def time_decode(rows: GpuRows, rate: float, sequences: int, slots: int, bits: int, goal: float
                ) -> None:
    layout = None if bits == 16 else GroupLayout(128, bits)
    cases = [decode_case(HALF, 128, 1, bits, 0, slots, sequences=sequences, kv_heads=32, free=0)
             for _ in range(2)]
    milliseconds = timed([lambda case=case: ops.decode_attention(**case) for case in cases])
    roofline = cases[0]["slots"].nbytes / rate * 1e3
    shape = f"batch {sequences}, 32 heads, d 128, {slots} slots, {bits} bits"
    rows.add("time", "decode", shape, HALF, milliseconds, "ms", roofline_ms=roofline,
             limit=roofline / goal if layout is None else None)


def time_prefill(rows: GpuRows, gemms: float, dtype) -> None:
    length, heads = 4096, 32
    q, k, v = normal(3, length, heads, 128, dtype=dtype)
    scores = torch.zeros(heads, length, device=GPU)
    flat = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    flash = timed([lambda: F.scaled_dot_product_attention(*flat, is_causal=True)])
    scored = timed([lambda: ops.prefill_attention(q, k, v, [length], scores=scores)])
    alone = timed([lambda: ops.prefill_attention(q, k, v, [length], key_lengths=[length])])
    roofline = 2 * length**2 * 128 * heads / gemms * 1e3
    shape = f"{heads} heads, d 128, s {length}"
    rows.add("time", "flash SDPA", shape, dtype, flash, "ms", roofline_ms=roofline)
    rows.add("time", "prefill", f"{shape}, no scores", dtype, alone, "ms", roofline_ms=roofline)
    rows.add("time", "prefill", f"{shape}, scores", dtype, scored, "ms", limit=1.8 * flash,
             roofline_ms=1.5 * roofline)


def time_selection(rows: GpuRows, rate: float) -> None:
    length, heavy, kv_heads = 32768, 1024, 32
    one = 2 * length * kv_heads * 128 * 2
    sequences = max(1, min(8, torch.cuda.mem_get_info()[0] // (2 * one)))
    k, v = normal(2, sequences * length, kv_heads, 8, dtype=HALF).repeat(1, 1, 1, 16)
    scores = torch.rand(kv_heads, sequences * length, device=GPU) ** 4
    shape = (sequences, kv_heads, heavy)
    state = EvictionState(Eviction(), torch.empty(shape, device=GPU),
                          torch.empty(shape, dtype=torch.int32, device=GPU))
    slots = torch.empty((2, *shape, 128), dtype=HALF, device=GPU)
    cuts = [Cut(length, heavy, 0)] * sequences
    milliseconds = timed([lambda: ops.select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots,
                                                           state=state)])
    roofline = (scores.nbytes + slots.nbytes) / rate * 1e3
    rows.add("time", "select", f"batch {sequences}, {kv_heads} heads, {heavy} of {length}", HALF,
             milliseconds, "ms", limit=2 * roofline, roofline_ms=roofline)


def steps(rows: GpuRows, brain: bool, reserve: float = COMPARISON) -> list[CheckStep]:
    """Everything about kernels, in order: first that they are right.

    `brain`: with bfloat16. `reserve`: seconds that timings leave.
    """
    rates: dict[str, float] = {}

    def measure_rates() -> None:
        torch.cuda.empty_cache()
        rates.update(copy=copy_rate(), gemm=gemm_rate())
        rows.add("time", "copy", "read and written", "uint8", rates["copy"] / 1e9, "GB/s")
        rows.add("time", "GEMM", "8192 x 8192 x 8192", HALF, rates["gemm"] / 1e12, "TFLOP/s")

    found = [CheckStep("check", "groups", lambda: check_groups(rows))]
    for check, name, cases in ((check_selection, "select", SELECTIONS),
                               (check_decode, "decode", DECODES),
                               (check_prefill, "prefill", PREFILLS)):
        found += [CheckStep("check", name, partial(check, rows, *case)) for case in cases
                  if brain or case[0] != BRAIN]
    found += [CheckStep("check", "product",
                        partial(check_matrix, rows, case, error, BOUND[case[0]]))
              for case in MATRICES if brain or case[0] != BRAIN]
    found.append(CheckStep("check", "unpack", lambda: check_rows(rows)))
    found += [CheckStep("check", "recall",
                        partial(check_recall, rows, case, error, BOUND[case[0]]))
              for case in RECALLS if brain or case[0] != BRAIN]
    found.append(CheckStep("check", "fast set", lambda: check_claims(rows)))
    timings: list[tuple[str, Callable[[], None]]] = [("rates", measure_rates)]
    for one in ((64, 1024, 16, 0.7), (1, 32768, 16, 0.5), (64, 1024, 8, 0.7), (64, 1024, 4, 0.7)):
        timings.append(("decode", lambda one=one: time_decode(rows, rates["copy"], *one)))
    for dtype in (HALF, BRAIN)[: 1 + brain]:
        timings.append(("prefill", lambda dtype=dtype: time_prefill(rows, rates["gemm"], dtype)))
    timings += [("select", lambda: time_selection(rows, rates["copy"])),
                ("recall", lambda: time_recall(rows, timed, rates["copy"])),
                ("product", lambda: time_matrices(rows, timed, rates["copy"], rates["gemm"]))]
    # Once the rates are left out for want of time, so is all that needs them.
    return found + [CheckStep("time", name, call, reserve) for name, call in timings]


def checked(number: int) -> list[dict]:
    """Rows of the check of a number, in a process of its own."""
    torch.manual_seed(torch.seed() % 2**32)  # fresh inputs every time
    rows = GpuRows()
    step = steps(rows, has_brain())[number]
    try:
        with torch.inference_mode():
            step.call()
    except Exception as found:  # whatever it is, the row says it, and the others go on
        rows.skip(step, f"{type(found).__name__}: {' '.join(str(found).split())[:300]}")
    return rows.rows


def has_brain() -> bool:
    """True if the GPU computes with bfloat16."""
    return torch.cuda.get_device_capability()[0] >= 8


def processes() -> int:
    """Checks that run side by side: each has a context on the GPU, and its data."""
    return max(1, min(len(os.sched_getaffinity(0)), torch.cuda.mem_get_info()[0] // CHECK_BYTES))


@contextmanager
def fresh_kernels() -> Iterator[Path]:
    """Within it, kernels are compiled and tuned anew, into a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["TRITON_CACHE_DIR"]


def card_folder(device: str) -> str:
    """The folder of a card's results, by the name that its driver gives it."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"),
                        help="folder in which the card gets one of its own")
    parser.add_argument("--models", type=Path, default=cache_dir() / "gpu-check",
                        help="folder of the model that is compared; it is made there, 13 GB")
    parser.add_argument("--seconds", type=float, default=500.0,
                        help="after which nothing more is begun")
    parser.add_argument("--kernels-only", action="store_true", help="compare no systems")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the kernels only these steps")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu-check needs a GPU, and PyTorch finds none here")
    deadline = Deadline(args.seconds)
    folder = args.out / card_folder(torch.cuda.get_device_name())
    rows = GpuRows()
    with contextlib.ExitStack() as opened:
        checkpoint = None
        if not args.kernels_only:
            checkpoint = WrittenModel(args.models, "opt-6.7b", "float16")
            opened.callback(checkpoint.stop)
        kernels = opened.enter_context(fresh_kernels())
        run_all(rows, deadline, kernels, 0.0 if checkpoint is None else COMPARISON, args.only)
        rows.write(str(folder / "gpu_kernels.csv"))
        if checkpoint is not None:
            torch.cuda.empty_cache()
            with told():
                print(summary(compare(folder / "compare_gpu_check.csv", checkpoint, deadline)))
    wrong = [row for row in rows.rows if row["kind"] == "check" and not row["passed"]]
    slow = [row for row in rows.rows if row["kind"] == "time" and row["passed"] is False]
    print(f"{len(wrong)} wrong or not checked, {len(slow)} goals missed; {folder}")
    sys.exit(bool(wrong))


def run_all(rows: GpuRows, deadline: Deadline, kernels: Path, reserve: float,
            only: Collection[str] | None) -> None:
    """Check and time all kernels, or `only` some steps, compiled into a folder; timings leave
    `reserve` seconds."""
    found = dict(enumerate(steps(rows, has_brain(), reserve)))
    found = {number: step for number, step in found.items()
             if only is None or step.name in {"rates", *only}}
    checks = {number: step for number, step in found.items() if step.kind == "check"}
    with multiprocessing.get_context("spawn").Pool(processes(), maxtasksperchild=1) as pool:
        done = run_side_by_side(pool, checked, checks, deadline)
    for number, step in checks.items():
        if number in done:
            rows.rows += done[number]  # which that process has printed
        else:
            rows.skip(step)
    for tuned in kernels.glob("*/*.autotune.json"):
        tuned.unlink()  # it was measured beside other work
    with torch.inference_mode():
        run_steps([step for step in found.values() if step.kind == "time"], deadline, rows.skip)


@contextmanager
def told() -> Iterator[None]:
    """Within it, a `UserError` is a line: what was measured before stands."""
    try:
        yield
    except UserError as found:
        print(f"no comparison: {found}", flush=True)


if __name__ == "__main__":
    main()
