"""Times work on a device: each measurement warms up first, and is the median of many samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from flexgen_h2o.storage.tiers import Device

LEAST_SECONDS = 1e-9
"""The least that is left when one time is taken from another: noise must not make it negative."""

FEWEST, MOST = 7, 200
"""Samples of a measurement."""

PATIENCE = 8
"""Times as long is taken for a difference, which is small beside what it is made of."""


class Clock:
    """Times work on a device, in samples of so many calls that reading the clock costs nothing.

    Parameters
    ----------
    device : Device
    seconds : float
        That the samples of a measurement take together, about.
    """

    def __init__(self, device: Device, seconds: float):
        self._device = device
        self._seconds = seconds

    def seconds(self, work: Callable[[], object], *, hopeless: float = math.inf) -> float:
        """Seconds of a call; no more than a look at it if they are `hopeless`."""
        if hopeless < math.inf:
            self._sample(work, 1)
            least = min(self._sample(work, 1) for _ in range(2))
            if least >= hopeless:
                return least
        return statistics.median(took for took, in self._samples(self._seconds, work))

    def difference(self, more: Callable[[], object], less: Callable[[], object]) -> float:
        """Seconds that a call of `more` takes beyond one of `less`; they take turns."""
        samples = self._samples(PATIENCE * self._seconds, more, less)
        return statistics.median(with_it - without for with_it, without in samples)

    def _samples(self, seconds: float, *works: Callable[[], object]) -> list[list[float]]:
        """Seconds of a call of each, again and again for so long, about."""
        for work in works:  # compiles, and starts threads
            self._sample(work, 1)
        tried = [[self._sample(work, 1) for work in works] for _ in range(FEWEST)]
        once = sum(map(min, zip(*tried, strict=True)))
        if FEWEST * once >= seconds:
            return tried
        calls = math.ceil(seconds / MOST / once)
        samples, ends = [], time.perf_counter() + seconds
        while len(samples) < FEWEST or time.perf_counter() < ends:
            samples.append([self._sample(work, calls) for work in works])
        return samples

    def _sample(self, work: Callable[[], object], calls: int) -> float:
        self._device.mark().synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        self._device.mark().synchronize()
        return (time.perf_counter() - began) / calls
