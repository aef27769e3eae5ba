"""Bytes over the links between tiers, and the time that they were busy."""

from __future__ import annotations

import threading

from flexgen_h2o.metrics.intervals import Union

LINKS = ("disk->cpu", "cpu->disk", "cpu->gpu", "gpu->cpu")
GB = 1e9


class LinkStats:
    """Bytes moved and seconds busy on each link, added from any thread.

    Busy time is the union of the intervals: two transfers at once count once, so that bytes over
    seconds is what the link carried.
    """

    MOST_INTERVALS = 1024
    """Of a link that are kept one by one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next run starts at zero."""
        with self._lock:
            self._bytes = dict.fromkeys(LINKS, 0)
            self._busy = {link: Union(self.MOST_INTERVALS) for link in LINKS}

    def add(self, link: str, nbytes: int, start: float, end: float) -> None:
        """Count a transfer of `nbytes` that took from `start` to `end` (perf_counter seconds)."""
        with self._lock:
            self._bytes[link] += nbytes
            self._busy[link].add(start, end)

    def totals(self) -> dict[str, tuple[int, float]]:
        """Link to (bytes, busy seconds), for the links that carried anything."""
        with self._lock:
            return {link: (nbytes, self._busy[link].seconds())
                    for link, nbytes in self._bytes.items() if nbytes}
