"""Check the GPU kernels' results on a real GPU, then time them.

    make gpu-check

A comparison with Accelerate and DeepSpeed follows: OPT-6.7B's shape within 16 GB. Results are in a
folder for each card, below benchmarks/results.

Checks run each operation at real shapes against the reference in float32 on the same GPU. Timings
are medians of device time between CUDA events, with their roofline: bytes over the copy bandwidth
of the same run, or PyTorch's flash attention. Timed data are larger than the caches. The exit
status is 1 if a result is wrong or there is no GPU; a missed goal is only reported.

Triton's compiler and autotuner take most of the time. Checks run in parallel, each in its own
process, so that a failure (also of the CUDA context) does not affect the others. Timings run alone
after them. The whole takes less than 9 minutes: steps without time left are skipped, with a row. A
check fails if it is skipped, raises an error, or its process ends early.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
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
from compare import summary
from csv_files import write_csv
from gpu_comparison import (
    CheckStep,
    Deadline,
    WrittenModel,
    compare,
    run_side_by_side,
    run_steps,
)
from gpu_kernels import (
    BF16,
    DECODES,
    FP16,
    GPU,
    MATRICES,
    PREFILLS,
    SELECTIONS,
    check_decode,
    check_groups,
    check_matrix,
    check_prefill,
    check_rows,
    check_selection,
    normal,
    time_decode,
    time_matrices,
    time_prefill,
    time_selection,
)
from gpu_recall import RECALLS, check_claims, check_recall, time_recall

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import cache_dir
from flexgen_h2o.metrics.provenance import source_commit

COLUMNS = ("date", "commit", "host", "device", "torch", "triton", "kind", "operation", "shape",
           "dtype", "measured", "unit", "limit", "roofline_ms", "passed")
CHECK_BYTES = 3 << 30
"""Bytes of GPU memory for each of the parallel checks."""
COMPARISON = 240.0
"""Seconds reserved for the comparison."""

NO_TIME = "no time left"


class GpuRows:
    """Collects and prints rows of the CSV file."""

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
        """Add a figure, which passes if it is at most its limit (NaN fails)."""
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

    def skip(self, step: CheckStep, why: str = NO_TIME) -> None:
        """Add a row for a skipped or broken step; a check fails."""
        self.add(step.kind, step.name, "left out", "", math.nan, why,
                 limit=0 if step.kind == "check" else None)

    def write(self, path: str) -> None:
        write_csv(path, COLUMNS, self.rows)


def timed(calls: list[Callable], rounds: int = 21) -> float:
    """Return the median device milliseconds of a call; calls with different data take turns."""
    for call in calls:
        for _ in range(2):
            call()
    times = []
    for number in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # the host queues the whole call meanwhile
        start.record()
        calls[number % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Return the bytes per second, read plus written, of a copy on the device."""
    size = min(1 << 30, torch.cuda.mem_get_info()[0] // 8)
    pairs = [torch.empty(2, size, dtype=torch.uint8, device=GPU) for _ in range(2)]
    return 2 * size / timed([lambda x=x: x[0].copy_(x[1]) for x in pairs]) * 1e3


def gemm_rate() -> float:
    """Return the float16 FLOP per second of a large matmul."""
    a, b = normal(2, 8192, 8192, dtype=FP16)
    return 2 * 8192**3 / timed([lambda: a @ b], 7) * 1e3


def steps(rows: GpuRows, bfloat16: bool, reserve: float = COMPARISON) -> list[CheckStep]:
    """Return the steps about kernels in order, checks first.

    `bfloat16` says whether to check it too; timings leave `reserve` seconds.
    """
    rates: dict[str, float] = {}

    def measure_rates() -> None:
        torch.cuda.empty_cache()
        rates.update(copy=copy_rate(), gemm=gemm_rate())
        rows.add("time", "copy", "read and written", "uint8", rates["copy"] / 1e9, "GB/s")
        rows.add("time", "GEMM", "8192 x 8192 x 8192", FP16, rates["gemm"] / 1e12, "TFLOP/s")

    check_steps = [CheckStep("check", "groups", lambda: check_groups(rows))]
    for check, name, cases in ((check_selection, "select", SELECTIONS),
                               (check_decode, "decode", DECODES),
                               (check_prefill, "prefill", PREFILLS)):
        check_steps += [CheckStep("check", name, partial(check, rows, *case)) for case in cases
                        if bfloat16 or case[0] != BF16]
    check_steps += [CheckStep("check", "product",
                              partial(check_matrix, rows, case))
                    for case in MATRICES if bfloat16 or case[0] != BF16]
    check_steps.append(CheckStep("check", "unpack", lambda: check_rows(rows)))
    check_steps += [CheckStep("check", "recall",
                              partial(check_recall, rows, case))
                    for case in RECALLS if bfloat16 or case[0] != BF16]
    check_steps.append(CheckStep("check", "fast set", lambda: check_claims(rows)))
    timings: list[tuple[str, Callable[[], None]]] = [("rates", measure_rates)]
    for shape in ((64, 1024, 16, 0.7), (1, 32768, 16, 0.5), (64, 1024, 8, 0.7), (64, 1024, 4, 0.7)):
        timings.append((
            "decode", lambda shape=shape: time_decode(rows, timed, rates["copy"], *shape)))
    for dtype in (FP16, BF16)[: 1 + bfloat16]:
        timings.append(("prefill", lambda dtype=dtype: time_prefill(rows, timed, rates["gemm"],
                                                                    dtype)))
    timings += [("select", lambda: time_selection(rows, timed, rates["copy"])),
                ("recall", lambda: time_recall(rows, timed, rates["copy"])),
                ("product", lambda: time_matrices(rows, timed, rates["copy"], rates["gemm"]))]
    # If the rates are skipped for lack of time, so are the timings that need them.
    return check_steps + [CheckStep("time", name, call, reserve) for name, call in timings]


def checked(number: int) -> list[dict]:
    """Run the check of a number in its own process, and return its rows."""
    torch.manual_seed(torch.seed() % 2**32)  # new inputs every time
    rows = GpuRows()
    step = steps(rows, has_bfloat16())[number]
    try:
        with torch.inference_mode():
            step.call()
    except Exception as found:  # any error goes into a row
        rows.skip(step, f"{type(found).__name__}: {' '.join(str(found).split())[:300]}")
    return rows.rows


def has_bfloat16() -> bool:
    """Return whether the GPU supports bfloat16."""
    return torch.cuda.get_device_capability()[0] >= 8


def processes() -> int:
    """Return the number of parallel checks, each with a CUDA context and its data."""
    return max(1, min(len(os.sched_getaffinity(0)), torch.cuda.mem_get_info()[0] // CHECK_BYTES))


@contextmanager
def fresh_kernels() -> Iterator[Path]:
    """Context in which kernels are compiled and autotuned into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["TRITON_CACHE_DIR"]


def card_folder(device: str) -> str:
    """Return the results folder of a card by its driver name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"),
                        help="results are in a subfolder named after the card")
    parser.add_argument("--models", type=Path, default=cache_dir() / "gpu-check",
                        help="folder of the compared model, which is written there (13 GB)")
    parser.add_argument("--seconds", type=float, default=500.0,
                        help="no step starts after this time")
    parser.add_argument("--kernels-only", action="store_true", help="skip the comparison")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these steps of the kernels")
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
            with errors_printed():
                print(summary(compare(folder / "compare_gpu_check.csv", checkpoint, deadline)))
    wrong = [row for row in rows.rows if row["kind"] == "check" and not row["passed"]]
    slow = [row for row in rows.rows if row["kind"] == "time" and row["passed"] is False]
    print(f"{len(wrong)} wrong or not checked, {len(slow)} goals missed; {folder}")
    sys.exit(bool(wrong))


def run_all(rows: GpuRows, deadline: Deadline, kernels: Path, reserve: float,
            only: Collection[str] | None) -> None:
    """Check and time the kernels, or `only` some steps; timings leave `reserve` seconds."""
    numbered = dict(enumerate(steps(rows, has_bfloat16(), reserve)))
    numbered = {number: step for number, step in numbered.items()
                if only is None or step.name in {"rates", *only}}
    checks = {number: step for number, step in numbered.items() if step.kind == "check"}
    done, ended = run_side_by_side(checked, checks, deadline, processes())
    for number, step in checks.items():
        if number in done:
            rows.rows += done[number]  # printed by that process
        else:
            rows.skip(step, ended.get(number, NO_TIME))
    for tuned in kernels.glob("*/*.autotune.json"):
        tuned.unlink()  # it was measured under load
    with torch.inference_mode():
        run_steps([step for step in numbered.values() if step.kind == "time"], deadline, rows.skip)


@contextmanager
def errors_printed() -> Iterator[None]:
    """Context that prints a `UserError` and continues."""
    try:
        yield
    except UserError as found:
        print(f"no comparison: {found}", flush=True)


if __name__ == "__main__":
    main()
