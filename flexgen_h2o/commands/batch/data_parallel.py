"""A job on several processes that a launcher has started: each answers windows of the same input.

Replica 0 writes the results file. Every other replica writes its own file beside it
(OUTPUT.rank1 and so on). Replica 0 merges these files at the end. The next start, with or without
several processes, merges what a killed job has left.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from flexgen_h2o.cli.launch import open_on_ranks
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.job import Job
from flexgen_h2o.distributed.replicas import ReplicaRank, WindowQueue, window_size
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.requests.input import JobInput
from flexgen_h2o.requests.results import ResultsFile, request_key
from flexgen_h2o.storage.free_memory import free_memory

if TYPE_CHECKING:
    from flexgen_h2o.distributed.pipeline import Pipeline
    from flexgen_h2o.llm import LLM

_LINES = 1024  # lines of a replica's file that are in memory at a time


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Answer(msgspec.Struct):
    response: _Response | None


class _SharedJob(msgspec.Struct):
    """Description of a job that replica 0 publishes."""

    error: str = ""  # why there is no job
    keys: bytes = b""  # digest of the input's keys
    left: bytes = b""  # bit mask of the requests without an answer
    window: int = 1  # requests of a window


_ANSWER = msgspec.json.Decoder(_Answer)


def publish_job(queue: WindowQueue, source: JobInput, options: BatchOptions,
                remaining: np.ndarray) -> int:
    """Publish the requests that are left, as replica 0. Return the requests of a window."""
    config = options.run
    size = window_size(len(remaining), queue.replicas, limit=options.window,
                       block=config.resolved_gpu_batch_size * config.resolved_num_gpu_batches)
    mask = np.zeros(len(source), bool)
    mask[remaining] = True
    queue.publish(msgspec.json.encode(_SharedJob(
        keys=_digest(source), left=np.packbits(mask).tobytes(), window=size)).decode())
    return size


def publish_error(queue: WindowQueue, error: str) -> None:
    """End the other replicas with an error, as replica 0, before the job begins."""
    queue.publish(msgspec.json.encode(_SharedJob(error=error)).decode())


def receive_job(queue: WindowQueue, source: JobInput) -> tuple[np.ndarray, int]:
    """Return the indices of the requests that are left, and the requests of a window.

    Raises `UserError` if replica 0 has stopped, or reads another input.
    """
    job = msgspec.json.decode(queue.wait_for_job(), type=_SharedJob)
    if job.error:
        raise UserError(f"replica 0 has stopped: {job.error}")
    if job.keys != _digest(source):
        raise UserError(f"--input {source.path} is not what replica 0 reads: give all processes "
                        "the same file")
    mask = np.unpackbits(np.frombuffer(job.left, np.uint8), count=len(source))
    return np.flatnonzero(mask), job.window


def work(queue: WindowQueue, job: Job, remaining: np.ndarray, size: int,
         should_end: Callable[[], bool]) -> None:
    """Answer windows of `size` requests until all are answered, or the job is to end.

    Raises
    ------
    UserError
        As `Job.run`, or replica 0 is gone.
    """
    with closing(queue.windows(-(-len(remaining) // size))) as windows:
        for window in windows:
            if should_end():
                break
            job.run(remaining[window * size:(window + 1) * size])
            if should_end():
                break
    queue.check()  # a lost queue also makes `should_end` true


def own_file(options: BatchOptions, rank: ReplicaRank) -> ResultsFile:
    """Return the results file of a replica other than replica 0."""
    return ResultsFile("--output", f"{options.output}.rank{rank.replica}")


def open_replica(config: RunConfig, rank: ReplicaRank, pipeline: Pipeline | None) -> LLM:
    """Open the `LLM` of a replica, on its own GPU or with its share of the host's memory.

    The ranks of a pipeline choose their GPUs themselves.
    """
    import torch

    local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", rank.replicas)))
    if config.memory_limit is None and local > 1:
        free = free_memory(config.offload_dir, None).cpu_bytes
        config = replace(config, memory_limit=free // local)
    on_gpu = config.device == "cuda" or config.device == "auto" and torch.cuda.is_available()
    if on_gpu and pipeline is None:
        config = replace(config, device=f"cuda:{rank.local % max(1, torch.cuda.device_count())}")
    return open_on_ranks(config, pipeline, progress=False)


def replica_files(output: str) -> list[str]:
    """Return the files of replicas beside a results file."""
    return sorted(path for path in glob.glob(f"{glob.escape(output)}.rank*")
                  if re.fullmatch(r"\.rank\d+", path[len(output):]))


def merge_replica_files(source: JobInput, *, results: ResultsFile, errors: ResultsFile
                        ) -> dict[str, int]:
    """Merge the replicas' files into the results, one answer for each request, and remove them.

    Raises `UserError` if a file is being written, or has a line that is no result of this job.

    `results` and `errors`: may be the same file.

    Returns
    -------
    dict of str to int
        Counts of the new lines: the arguments of `JobProgress.add`.
    """
    counts = dict.fromkeys(("answered", "failed", "prompt_tokens", "generated_tokens"), 0)
    paths = replica_files(results.path)
    answered = np.zeros(len(source), bool)
    for file in {results, errors} if paths else ():
        answered[file.answered(source)[0]] = True
    for path in paths:
        with ResultsFile("--output", path) as file:
            file.answered(source)  # checks that the file is of this job
            with catch_write_errors("--output", path), open(path, "rb") as lines:
                while chunk := list(islice(lines, _LINES)):
                    _add_new(chunk, answered, source, counts, {True: results, False: errors})
            with catch_write_errors("--output", path):
                os.unlink(path)
    return counts


def _add_new(lines: Sequence[bytes], answered: np.ndarray, source: JobInput,
             counts: dict[str, int], files: Mapping[bool, ResultsFile]) -> None:
    """Add the lines of requests without an answer to the file of successes or of failures."""
    new: dict[bool, list[bytes]] = {True: [], False: []}
    keys, successes = zip(*map(request_key, lines), strict=True)
    indices = source.find(np.array(keys, np.uint64))
    for line, index, success in zip(lines, indices, successes, strict=True):
        if index < 0 or not answered[index]:
            new[success].append(line.rstrip(b"\n"))
        if index >= 0 and not answered[index]:
            answered[index] = True
            counts["answered"] += 1
            counts["failed"] += not success
            response = _ANSWER.decode(line).response
            if response is not None and response.body.usage is not None:
                counts["prompt_tokens"] += response.body.usage.prompt_tokens
                counts["generated_tokens"] += response.body.usage.completion_tokens
    for success, new_lines in new.items():
        files[success].add(new_lines)


def _digest(source: JobInput) -> bytes:
    return hashlib.blake2b(source.keys.tobytes(), digest_size=16).digest()
