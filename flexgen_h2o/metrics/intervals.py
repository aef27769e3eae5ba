"""Unions and differences of intervals of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end, in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same instants in disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


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
