"""From a run's configuration to the `LLM` that it describes, for every command alike."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from flexgen_h2o.cli.command import Ending
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.launch import check_ranks, launched
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import json_texts, read_lines

if TYPE_CHECKING:
    from flexgen_h2o.distributed.pipeline import Pipeline
    from flexgen_h2o.llm import LLM

_ALIKE = ("model", "path", "activation_bits", "key_bits", "value_bits", "attn_sparsity",
          "calibration", "verify", "device", "dtype", "offload_dir", "seed", "memory_limit",
          "device_memory_limit")


def llm_arguments(config: RunConfig, **others: Any) -> dict[str, Any]:
    """The arguments of `LLM` by name, with `others` in place of those of the config or beside
    them."""
    return {
        **{name: getattr(config, name) for name in _ALIKE},
        "policy": config.policy(),
        "h2o": config.h2o(),
        "weight_bits": config.resolved_weight_bits,
        "weight_cache": config.resolved_weight_cache,
        "cache_bits": config.resolved_cache_bits,
        "generation_config": not config.no_generation_config,
    } | others


def open_llm(config: RunConfig, **others: Any) -> LLM:
    """The `LLM` of `llm_arguments`. Loads torch; raises `UserError`."""
    from flexgen_h2o.llm import LLM  # only now: bad flags answer at once

    return LLM(**llm_arguments(config, **others))


# The warm-up: what a run generates before it is measured.


_TOKENS = 2
"""Of each sequence: the prefill gives one, a decode step the other."""


def warm_up(llm: LLM, prompts: Sequence[str | Sequence[int]], config: RunConfig) -> None:
    """Generate from the first GPU batch, and forget it.

    On a GPU as many tokens as will be measured: Triton compiles and tunes its kernels for the
    lengths that they meet, which takes seconds, so that two tokens leave some to be compiled.
    """
    tokens = config.cut_gen_len or config.gen_len
    if llm.device.type == "cpu":
        tokens = min(tokens, _TOKENS)
    # With --cut-gen-len, the run to come makes room for so many tokens only.
    llm.generate(prompts[: config.policy().gpu_batch_size], max_new_tokens=tokens,
                 eos_token_id=-1)


# Prompts of a run: from files, or random tokens.


def read_prompts(path: str) -> list[str]:
    """Read prompts: ``.txt`` one a line, ``.jsonl`` the key `prompt` of each line.

    Blank lines are skipped. Raises `UserError` (with the line number, for .jsonl) when the file
    is missing, empty, not UTF-8, or a line is not JSON or has no `prompt`.
    """
    if_empty = "holds no prompts: write one a line"
    if path.endswith(".jsonl"):
        return json_texts("--prompts", path, "prompt", if_empty=if_empty)
    return [line.rstrip("\r") for _, line in read_lines("--prompts", path, if_empty=if_empty)]


def synthetic_prompts(config: RunConfig, vocab_size: int) -> list[list[int]]:
    """Random token ids for each sequence, of one block by default; the same for the same seed."""
    draw = random.Random(config.seed)
    count = config.num_prompts or (
        config.resolved_gpu_batch_size * config.resolved_num_gpu_batches)
    return [draw.choices(range(vocab_size), k=config.prompt_len) for _ in range(count)]


def workload(config: RunConfig, texts: Sequence[str]) -> Workload:
    """The workload, for a memory plan before there is a tokenizer.

    A token has about four bytes of text; three leave some room. `LLM` plans again when it knows.
    """
    prompt_len, count = config.prompt_len, len(texts) or config.num_prompts
    batch, batches = config.resolved_gpu_batch_size, config.resolved_num_gpu_batches
    if texts:
        prompt_len = max(len(text.encode("utf-8")) for text in texts) // 3 + 1
    if count:
        batch = min(batch, count)
        batches = min(batches, -(-count // batch))
    return Workload(prompt_len, config.gen_len, gpu_batch_size=batch, num_gpu_batches=batches)


# A command on the ranks of a pipeline: the first does the work, the others run what it runs.


@contextmanager
def joined(config: RunConfig, command: str, *, replica: int | None = None
           ) -> Iterator[Pipeline | None]:
    """The ranks over which a command runs; None for the only one.

    The first does the work within the ``with`` statement, where it opens its model with
    `open_on_ranks`, or none; the others `follow`.

    Parameters
    ----------
    config : RunConfig
    command : str
        The module that torchrun starts, for errors.
    replica : int, optional
        Which of several replicas this process belongs to, each of which has its own pipeline.

    Raises
    ------
    UserError
        Not as many ranks have been started as `config` says, or they do not find each other, or
        this is the one to tell of one that has failed or gone; the others exit with status 2.
    """
    launch = launched()
    if replica is not None:
        launch = launch.within(config.pipeline_parallel)
    check_ranks(config.pipeline_parallel, launch.ranks, command)
    if launch.ranks == 1:
        yield None
        return
    # Where a rank is gone, torch would show its own stack beside the line that says so.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from flexgen_h2o.distributed.pipeline import Pipeline  # only now: it loads torch

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


def open_on_ranks(config: RunConfig, pipeline: Pipeline | None, *,
                  bounds: Sequence[int] | None = None, **others: Any) -> LLM:
    """The `LLM` of `open_llm`; the other ranks open theirs."""
    if pipeline is None:
        return open_llm(config, **others)
    # As it was planned here: others may not see the files that it came from.
    pipeline.broadcast(msgspec.json.encode(config.to_dict()))
    return open_llm(config, pipeline=pipeline, bounds=bounds, **others)


def follow(pipeline: Pipeline) -> None:
    """On a rank that is not the first: run what that one runs, until it has no more.

    Nothing is read, written or printed but errors that are its own.
    """
    with Ending(lambda: None):  # signals go to all ranks alike: the first one decides
        found = pipeline.receive_broadcast()
        if not found:
            return
        given: Mapping[str, Any] = msgspec.json.decode(found)
        config = RunConfig.from_mapping(given)
        # Files are the first rank's.
        quiet = replace(config, prompts=None, csv=None, output=None, trace=None, debug_mode=None,
                        count_experts=None)
        with open_llm(quiet, pipeline=pipeline, progress=False) as llm:
            llm.follow()
