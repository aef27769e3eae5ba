"""Traces of a run: link statistics, spans and memory samples over time. No torch."""

from __future__ import annotations

import bisect
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from flexgen_h2o.files.writing import open_atomic
from flexgen_h2o.metrics.run_stats import ratio

LINKS = ("disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu")
GB = 1e9


class LinkStats:
    """Bytes moved and busy seconds of each link. Thread-safe.

    Busy time is the union of the transfers' intervals: concurrent transfers count once, so that
    bytes over seconds is the link's throughput.
    """

    MAX_INTERVALS = 1024
    """Intervals of a link that are kept one by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set everything to zero."""
        with self._lock:
            self._bytes = dict.fromkeys(LINKS, 0)
            self._busy = {link: IntervalUnion(self.MAX_INTERVALS) for link in LINKS}

    def add(self, link: str, nbytes: int, start: float, end: float) -> None:
        """Add a transfer of `nbytes` from `start` to `end` (perf_counter seconds)."""
        with self._lock:
            self._bytes[link] += nbytes
            self._busy[link].add(start, end)

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return bytes and busy seconds of each link that was used."""
        with self._lock:
            return {link: (nbytes, self._busy[link].seconds())
                    for link, nbytes in self._bytes.items() if nbytes}


Interval = tuple[float, float]
"""Start and end, in seconds."""


class IntervalUnion:
    """A growing union of intervals.

    Parameters
    ----------
    max_intervals : int or None
        Maximum number of intervals to keep; None: all. Beyond it the earlier half is replaced by
        its sum, because a long run has millions. An interval added there later counts twice.

    Attributes
    ----------
    intervals : list of Interval
        The kept intervals: disjoint and ascending.
    """

    def __init__(self, max_intervals: int | None = None):
        self.intervals: list[Interval] = []
        self._max_intervals = max_intervals
        self._closed = 0.0

    def add(self, start: float, end: float) -> None:
        """Add an interval, and merge it with the intervals that it touches."""
        intervals = self.intervals
        first = bisect.bisect_left(intervals, start, key=lambda span: span[1])
        last = bisect.bisect_right(intervals, end, key=lambda span: span[0])
        if first < last:
            start, end = min(start, intervals[first][0]), max(end, intervals[last - 1][1])
        intervals[first:last] = [(start, end)]
        if self._max_intervals is not None and len(intervals) > self._max_intervals:
            half = self._max_intervals // 2
            self._closed += seconds(intervals[:half])
            del intervals[:half]

    def seconds(self) -> float:
        """Return the total length."""
        return self._closed + seconds(self.intervals)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    merged = IntervalUnion()
    for start, end in sorted(intervals):
        merged.add(start, end)
    return merged.intervals


def difference(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return the intervals without the holes; both are disjoint and in order."""
    left, first = [], 0
    for start, end in intervals:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        for hole in range(first, len(holes)):
            if holes[hole][0] >= end:
                break
            if holes[hole][0] > start:
                left.append((start, holes[hole][0]))
            start = holes[hole][1]
        if start < end:
            left.append((start, end))
    return left


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the intersection; both are disjoint and in order."""
    return difference(a, difference(a, b))


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


COMPUTE, WAITING, PHASES = "compute", "waiting", "phases"
"""Tracks of a trace in addition to the links. WAITING is where compute waits for a transfer, within
its own spans. PHASES holds each block's ``prefill`` and ``decode``.
"""
PROCESS_MEMORY, DEVICE_MEMORY = "process memory", "device memory"
"""Sampled quantities, in bytes: resident memory of the process, memory allocated on a GPU."""


class Trace:
    """A thread-safe recorder of memory samples, and of spans in tracks such as ``disk->cpu``.

    Times are `time.perf_counter` seconds. A disabled trace records nothing. The file format is
    Chrome trace JSON, which ui.perfetto.dev shows: spans in tracks, memory as graphs.

    `about`: metadata of the run, written to the file.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.about: dict[str, object] = {}
        self._origin = time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[tuple[str, str, float, float, int]] = []
        self._samples: list[tuple[str, float, int]] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within the context."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def span(self, name: str, track: str) -> AbstractContextManager[None]:
        """Record the body of a ``with`` statement as a span, also when it raises."""
        return self._timed(name, track) if self.enabled else nullcontext()

    @contextmanager
    def _timed(self, name: str, track: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, track, start, time.perf_counter())

    def add(self, name: str, track: str, start: float, end: float, nbytes: int = 0) -> None:
        """Record a span that was timed elsewhere, and the bytes that it moved."""
        if self.enabled:
            with self._lock:
                self._spans.append((name, track, start, end, nbytes))

    def sample(self, memory: str, at: float, nbytes: int) -> None:
        """Record the bytes in use of a memory at a time."""
        if self.enabled:
            with self._lock:
                self._samples.append((memory, at, nbytes))

    def spans(self) -> list[tuple[str, str, float, float, int]]:
        """Return all spans: (name, track, start, end, bytes), in order of recording."""
        with self._lock:
            return list(self._spans)

    def samples(self) -> list[tuple[str, float, int]]:
        """Return all samples: (memory, time, bytes), in order of recording."""
        with self._lock:
            return list(self._samples)

    def write_chrome(self, path: str | os.PathLike) -> None:
        """Write Chrome trace JSON (microseconds). Raises OSError if the file cannot be written."""
        spans = self.spans()
        tracks = {track: number for number, track in enumerate(dict.fromkeys(s[1] for s in spans))}
        events: list[dict] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        for name, track, start, end, nbytes in spans:
            event = {"ph": "X", "name": name, "cat": track, "pid": 1, "tid": tracks[track],
                     "ts": (start - self._origin) * 1e6, "dur": max(end - start, 0.0) * 1e6}
            if nbytes:
                event["args"] = {"bytes": nbytes, "GB/s": ratio(nbytes / GB, end - start)}
            events.append(event)
        for memory, at, nbytes in self.samples():
            events.append({"ph": "C", "name": memory, "pid": 1, "ts": (at - self._origin) * 1e6,
                           "args": {"bytes": nbytes}})
        with open_atomic(path) as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": self.about},
                      file)
