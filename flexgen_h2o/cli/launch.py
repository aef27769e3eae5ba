"""Open the `LLM` of a configuration on one rank, all ranks or replicas; read prompts; warm up."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from flexgen_h2o.cli.entry_point import StopRequest
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.parallel import check_world_size, torchrun_env
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_json_texts, read_lines
from flexgen_h2o.metrics.report import format_bytes
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun

if TYPE_CHECKING:
    from flexgen_h2o.cli.planner import Plan
    from flexgen_h2o.distributed.pipeline import Pipeline
    from flexgen_h2o.llm import LLM


_SAME_NAMES = ("model", "path", "activation_bits", "key_bits", "value_bits", "attn_sparsity",
               "calibration", "verify", "device", "dtype", "offload_dir", "seed", "memory_limit",
               "device_memory_limit", "batch_invariant")


def llm_arguments(config: RunConfig, **overrides: Any) -> dict[str, Any]:
    """Return the keywords of `LLM` for a configuration; `overrides` override or extend them."""
    return {
        **{name: getattr(config, name) for name in _SAME_NAMES},
        "policy": config.policy(),
        "h2o": config.h2o(),
        "weight_bits": config.resolved_weight_bits,
        "weight_cache": config.resolved_weight_cache,
        "cache_bits": config.resolved_cache_bits,
        "generation_config": not config.no_generation_config,
    } | overrides


def open_llm(config: RunConfig, **overrides: Any) -> LLM:
    """Open the `LLM` of a configuration. Imports torch; raises `UserError`."""
    from flexgen_h2o.llm import LLM  # imports torch: bad flags are refused before

    return LLM(**llm_arguments(config, **overrides))


def check_counting(path: str | None, llm: LLM) -> None:
    """Raise `UserError` if counts are wanted (`path` is not None) of a model without experts."""
    if path is not None and llm.model_config.experts is None:
        raise UserError(f"{llm.model_config.name} has no experts: leave --count-experts out")


_WARM_UP_TOKENS = 2
"""New tokens of a warm-up on a CPU: one by the prefill, one by a decode step."""


def warm_up(llm: LLM, prompts: Sequence[str | Sequence[int]], config: RunConfig) -> None:
    """Generate from the first GPU batch and drop the outputs.

    On a GPU it generates as many tokens as will be measured, because Triton compiles and autotunes
    its kernels per shape, which takes seconds.
    """
    tokens = config.cut_gen_len or config.gen_len
    if llm.device.type == "cpu":
        tokens = min(tokens, _WARM_UP_TOKENS)
    # With --cut-gen-len, the measured run allocates for this many tokens only.
    llm.generate(prompts[: config.policy().gpu_batch_size], max_new_tokens=tokens,
                 eos_token_id=-1)


def read_prompts(path: str) -> list[str]:
    """Read prompts: a line each of a ``.txt`` file, the key `prompt` of each line of ``.jsonl``.

    Blank lines are skipped. Raises `UserError` (with the line number, for .jsonl) if the file
    is missing, empty, not UTF-8, or a line is not JSON or has no `prompt`.
    """
    if_empty = "holds no prompts: write one a line"
    if path.endswith(".jsonl"):
        return read_json_texts("--prompts", path, "prompt", if_empty=if_empty)
    return [line.rstrip("\r") for _, line in read_lines("--prompts", path, if_empty=if_empty)]


def synthetic_prompts(config: RunConfig, vocab_size: int) -> list[list[int]]:
    """Return random token ids, by default for one block; equal for equal seeds."""
    draw = random.Random(config.seed)
    count = config.num_prompts or (
        config.resolved_gpu_batch_size * config.resolved_num_gpu_batches)
    return [draw.choices(range(vocab_size), k=config.prompt_len) for _ in range(count)]


def workload(config: RunConfig, texts: Sequence[str]) -> Workload:
    """Estimate the workload for a memory plan before the tokenizer is loaded.

    A token has about four bytes of text; three are a safe bound. `LLM` plans again with counts.
    """
    prompt_len, count = config.prompt_len, len(texts) or config.num_prompts
    batch, batches = config.resolved_gpu_batch_size, config.resolved_num_gpu_batches
    if texts:
        prompt_len = max(len(text.encode("utf-8")) for text in texts) // 3 + 1
    if count:
        batch = min(batch, count)
        batches = min(batches, -(-count // batch))
    return Workload(prompt_len, config.gen_len, gpu_batch_size=batch, num_gpu_batches=batches)


@contextmanager
def joined(config: RunConfig, command: str, *, replica: int | None = None
           ) -> Iterator[Pipeline | None]:
    """Join the ranks of a pipeline; None if there is only one rank.

    The first rank works inside the ``with`` statement and opens its model with `open_on_ranks`; the
    others call `follow`.

    Raises `UserError` if the number of ranks differs from `config`, or they do not find each other,
    or a rank has failed or is lost. One rank reports the failure; the others exit with status 2.

    `command`: module that torchrun starts, for error messages. `replica`: replica of this process;
    each replica has its own pipeline.
    """
    launch = torchrun_env()
    if replica is not None:
        launch = launch.within_replica(config.pipeline_parallel)
    check_world_size(config.pipeline_parallel, launch.ranks, command)
    if launch.ranks == 1:
        yield None
        return
    # Keep torch from printing a stack trace beside the one line about a lost rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from flexgen_h2o.distributed.pipeline import Pipeline  # imports torch

    with Pipeline.join(launch, rank_timeout=config.rank_timeout,
                       name=f"pipeline {replica or 0}") as pipeline:
        try:
            yield pipeline
            if launch.rank == 0 and not pipeline.has_broadcast:
                pipeline.broadcast(b"")  # there was nothing to run
        except UserError as error:
            if not pipeline.fail(error):
                sys.exit(2)
            raise


def open_on_ranks(config: RunConfig, pipeline: Pipeline | None, plan: Plan | None = None,
                  **overrides: Any) -> LLM:
    """Open the `LLM` of a configuration on the first rank, and tell the others to open theirs.

    It uses the plan's kernels and layers of the ranks; its policy is in the configuration.
    """
    if plan is not None:
        overrides["implementations"] = plan.implementations
    if pipeline is None:
        return open_llm(config, **overrides)
    # Send the resolved configuration: other ranks may not see the files that it came from.
    pipeline.broadcast(msgspec.json.encode(config.to_dict()))
    return open_llm(config, pipeline=pipeline, bounds=plan and plan.bounds, **overrides)


def follow(pipeline: Pipeline) -> None:
    """Run the first rank's work on another rank, until it ends.

    This rank reads, writes and prints nothing, except its own errors.
    """
    with StopRequest(lambda: None):  # all ranks get the signals; the first one decides
        message = pipeline.receive_broadcast()
        if not message:
            return
        values: Mapping[str, Any] = msgspec.json.decode(message)
        config = RunConfig.from_mapping(values)
        # The first rank reads and writes the files.
        quiet = replace(config, prompts=None, csv=None, output=None, trace=None, debug_mode=None,
                        count_experts=None)
        with open_llm(quiet, pipeline=pipeline, progress=False) as llm:
            llm.follow()


PROCESS_BYTES = 640 << 20
"""Resident bytes of a replica with a tiny model: Python, PyTorch, transformers and Ray. The memory
plan does not include them."""


@dataclass(frozen=True)
class ReplicaResources:
    """Resources of one replica, as Ray counts them."""

    memory: int
    """Bytes of host memory, including the process itself. Ray only places replicas by it; the
    engine's `memory_limit` enforces it."""
    num_cpus: int = 1
    """CPU threads."""
    num_gpus: int = 0
    accelerator_type: str | None = None  # a kind of GPU, as Ray names it

    @property
    def memory_limit(self) -> int:
        """`LLM`'s memory limit: the bytes of host memory without the process itself."""
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
        has_gpu, source.writes_weights, cache, source.weight_format.options,
        batch_invariant=arguments.get("batch_invariant", False))).total("cpu")
