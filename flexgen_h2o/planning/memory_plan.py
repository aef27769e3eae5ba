"""The memory plan: bytes that a run needs on each tier, checked against free memory. No torch.

The plan is made before anything is allocated. A run that cannot fit is refused with the sums, the
limits and a ``--percent`` that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.placement import PLACED, TIERS, Placement
from flexgen_h2o.config.policy import Policy, Workload, format_percent
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.errors import InsufficientMemory
from flexgen_h2o.files import terminal
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.metrics.trace import GB
from flexgen_h2o.planning.memory_rows import WEIGHT_ROWS, MemoryRow, plan_rows
from flexgen_h2o.planning.planned_run import DraftModel, PlannedRun
from flexgen_h2o.storage.free_memory import MemoryLimits, free_heap_bytes, free_memory
from flexgen_h2o.storage.offload_dirs import AnyDirs

if TYPE_CHECKING:
    from flexgen_h2o.models.model_config import ModelConfig

STEP = 5
"""Percent that `MemoryPlan.suggest` moves at a time."""

_NAMES = {"gpu": "device memory", "cpu": "host memory", "disk": "disk space"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a run on each tier."""

    run: PlannedRun

    @cached_property
    def rows(self) -> tuple[MemoryRow, ...]:
        """Bytes of each kind of data."""
        return plan_rows(self.run)

    def total(self, tier: str) -> int:
        """Return the bytes of all rows on a tier."""
        return sum(getattr(row, tier) for row in self.rows)

    def held(self) -> dict[str, int]:
        """Return the bytes on each tier, with weights that are read from the checkpoint."""
        whole = MemoryPlan(replace(self.run, writes_weights=True))
        return {tier: whole.total(tier) for tier in TIERS if tier != "gpu" or self.run.has_gpu}

    def shortfalls(self, limits: MemoryLimits) -> tuple[str, ...]:
        """Return the tiers that need more than is free."""
        return tuple(tier for tier in TIERS
                     if limits.free(tier) is not None and self.total(tier) > limits.free(tier))

    def check(self, limits: MemoryLimits) -> None:
        """Check that the plan fits.

        Raises `UserError` if it does not fit; the message has the sums, the limits and a placement
        that fits.
        """
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
            advice = f"--percent {format_percent(fitting)}{alone} would fit"
        raise InsufficientMemory(f"the run does not fit. {sums}. {advice}")

    def before_loading(self, limits: MemoryLimits, *, free_heap: int) -> MemoryLimits:
        """Return the free memory before weights and their buffers were loaded.

        `limits` are measured since. `free_heap` is the bytes of unused host memory that the system
        does not count as free.
        """
        gpu, cpu, disk = (
            sum(getattr(row, tier) for row in self.rows if row.name in WEIGHT_ROWS)
            for tier in TIERS)
        return MemoryLimits(None if limits.gpu_bytes is None else limits.gpu_bytes + gpu,
                            limits.cpu_bytes + cpu + free_heap, limits.disk_bytes + disk)

    def _excess(self, tier: str, limits: MemoryLimits) -> str:
        """Return a text with a tier's need, its three largest rows and its limit."""
        rows = sorted(((row.name, getattr(row, tier)) for row in self.rows),
                      key=lambda row: -row[1])
        rows = [row for row in rows[:3] if row[1]]
        needs, free, *parts = format_bytes(self.total(tier), limits.free(tier),
                                           *(nbytes for _, nbytes in rows))
        named = (f"{name} {part}" for (name, _), part in zip(rows, parts, strict=True))
        return f"needs {needs} ({', '.join(named)}), {free} free"

    def suggest(self, limits: MemoryLimits) -> Policy | None:
        """Return a policy that fits, or None if none is found.

        Weights move to slower tiers first, then the cache, then activations. The search starts at
        this plan's placements, and again with everything on the fastest tier, which also finds
        a placement if the disk is full.
        """
        base_policy = replace(self.run.policy, experts=None)  # weight shares move experts first
        on_fastest: dict[str, Any] = dict.fromkeys(PLACED, Placement(100, 0, 0))
        fastest = replace(base_policy, **on_fastest)
        for start in (base_policy, fastest):
            policy: Policy | None = start
            while policy is not None:
                short = MemoryPlan(replace(self.run, policy=policy)).shortfalls(limits)
                if not short:
                    return policy
                # No slower tier is below the disk.
                policy = None if "disk" in short else _move(policy, short[0], self.run.has_gpu)
        return None

    def summary(self, limits: MemoryLimits) -> str:
        """Return the sums and the free memory as one line."""
        tiers = TIERS if self.run.has_gpu else TIERS[1:]
        return ", ".join(
            f"{_NAMES[tier]} {self.total(tier) / GB:.1f} of {limits.free(tier) / GB:.1f} GB"
            for tier in tiers)

    def table(self, limits: MemoryLimits | None = None) -> str:
        """Return the plan as a table of GB: rows, sums, and free memory on each tier."""
        tiers = TIERS if self.run.has_gpu else TIERS[1:]
        lines = [("memory plan (GB)", *(_NAMES[tier] for tier in tiers))]
        for row in self.rows:
            lines.append((row.name, *(f"{getattr(row, tier) / GB:.3f}" for tier in tiers)))
        lines.append(("sum", *(f"{self.total(tier) / GB:.3f}" for tier in tiers)))
        if limits is not None:
            free = (limits.free(tier) for tier in tiers)
            lines.append(("free", *("-" if n is None else f"{n / GB:.3f}" for n in free)))
        return "\n".join(f"{first:<18}" + "".join(f"{cell:>15}" for cell in values)
                         for first, *values in lines)


def _move(policy: Policy, tier: str, has_gpu: bool) -> Policy | None:
    """Move `STEP` percent of the first kind of data on `tier` to the next slower tier."""
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


@dataclass(kw_only=True)
class MemoryCheck:
    """Check of runs of one model against free memory.

    Attributes
    ----------
    model, weights, itemsize, writes_weights, draft, batch_invariant
        See `PlannedRun`. Weights of the disk tier are written to `offload_dir`.
    stage, groups
        See `PlannedRun.of_stage`.
    max_bytes : mapping of str to int or None
        Upper bounds of the bytes that count as free, for the tiers `cpu` and `gpu`.
    device_bytes : callable () -> int or None
        Returns the free bytes of a separate device; None where compute memory is host memory.
    """

    model: ModelConfig
    weights: WeightOptions
    itemsize: int
    writes_weights: bool
    offload_dir: AnyDirs
    max_bytes: Mapping[str, int | None]
    device_bytes: Callable[[], int | None]
    stage: Stage | None = None
    groups: int = 1
    draft: DraftModel | None = None
    batch_invariant: bool = False

    def check_fits(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
                   loaded_bytes: int | None, show: bool = False) -> None:
        """Check that a run fits, before anything is allocated for it.

        Raises `UserError` if a tier has too little memory.

        `loaded_bytes`: resident bytes of the process after the weights were loaded; None before.
        `show`: print the plan first.
        """
        plan, limits = self.plan(policy, cache, workload, loaded_bytes=loaded_bytes)
        if show:
            terminal.print_stdout(plan.table(limits))
        plan.check(limits)

    def largest_batch(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
                      loaded_bytes: int | None) -> int:
        """Return the largest GPU batch size that fits; parameters as in `check_fits`.

        It is the workload's own size or a smaller power of two; 1 if nothing fits.
        """
        size = workload.gpu_batch_size
        while size > 1:
            plan, limits = self.plan(policy, cache, replace(workload, gpu_batch_size=size),
                                     loaded_bytes=loaded_bytes)
            if not plan.shortfalls(limits):
                break
            size = 1 << ((size - 1).bit_length() - 1)  # the next power of two below
        return size

    def plan(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
             loaded_bytes: int | None) -> tuple[MemoryPlan, MemoryLimits]:
        """Return the memory plan of a run and the free memory; parameters as in `check_fits`."""
        device_free = self.device_bytes()
        run = PlannedRun(self.model, policy, workload, self.itemsize, device_free is not None,
                         self.writes_weights, cache, self.weights, draft=self.draft,
                         batch_invariant=self.batch_invariant)
        plan = MemoryPlan(run if self.stage is None else run.of_stage(self.stage, self.groups))
        limits = free_memory(self.offload_dir, device_free)
        if loaded_bytes is not None:
            limits = plan.before_loading(limits, free_heap=free_heap_bytes(loaded_bytes))
        return plan, limits.capped(**self.max_bytes)
