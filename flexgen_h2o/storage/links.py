"""Measured rates of this machine's links: disks, and copies between host and GPU.

Rates are measured as the engine uses the hardware, with nothing else running, on more memory than
the caches hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flexgen_h2o.storage.device import PAGE, Device
from flexgen_h2o.storage.disk import CHUNK, WORKERS, AlignedRead, Disk, Extent

REPEATS = 5
LOAD_THREADS = 2
"""Threads that wait for loads, as in `transfer.QUEUES_OF`."""
WINDOW = 16 * CHUNK


def median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of a call, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def disk_read_rate(path: Path, *, nbytes: int = 1 << 30) -> float:
    """Return the bytes per second of aligned O_DIRECT reads from the start of a file.

    The file has at least a page. Up to `nbytes` are read.
    """
    def read(disk: Disk, start: int, window: torch.Tensor) -> None:
        disk.read([AlignedRead(path, start, len(window), 0)], window)

    return _disk_rate(read, path, nbytes)


def disk_write_rate(path: Path, *, nbytes: int = 1 << 30) -> float:
    """Return the bytes per second of aligned O_DIRECT writes over the start of a file.

    Up to `nbytes` are written, random ones, without a sync.
    """
    def write(disk: Disk, start: int, window: torch.Tensor) -> None:
        disk.write(Extent(path, start, len(window)), window)

    return _disk_rate(write, path, nbytes)


def _disk_rate(move: Callable[[Disk, int, torch.Tensor], None], path: Path, nbytes: int
               ) -> float:
    """Return the bytes per second of ``move(disk, offset, buffer)``, window by window."""
    nbytes = min(nbytes, path.stat().st_size) // PAGE * PAGE
    buffer = Device().host_empty(min(WINDOW, nbytes)).random_(0, 256)
    disk = Disk(WORKERS)

    def move_all() -> None:
        for start in range(0, nbytes, WINDOW):
            move(disk, start, buffer[: nbytes - start])

    try:
        return nbytes / median_seconds(move_all, 1)
    finally:
        disk.close()


def disk_beside(path: Path, work: Callable[[], object], *, nbytes: int = 1 << 30
                ) -> list[tuple[float, float, int]]:
    """Measure how reading the start of a file slows down work that overlaps with it.

    The file is read like weights in a run: in two parts, each with one chunk of `disk.CHUNK` bytes
    at a time. That needs more CPU time than one long read (0.45 instead of 0.13 of the time of the
    read alone).

    Returns
    -------
    list of (float, float, int)
        For each repetition: seconds of the read alone, seconds of the read during `work`, and how
        often `work` was done during the latter.
    """
    nbytes = min(nbytes, path.stat().st_size) // PAGE * PAGE
    starts = range(0, nbytes, CHUNK)
    disk = Disk()

    def read_part(part: int) -> None:
        buffer = buffers[part]
        for start in starts[part::LOAD_THREADS]:
            disk.read([AlignedRead(path, start, min(CHUNK, nbytes - start), 0)], buffer)

    def read(threads: ThreadPoolExecutor) -> float:
        began = time.perf_counter()
        list(threads.map(read_part, range(LOAD_THREADS)))
        return time.perf_counter() - began

    buffers = [Device().host_empty(CHUNK, touch=True) for _ in range(LOAD_THREADS)]
    times = []
    try:
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(LOAD_THREADS) as threads:
            for _ in range(REPEATS):
                alone, reading, done = read(threads), reader.submit(read, threads), 0
                while not reading.done():
                    work()
                    done += 1
                times.append((alone, reading.result(), done))
    finally:
        disk.close()
    return times


def copy_rates(device: Device, *, nbytes: int = 256 << 20) -> tuple[float, float]:
    """Return the bytes per second of copies from pinned host memory to a GPU, and back."""
    host, device_buffer = device.host_empty(nbytes).random_(0, 256), device.empty(nbytes)
    stream = device.stream()

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            stream.copy(target, source)
            stream.record_event().synchronize()

        return nbytes / median_seconds(copy)

    return rate(device_buffer, host), rate(host, device_buffer)
