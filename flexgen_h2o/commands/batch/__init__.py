"""Run a file of requests: ``flexgen-h2o batch -i requests.jsonl -o results.jsonl --model NAME``.

Requests and results are in the form of OpenAI's Batch API. A job may be stopped at any moment, and
the same command goes on with what has no answer yet. All that can be refused is refused before
torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flexgen_h2o.cli.command import ALL_FAILED, Ending, entry_point
from flexgen_h2o.cli.launch import follow, joined, open_on_ranks
from flexgen_h2o.cli.results import append_csv, check_results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.commands.batch import data_parallel, ray_job
from flexgen_h2o.commands.batch import progress as job_plot
from flexgen_h2o.commands.batch.flags import DECIDING, BatchOptions, parse_args, parser
from flexgen_h2o.commands.batch.input import JobInput
from flexgen_h2o.commands.batch.job import Job
from flexgen_h2o.commands.batch.preparation import (
    JobTotals,
    count,
    encoder_of,
    planned,
    predicted_seconds,
)
from flexgen_h2o.commands.batch.progress import JobProgress
from flexgen_h2o.commands.batch.results import ResultsFile
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.distributed.replicas import ReplicaRank, WindowQueue
from flexgen_h2o.engine.progress import byte_bar
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import SettingsFile
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.kernels.implementations import AutotuneTable
from flexgen_h2o.metrics import report
from flexgen_h2o.metrics.run_stats import RunStats

if TYPE_CHECKING:
    from flexgen_h2o.distributed.pipeline import Pipeline

__all__ = ["main", "parse_args", "parser", "run"]


def run(options: BatchOptions) -> int:
    """Answer what has no answer yet; write the files and print the summary.

    Returns the exit status: `ALL_FAILED` if no request of the input can run, or has run.
    """
    for name in ("progress_file", "plot"):
        if getattr(options, name) is not None:
            check_writable(flag_name(name), getattr(options, name))
    check_results({} if options.run.csv is None else {"csv": options.run.csv})
    if options.dry_run:
        with _source(options) as source:
            return dry_run(options, source)
    if options.data_parallel:
        return _share(options)
    with joined(options.run, "flexgen_h2o.batch") as pipeline:
        if pipeline is not None and pipeline.rank > 0:
            follow(pipeline)
            return 0
        return _answer(options, pipeline)


def _answer(options: BatchOptions, pipeline: Pipeline | None) -> int:
    """Answer on the first rank of a pipeline, or on the only one."""
    with _results(options) as (results, errors), _source(options) as source:
        config, implementations, bounds = _planned(options, source)
        left, progress = _resumed(options, config, source, results=results, errors=errors)
        stats = None
        if len(left) and options.ray:
            with _telling(progress), Ending(_tell_of_the_end) as ending:
                ray_job.RayJob(source, options, results=results, errors=errors,
                               progress=progress).run(
                    left, lambda: ending.asked or progress.late(options.max_hours))
        elif len(left):
            with (_telling(progress),
                  open_on_ranks(config, pipeline, bounds=bounds, progress=False,
                                implementations=implementations) as llm,
                  Ending(_tell_of_the_end) as ending):  # while it loads, a signal stops at once
                progress.begin()
                job = Job(llm, source, options, results=results, errors=errors, progress=progress,
                          should_end=lambda: ending.asked or progress.late(options.max_hours))
                job.run(left)
            stats = job.stats
    return _report(options, config, progress, stats)


def _share(options: BatchOptions) -> int:
    """Answer windows of a job as a replica of several, or as a rank of a replica's pipeline."""
    place = ReplicaRank.of_this_process(options.run.pipeline_parallel)
    with (WindowQueue.joined(place) if place.leads else nullcontext() as queue,
          joined(options.run, "flexgen_h2o.batch", replica=place.replica) as pipeline):
        if queue is not None:
            return (_follow if place.replica else _lead)(options, place, queue, pipeline)
        if pipeline is not None:
            follow(pipeline)
        return 0


def _lead(options: BatchOptions, place: ReplicaRank, queue: WindowQueue,
          pipeline: Pipeline | None) -> int:
    """Share the job with the replicas that follow, and put the results together."""
    said = False
    try:
        with _results(options) as (results, errors), _source(options) as source:
            config, _, _ = _planned(options, source)
            left, progress = _resumed(options, config, source, results=results, errors=errors)
            size, said = data_parallel.lead(queue, source, options, left), True
            with _telling(progress):
                _work(options, place, queue, (left, size), pipeline=pipeline, source=source,
                      progress=progress, files=(results, errors))
                queue.wait_for_others()
                progress.add(**data_parallel.absorb(source, results=results, errors=errors))
            return _report(options, config, progress, None)
    except UserError as error:
        if not said:
            data_parallel.refuse(queue, str(error))
            queue.wait_for_others()
        raise


def _follow(options: BatchOptions, place: ReplicaRank, queue: WindowQueue,
            pipeline: Pipeline | None) -> int:
    """Answer windows of the job that replica 0 shares."""
    with _source(options) as source:
        windows = data_parallel.follow(queue, source)
        progress = JobProgress(len(source), 0, 0, None, shown=False)
        with data_parallel.own_file(options, place) as results:
            _work(options, place, queue, windows, pipeline=pipeline, source=source,
                  progress=progress, files=(results, results))
    return 0


def _work(options: BatchOptions, place: ReplicaRank, queue: WindowQueue,
          windows: tuple[np.ndarray, int], *, pipeline: Pipeline | None, source: JobInput,
          progress: JobProgress, files: tuple[ResultsFile, ResultsFile]) -> None:
    """Answer windows of the job, as the first rank of a replica."""
    left, size = windows
    if not len(left):
        return
    with (data_parallel.open_replica(options.run, place, pipeline) as llm,
          Ending(_tell_of_the_end) as ending):
        progress.begin()

        def should_end() -> bool:
            told = ending.asked or progress.late(options.max_hours)
            if told and not place.replica:
                queue.end()  # it keeps the queue, without which nobody goes on
            return told or queue.ended

        job = Job(llm, source, options, results=files[0], errors=files[1], progress=progress,
                  should_end=should_end)
        data_parallel.work(queue, job, left, size, should_end)


def dry_run(options: BatchOptions, source: JobInput) -> int:
    """Check every line, count tokens, and predict how long they take. Returns the exit status."""
    found = count(source, encoder_of(options.run), options)
    print_stdout(found.text())
    if found.failures < found.requests:
        plan = planned(options.run, found)
        hours = predicted_seconds(plan.config, found) / 3600
        print_stdout(f"{plan.text}\n"
                     f"all requests   at most {hours:.4g} hours, each to its most tokens")
    if options.strict:
        _refuse_failures(options, found)
    return ALL_FAILED if found.failures == found.requests else 0


@contextmanager
def _results(options: BatchOptions) -> Iterator[tuple[ResultsFile, ResultsFile]]:
    """The files for answers and for failures, which may be one."""
    with ResultsFile("--output", str(options.output)) as results, (
            nullcontext(results) if options.errors is None
            else ResultsFile("--errors", options.errors)) as errors:
        yield results, errors


def _source(options: BatchOptions) -> JobInput:
    assert options.input is not None  # it has been checked
    with byte_bar("reading", off=None) as bar:
        return JobInput(options.input, progress=bar)


def _planned(options: BatchOptions, source: JobInput
             ) -> tuple[RunConfig, AutotuneTable | None, Sequence[int] | None]:
    """The configuration to run; if it was planned, what was measured and the ranks' layers.

    ``--percent auto`` takes a look at all requests; as does ``--strict``, which raises `UserError`
    for one that cannot run.
    """
    config = options.run
    if not options.strict and config.percent != AUTO:
        return config, None, None
    found = count(source, encoder_of(config), options)
    if options.strict:
        _refuse_failures(options, found)
    if config.percent != AUTO:
        return config, None, None
    if found.failures == found.requests:  # there is nothing to plan for, and little to do
        return replace(config, percent=RunConfig.percent, goal=RunConfig.goal,
                       allow_compression=False, recalibrate=False), None, None
    plan = planned(config, found)
    print_stdout(plan.text)
    return plan.config, plan.implementations, plan.bounds


def _refuse_failures(options: BatchOptions, found: JobTotals) -> None:
    if found.failures:
        raise UserError(f"{found.failures} of {found.requests} requests of --input {options.input} "
                        f"cannot run, and --strict runs all or none: {found.failed[0]}")


def _resumed(options: BatchOptions, config: RunConfig, source: JobInput, *, results: ResultsFile,
             errors: ResultsFile) -> tuple[np.ndarray, JobProgress]:
    """The places of requests that have no answer in these files, and how far that is.

    Raises `UserError` if the files are of another job.
    """
    settings = SettingsFile("--output", str(options.output), options.settings(config), DECIDING)
    files, more = {results, errors}, data_parallel.rank_files(results.path)
    if options.overwrite:
        for file in files:
            file.clear()
        for path in more:
            with ResultsFile("--output", path) as file:  # which refuses one that is being written
                file.clear()
        more = []
    if all(file.empty for file in files) and not more:
        with catch_write_errors("--output", settings.path):
            settings.write()
    elif results.empty and not more and not os.path.exists(settings.path):
        raise UserError(f"--errors {errors.path} has lines of another job, as {settings.path} is "
                        "not there: choose another file, or delete this one")
    else:
        settings.check()
    data_parallel.absorb(source, results=results, errors=errors)
    waiting, bad = np.ones(len(source), bool), np.ones(len(source), bool)
    for file in files:
        places, failures = file.answered(source)
        waiting[places] = False
        bad[np.setdiff1d(places, failures)] = False
    left, failed = np.flatnonzero(waiting), int((bad & ~waiting).sum())
    if 0 < len(left) < len(source):
        print_stdout(f"going on: {len(source) - len(left)} of {len(source)} requests are answered")
    return left, JobProgress(len(source), len(source) - len(left), failed, options.progress_file)


def _tell_of_the_end() -> None:
    # In a signal's handler, where sys.stderr may be in the middle of a write.
    with suppress(OSError):
        os.write(2, b"\nending with the block under way; a second signal stops at once\n")


@contextmanager
def _telling(progress: JobProgress) -> Iterator[None]:
    """Tell of a job that stops by an error or an interrupt what it has left."""
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        with suppress(UserError):  # the file may be on the disk that is full
            progress.end()
        where = f"({progress.answered} of {progress.total} requests are answered; the same " \
            "command goes on)"
        raise type(error)(f"{error} {where}".lstrip()) from None


def _report(options: BatchOptions, config: RunConfig, progress: JobProgress,
            stats: RunStats | None) -> int:
    """Print the summary; write the row and the picture of a job that has run something.

    Returns the exit status.
    """
    progress.end()
    try:
        print_stdout(progress.text()
                     + (f"\n{report.stats_table(stats)}" if stats is not None else ""))
    finally:  # a full disk behind stdout must not lose the files too
        if stats is not None and config.csv is not None:
            with catch_write_errors("--csv", config.csv):
                append_csv(config.csv, stats, config)
                config.save(f"{config.csv}.config.yaml")
        if options.plot is not None:
            with catch_write_errors("--plot", options.plot):
                job_plot.draw(progress.samples, options.plot,
                              title=f"{config.model}, {progress.answered} of {progress.total} "
                              f"requests, {progress.generated_tokens} tokens")
    return ALL_FAILED if progress.failed == progress.total else 0


main = entry_point(parse_args, run)
