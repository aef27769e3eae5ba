"""The resources of a replica on a Ray cluster, from the memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun

PROCESS_BYTES = 640 << 20
"""Resident bytes of a replica with a tiny model: Python, PyTorch, transformers and Ray. The memory
plan does not include them."""


@dataclass(frozen=True)
class ReplicaResources:
    """Resources of one replica, as Ray counts them."""

    memory: int
    """Bytes of host memory, including the process itself. Ray only places replicas by it; the
    engine's `memory_limit`, which is `planned_bytes`, enforces it."""
    num_cpus: int = 1
    """CPU threads."""
    num_gpus: int = 0
    accelerator_type: str | None = None  # a kind of GPU, as Ray names it

    @property
    def planned_bytes(self) -> int:
        """Bytes of host memory without the process itself, for the memory plan."""
        return max(1, self.memory - PROCESS_BYTES)

    def arguments(self) -> dict[str, Any]:
        """Return keywords of ``map_batches``."""
        keywords: dict[str, Any] = {"memory": self.memory, "num_cpus": self.num_cpus}
        if self.num_gpus:
            keywords["num_gpus"] = self.num_gpus
        if self.accelerator_type is not None:
            keywords["accelerator_type"] = self.accelerator_type
        return keywords

    def capacity(self, node: Mapping[str, float]) -> int:
        """Return the number of replicas that fit on a machine with these resources of Ray."""
        needs = {"CPU": self.num_cpus, "memory": self.memory, "GPU": self.num_gpus}
        return min(int(node.get(name, 0) // need) for name, need in needs.items() if need)

    def fitted(self, nodes: Iterable[Mapping[str, float]], replicas: int) -> ReplicaResources:
        """Return these resources with as many CPUs per replica as the machines allow.

        Raises `UserError` if the replicas do not fit even with a single CPU each.
        """
        nodes = list(nodes)
        max_cpus = int(max((node.get("CPU", 0) for node in nodes), default=0))
        for cpus in range(max_cpus, 0, -1):
            resources = replace(self, num_cpus=cpus)
            if sum(resources.capacity(node) for node in nodes) >= replicas:
                return resources
        smallest = replace(self, num_cpus=1)
        capacity = sum(smallest.capacity(node) for node in nodes)
        needs = ", ".join(["1 CPU", f"{format_bytes(self.memory)[0]} of host memory",
                           *([f"{self.num_gpus} GPU"] if self.num_gpus else [])])
        raise UserError(
            f"Ray can place {capacity} replicas of {needs} each, not {replicas}: lower "
            "--replicas, the batch sizes or --memory-limit, or keep more of the model on disk with "
            "--percent")


def planned_bytes(arguments: Mapping[str, Any], workload: Workload, *, has_gpu: bool) -> int:
    """Return the bytes of host memory that the memory plan needs for a model.

    Raises `UserError` if the model cannot be loaded.

    `arguments`: arguments of `LLM` by name, with `model`. `workload`: the largest block. `has_gpu`:
    the replica computes on a GPU, with its own memory.
    """
    # Imported here since they load torch.
    from flexgen_h2o.engine.args import EngineArgs
    from flexgen_h2o.engine.source import find_model
    from flexgen_h2o.storage.device import open_device

    # This machine may have no GPU; a GPU's dtype has as many bytes as a CPU's.
    names = {"path", "dtype", "weight_bits", "weight_cache"} & arguments.keys()
    source = find_model(EngineArgs(model=str(arguments["model"]), **{
        name: arguments[name] for name in names}), open_device("cpu"))
    cache = CacheOptions(arguments.get("h2o"), arguments.get("cache_bits", 16),
                         arguments.get("attn_sparsity", 1.0), arguments.get("key_bits"),
                         arguments.get("value_bits"))
    return MemoryPlan(PlannedRun(
        source.config, arguments.get("policy") or Policy(), workload, source.dtype.itemsize,
        has_gpu, source.writes_weights, cache, source.weight_format.options)).total("cpu")
