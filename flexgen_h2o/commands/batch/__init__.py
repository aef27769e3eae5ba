"""Run a file of requests: ``flexgen-h2o batch -i requests.jsonl -o results.jsonl --model NAME``.

Requests and results are in the format of OpenAI's Batch API. A job may be stopped at any time, and
the same command resumes it. Invalid flags and files are refused before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flexgen_h2o.cli.entry_point import ALL_FAILED, StopRequest, entry_point
from flexgen_h2o.cli.launch import follow, joined, open_on_ranks
from flexgen_h2o.cli.parser import check_outputs_writable
from flexgen_h2o.cli.results import append_csv, check_results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch import data_parallel
from flexgen_h2o.commands.batch.estimate import (
    InputStats,
    load_tokenizer,
    plan_job,
    predict_seconds,
    scan_input,
)
from flexgen_h2o.commands.batch.flags import RESUME_SETTINGS, BatchOptions, parse_args, parser
from flexgen_h2o.commands.batch.job import Job, JobProgress, draw
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.distributed.replicas import ReplicaRank, WindowQueue
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import SettingsFile, report_partial
from flexgen_h2o.files.terminal import byte_bar, print_stdout
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.metrics import report
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.requests.input import JobInput
from flexgen_h2o.requests.results import ResultsFile

if TYPE_CHECKING:
    from flexgen_h2o.cli.planner import Plan
    from flexgen_h2o.distributed.pipeline import Pipeline

__all__ = ["main", "parse_args", "parser", "run"]


def run(options: BatchOptions) -> int:
    """Answer the requests without an answer, write the files, and print a summary.

    Returns the exit status: `ALL_FAILED` if every request has failed or cannot run.
    """
    check_outputs_writable(options, "progress_file", "plot")
    check_results({"csv": options.run.csv})
    if options.dry_run:
        with _open_input(options) as source:
            return dry_run(options, source)
    if options.data_parallel:
        return _run_replica(options)
    with joined(options.run, "flexgen_h2o.batch") as pipeline:
        if pipeline is not None and pipeline.rank > 0:
            follow(pipeline)
            return 0
        return _run_job(options, pipeline)


def _run_job(options: BatchOptions, pipeline: Pipeline | None) -> int:
    """Run the job on the only rank, or on the first rank of a pipeline."""
    with _open_results(options) as (results, errors), _open_input(options) as source:
        config, plan = _resolve_plan(options, source)
        remaining, progress = _resume(options, config, source, results=results, errors=errors)
        stats = None
        if len(remaining) and options.ray:
            with report_partial(partial(_done, progress)), StopRequest(_announce_end) as stop:
                data_parallel.RayJob(source, options, results=results, errors=errors,
                               progress=progress).run(
                    remaining, lambda: stop.requested or progress.is_over(options.max_hours))
        elif len(remaining):
            with (report_partial(partial(_done, progress)),
                  open_on_ranks(config, pipeline, plan, progress=False) as llm,
                  StopRequest(_announce_end) as stop):  # a signal during loading stops at once
                progress.begin()
                job = Job(llm, source, options, results=results, errors=errors, progress=progress,
                          should_end=lambda: stop.requested or progress.is_over(options.max_hours))
                job.run(remaining)
            stats = job.stats
    return _report(options, config, progress, stats)


def _run_replica(options: BatchOptions) -> int:
    """Run this process's part of a job, as a replica or as a rank of a replica's pipeline."""
    rank = ReplicaRank.of_this_process(options.run.pipeline_parallel)
    with (WindowQueue.joined(rank) if rank.leads else nullcontext() as queue,
          joined(options.run, "flexgen_h2o.batch", replica=rank.replica) as pipeline):
        if queue is not None:
            run_replica = _run_other_replica if rank.replica else _run_first_replica
            return run_replica(options, rank, queue, pipeline)
        if pipeline is not None:
            follow(pipeline)
        return 0


def _run_first_replica(options: BatchOptions, rank: ReplicaRank, queue: WindowQueue,
                       pipeline: Pipeline | None) -> int:
    """Share the job with the other replicas, and merge the results."""
    published = False
    try:
        with _open_results(options) as (results, errors), _open_input(options) as source:
            config, _ = _resolve_plan(options, source)
            remaining, progress = _resume(options, config, source, results=results, errors=errors)
            size, published = data_parallel.publish_job(queue, source, options, remaining), True
            with report_partial(partial(_done, progress)):
                _answer_windows(options, rank, queue, (remaining, size), pipeline=pipeline,
                                source=source, progress=progress, files=(results, errors))
                queue.wait_for_others()
                progress.add(**data_parallel.merge_replica_files(
                    source, results=results, errors=errors))
            return _report(options, config, progress, None)
    except UserError as error:
        if not published:
            data_parallel.publish_error(queue, str(error))
            queue.wait_for_others()
        raise


def _run_other_replica(options: BatchOptions, rank: ReplicaRank, queue: WindowQueue,
                       pipeline: Pipeline | None) -> int:
    """Answer windows of the job that replica 0 publishes."""
    with _open_input(options) as source:
        windows = data_parallel.receive_job(queue, source)
        progress = JobProgress(len(source), 0, 0, None, shown=False)
        with data_parallel.own_file(options, rank) as results:
            _answer_windows(options, rank, queue, windows, pipeline=pipeline, source=source,
                            progress=progress, files=(results, results))
    return 0


def _answer_windows(options: BatchOptions, rank: ReplicaRank, queue: WindowQueue,
                    windows: tuple[np.ndarray, int], *, pipeline: Pipeline | None, source: JobInput,
                    progress: JobProgress, files: tuple[ResultsFile, ResultsFile]) -> None:
    """Answer windows of the job on the first rank of a replica."""
    remaining, size = windows
    if not len(remaining):
        return
    with (data_parallel.open_replica(options.run, rank, pipeline) as llm,
          StopRequest(_announce_end) as stop):
        progress.begin()

        def should_end() -> bool:
            ends = stop.requested or progress.is_over(options.max_hours)
            if ends and not rank.replica:
                queue.end()  # replica 0 hosts the queue, so all replicas end
            return ends or queue.ended

        job = Job(llm, source, options, results=files[0], errors=files[1], progress=progress,
                  should_end=should_end)
        data_parallel.work(queue, job, remaining, size, should_end)


def dry_run(options: BatchOptions, source: JobInput) -> int:
    """Check every line, count tokens, and predict the time. Return the exit status."""
    stats = scan_input(source, load_tokenizer(options.run), options)
    print_stdout(stats.text())
    if stats.failures < stats.requests:
        plan = plan_job(options.run, stats)
        hours = predict_seconds(plan.config, stats) / 3600
        plan.show()
        print_stdout(f"all requests   at most {hours:.4g} hours, each to its most tokens")
    if options.strict:
        _refuse_failures(options, stats)
    return ALL_FAILED if stats.failures == stats.requests else 0


@contextmanager
def _open_results(options: BatchOptions) -> Iterator[tuple[ResultsFile, ResultsFile]]:
    """Open the files for answers and for failures, which may be the same."""
    with ResultsFile("--output", str(options.output)) as results, (
            nullcontext(results) if options.errors is None
            else ResultsFile("--errors", options.errors)) as errors:
        yield results, errors


def _open_input(options: BatchOptions) -> JobInput:
    assert options.input is not None
    with byte_bar("reading", progress=None) as bar:
        return JobInput(options.input, progress=bar)


def _resolve_plan(options: BatchOptions, source: JobInput) -> tuple[RunConfig, Plan | None]:
    """Return the configuration to run, and its plan, if ``--percent auto`` has made one.

    ``--percent auto`` and ``--strict`` read all requests first. ``--strict`` raises `UserError`
    for a request that cannot run.
    """
    config = options.run
    if not options.strict and config.percent != AUTO:
        return config, None
    stats = scan_input(source, load_tokenizer(config), options)
    if options.strict:
        _refuse_failures(options, stats)
    if config.percent != AUTO:
        return config, None
    if stats.failures == stats.requests:  # nothing to plan for
        return replace(config, percent=RunConfig.percent, goal=RunConfig.goal,
                       allow_compression=False, recalibrate=False), None
    plan = plan_job(config, stats)
    plan.show()
    return plan.config, plan


def _refuse_failures(options: BatchOptions, stats: InputStats) -> None:
    if stats.failures:
        raise UserError(f"{stats.failures} of {stats.requests} requests of --input {options.input} "
                        f"cannot run, and --strict runs all or none: {stats.messages[0]}")


def _resume(options: BatchOptions, config: RunConfig, source: JobInput, *, results: ResultsFile,
            errors: ResultsFile) -> tuple[np.ndarray, JobProgress]:
    """Return the indices of the requests without an answer in these files, and the progress.

    Raises `UserError` if the files are of another job.
    """
    settings = SettingsFile("--output", str(options.output), options.settings(config),
                            RESUME_SETTINGS)
    files, replica_files = {results, errors}, data_parallel.replica_files(results.path)
    if options.overwrite:
        for file in files:
            file.clear()
        for path in replica_files:
            with ResultsFile("--output", path) as file:  # raises if the file is being written
                file.clear()
        replica_files = []
    if all(file.empty for file in files) and not replica_files:
        with catch_write_errors("--output", settings.path):
            settings.write()
    elif results.empty and not replica_files and not os.path.exists(settings.path):
        raise UserError(f"--errors {errors.path} has lines of another job, as {settings.path} is "
                        "not there: choose another file, or delete this one")
    else:
        settings.check()
    data_parallel.merge_replica_files(source, results=results, errors=errors)
    answered, succeeded = np.zeros(len(source), bool), np.zeros(len(source), bool)
    for file in files:
        indices, failures = file.answered(source)
        answered[indices] = True
        succeeded[np.setdiff1d(indices, failures)] = True
    remaining, failed = np.flatnonzero(~answered), int((answered & ~succeeded).sum())
    done = len(source) - len(remaining)
    if 0 < done < len(source):
        print_stdout(f"resuming: {done} of {len(source)} requests are answered")
    return remaining, JobProgress(len(source), done, failed, options.progress_file)


def _announce_end() -> None:
    # In a signal handler, sys.stderr may be in the middle of a write.
    with suppress(OSError):
        os.write(2, b"\nstopping after the current block; a second signal stops at once\n")


def _done(progress: JobProgress) -> str:
    """Return how many requests a job that stops early has answered."""
    with suppress(UserError):  # the disk may be full
        progress.end()
    return (f"{progress.answered} of {progress.total} requests are answered; run the same command "
            "to resume")


def _report(options: BatchOptions, config: RunConfig, progress: JobProgress,
            stats: RunStats | None) -> int:
    """Print the summary, and write the CSV row and the plot. Return the exit status."""
    progress.end()
    try:
        print_stdout(progress.text()
                     + (f"\n{report.stats_table(stats)}" if stats is not None else ""))
    finally:  # write the files even if stdout fails
        if stats is not None and config.csv is not None:
            with catch_write_errors("--csv", config.csv):
                append_csv(config.csv, stats, config)
                config.save(f"{config.csv}.config.yaml")
        if options.plot is not None:
            with catch_write_errors("--plot", options.plot):
                draw(progress.samples, options.plot,
                     title=f"{config.model}, {progress.answered} of {progress.total} "
                     f"requests, {progress.generated_tokens} tokens")
    return ALL_FAILED if progress.failed == progress.total else 0


main = entry_point(parse_args, run)
