"""Open the `LLM` of a configuration on one rank or on all ranks; read prompts; warm up."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from flexgen_h2o.cli.entry_point import StopRequest
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.parallel import check_world_size, torchrun_env
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_json_texts, read_lines

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
