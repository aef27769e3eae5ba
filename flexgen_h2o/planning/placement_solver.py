"""Placements for one batch shape: a linear programme, rounded and held to the memory plan.

Seconds are affine in the shares of the placements (see `cost`), and so are bytes but for a few
buffers; the least time is then a linear programme (FlexGen, arXiv 2303.06865, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from scipy.optimize import linprog

from flexgen_h2o.config.placement import PLACED, TIERS, Placement
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.planning.cache_cost import TERMS
from flexgen_h2o.planning.cost import layer_step_costs, placement_shares
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun, head_and_total_bytes
from flexgen_h2o.storage.free_memory import MemoryLimits
from flexgen_h2o.storage.placement import split

_SHARES = TERMS[1:]
_SLOWER = 1e-4
"""The part of all time that a share on a slower tier is charged: where nothing else decides, it is
fast."""

_ROUNDINGS = 4
_STEPS = (1, 5, 20)  # percent, or sequences of a batch
_ENOUGH = 1e-3  # of the time, what a move has to gain
_NOTHING = 5e-3  # of the time, what no slower tier is worth


class PlacementSolver:
    """Finds the placements of a run whose batch sizes, bits and place of attention are given.

    Parameters
    ----------
    hardware : Hardware
    run : PlannedRun
        Its placements do not matter.
    limits : MemoryLimits
        What it may take.
    """

    def __init__(self, hardware: Hardware, run: PlannedRun, limits: MemoryLimits):
        self._limits = limits
        self.run = run if run.model.experts is None else self._others_placed(run)
        # Without a GPU the tiers gpu and cpu are the same memory.
        self._tiers = TIERS if run.has_gpu else ("gpu", "disk")
        prefill, step = layer_step_costs(hardware, run)
        steps = run.workload.gen_len - 1
        self._layer_steps = [*prefill, *(replace(layer_step, count=layer_step.count * steps)
                                         for layer_step in step
                                         if steps)]
        # As floats: a file may give a disk more bytes than an integer of NumPy's holds.
        self._free = np.array([math.inf if limits.free(tier) is None else limits.free(tier)
                               for tier in TIERS], dtype=float)

    def _others_placed(self, run: PlannedRun) -> PlannedRun:
        """A run of a mixture with all but the experts on the fastest tier that has room for it.

        From here on the experts are what is placed of the weights.
        """
        least = dict.fromkeys(("experts", "cache", "activations"), Placement(0, 0, 100))
        runs = [replace(run, policy=replace(run.policy, weights=weights, **least)) for weights in
                (Placement(100, 0, 0), Placement(0, 100, 0), Placement(0, 0, 100))]
        return next(filter(self._fits, runs), runs[0])

    def _placement(self, policy: Policy, kind: str) -> Placement:
        """The placement of a kind."""
        return getattr(policy, self._field(kind))

    def _with(self, policy: Policy, placements: Mapping[str, Placement]) -> Policy:
        """A policy with other placements of some kinds."""
        return replace(policy, **{self._field(kind): each for kind, each in placements.items()})

    def _field(self, kind: str) -> str:
        return "experts" if kind == "weights" and self.run.model.experts is not None else kind

    @cached_property
    def seconds(self) -> float:
        """Seconds of the block that no placement can beat; inf if none fits."""
        shares = self._solve(self._free)
        return math.inf if shares is None else self._time(np.array([1, *shares]))

    @property
    def sequences(self) -> int:
        """Tokens per second of the block."""
        return self.run.workload.gpu_batch_size * self.run.workload.num_gpu_batches

    @property
    def seconds_per_sequence(self) -> float:
        """The phases whose sum is `seconds`."""
        return self.seconds / self.sequences

    def best(self) -> PlannedRun | None:
        """The run, placed so that it fits and takes the least time that was found.

        A cache that is wholly on one tier needs no buffers to get to it from another. The linear
        programme knows nothing of that, and so it is asked once more for each tier.
        """
        starts = [self._rounded(), *(self._rounded(tier) for tier in self._tiers)]
        found = [self._descended(run) for run in starts if run is not None]
        best = min(found, key=lambda run: float(self._time(placement_shares(run))), default=None)
        return best and self._with_slots(self._simpler(best))

    def _with_slots(self, run: PlannedRun) -> PlannedRun:
        """The run with half of the experts that compute memory has room for in slots.

        It is for few sequences, which choose less than half of a layer's experts at a time: slots
        then keep those that the text at hand needs, which nobody knows before. If all were needed
        alike often, it would be the same.
        """
        experts, policy, every = run.model.experts, run.policy, run.num_experts
        if (experts is None or policy.expert_slots is not None or not run.expert_slots
                or run.computes_experts_on_host
                or run.touched(run.sequences, 1) > experts.count / 2):
            return run
        surplus = every * policy.experts.gpu / 100 - run.expert_slots
        for target in self._tiers[1:]:
            percent = int(100 * surplus / 2 / every)
            while percent > 0:
                added = int(percent / 100 * every * run.expert_bytes / run.slot_bytes)
                found = replace(run, policy=replace(
                    policy, experts=_moved(policy.experts, "gpu", target, percent),
                    expert_slots=run.expert_slots + added))
                if self._fits(found):
                    return found
                percent //= 2
        return run

    def _descended(self, run: PlannedRun) -> PlannedRun:
        """The run that is left when no neighbour is faster."""
        better: PlannedRun | None = run
        while better is not None:
            run, better = better, self._improved(better)
        return run

    def _time(self, shares: np.ndarray) -> np.ndarray:
        """Seconds of the block for shares [TERMS] or [TERMS, n]."""
        return sum(layer_step.elapsed(shares) for layer_step in self._layer_steps)

    def _fits(self, run: PlannedRun) -> bool:
        return not MemoryPlan(run).shortfalls(self._limits)

    def _rounded(self, cache_tier: str | None = None) -> PlannedRun | None:
        """The linear programme's shares in whole percents and sequences, mended until they fit.

        The whole cache is on `cache_tier`, if that is given.
        """
        free, run = self._free, None
        for _ in range(_ROUNDINGS):
            shares = self._solve(free, cache_tier)
            if shares is None:
                break
            run = self._placed(shares)
            over = _totals(run) - self._free
            if (over <= 0).all():
                return run
            # Rounding, and buffers that come whole or not at all: next time with less.
            free = free - np.maximum(over, 0)
        if run is None:
            return None
        policy = MemoryPlan(run).suggest(self._limits)
        if policy is None:
            return None
        found = replace(run, policy=policy)
        if run.model.experts is None:
            return found
        others, experts = found.weight_placements
        return replace(run, policy=replace(policy, weights=others, experts=experts))

    def _placed(self, shares: np.ndarray) -> PlannedRun:
        """The run with the shares [_SHARES] in whole percents, of the cache in sequences."""
        placements = {}
        for kind, three in zip(PLACED, shares.reshape(len(PLACED), len(TIERS)), strict=True):
            placement = _placement(three)
            if kind == "cache":
                placement = _placement(split(self.run.workload.gpu_batch_size, placement))
            placements[kind] = Placement(*split(100, placement))
        return replace(self.run, policy=self._with(self.run.policy, placements))

    def _improved(self, run: PlannedRun) -> PlannedRun | None:
        """The fastest neighbour that fits, if it is faster."""
        neighbours = [replace(run, policy=policy) for policy in self._neighbours(run.policy)]
        times = self._time(np.stack([placement_shares(each) for each in neighbours], axis=1))
        least = self._time(placement_shares(run)) * (1 - _ENOUGH)
        order = [index for index in np.argsort(times, kind="stable") if times[index] < least]
        return next((neighbours[index] for index in order if self._fits(neighbours[index])), None)

    def _simpler(self, run: PlannedRun) -> PlannedRun:
        """The run without the slower tiers that gain next to nothing."""
        most = self._time(placement_shares(run)) * (1 + _NOTHING)
        for kind in PLACED:
            for source, target in (("disk", "cpu"), ("disk", "gpu"), ("cpu", "gpu")):
                placement = self._placement(run.policy, kind)
                moved = _moved(placement, source, target, getattr(placement, source))
                other = replace(run, policy=self._with(run.policy, {kind: moved}))
                usable = target in self._tiers and self._fits(other)
                if usable and self._time(placement_shares(other)) <= most:
                    run = other
        return run

    def _neighbours(self, policy: Policy) -> Iterator[Policy]:
        """Policies with a little, or all, of one kind moved from a tier to another."""
        sequence = 100 / self.run.workload.gpu_batch_size
        for kind in PLACED:
            placement = self._placement(policy, kind)
            for source in self._tiers:
                held = getattr(placement, source)
                unit = max(1, sequence) if kind == "cache" else 1
                moved = {min(held, round(step * unit)) for step in (*_STEPS, 100)} - {0}
                for target in self._tiers:
                    for amount in moved if target != source else ():
                        yield self._with(policy, {
                            kind: _moved(placement, source, target, amount)})

    def _solve(self, free: np.ndarray, cache_tier: str | None = None) -> np.ndarray | None:
        """The shares of least time by the linear programme; None if nothing fits in `free`, with
        the whole cache on `cache_tier` if that is given.

        Its variables are the shares, and the seconds of each layer step: at least those of its
        lanes.
        """
        bytes_of = self._bytes
        limited = np.isfinite(free)
        rows = [np.hstack((bytes_of[limited, 1:],
                           np.zeros((limited.sum(), len(self._layer_steps)))))]
        bounds = [free[limited] - bytes_of[limited, 0]]
        scale = np.maximum(np.abs(rows[0]).max(axis=1), 1)
        rows[0], bounds[0] = rows[0] / scale[:, None], bounds[0] / scale
        compute = self._time(np.array([1.0] + [0.0] * len(_SHARES)))
        for index, layer_step in enumerate(self._layer_steps):
            weight = layer_step.count / compute  # keeps numbers near 1
            elapsed = np.zeros((len(layer_step.lanes), len(self._layer_steps)))
            elapsed[:, index] = -1
            rows.append(np.hstack((layer_step.lanes[:, 1:] * weight, elapsed)))
            bounds.append(-layer_step.lanes[:, 0] * weight)
        slower = [_SLOWER * TIERS.index(tier) for _, tier in _SHARES]
        whole = np.zeros((len(PLACED), len(_SHARES) + len(self._layer_steps)))
        for index, kind in enumerate(PLACED):
            whole[index, [number for number, (k, _) in enumerate(_SHARES) if k == kind]] = 1
        shares = [(0, int(tier in self._tiers and (kind != "cache" or cache_tier in (None, tier))))
                  for kind, tier in _SHARES]
        found = linprog(
            [*slower, *[1] * len(self._layer_steps)], A_ub=np.vstack(rows),
            b_ub=np.concatenate(bounds),
            A_eq=whole, b_eq=np.ones(len(PLACED)),
            bounds=[*shares, *[(0, None)] * len(self._layer_steps)], method="highs")
        return found.x[: len(_SHARES)] if found.success else None

    @cached_property
    def _bytes(self) -> np.ndarray:
        """Bytes [tiers, TERMS] that the memory plan takes, between the placements of one tier each.

        It adds up over the kinds, and is linear for each of them but for buffers, of which it says
        too little in between. Of the weights all but the head's matrix leave the fastest tier: a
        share that has room for it needs no buffers of its size.
        """
        fast = Placement(100, 0, 0)
        head, weights = head_and_total_bytes(self.run) if self.run.model.experts is None else (0, 1)
        everything = dict.fromkeys(PLACED, fast)
        base = _totals(replace(self.run, policy=self._with(self.run.policy, everything)))
        found = np.zeros((len(TIERS), len(TERMS)))
        found[:, 0] = base
        for number, (kind, tier) in enumerate(_SHARES, 1):
            if tier in self._tiers[1:]:
                kept = math.ceil(1e4 * head / weights) / 1e4 if kind == "weights" else 0.0
                there = everything | {kind: _moved(fast, "gpu", tier, 100 * (1 - kept))}
                run = replace(self.run, policy=self._with(self.run.policy, there))
                found[:, number] = (_totals(run) - base) / (1 - kept)
        return found


def _totals(run: PlannedRun) -> np.ndarray:
    """Bytes on each tier by the memory plan."""
    plan = MemoryPlan(run)
    return np.array([float(plan.total(tier)) for tier in TIERS])


def _moved(placement: Placement, source: str, target: str, percent: float) -> Placement:
    """A placement with so many percent on another tier."""
    return replace(placement, **{source: getattr(placement, source) - percent,
                                 target: getattr(placement, target) + percent})


def _placement(shares: Sequence[float]) -> Placement:
    """A placement of shares of any sum; a little below 0 is 0."""
    positive = [max(0.0, float(share)) for share in shares]
    return Placement(*(100 * share / sum(positive) for share in positive))
