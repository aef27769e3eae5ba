"""Plain requests on a file, and works that are timed in turn: the raw side of `links`."""

from __future__ import annotations

import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flexgen_h2o.errors import UserError


@dataclasses.dataclass
class TimedWork:
    """A call to time, which moves `nbytes`."""

    run: Callable[[], object]
    nbytes: int


@dataclasses.dataclass
class Row:
    """A link, what the engine moves over it, and the raw works to set beside it."""

    link: str
    what: str
    raw: dict[tuple, TimedWork]
    engine: TimedWork


def _seconds(work: TimedWork) -> float:
    began = time.perf_counter()
    work.run()
    return time.perf_counter() - began


def rates(works: dict[tuple, TimedWork], repeats: int) -> dict[tuple, float]:
    """The median bytes per second of each; they take turns, and the first round warms up."""
    seconds: dict[tuple, list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, work in works.items():
            seconds[key].append(_seconds(work))
        print(f"round {repeat} of {repeats}" + (" (warms up)" if repeat == 0 else ""), flush=True)
    return {key: works[key].nbytes / statistics.median(times[1:]) for key, times in seconds.items()}


def beside(raw: TimedWork, engine: TimedWork, repeats: int) -> tuple[float, float, float]:
    """Bytes per second of both, and the second over the first: medians of so many pairs of runs.

    A pair is one of each right after the other, as a disk's rate drifts by more than what is to be
    seen; every other pair begins with the engine.
    """
    found = []
    for repeat in range(repeats):
        order = (raw, engine) if repeat % 2 == 0 else (engine, raw)
        seconds = {id(work): _seconds(work) for work in order}
        found.append((raw.nbytes / seconds[id(raw)], engine.nbytes / seconds[id(engine)]))
    ratios = [ours / plain for plain, ours in found]
    plain, ours = (statistics.median(column) for column in zip(*found, strict=True))
    return plain, ours, statistics.median(ratios)


def spans(start: int, nbytes: int, request: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each request over a range, the last one shorter where need be."""
    return ((start + done, min(request, nbytes - done)) for done in range(0, nbytes, request))


class RawFile:
    """Plain O_DIRECT requests on one file.

    Parameters
    ----------
    start, nbytes : int
        The range that is read or written: whole pages.
    buffer : uint8 Tensor, page-aligned, on the host
        Threads share it out.
    """

    def __init__(self, path: Path, start: int, nbytes: int, buffer: torch.Tensor, *, write: bool):
        self._path, self._start, self.nbytes = path, start, nbytes
        self._view = memoryview(buffer.numpy())
        self._call = os.pwritev if write else os.preadv
        try:
            self._file = os.open(path, os.O_DIRECT | (os.O_RDWR if write else os.O_RDONLY))
        except OSError as error:
            raise UserError(f"{path} can't be opened with O_DIRECT: {error.strerror}; choose a "
                            "file system on a disk") from error

    def close(self) -> None:
        os.close(self._file)

    def sweep(self, request: int, threads: int) -> None:
        """Move the whole range, in order, each thread one request at a time."""
        todo, lock = spans(self._start, self.nbytes, request), threading.Lock()

        def work(thread: int) -> None:
            mine = self._view[thread * request : (thread + 1) * request]
            while True:
                with lock:
                    offset, length = next(todo, (0, 0))
                if not length:
                    return
                if self._call(self._file, [mine[:length]], offset) != length:
                    raise UserError(f"{self._path}: a request came back short")

        try:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, range(threads)))
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror}") from error

    def works(self, name: str, settings: Iterable[tuple[int, int]]) -> dict[tuple, TimedWork]:
        """One for each setting, under (name, request, threads)."""
        return {(name, request, threads): TimedWork(
                    lambda request=request, threads=threads: self.sweep(request, threads),
                    self.nbytes)
                for request, threads in settings}
