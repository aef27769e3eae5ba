"""The resources of a replica, by the memory plan, and the room that a Ray cluster has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.planning.memory_plan import memory_plan

if TYPE_CHECKING:
    from flexgen_h2o.engine.source import ModelSource

PROCESS_BYTES = 640 << 20
"""Resident bytes of a replica that has Python, PyTorch, transformers and Ray loaded, and a model of
a megabyte: the memory plan leaves them out, as they are there before it looks at what is free."""


@dataclass(frozen=True)
class ReplicaResources:
    """Resources of one replica, in the words of Ray.

    Attributes
    ----------
    memory : int
        Bytes of host memory, the process itself included. Ray places by it; what holds the replica
        to it is the engine's `memory_limit`, which is `planned_bytes`.
    num_cpus : int
        CPU threads.
    num_gpus : int
    accelerator_type : str or None
        A kind of GPU, as Ray names it.
    """

    memory: int
    num_cpus: int = 1
    num_gpus: int = 0
    accelerator_type: str | None = None

    @property
    def planned_bytes(self) -> int:
        """Bytes of host memory for what the memory plan sums."""
        return max(1, self.memory - PROCESS_BYTES)

    def arguments(self) -> dict[str, Any]:
        """Keywords of ``map_batches``."""
        found: dict[str, Any] = {"memory": self.memory, "num_cpus": self.num_cpus}
        if self.num_gpus:
            found["num_gpus"] = self.num_gpus
        if self.accelerator_type is not None:
            found["accelerator_type"] = self.accelerator_type
        return found

    def room(self, node: Mapping[str, float]) -> int:
        """Replicas for which a machine with these resources of Ray's has room."""
        needs = {"CPU": self.num_cpus, "memory": self.memory, "GPU": self.num_gpus}
        return min(int(node.get(name, 0) // need) for name, need in needs.items() if need)

    def fitted(self, nodes: Iterable[Mapping[str, float]], replicas: int) -> ReplicaResources:
        """These, with the most CPUs with which so many replicas have room on these machines.

        Raises `UserError` where they have none with a single CPU each.
        """
        nodes = list(nodes)
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        for cpus in range(most, 0, -1):
            found = replace(self, num_cpus=cpus)
            if sum(found.room(node) for node in nodes) >= replicas:
                return found
        one = replace(self, num_cpus=1)
        room = sum(one.room(node) for node in nodes)
        needs = ", ".join(["1 CPU", f"{format_bytes(self.memory)[0]} of host memory",
                           *([f"{self.num_gpus} GPU"] if self.num_gpus else [])])
        raise UserError(f"Ray has room for {room} replicas of {needs} each, not for {replicas}: "
                        "lower --replicas, the batch sizes or --memory-limit, or keep more of the "
                        "model on disk with --percent")


def planned_bytes(arguments: Mapping[str, Any], workload: Workload, *, has_gpu: bool) -> int:
    """Bytes of host memory that the memory plan sums for a model and its largest block.

    Parameters
    ----------
    arguments : mapping
        Arguments of `LLM` by name; `model` is there.
    workload : Workload
        The largest block.
    has_gpu : bool
        The replica computes on a GPU, so that its compute memory is apart from host memory.

    Raises
    ------
    UserError
        The model can't be had.
    """
    source = _found(arguments)
    plan = memory_plan(
        source.config, arguments.get("policy") or Policy(), workload,
        itemsize=source.dtype.itemsize, has_gpu=has_gpu,
        writes_weights=source.writes_weights(arguments.get("weight_cache", "auto")),
        cache=CacheOptions(arguments.get("h2o"), arguments.get("cache_bits", 16),
                           arguments.get("attn_sparsity", 1.0), arguments.get("key_bits"),
                           arguments.get("value_bits")),
        weights=source.form.options)
    return plan.total("cpu")


def _found(arguments: Mapping[str, Any]) -> ModelSource:
    # Only now: these load torch. A GPU's number format takes as many bytes as a CPU's, and the
    # machine that asks need not have one.
    from flexgen_h2o.engine.progress import byte_bar
    from flexgen_h2o.engine.source import find_model
    from flexgen_h2o.storage.tiers import open_device

    with byte_bar("converting", off=None) as bar:
        return find_model(str(arguments["model"]), path=arguments.get("path"),
                    dtype=arguments.get("dtype", "auto"), bits=arguments.get("weight_bits", AUTO),
                    device=open_device("cpu"), progress=bar)
