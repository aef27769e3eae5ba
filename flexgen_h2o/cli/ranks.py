"""A command on the ranks of a pipeline: the first does the work, the others run what it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from flexgen_h2o.cli.llm_arguments import open_llm
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.signals import Ending
from flexgen_h2o.config.launch import check_ranks, launched
from flexgen_h2o.errors import UserError

if TYPE_CHECKING:
    from flexgen_h2o.engine.pipeline import Pipeline
    from flexgen_h2o.llm import LLM


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
    from flexgen_h2o.engine.pipeline import Pipeline  # only now: it loads torch

    with Pipeline.join(launch, rank_timeout=config.rank_timeout,
                       name=f"pipeline {replica or 0}") as pipeline:
        try:
            yield pipeline
            if launch.rank == 0 and not pipeline.has_ordered:
                pipeline.order(b"")  # there was nothing to run
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
    pipeline.order(msgspec.json.encode(config.to_dict()))
    return open_llm(config, pipeline=pipeline, bounds=bounds, **others)


def follow(pipeline: Pipeline) -> None:
    """On a rank that is not the first: run what that one runs, until it has no more.

    Nothing is read, written or printed but errors that are its own.
    """
    with Ending(lambda: None):  # signals go to all ranks alike: the first one decides
        found = pipeline.listen()
        if not found:
            return
        given: Mapping[str, Any] = msgspec.json.decode(found)
        config = RunConfig.from_mapping(given)
        # Files are the first rank's.
        quiet = replace(config, prompts=None, csv=None, output=None, trace=None, debug_mode=None,
                        count_experts=None)
        with open_llm(quiet, pipeline=pipeline, progress=False) as llm:
            llm.follow()
