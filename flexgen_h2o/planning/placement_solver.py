"""The placement solver: a linear program, rounded and checked against the memory plan. No torch.

Seconds are affine in the placement shares (see `cost`), and so are bytes, except for a few buffers.
The least time is then the solution of a linear program (FlexGen, arXiv 2303.06865, section 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import linprog

from flexgen_h2o.config.placement import PLACED, TIERS, Placement, split
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.planning.cache_cost import TERMS
from flexgen_h2o.planning.cost import placement_shares, unit_costs
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun, head_and_total_bytes
from flexgen_h2o.storage.free_memory import MemoryLimits

_SHARES = TERMS[1:]
_TIER_PENALTY = 1e-4
"""Cost of a share per slower tier, over the total time: ties go to fast tiers."""

_MAX_ROUNDS = 4
_MOVES = (1, 5, 20)  # percent, or sequences of a batch
_MIN_GAIN = 1e-3  # of the time: a move that gains less is not made
_NEGLIGIBLE = 5e-3  # of the time: a slower tier that saves less is not used


class PlacementSolver:
    """Solver for the placements of a run with fixed batch sizes, bits and place of attention.

    `run`: its own placements are ignored. `limits`: memory that the run may take.
    """

    def __init__(self, hardware: Hardware, run: PlannedRun, limits: MemoryLimits):
        self._limits = limits
        self.run = run if run.model.experts is None else self._place_dense_weights(run)
        # Without a GPU the tiers gpu and cpu are the same memory.
        self._tiers = TIERS if run.has_gpu else ("gpu", "disk")
        prefill, step = unit_costs(hardware, run)
        steps = run.workload.gen_len - 1
        self._units = [*prefill, *(replace(unit, count=unit.count * steps)
                                   for unit in step if steps)]
        # As floats: a file may give a disk more bytes than an integer of NumPy's holds.
        self._free = np.array([math.inf if limits.free(tier) is None else limits.free(tier)
                               for tier in TIERS], dtype=float)

    def _place_dense_weights(self, run: PlannedRun) -> PlannedRun:
        """Return a mixture's run with all weights but the experts on the fastest tier that fits.

        From then on, "weights" are the experts.
        """
        least: dict[str, Any] = dict.fromkeys(("experts", "cache", "activations"),
                                              Placement(0, 0, 100))
        runs = [replace(run, policy=replace(run.policy, weights=weights, **least)) for weights in
                (Placement(100, 0, 0), Placement(0, 100, 0), Placement(0, 0, 100))]
        return next(filter(self._fits, runs), runs[0])

    def _placement(self, policy: Policy, kind: str) -> Placement:
        """Return the placement of a kind of data."""
        return getattr(policy, self._field(kind))

    def _replace(self, policy: Policy, placements: Mapping[str, Placement]) -> Policy:
        """Return a policy with other placements of some kinds."""
        fields: dict[str, Any] = {self._field(kind): placement
                                  for kind, placement in placements.items()}
        return replace(policy, **fields)

    def _field(self, kind: str) -> str:
        return "experts" if kind == "weights" and self.run.model.experts is not None else kind

    @cached_property
    def seconds(self) -> float:
        """Lower bound of the seconds of a block, over all placements; inf if none fits."""
        shares = self._solve_lp(self._free)
        return math.inf if shares is None else self._block_seconds(np.array([1, *shares]))

    @property
    def amortized_seconds(self) -> float:
        """Lower bound of the seconds of a block, divided by its sequences."""
        return self.seconds / self.run.sequences

    def best(self) -> PlannedRun | None:
        """Return the run with the fastest placement found that fits; None if none fits.

        The linear program does not know that a cache on a single tier needs no staging buffers. It
        is therefore also solved with the whole cache on each tier.
        """
        starts = [self._round_solution(), *(self._round_solution(tier) for tier in self._tiers)]
        improved = [self._hill_climb(run) for run in starts if run is not None]
        best = min(improved, key=self._run_seconds, default=None)
        return best and self._add_expert_slots(self._drop_slow_tiers(best))

    def _add_expert_slots(self, run: PlannedRun) -> PlannedRun:
        """Return the run with half of the experts on a GPU turned into slots for host memory's.

        This is for small batches, which choose less than half of a layer's experts at a time: slots
        adapt to the experts that the text needs. If all experts were chosen equally often, it would
        change nothing. Experts on disk share one pool in any case (`pool_experts`).
        """
        experts, policy, num_experts = run.model.experts, run.policy, run.num_experts
        if (experts is None or policy.expert_slots is not None or not run.has_gpu
                or not policy.experts.cpu or run.computes_experts_on_host
                or run.touched(run.sequences, 1) > experts.count / 2):
            return run
        surplus = num_experts * policy.experts.gpu / 100 - run.expert_slots
        percent = int(100 * surplus / 2 / num_experts)
        while percent > 0:
            added = int(percent / 100 * num_experts * run.expert_bytes / run.slot_bytes)
            with_slots = replace(run, policy=replace(
                policy, experts=_shift(policy.experts, "gpu", "cpu", percent),
                expert_slots=run.expert_slots + added))
            if self._fits(with_slots):
                return with_slots
            percent //= 2
        return run

    def _hill_climb(self, run: PlannedRun) -> PlannedRun:
        """Return the local optimum that is reached from a run by moves to its best neighbour."""
        better: PlannedRun | None = run
        while better is not None:
            run, better = better, self._best_neighbour(better)
        return run

    def _block_seconds(self, shares: np.ndarray) -> Any:
        """Return the seconds of a block for placement shares [TERMS] or [TERMS, n]."""
        return sum(unit.elapsed(shares) for unit in self._units)

    def _run_seconds(self, run: PlannedRun) -> float:
        return float(self._block_seconds(placement_shares(run)))

    def _fits(self, run: PlannedRun) -> bool:
        return not MemoryPlan(run).shortfalls(self._limits)

    def _round_solution(self, cache_tier: str | None = None) -> PlannedRun | None:
        """Return the linear program's solution, rounded to percents and sequences, repaired to fit.

        The whole cache is on `cache_tier`, if given. None if nothing fits.
        """
        free, run = self._free, None
        for _ in range(_MAX_ROUNDS):
            shares = self._solve_lp(free, cache_tier)
            if shares is None:
                break
            run = self._apply_shares(shares)
            over = _tier_bytes(run) - self._free
            if (over <= 0).all():
                return run
            # Rounding and buffers exceed the limit: solve again with less memory.
            free = free - np.maximum(over, 0)
        if run is None:
            return None
        policy = MemoryPlan(run).suggest(self._limits)
        if policy is None:
            return None
        rounded = replace(run, policy=policy)
        if run.model.experts is None:
            return rounded
        others, experts = rounded.weight_placements
        return replace(run, policy=replace(policy, weights=others, experts=experts))

    def _apply_shares(self, shares: np.ndarray) -> PlannedRun:
        """Return the run with shares [_SHARES] in whole percents, and whole sequences for the
        cache."""
        placements = {}
        for kind, percents in zip(PLACED, shares.reshape(len(PLACED), len(TIERS)), strict=True):
            placement = _normalize(percents.tolist())
            if kind == "cache":
                placement = _normalize(split(self.run.workload.gpu_batch_size, placement))
            placements[kind] = Placement(*split(100, placement))
        return replace(self.run, policy=self._replace(self.run.policy, placements))

    def _best_neighbour(self, run: PlannedRun) -> PlannedRun | None:
        """Return the fastest neighbour that fits, if it is faster than the run."""
        neighbours = [replace(run, policy=policy) for policy in self._neighbours(run.policy)]
        shares = np.stack([placement_shares(neighbour) for neighbour in neighbours], axis=1)
        times = self._block_seconds(shares)
        least = self._run_seconds(run) * (1 - _MIN_GAIN)
        order = [index for index in np.argsort(times, kind="stable") if times[index] < least]
        return next((neighbours[index] for index in order if self._fits(neighbours[index])), None)

    def _drop_slow_tiers(self, run: PlannedRun) -> PlannedRun:
        """Return the run without slower tiers that save next to nothing."""
        max_seconds = self._run_seconds(run) * (1 + _NEGLIGIBLE)
        for kind in PLACED:
            for source, target in (("disk", "cpu"), ("disk", "gpu"), ("cpu", "gpu")):
                placement = self._placement(run.policy, kind)
                moved = _shift(placement, source, target, getattr(placement, source))
                other = replace(run, policy=self._replace(run.policy, {kind: moved}))
                usable = target in self._tiers and self._fits(other)
                if usable and self._run_seconds(other) <= max_seconds:
                    run = other
        return run

    def _neighbours(self, policy: Policy) -> Iterator[Policy]:
        """Yield policies with a part, or all, of one kind of data moved to another tier."""
        sequence = 100 / self.run.workload.gpu_batch_size
        for kind in PLACED:
            placement = self._placement(policy, kind)
            for source in self._tiers:
                share = getattr(placement, source)
                unit = max(1, sequence) if kind == "cache" else 1
                moved = {min(share, round(step * unit)) for step in (*_MOVES, 100)} - {0}
                for target in self._tiers:
                    for amount in moved if target != source else ():
                        yield self._replace(policy, {
                            kind: _shift(placement, source, target, amount)})

    def _solve_lp(self, free: np.ndarray, cache_tier: str | None = None) -> np.ndarray | None:
        """Return the shares of least time that take at most `free` bytes [tiers]; None if none do.

        The variables are the shares and the seconds of each unit. A unit takes at least as long as
        each of its paths. The whole cache is on `cache_tier`, if given.
        """
        bytes_of = self._bytes_by_term
        limited = np.isfinite(free)
        rows = [np.hstack((bytes_of[limited, 1:],
                           np.zeros((limited.sum(), len(self._units)))))]
        limits = [free[limited] - bytes_of[limited, 0]]
        scale = np.maximum(np.abs(rows[0]).max(axis=1), 1)
        rows[0], limits[0] = rows[0] / scale[:, None], limits[0] / scale
        constant = self._block_seconds(np.array([1.0] + [0.0] * len(_SHARES)))
        for index, unit in enumerate(self._units):
            weight = unit.count / constant  # keeps numbers near 1
            elapsed = np.zeros((len(unit.path_seconds), len(self._units)))
            elapsed[:, index] = -1
            rows.append(np.hstack((unit.path_seconds[:, 1:] * weight, elapsed)))
            limits.append(-unit.path_seconds[:, 0] * weight)
        slower = [_TIER_PENALTY * TIERS.index(tier) for _, tier in _SHARES]
        sums_to_one = np.zeros((len(PLACED), len(_SHARES) + len(self._units)))
        for index, kind in enumerate(PLACED):
            sums_to_one[index, [number for number, (k, _) in enumerate(_SHARES) if k == kind]] = 1
        share_bounds = [
            (0, int(tier in self._tiers and (kind != "cache" or cache_tier in (None, tier))))
            for kind, tier in _SHARES]
        solution = linprog(
            [*slower, *[1] * len(self._units)], A_ub=np.vstack(rows),
            b_ub=np.concatenate(limits),
            A_eq=sums_to_one, b_eq=np.ones(len(PLACED)),
            bounds=[*share_bounds, *[(0, None)] * len(self._units)], method="highs")
        return solution.x[: len(_SHARES)] if solution.success else None

    @cached_property
    def _bytes_by_term(self) -> np.ndarray:
        """Bytes [tiers, TERMS] of the memory plan, as an affine function of the shares.

        They are interpolated between placements on a single tier, which underestimates some
        buffers. All weights except the head's matrix leave the fastest tier: with a share that
        holds the head, no buffer of its size is needed.
        """
        fast = Placement(100, 0, 0)
        head, weights = head_and_total_bytes(self.run) if self.run.model.experts is None else (0, 1)
        everything = dict.fromkeys(PLACED, fast)
        base = _tier_bytes(replace(self.run, policy=self._replace(self.run.policy, everything)))
        nbytes = np.zeros((len(TIERS), len(TERMS)))
        nbytes[:, 0] = base
        for number, (kind, tier) in enumerate(_SHARES, 1):
            if tier in self._tiers[1:]:
                head_share = math.ceil(1e4 * head / weights) / 1e4 if kind == "weights" else 0.0
                there = everything | {kind: _shift(fast, "gpu", tier, 100 * (1 - head_share))}
                run = replace(self.run, policy=self._replace(self.run.policy, there))
                nbytes[:, number] = (_tier_bytes(run) - base) / (1 - head_share)
        return nbytes


def _tier_bytes(run: PlannedRun) -> np.ndarray:
    """Return the bytes on each tier by the memory plan."""
    plan = MemoryPlan(run)
    return np.array([float(plan.total(tier)) for tier in TIERS])


def _shift(placement: Placement, source: str, target: str, percent: float) -> Placement:
    """Return a placement with `percent` moved from one tier to another."""
    return replace(placement, **{source: getattr(placement, source) - percent,
                                 target: getattr(placement, target) + percent})


def _normalize(shares: Sequence[float]) -> Placement:
    """Return a placement in proportion to shares; negative rounding errors count as 0."""
    positive = [max(0.0, float(share)) for share in shares]
    return Placement(*(100 * share / sum(positive) for share in positive))
