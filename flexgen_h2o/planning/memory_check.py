"""The check of runs against the memory that is there. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.formats import CacheOptions, WeightOptions
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.config.stage import Stage
from flexgen_h2o.config.workload import Workload
from flexgen_h2o.files import terminal
from flexgen_h2o.planning.memory_plan import MemoryPlan, memory_plan
from flexgen_h2o.storage.free_memory import MemoryLimits, free_memory, kept_heap

if TYPE_CHECKING:
    from flexgen_h2o.models.spec import ModelConfig


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

    def refuse(self, policy: Policy, cache: CacheOptions, workload: Workload, *,
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
        """Sequences together for which there is memory; parameters as of `refuse`.

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
