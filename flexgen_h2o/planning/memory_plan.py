"""The memory plan: what a run will need on each tier, against what is free. No torch.

The plan is made before anything is allocated. A run that cannot fit stops with the sum, the limit
and a ``--percent`` that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from flexgen_h2o.config.formats import CacheOptions, WeightOptions
from flexgen_h2o.config.placement import PLACED, TIERS, Placement
from flexgen_h2o.config.policy import Policy, percent_text
from flexgen_h2o.config.stage import Stage
from flexgen_h2o.config.workload import Workload
from flexgen_h2o.errors import TooLittleMemory
from flexgen_h2o.metrics.links import GB
from flexgen_h2o.metrics.text import sizes
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.rows import WEIGHT_ROWS, PlanRow, plan_rows
from flexgen_h2o.storage.free_memory import MemoryLimits

if TYPE_CHECKING:
    from flexgen_h2o.models.spec import ModelConfig

STEP = 5
"""Percent that the search for a placement moves at a time."""

_NAMES = {"gpu": "device memory", "cpu": "host memory", "disk": "disk space"}
_FULL_CACHE = CacheOptions()
_PLAIN_WEIGHTS = WeightOptions()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run takes on each tier. Make one with `memory_plan`."""

    run: PlannedRun

    @cached_property
    def rows(self) -> tuple[PlanRow, ...]:
        """Bytes of each kind of data."""
        return plan_rows(self.run)

    def total(self, tier: str) -> int:
        """Bytes of all rows on a tier."""
        return sum(getattr(row, tier) for row in self.rows)

    def shortfalls(self, limits: MemoryLimits) -> tuple[str, ...]:
        """The tiers that need more than is free."""
        return tuple(tier for tier in TIERS
                     if limits.free(tier) is not None and self.total(tier) > limits.free(tier))

    def check(self, limits: MemoryLimits) -> None:
        """Raise `UserError` with sums, limits and a placement that fits, unless this one does."""
        short = self.shortfalls(limits)
        if not short:
            return
        sums = "; ".join(f"{_NAMES[tier]}: {self._excess(tier, limits)}" for tier in short)
        fitting = self.suggest(limits)
        if fitting is None:
            advice = ("no --percent would fit: lower --gpu-batch-size, --num-gpu-batches or "
                      "--gen-len, or take a smaller model")
        else:
            alone = "" if self.run.policy.experts is None else " without --expert-percent"
            advice = f"--percent {percent_text(fitting)}{alone} would fit"
        raise TooLittleMemory(f"the run does not fit. {sums}. {advice}")

    def before_loading(self, limits: MemoryLimits, *, kept: int) -> MemoryLimits:
        """Memory that was free before the weights and their buffers came, of `limits` measured
        since.

        `kept` bytes of host memory are in no use, and the system does not count them as free.
        """
        gpu, cpu, disk = (
            sum(getattr(row, tier) for row in self.rows if row.name in WEIGHT_ROWS)
            for tier in TIERS)
        return MemoryLimits(None if limits.gpu_bytes is None else limits.gpu_bytes + gpu,
                            limits.cpu_bytes + cpu + kept, limits.disk_bytes + disk)

    def _excess(self, tier: str, limits: MemoryLimits) -> str:
        """Text on a tier's need, with its largest three rows, and its limit."""
        rows = sorted(((row.name, getattr(row, tier)) for row in self.rows),
                      key=lambda row: -row[1])
        rows = [row for row in rows[:3] if row[1]]
        needs, free, *parts = sizes(self.total(tier), limits.free(tier),
                                    *(nbytes for _, nbytes in rows))
        named = (f"{name} {part}" for (name, _), part in zip(rows, parts, strict=True))
        return f"needs {needs} ({', '.join(named)}), {free} free"

    def suggest(self, limits: MemoryLimits) -> Policy | None:
        """A policy that fits: weights go to slower tiers first, then the cache, then activations.

        The search starts at this plan's placement, and again with all on the fastest tier, so
        that it also finds what must come back from a full disk. None if neither way fits.
        """
        given = replace(self.run.policy, experts=None)  # a share of all weights moves them first
        fastest = replace(given, **dict.fromkeys(PLACED, Placement(100, 0, 0)))
        for start in (given, fastest):
            policy: Policy | None = start
            while policy is not None:
                short = MemoryPlan(replace(self.run, policy=policy)).shortfalls(limits)
                if not short:
                    return policy
                # No slower tier is below the disk.
                policy = None if "disk" in short else _move(policy, short[0], self.run.has_gpu)
        return None

    def summary(self, limits: MemoryLimits) -> str:
        """The sums and what is free, in a line."""
        tiers = TIERS if self.run.has_gpu else TIERS[1:]
        return ", ".join(
            f"{_NAMES[tier]} {self.total(tier) / GB:.1f} of {limits.free(tier) / GB:.1f} GB"
            for tier in tiers)

    def table(self, limits: MemoryLimits | None = None) -> str:
        """The plan as text: GB of each row on each tier, the sums, and what is free."""
        tiers = TIERS if self.run.has_gpu else TIERS[1:]
        lines = [("memory plan (GB)", *(_NAMES[tier] for tier in tiers))]
        for row in self.rows:
            lines.append((row.name, *(f"{getattr(row, tier) / GB:.3f}" for tier in tiers)))
        lines.append(("sum", *(f"{self.total(tier) / GB:.3f}" for tier in tiers)))
        if limits is not None:
            free = (limits.free(tier) for tier in tiers)
            lines.append(("free", *("-" if n is None else f"{n / GB:.3f}" for n in free)))
        return "\n".join(f"{first:<18}" + "".join(f"{cell:>15}" for cell in rest)
                         for first, *rest in lines)


def memory_plan(
    model: ModelConfig,
    policy: Policy,
    workload: Workload,
    *,
    itemsize: int,
    has_gpu: bool = False,
    writes_weights: bool = False,
    cache: CacheOptions = _FULL_CACHE,
    weights: WeightOptions = _PLAIN_WEIGHTS,
    stage: Stage | None = None,
    groups: int = 1,
) -> MemoryPlan:
    """Sum what a run takes on each tier.

    Parameters
    ----------
    model : ModelConfig
        Its sizes.
    policy : Policy
        Its placements; the batch sizes are the workload's.
    workload : Workload
        The largest block.
    itemsize : int
        Bytes of an element of weights, cache and activations that are not quantized.
    has_gpu : bool
        Compute memory is apart from host memory. If not, both count as host memory and nothing
        is staged between them.
    writes_weights : bool
        Weights on disk have to be written there (dummy weights, and quantized ones that no weight
        cache keeps); otherwise they are read from files that are there and take no free space.
    cache : CacheOptions
        What stays cached, and in how many bits.
    weights : WeightOptions
        In how many bits matrices lie at rest; shares of a placement are of these bytes.
    stage : Stage, optional
        The layers of the rank of a pipeline that it is for.
    groups : int
        Into which the ranks cut the batches of a block.
    """
    run = PlannedRun(model, policy, workload, itemsize, has_gpu, writes_weights, cache, weights)
    return MemoryPlan(run if stage is None else run.of_stage(stage, groups))


def _move(policy: Policy, tier: str, has_gpu: bool) -> Policy | None:
    """Move `STEP` percent of the first kind that has any from `tier` to the next slower one."""
    # Without a GPU both memory tiers are host memory, and the next slower one is the disk.
    sources = (tier,) if has_gpu else ("cpu", "gpu")
    target = "cpu" if tier == "gpu" else "disk"
    for kind in PLACED:
        placement = getattr(policy, kind)
        for source in sources:
            share = getattr(placement, source)
            if share > 0:
                step = min(STEP, share)
                changed = {source: share - step, target: getattr(placement, target) + step}
                return replace(policy, **{kind: replace(placement, **changed)})
    return None
