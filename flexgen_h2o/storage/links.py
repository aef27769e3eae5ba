"""Measured rates of this machine: disk, copies, host memory, matrix products. A run's rooflines.

A rate is measured the way that the engine would use it, with nothing else running, and on more
memory than caches hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flexgen_h2o.storage.disk import CHUNK, WORKERS, AlignedRead, Disk, Extent
from flexgen_h2o.storage.tiers import PAGE, Device, typed

REPEATS = 5
LANES = 2
"""Threads that each wait for the chunks of a load, as of `transfer.LANES_OF`."""
WINDOW = 16 * CHUNK


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
    def read(disk: Disk, start: int, window: torch.Tensor) -> None:
        disk.read([AlignedRead(path, start, len(window), 0)], window)

    return _disk_rate(read, path, nbytes, workers)


def disk_write_rate(path: Path, *, nbytes: int = 1 << 30, workers: int = WORKERS) -> float:
    """Bytes per second of aligned O_DIRECT writes over the start of a file; random bytes.

    Parameters are those of `disk_read_rate`. What has been written is not synced.
    """
    def write(disk: Disk, start: int, window: torch.Tensor) -> None:
        disk.write(Extent(path, start, len(window)), window)

    return _disk_rate(write, path, nbytes, workers)


def _disk_rate(move: Callable[[Disk, int, torch.Tensor], None], path: Path, nbytes: int,
               workers: int) -> float:
    """Bytes per second of `move`, which fills or writes a buffer at a place in the file, window by
    window."""
    nbytes = min(nbytes, path.stat().st_size) // PAGE * PAGE
    buffer = Device().host_empty(min(WINDOW, nbytes)).random_(0, 256)
    disk = Disk(workers)

    def move_all() -> None:
        for start in range(0, nbytes, WINDOW):
            move(disk, start, buffer[: nbytes - start])

    try:
        return nbytes / _median_seconds(move_all, 1)
    finally:
        disk.close()


def disk_beside(path: Path, work: Callable[[], object], *, nbytes: int = 1 << 30
                ) -> list[tuple[float, float, int]]:
    """Rates of reading the start of a file beside work that is repeated.

    It is read as weights come in a run, in chunks of `disk.CHUNK` bytes each of which ends before
    the next of its lane begins, in two lanes: that takes the processors far more than one long read
    (measured: 0.45 against 0.13 of the time that the reading takes alone).

    Returns
    -------
    list of (float, float, int)
        Of each of a few tries the seconds of reading alone, those beside the work, and how often
        it was done meanwhile.
    """
    nbytes = min(nbytes, path.stat().st_size) // PAGE * PAGE
    starts = range(0, nbytes, CHUNK)
    disk = Disk()

    def read_lane(lane: int) -> None:
        buffer = buffers[lane]
        for start in starts[lane::LANES]:
            disk.read([AlignedRead(path, start, min(CHUNK, nbytes - start), 0)], buffer)

    def read(lanes: ThreadPoolExecutor) -> float:
        began = time.perf_counter()
        list(lanes.map(read_lane, range(LANES)))
        return time.perf_counter() - began

    buffers = [Device().host_empty(CHUNK, touch=True) for _ in range(LANES)]
    found = []
    try:
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(LANES) as lanes:
            for _ in range(REPEATS):
                alone, reading, done = read(lanes), reader.submit(read, lanes), 0
                while not reading.done():
                    work()
                    done += 1
                found.append((alone, reading.result(), done))
    finally:
        disk.close()
    return found


def copy_rates(device: Device, *, nbytes: int = 256 << 20) -> tuple[float, float]:
    """Bytes per second of copies from pinned host memory to a GPU, and back."""
    host, there = device.host_empty(nbytes).random_(0, 256), device.empty(nbytes)
    stream = device.stream()

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            stream.copy(target, source)
            stream.mark().synchronize()

        return nbytes / _median_seconds(copy)

    return rate(there, host), rate(host, there)


def memory_read_rate(nbytes: int = 2 << 30, *, device: Device | None = None) -> float:
    """Bytes per second that a sum over the device's memory reads; None: host memory."""
    return nbytes / _median_seconds(memory_reader(nbytes, device=device))


def memory_reader(nbytes: int, *, device: Device | None = None) -> Callable[[], None]:
    """A function that reads so many bytes of the device's memory; None: of host memory.

    On the host they lie in huge pages, as weights and caches do: small ones are slower.
    """
    device = device or Device()
    data = typed(device.empty(nbytes), 0, (nbytes // 4,), torch.float32).fill_(1)

    def read() -> None:
        data.sum()
        device.mark().synchronize()

    return read


def gemm_rate(rows: int, dtype: torch.dtype, *, width: int = 2048, depth: int = 8192,
              device: Device | None = None) -> float:
    """FLOP per second of [rows, width] x [width, depth] into a reused output, weights in turn.

    `device` None: by the processor.
    """
    device = device or Device()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device.torch).to(dtype)

    weights, x = [random(depth, width) for _ in range(8)], random(rows, width)
    out = torch.empty(rows, depth, dtype=dtype, device=device.torch)

    def multiply_all() -> None:
        for weight in weights:
            torch.mm(x, weight.t(), out=out)
        device.mark().synchronize()

    return len(weights) * 2 * rows * width * depth / _median_seconds(multiply_all)


def best_gemm_rate(rows: int, dtype: torch.dtype, *, device: Device | None = None) -> float:
    """`gemm_rate` of the faster of a dtype and float32, which a small product finds out: a CPU that
    multiplies nothing shorter is slower in 16 bits."""
    device = device or Device()
    if device.separate:
        return gemm_rate(rows, dtype, device=device)
    faster = max((dtype, torch.float32), key=lambda each: gemm_rate(
        256, each, width=1024, depth=1024, device=device))
    return gemm_rate(rows, faster, device=device)
