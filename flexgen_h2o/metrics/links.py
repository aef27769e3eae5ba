"""Bytes over the links between tiers, and the time that they were busy."""

from __future__ import annotations

import bisect
import threading

LINKS = ("disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu")
GB = 1e9


class LinkStats:
    """Bytes moved and seconds busy on each link, added from any thread.

    Busy time is the union of the intervals: two transfers at once count once, so that bytes over
    seconds is what the link carried. Intervals are merged as they come; the oldest are closed into
    a sum, as a long run has millions.
    """

    _MOST_OPEN = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next run starts at zero."""
        with self._lock:
            self._bytes = dict.fromkeys(LINKS, 0)
            self._closed = dict.fromkeys(LINKS, 0.0)
            self._open: dict[str, list[tuple[float, float]]] = {link: [] for link in LINKS}

    def add(self, link: str, nbytes: int, start: float, end: float) -> None:
        """Count a transfer of `nbytes` that took from `start` to `end` (perf_counter seconds)."""
        with self._lock:
            self._bytes[link] += nbytes
            intervals = self._open[link]
            first = bisect.bisect_left(intervals, start, key=lambda span: span[1])
            last = bisect.bisect_right(intervals, end, key=lambda span: span[0])
            if first < last:
                start, end = min(start, intervals[first][0]), max(end, intervals[last - 1][1])
            intervals[first:last] = [(start, end)]
            if len(intervals) > self._MOST_OPEN:
                half = self._MOST_OPEN // 2
                self._closed[link] += sum(b - a for a, b in intervals[:half])
                del intervals[:half]

    def totals(self) -> dict[str, tuple[int, float]]:
        """Link to (bytes, busy seconds), for the links that carried anything."""
        with self._lock:
            return {
                link: (nbytes, self._closed[link] + sum(b - a for a, b in self._open[link]))
                for link, nbytes in self._bytes.items() if nbytes
            }
