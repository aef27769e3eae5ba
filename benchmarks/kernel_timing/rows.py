"""Results of the benchmark of kernels: timed rows, their file and their plot."""

from __future__ import annotations

import datetime
import functools
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.metrics.figures import new_figure, save
from flexgen_h2o.metrics.provenance import cpu_model, source_commit
from flexgen_h2o.storage.links import best_gemm_rate, memory_reader
from flexgen_h2o.storage.tiers import Device, typed

DTYPE = torch.bfloat16
ROTATED = 1 << 30
"""Bytes of all the copies that contestants go through in turn."""
PATIENCE = 6.0
"""Seconds after which a contestant's turns end, once it has had `FEWEST` of them."""
FEWEST = 3
IN_A_ROW = 8
"""Calls of a contestant in one turn: in a run, too, one layer's call follows another's."""
READ = 1 << 30
"""Bytes that are read in each turn, for the rate of memory."""
LONG = 0.1
"""Seconds of a call after which a turn ends: what went before it no longer matters then."""
COLUMNS = (
    "date", "commit", "host", "cpu", "threads", "torch", "isa", "dtype", "repeats",
    "operation", "shape", "contestant", "ms", "fastest_ms", "roofline_ms", "share_of_roofline",
    "limit", "gb_per_s",
    "over_sdpa", "speedup_over_plain", "speedup_over_16_bits", "extra_mb", "error",
    "expected_error",
)
RATIOS = ("over_sdpa", "speedup_over_plain", "speedup_over_16_bits")
OURS, OURS_8, OURS_4, SCORELESS = "ours", "ours, 8 bits", "ours, 4 bits", "ours, no scores"
OURS_12, OURS_MXFP4 = "ours, 12 bits", "ours, MXFP4"
OURS_8_8, OURS_4_8 = (f"{name}, activations 8" for name in (OURS_8, OURS_4))
SDPA, PLAIN, INDEXED = "torch SDPA", "plain PyTorch", "plain, indexed"
RANGE = "ours, no search"
LOOKS = {OURS: ("#0072B2", ""), OURS_12: ("#0072B2", "//"), OURS_8: ("#56B4E9", "//"),
         OURS_4: ("#CC79A7", ".."),
         OURS_MXFP4: ("#CC79A7", "xx"), OURS_8_8: ("#56B4E9", "\\\\"),
         OURS_4_8: ("#CC79A7", "\\\\"),
         SCORELESS: ("#009E73", "--"), SDPA: ("#E69F00", "\\\\"), PLAIN: ("#999999", "xx"),
         INDEXED: ("#666666", "++"), RANGE: ("#D55E00", "oo"), "full cache": ("#999999", ""),
         "recall 20%, 4 bits": ("#CC79A7", ""), "recall 20%, 2 bits": ("#CC79A7", "//"),
         "recall 10%, 4 bits": ("#E69F00", ""), "recall 5%, 4 bits": ("#E69F00", "//"),
         "pytorch": ("#999999", ""), "skinny": ("#0072B2", ""), "tiled": ("#009E73", ""),
         "float32": ("#CC79A7", "")}


class TimedRows:
    """Times cases and collects the rows of the file, which has them as they come if it is named."""

    def __init__(self, repeats: int, path: Path | None = None):
        self.repeats, self.path, self.rows = repeats, path, []

    def measure(self, operation: str, shape: str, functions: dict[str, Callable],
                inputs: dict[str, Iterator[dict]], *, nbytes: dict[str, int] | None = None,
                flops: float = 0) -> None:
        """A row for each function, called with the next of its inputs, and its roofline.

        The roofline is of FLOPs where they are given, else of bytes.
        """
        product_rate = functools.partial(best_gemm_rate, 2048, DTYPE)
        rates = [product_rate()] if flops else []
        read, seconds = memory_reader(READ), {name: [] for name in functions}
        for repeat in range(self.repeats + 1):  # the first one warms up
            took = _seconds(read)  # wakes the threads, too
            if not flops and repeat:
                rates.append(READ / took)
            for name, function in functions.items():
                if len(seconds[name]) >= FEWEST and sum(seconds[name]) > PATIENCE:
                    continue
                for arguments in itertools.islice(inputs[name], IN_A_ROW):
                    took = _seconds(function, **arguments)
                    if repeat:
                        seconds[name].append(took)
                    if took > LONG:
                        break
        rate = max(*rates, product_rate()) if flops else statistics.median(rates)
        limit = f"{rate / 1e12:.2f} TFLOP/s" if flops else f"{rate / 1e9:.1f} GB/s"
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        sixteen = middle.get(OURS, middle.get(PLAIN))
        for name, took in middle.items():
            roofline = (flops or nbytes[name]) / rate
            self.rows.append({
                "operation": operation, "shape": shape, "contestant": name, "ms": took * 1e3,
                "fastest_ms": min(seconds[name]) * 1e3, "roofline_ms": roofline * 1e3,
                "share_of_roofline": roofline / took, "limit": limit,
                "gb_per_s": nbytes[name] / took / 1e9 if nbytes else "",
                "over_sdpa": took / middle[SDPA] if SDPA in middle else "",
                "speedup_over_plain": middle[PLAIN] / took if PLAIN in middle else "",
                "speedup_over_16_bits": sixteen / took if name in (
                    OURS_12, OURS_8, OURS_4, OURS_MXFP4, OURS_8_8, OURS_4_8) else "",
                "extra_mb": "", "error": "", "expected_error": ""})
            row = self.rows[-1]
            print(f"{operation:10}  {shape:33}  {name:15} {row['ms']:9.2f} ms, roofline "
                  f"{row['roofline_ms']:7.2f} ({row['share_of_roofline']:.2f} of {limit})"
                  + "".join(
                      f", {key} {row[key]:.2f}" for key in RATIOS if row[key] != ""),
                  flush=True)
        if self.path is not None:
            self.write(self.path)

    def write(self, path: Path) -> None:
        common = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": source_commit(), "host": platform.node(), "cpu": cpu_model(),
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "isa": cpu_library.instruction_set(), "dtype": str(DTYPE).removeprefix("torch."),
            "repeats": self.repeats}
        write_csv(path, COLUMNS, (common | row for row in self.rows))


def _seconds(function: Callable, **arguments: object) -> float:
    began = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - began


def copies(block: torch.Tensor, quick: bool) -> list[torch.Tensor]:
    """Equal tensors in `engine_memory`, enough of them for `ROTATED` bytes."""
    count = 2 if quick else max(2, math.ceil(ROTATED / block.nbytes))
    return [engine_memory(block) for _ in range(count)]


def engine_memory(block: torch.Tensor) -> torch.Tensor:
    """A copy in huge pages, as the engine has weights and caches; PyTorch has small ones."""
    return typed(Device().empty(block.nbytes), 0, block.shape, block.dtype).copy_(block)


def error(x: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error in the 2-norm."""
    return ((x.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check(what: str, *errors: float, same: bool = True, bound: float = 1e-2) -> None:
    """Print the largest error; RuntimeError if it is too large, or not the same what must be."""
    print(f"check  {what:50} error {max(errors):.2g}", flush=True)
    if not (same and max(errors) <= bound):
        raise RuntimeError(f"{what}: wrong by {max(errors):.2g} (at most {bound:g}), {same=}")


def draw(rows: list[dict], path: Path, title: str) -> None:
    """Bars: the share of its roofline that each contestant reaches, its time beside it."""
    figure = new_figure(9, 2 + 0.24 * len(rows))
    axes = figure.subplots()
    ticks: dict[str, list[float]] = {}
    labels = dict.fromkeys(row["contestant"] for row in rows)
    place = 0.0
    for row in rows:
        case, share = f"{row['operation']}\n{row['shape']}", 100 * row["share_of_roofline"]
        place += 1.0 if case in ticks else 1.8  # a gap before the next case
        ticks.setdefault(case, []).append(place)
        name = row["contestant"]
        color, hatch = LOOKS[name]
        axes.barh(place, share, 0.9, color=color, hatch=hatch, edgecolor="white",
                  label=name if name in labels else None)
        labels.pop(name, None)
        axes.annotate(f"{row['ms']:.3g} ms", (share, place), (3, 0), textcoords="offset points",
                      va="center", fontsize=7)
    axes.set_yticks([statistics.mean(places) for places in ticks.values()], list(ticks), fontsize=8)
    axes.axvline(100, color="black", linewidth=1, linestyle=":")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("roofline over time, %: longer is better; dotted: memory or matrix products at "
                    "this machine's own rate")
    axes.set_title(title, fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, str(path))
