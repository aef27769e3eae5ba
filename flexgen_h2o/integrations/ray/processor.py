"""A processor, as ``ray.data.llm`` has for its engines: a dataset in, one with answers out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli.replica_resources import PROCESS_BYTES, ReplicaResources, planned_bytes
from flexgen_h2o.config.validation import Text, check_bool, check_int, validated
from flexgen_h2o.distributed.ray_cluster import map_batches, pool, ray_module
from flexgen_h2o.errors import UserError, shown
from flexgen_h2o.integrations.ray.generator import BatchGenerator, Row

if TYPE_CHECKING:
    import ray.data

@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """The configuration of a processor. Names are ``ray.data.llm``'s where they mean the same.

    Parameters
    ----------
    model_source : str
        A name that `LLM` takes. Each machine loads it: from a folder that all see, or its own.
    engine_kwargs : mapping
        More arguments of `LLM`: policy, h2o, dtype, ... Its `workload`, the longest prompts and
        answers to come, is what the memory plan is made for.
    batch_size : int
        Rows that a replica gets together. It should be some blocks of the policy's.
    concurrency : int or (int, int)
        Replicas: so many, or from so many to so many.
    should_continue_on_error : bool
        A row that cannot run gets its error in ``__inference_error__`` and passes by `postprocess`.
    accelerator_type : str, optional
        A kind of GPU, as Ray names it. A replica computes on one then.
    num_cpus : int
        CPU threads of a replica.
    num_gpus : int, optional
        0 or 1. Default: 1 with `accelerator_type`, or where `engine_kwargs` say ``device="cuda"``.
    memory : int, optional
        Bytes of host memory to ask for. Default: what the memory plan for `workload` sums, or
        `memory_limit` of `engine_kwargs`, and the process itself.
    runtime_env : mapping, optional
        Ray's, of the replicas.
    seed : int
        With its prompt, the seed of a row that names none.

    Raises
    ------
    UserError
        A value is of a wrong type or out of range, or nothing says how much memory a replica takes.
    """

    model_source: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 256
    concurrency: int | tuple[int, int] = 1
    should_continue_on_error: bool = False
    accelerator_type: str | None = None
    num_cpus: int = 1
    num_gpus: int | None = None
    memory: int | None = None
    runtime_env: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        validated(Text, self.model_source, "model_source")
        for name in ("engine_kwargs", "runtime_env"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) and (given, name) != (None, "runtime_env"):
                raise UserError(f"{name} must be a mapping, got {shown(given)}")
        check_bool("should_continue_on_error", self.should_continue_on_error)
        for name in ("batch_size", "num_cpus"):
            check_int(name, getattr(self, name), low=1)
        check_int("seed", self.seed, low=0)
        for name, size in (("memory", self.memory), ("memory_limit of engine_kwargs",
                                                     self.engine_kwargs.get("memory_limit"))):
            if size is not None:
                check_int(name, size, low=1)
        if self.num_gpus not in (None, 0, 1):
            raise UserError(f"num_gpus must be 0 or 1, got {shown(self.num_gpus)}")
        if self.accelerator_type is not None:
            validated(Text, self.accelerator_type, "accelerator_type")
        few, many = self._range
        if not 1 <= few <= many:
            raise UserError(f"concurrency must be from 1 up, got {few} to {many}")
        for name in ("model", "progress"):
            if name in self.engine_kwargs:
                raise UserError(f"engine_kwargs must not have {name}"
                                + (": it is model_source" if name == "model" else ""))
        if (self.memory is None and self.engine_kwargs.get("workload") is None
                and self.engine_kwargs.get("memory_limit") is None):
            raise UserError("say what a replica takes: a workload in engine_kwargs, such as "
                            "Workload(512, 64, gpu_batch_size=8, num_gpu_batches=2), from which "
                            "the memory plan is made, or memory in bytes")

    @property
    def _range(self) -> tuple[int, int]:
        given = self.concurrency
        ends = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
        if len(ends) != 2:
            raise UserError(f"concurrency must be a number, or two, got {shown(given)}")
        for end in ends:
            check_int("concurrency", end, low=1)
        return ends[0], ends[1]

    def resources(self) -> ReplicaResources:
        """The resources of a replica. Loads torch; raises `UserError` if there is no such model."""
        gpus = self.num_gpus
        if gpus is None:
            gpus = int(self.accelerator_type is not None
                       or str(self.engine_kwargs.get("device", "")).startswith("cuda"))
        memory, limit = self.memory, self.engine_kwargs.get("memory_limit")
        if memory is None and limit is None:
            limit = planned_bytes({"model": self.model_source, **self.engine_kwargs},
                                  self.engine_kwargs["workload"], has_gpu=gpus > 0)
        if memory is None:
            assert limit is not None
            memory = limit + PROCESS_BYTES
        return ReplicaResources(memory, self.num_cpus, gpus, self.accelerator_type)

    def for_llm(self, resources: ReplicaResources) -> dict[str, Any]:
        """Arguments of a replica's `LLM` by name, which keep it within its memory."""
        return {"memory_limit": resources.planned_bytes, **self.engine_kwargs,
                "model": self.model_source, "progress": False}


class Processor:
    """A step of a pipeline: call it with a dataset, as ``ray.data.llm``'s.

    Parameters
    ----------
    config : ProcessorConfig
    preprocess, postprocess : callable (dict) -> dict, optional
        Of a row, before and after. What `preprocess` returns comes beside the row's own columns, or
        in their place; what `postprocess` returns is the row. One with an error passes it by.
    """

    def __init__(self, config: ProcessorConfig, preprocess: Callable[[Row], Row] | None = None,
                 postprocess: Callable[[Row], Row] | None = None):
        self.config = config
        self._before, self._after = preprocess, postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """The dataset with answers; nothing runs before it is consumed. Raises `UserError`."""
        config, ray = self.config, ray_module()
        resources = config.resources()
        more = {} if config.runtime_env is None else {"runtime_env": dict(config.runtime_env)}
        # `preprocess` and `postprocess` run in the replica: as steps of their own each would want a
        # CPU, and wait without end where replicas have them all.
        return map_batches(
            dataset, BatchGenerator, batch_size=config.batch_size, batch_format="numpy",
            fn_constructor_kwargs={
                "llm": config.for_llm(resources), "threads": config.num_cpus, "seed": config.seed,
                "should_continue_on_error": config.should_continue_on_error,
                "preprocess": self._before, "postprocess": self._after},
            **pool(ray, config._range), **resources.arguments(), **more)


def build_processor(config: ProcessorConfig, preprocess: Callable[[Row], Row] | None = None,
                    postprocess: Callable[[Row], Row] | None = None) -> Processor:
    """Make a processor, as ``ray.data.llm.build_processor``; parameters as of `Processor`.

    Ray's own checkpoint serves it: where ``DataContext.checkpoint_config`` names an `id_column`,
    which passes through, and the pipeline ends in a write, what is written is not run again.

    Examples
    --------
    >>> processor = build_processor(                                        # doctest: +SKIP
    ...     ProcessorConfig(model_source="smollm2-135m", concurrency=2, engine_kwargs={
    ...         "workload": Workload(256, 64, gpu_batch_size=8, num_gpu_batches=1)}),
    ...     preprocess=lambda row: {"prompt": row["question"]},
    ...     postprocess=lambda row: {"answer": row["generated_text"]})
    >>> processor(ray.data.read_json("questions.jsonl")).write_json("answers")  # doctest: +SKIP
    """
    return Processor(config, preprocess, postprocess)
