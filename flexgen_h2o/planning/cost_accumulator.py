"""Accumulate the seconds of a unit by resource and placement share. No torch.

A resource is compute, the host's attention, or a link between two tiers. Seconds are affine in the
placement shares, so that placements can be solved for as a linear program.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexgen_h2o.config.placement import PLACED, TIERS
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.planning.hardware import Hardware

COMPUTE, HOST = "compute", "cpu attention"
RESOURCES = (COMPUTE, HOST, *LINKS)
TERMS = (None, *((kind, tier) for kind in PLACED for tier in TIERS))
"""Variables of the affine cost: a constant (None), then the share, 0 to 1, of each kind of data on
each tier. For a mixture of experts, "weights" means the experts; its other weights are part of
the constant."""


@dataclass(frozen=True)
class UnitCost:
    """One type of unit of the schedule, for all batches of a block."""

    count: float  # number of these units in a phase
    path_seconds: np.ndarray
    """Seconds of each path. Paths run in parallel, so that the unit takes as long as the slowest
    one. Interference between paths is included."""
    seconds: np.ndarray  # seconds of each resource without interference

    def elapsed(self, shares: np.ndarray) -> np.ndarray:
        """Return the seconds in the phase for `shares` [TERMS], or [TERMS, n] for n placements."""
        return self.count * (self.path_seconds @ shares).max(axis=0)


class CostAccumulator:
    """Accumulator of the seconds of one unit."""

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self.seconds = np.zeros((len(RESOURCES), len(TERMS)))

    def add(self, resource: str, seconds: float, term: tuple[str, str] | None = None) -> None:
        """Add seconds to a resource: constant, or multiplied by the share of `term`."""
        self.seconds[RESOURCES.index(resource), TERMS.index(term)] += seconds

    def transfer(self, name: str, nbytes: float, term: tuple[str, str]) -> None:
        """Add a transfer over a link of `nbytes` times the share of `term`."""
        self.add(name, nbytes / self._hardware.links[name], term)

    def load(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Add a load into compute memory, from each of `tiers`, of `nbytes` times its share."""
        for tier in tiers:
            if tier == "disk":
                self.transfer("disk->cpu", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.transfer("cpu->gpu", nbytes, (kind, tier))

    def load_fixed(self, tier: str, nbytes: float) -> None:
        """Add a load into compute memory of `nbytes` from `tier`, independent of the placement."""
        for link, passed in (("disk->cpu", tier == "disk"),
                             ("cpu->gpu", tier != "gpu" and self._hardware.has_gpu)):
            if passed:
                self.add(link, nbytes / self._hardware.links[link])

    def store(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Add a store from compute memory, to each of `tiers`, of `nbytes` times its share."""
        for tier in tiers:
            if tier == "disk":
                self.transfer("cpu->disk", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.transfer("gpu->cpu", nbytes, (kind, tier))
