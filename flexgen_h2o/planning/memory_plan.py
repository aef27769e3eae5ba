"""The memory plan: what a run will need on each tier, against what is free. No torch.

The plan is made before anything is allocated. A run that cannot fit stops with the sum, the limit
and a ``--percent`` that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.placement import PLACED, TIERS, Placement
from flexgen_h2o.config.policy import Policy, Workload, percent_text
from flexgen_h2o.config.stage import Stage
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.errors import TooLittleMemory
from flexgen_h2o.files import terminal
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.metrics.trace import GB
from flexgen_h2o.planning.memory_rows import WEIGHT_ROWS, MemoryRow, plan_rows
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.storage.free_memory import MemoryLimits, free_memory, kept_heap

if TYPE_CHECKING:
    from flexgen_h2o.models.model_config import ModelConfig

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
    def rows(self) -> tuple[MemoryRow, ...]:
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
        needs, free, *parts = format_bytes(self.total(tier), limits.free(tier),
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


# The check of runs against the memory that is there. No torch.


class MemoryCheck:
    """Holds runs of one model against the memory that is there.

    Parameters
    ----------
    model : ModelConfig
    weights : WeightOptions
    itemsize : int
        Bytes of an element in the run's dtype.
    writes_weights : bool
        Weights that the disk has are written to `offload_dir`.
    offload_dir : str
    most : mapping of str to int or None
        Bytes to count as free at most, by tier: of `cpu` and `gpu`.
    device_bytes : callable () -> int or None
        Free bytes of a separate device; None where compute memory is host memory.
    stage, groups : Stage or None, int
        Of a rank of a pipeline: see `memory_plan`.
    """

    def __init__(self, model: ModelConfig, weights: WeightOptions, *, itemsize: int,
                 writes_weights: bool, offload_dir: str, most: Mapping[str, int | None],
                 device_bytes: Callable[[], int | None], stage: Stage | None = None,
                 groups: int = 1):
        self._model = model
        self._weights = weights
        self._itemsize = itemsize
        self._writes_weights = writes_weights
        self._offload_dir = offload_dir
        self._most = most
        self._device_bytes = device_bytes
        self._stage, self._groups = stage, groups

    def check_fits(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
               loaded_bytes: int | None, show: bool = False) -> None:
        """Stop a run that does not fit, before anything is allocated for it.

        Parameters
        ----------
        policy : Policy
        cache : CacheOptions
        workload : Workload
        loaded_bytes : int or None
            Resident bytes of the process when the weights had been loaded; None before.
        show : bool
            Print the plan first.

        Raises
        ------
        UserError
            A tier has too little memory.
        """
        plan, limits = self._planned(policy, cache, workload, loaded_bytes)
        if show:
            terminal.show(plan.table(limits))
        plan.check(limits)

    def largest_batch(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
                      loaded_bytes: int | None) -> int:
        """Sequences together for which there is memory; parameters as of `check_fits`.

        Returns the workload's own number, or a power of two below; 1 where nothing fits.
        """
        size = workload.gpu_batch_size
        while size > 1:
            plan, limits = self._planned(policy, cache, replace(workload, gpu_batch_size=size),
                                         loaded_bytes)
            if not plan.shortfalls(limits):
                break
            size = 1 << ((size - 1).bit_length() - 1)  # the next power of two below
        return size

    def _planned(self, policy: Policy, cache: CacheOptions, workload: Workload,
                 loaded_bytes: int | None) -> tuple[MemoryPlan, MemoryLimits]:
        """The memory plan of a run, and the free memory."""
        device_free = self._device_bytes()
        plan = memory_plan(self._model, policy, workload, itemsize=self._itemsize,
                           has_gpu=device_free is not None, writes_weights=self._writes_weights,
                           cache=cache, weights=self._weights, stage=self._stage,
                           groups=self._groups)
        limits = free_memory(self._offload_dir, device_free)
        if loaded_bytes is not None:
            limits = plan.before_loading(limits, kept=kept_heap(loaded_bytes))
        return plan, limits.within(**self._most)
