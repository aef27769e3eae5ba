"""The tally of a layer step: what it takes of each resource, by shares of placements. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexgen_h2o.config.placement import PLACED, TIERS
from flexgen_h2o.metrics.links import LINKS
from flexgen_h2o.planning.hardware import Hardware

COMPUTE, HOST = "compute", "cpu attention"
RESOURCES = (COMPUTE, HOST, *LINKS)
TERMS = (None, *((kind, tier) for kind in PLACED for tier in TIERS))
"""The variables in which seconds are affine: a constant, and the share (1: all) of each kind on
each tier. The weights of a mixture that count here are the experts; the others lie as they do."""


@dataclass(frozen=True)
class LayerStepCost:
    """One layer step of the schedule, for all batches of a block.

    Attributes
    ----------
    count : float
        How often it comes in its phase.
    lanes : float array [lanes, TERMS]
        Seconds of what runs side by side, and is disturbed by the others: the layer step takes as
        long as the largest.
    seconds : float array [RESOURCES, TERMS]
        Seconds of each resource alone.
    """

    count: float
    lanes: np.ndarray
    seconds: np.ndarray

    def elapsed(self, shares: np.ndarray) -> np.ndarray:
        """Seconds in the phase, for `shares` [TERMS] or, of many placements, [TERMS, n]."""
        return self.count * (self.lanes @ shares).max(axis=0)


class Tally:
    """Sums up what a layer step takes of each resource, by `TERMS`."""

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self.seconds = np.zeros((len(RESOURCES), len(TERMS)))

    def add(self, resource: str, seconds: float, term: tuple[str, str] | None = None) -> None:
        """Seconds of a resource, whatever the placements are or times the share of a term."""
        self.seconds[RESOURCES.index(resource), TERMS.index(term)] += seconds

    def link(self, name: str, nbytes: float, term: tuple[str, str]) -> None:
        """Bytes times the share of a term over a link."""
        self.add(name, nbytes / self._hardware.links[name], term)

    def bring(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Bytes of which the shares on `tiers` come to compute memory."""
        for tier in tiers:
            if tier == "disk":
                self.link("disk->cpu", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.link("cpu->gpu", nbytes, (kind, tier))

    def bring_fixed(self, tier: str, nbytes: float) -> None:
        """Bytes that come to compute memory from a tier, whatever the placements are."""
        for link, passed in (("disk->cpu", tier == "disk"),
                             ("cpu->gpu", tier != "gpu" and self._hardware.has_gpu)):
            if passed:
                self.add(link, nbytes / self._hardware.links[link])

    def send(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Bytes of which the shares on `tiers` leave compute memory."""
        for tier in tiers:
            if tier == "disk":
                self.link("cpu->disk", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.link("gpu->cpu", nbytes, (kind, tier))
