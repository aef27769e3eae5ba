"""Measured rates of this machine: disk, host memory, matrix products. The floors under a run.

A rate is measured the way that the engine would use it, with nothing else running, and on more
memory than caches hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flexgen_h2o.storage.disk import PIECE, WORKERS, AlignedRead, Disk
from flexgen_h2o.storage.tiers import PAGE, Device

REPEATS = 5


def _median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def disk_read_rate(path: Path, *, nbytes: int = 1 << 30, workers: int = WORKERS) -> float:
    """Bytes per second of aligned O_DIRECT reads from the start of a file.

    Parameters
    ----------
    path : Path
        A file; its first `nbytes` are read, or all whole pages of a shorter one.
    nbytes : int
        How much to read in one go.
    workers : int
        Requests in flight.
    """
    nbytes = min(nbytes, path.stat().st_size) // PAGE * PAGE
    window = 16 * PIECE
    buffer = Device().host_empty(window)
    disk = Disk(workers)

    def read_all() -> None:
        for start in range(0, nbytes, window):
            disk.read([AlignedRead(path, start, min(window, nbytes - start), 0)], buffer)

    try:
        return nbytes / _median_seconds(read_all, 1)
    finally:
        disk.close()


def memory_read_rate(nbytes: int = 2 << 30) -> float:
    """Bytes per second that a sum over host memory reads."""
    data = torch.ones(nbytes // 4)
    return data.nbytes / _median_seconds(data.sum)


def gemm_rate(rows: int, dtype: torch.dtype, *, width: int = 2048, depth: int = 8192) -> float:
    """FLOP per second of [rows, width] x [width, depth] into a reused output, weights in turn."""
    weights = [torch.randn(depth, width).to(dtype) for _ in range(8)]
    x, out = torch.randn(rows, width).to(dtype), torch.empty(rows, depth, dtype=dtype)

    def multiply_all() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)

    return len(weights) * 2 * rows * width * depth / _median_seconds(multiply_all)
