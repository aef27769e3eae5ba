"""Unions and differences of intervals of time."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end, in seconds."""


class Union:
    """A growing union of intervals.

    Parameters
    ----------
    most : int or None
        Intervals that are kept; beyond that the earlier half is closed into a sum, as a long run
        has millions, and what is added there later counts again. None: all.

    Attributes
    ----------
    intervals : list of Interval
        Those kept: disjoint, in order.
    """

    def __init__(self, most: int | None = None):
        self.intervals: list[Interval] = []
        self._most = most
        self._closed = 0.0

    def add(self, start: float, end: float) -> None:
        """Merge an interval with those that it touches."""
        intervals = self.intervals
        first = bisect.bisect_left(intervals, start, key=lambda span: span[1])
        last = bisect.bisect_right(intervals, end, key=lambda span: span[0])
        if first < last:
            start, end = min(start, intervals[first][0]), max(end, intervals[last - 1][1])
        intervals[first:last] = [(start, end)]
        if self._most is not None and len(intervals) > self._most:
            half = self._most // 2
            self._closed += seconds(intervals[:half])
            del intervals[:half]

    def seconds(self) -> float:
        """Total length."""
        return self._closed + seconds(self.intervals)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants in disjoint intervals, in order."""
    merged = Union()
    for start, end in sorted(intervals):
        merged.add(start, end)
    return merged.intervals


def minus(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Intervals without the holes; both are disjoint and in order."""
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


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The instants in both; both are disjoint and in order."""
    return minus(one, minus(one, other))


def seconds(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
