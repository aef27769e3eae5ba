"""A processor as in ``ray.data.llm``: it maps a dataset of prompts to one with generated text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli.replica_resources import PROCESS_BYTES, ReplicaResources, planned_bytes
from flexgen_h2o.config.validation import Count, NonNegative, Text, check_fields, check_int
from flexgen_h2o.distributed.ray_cluster import map_replicas, ray_module
from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.integrations.ray.generator import BatchGenerator, Row

if TYPE_CHECKING:
    import ray.data


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Configuration of a processor, with the names of ``ray.data.llm`` where they mean the same.

    Parameters
    ----------
    model_source : str
        The model, as `LLM` takes it. Each machine loads it, from a shared folder or its own.
    engine_kwargs : mapping
        Other arguments of `LLM`: policy, h2o, dtype, ... Its `workload` is the longest prompts and
        answers to expect, for the memory plan.
    batch_size : int
        Rows of a replica's batch: best a few blocks of the policy.
    concurrency : int or (int, int)
        Number of replicas, or its lower and upper limit.
    should_continue_on_error : bool
        Report the error of a row in ``__inference_error__``, without `postprocess`.
    accelerator_type : str, optional
        A kind of GPU, as Ray names it; a replica computes on one.
    num_cpus : int
        CPU threads of a replica.
    num_gpus : int, optional
        0 or 1. Default: 1 with `accelerator_type`, or with ``device="cuda"`` in `engine_kwargs`.
    memory : int, optional
        Bytes of host memory of a replica. Default: the sum of the memory plan for `workload`, or
        `memory_limit` of `engine_kwargs`, plus the process itself.
    runtime_env : mapping, optional
        Ray's runtime environment of the replicas.
    seed : int
        Seeds rows without their own seed, together with the prompt.

    Raises
    ------
    UserError
        A value is of a wrong type or out of range, or the memory of a replica is unknown.
    """

    model_source: Text
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: Count = 256
    concurrency: int | tuple[int, int] = 1
    should_continue_on_error: bool = False
    accelerator_type: Text | None = None
    num_cpus: Count = 1
    num_gpus: int | None = None
    memory: Count | None = None
    runtime_env: Mapping[str, Any] | None = None
    seed: NonNegative = 0

    def __post_init__(self) -> None:
        for name in ("engine_kwargs", "runtime_env"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) and (value, name) != (None, "runtime_env"):
                raise UserError(f"{name} must be a mapping, got {short_repr(value)}")
        if self.num_gpus not in (None, 0, 1):
            raise UserError(f"num_gpus must be 0 or 1, got {short_repr(self.num_gpus)}")
        check_fields(self)
        if self.engine_kwargs.get("memory_limit") is not None:
            check_int("memory_limit of engine_kwargs", self.engine_kwargs["memory_limit"], ge=1)
        low, high = self._range
        if not 1 <= low <= high:
            raise UserError(f"concurrency must be from 1 up, got {low} to {high}")
        for name in ("model", "progress"):
            if name in self.engine_kwargs:
                raise UserError(f"engine_kwargs must not have {name}"
                                + (": it is model_source" if name == "model" else ""))
        if (self.memory is None and self.engine_kwargs.get("workload") is None
                and self.engine_kwargs.get("memory_limit") is None):
            raise UserError("give the memory or the workload of a replica in engine_kwargs: "
                            "Workload(512, 64, gpu_batch_size=8, num_gpu_batches=2), from which "
                            "the memory plan is made, or memory in bytes")

    @property
    def _range(self) -> tuple[int, int]:
        concurrency = self.concurrency
        ends = (tuple(concurrency) if isinstance(concurrency, (tuple, list))
                else (concurrency, concurrency))
        if len(ends) != 2:
            raise UserError(f"concurrency must be a number, or two, got {short_repr(concurrency)}")
        for end in ends:
            check_int("concurrency", end, ge=1)
        return ends[0], ends[1]

    def resources(self) -> ReplicaResources:
        """Return the resources of a replica. Raises `UserError` for an unknown model."""
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

    def llm_arguments(self, resources: ReplicaResources) -> dict[str, Any]:
        """Return the arguments of a replica's `LLM`, which keep it within its memory."""
        return {"memory_limit": resources.planned_bytes, **self.engine_kwargs,
                "model": self.model_source, "progress": False}


class Processor:
    """A step of a pipeline, called with a dataset, as in ``ray.data.llm``.

    Parameters
    ----------
    config : ProcessorConfig
    preprocess, postprocess : callable (dict) -> dict, optional
        See `BatchGenerator`.
    """

    def __init__(self, config: ProcessorConfig, preprocess: Callable[[Row], Row] | None = None,
                 postprocess: Callable[[Row], Row] | None = None):
        self.config = config
        self._preprocess, self._postprocess = preprocess, postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the dataset with generated text, which runs when it is consumed."""
        config, ray = self.config, ray_module()
        resources = config.resources()
        options = {} if config.runtime_env is None else {"runtime_env": dict(config.runtime_env)}
        # Preprocessing runs in the replica: its own step would need a CPU, and never run if
        # the replicas have all of them.
        return map_replicas(
            ray, dataset, BatchGenerator, config._range, batch_size=config.batch_size,
            batch_format="numpy", fn_constructor_kwargs={
                "llm": config.llm_arguments(resources), "threads": config.num_cpus,
                "seed": config.seed,
                "should_continue_on_error": config.should_continue_on_error,
                "preprocess": self._preprocess, "postprocess": self._postprocess},
            **resources.arguments(), **options)


def build_processor(config: ProcessorConfig, preprocess: Callable[[Row], Row] | None = None,
                    postprocess: Callable[[Row], Row] | None = None) -> Processor:
    """Return a `Processor`, as ``ray.data.llm.build_processor``.

    Ray's checkpoints work with it: if ``DataContext.checkpoint_config`` names an `id_column` of the
    dataset and the pipeline ends in a write, rows that are written are not run again.

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
