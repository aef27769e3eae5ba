"""A job on several processes that a launcher has started: each answers windows of the same input.

Replica 0 writes the results file, each other one a file of its own beside it, OUTPUT.rank1 and so
on. Replica 0 adds these to the results at the end, and whatever of them a killed job has left at
the next start, with or without several processes.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from flexgen_h2o.cli.launch import open_on_ranks
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.input import JobInput
from flexgen_h2o.commands.batch.job import Job
from flexgen_h2o.commands.batch.results import ResultsFile, key_of
from flexgen_h2o.config.launch import Launch, launched
from flexgen_h2o.distributed.heartbeat import TimeoutStore, call_with_timeout
from flexgen_h2o.distributed.replicas import WindowQueue
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import writing
from flexgen_h2o.storage.free_memory import free_memory

if TYPE_CHECKING:
    from flexgen_h2o.distributed.pipeline import Pipeline
    from flexgen_h2o.llm import LLM

PATIENCE = 20.0
"""Seconds without a sign of life after which a replica's window goes to another one. torchrun ends
all processes when one has died, and kills those that are still there 30 seconds later."""

_START = timedelta(seconds=300)
"""How long a launcher may take from the first process to the last."""
_SHARES = 4
"""Windows of each replica at least, so that none waits long for the last one."""
_LINES = 1024  # of a replica's file that are in memory at a time


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Answer(msgspec.Struct):
    response: _Response | None


class _Words(msgspec.Struct):
    """The words of replica 0 on a job: an error, or the places that are left, in bits, of an input
    with these keys, and how many make a window."""

    error: str = ""
    keys: bytes = b""
    left: bytes = b""
    window: int = 1


_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True)
class ReplicaRank:
    """The replica that a process belongs to, of `replicas`, and its place among the processes of
    its host. The first rank of a replica leads it: it takes the windows."""

    replica: int
    replicas: int
    local: int
    leads: bool = True

    @classmethod
    def of(cls, launch: Launch, ranks_of_each: int = 1) -> ReplicaRank:
        """The seat of a rank where each replica has so many ranks, one after the other."""
        ranks = launch.within(ranks_of_each)
        return cls(launch.rank // ranks_of_each, launch.ranks // ranks_of_each, launch.local_rank,
                   ranks.rank == 0)


def seat(ranks_of_each: int) -> ReplicaRank:
    """The seat of this process, where each replica has so many ranks. Raises `UserError` if no
    launcher has started it."""
    if "RANK" not in os.environ:
        raise UserError("--data-parallel is for several processes, and a launcher has to start "
                        "them: torchrun --nproc-per-node 2 -m flexgen_h2o.batch --data-parallel "
                        "... (any that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)")
    return ReplicaRank.of(launched(), ranks_of_each)


@contextmanager
def joined(place: ReplicaRank) -> Iterator[WindowQueue]:
    """The queue that the replicas of this job share, with this one's signs of life in it.

    Raises `UserError` if there is no replica 0.
    """
    # A store that goes with a process that is killed is told here, in a line, and not by PyTorch.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed

    try:
        found = torch.distributed.rendezvous("env://", timeout=_START)
        store, _, _ = call_with_timeout(next, found, seconds=_START.total_seconds() + PATIENCE)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError("the processes of --data-parallel do not find each other at MASTER_ADDR "
                        f"{os.environ.get('MASTER_ADDR')}: {str(error).splitlines()[0]}") from None
    # torchrun keeps its store, with what is in it, when it starts all processes again.
    store = torch.distributed.PrefixStore(
        "start " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    queue = WindowQueue(TimeoutStore(store, PATIENCE), place.replica, place.replicas,
                        patience=PATIENCE)
    with queue.beating():
        yield queue


def lead(queue: WindowQueue, source: JobInput, options: BatchOptions, left: np.ndarray) -> int:
    """Say what is left, as replica 0. Returns the requests of a window."""
    config = options.run
    block = config.resolved_gpu_batch_size * config.resolved_num_gpu_batches
    size = min(options.window, max(block, -(-len(left) // (_SHARES * queue.replicas))))
    waiting = np.zeros(len(source), bool)
    waiting[left] = True
    queue.publish(msgspec.json.encode(_Words(
        keys=_digest(source), left=np.packbits(waiting).tobytes(), window=size)).decode())
    return size


def refuse(queue: WindowQueue, error: str) -> None:
    """Have the others end with this error, as replica 0, before the job begins."""
    queue.publish(msgspec.json.encode(_Words(error=error)).decode())


def follow(queue: WindowQueue, source: JobInput) -> tuple[np.ndarray, int]:
    """The places that are left, and the requests of a window, as replica 0 says.

    Raises `UserError` if it has refused the job, or has another input.
    """
    words = msgspec.json.decode(queue.job(), type=_Words)
    if words.error:
        raise UserError(f"replica 0 has stopped: {words.error}")
    if words.keys != _digest(source):
        raise UserError(f"--input {source.path} is not what replica 0 reads: give all processes "
                        "the same file")
    bits = np.unpackbits(np.frombuffer(words.left, np.uint8), count=len(source))
    return np.flatnonzero(bits), words.window


def work(queue: WindowQueue, job: Job, left: np.ndarray, size: int,
         should_end: Callable[[], bool]) -> None:
    """Answer windows until all are answered by some replica, or the job is to end.

    Raises `UserError` as `Job.run`, and if replica 0 has gone.
    """
    with closing(queue.windows(-(-len(left) // size))) as windows:
        for window in windows:
            if should_end():
                break
            job.run(left[window * size:(window + 1) * size])
            if should_end():
                break
    queue.check()  # that there is no queue any more is a reason to end, too


def own_file(options: BatchOptions, place: ReplicaRank) -> ResultsFile:
    """The file of the results of a replica that is not the first."""
    return ResultsFile("--output", f"{options.output}.rank{place.replica}")


def open_replica(config: RunConfig, place: ReplicaRank, pipeline: Pipeline | None) -> LLM:
    """The `LLM` of a replica: on GPUs of its own, or with its share of the host's memory.

    The ranks of a pipeline choose their GPUs themselves.
    """
    import torch

    local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", place.replicas)))
    if config.memory_limit is None and local > 1:
        free = free_memory(config.offload_dir, None).cpu_bytes
        config = replace(config, memory_limit=free // local)
    on_gpu = config.device == "cuda" or config.device == "auto" and torch.cuda.is_available()
    if on_gpu and pipeline is None:
        config = replace(config, device=f"cuda:{place.local % max(1, torch.cuda.device_count())}")
    return open_on_ranks(config, pipeline, progress=False)


# --- files of replicas


def rank_files(output: str) -> list[str]:
    """The files that replicas have left beside a results file."""
    return sorted(path for path in glob.glob(f"{glob.escape(output)}.rank*")
                  if re.fullmatch(r"\.rank\d+", path[len(output):]))


def absorb(source: JobInput, *, results: ResultsFile, errors: ResultsFile) -> dict[str, int]:
    """Add the lines of replicas' files to the results, each request's once, and remove the files.

    Parameters
    ----------
    source : JobInput
    results, errors : ResultsFile
        They may be the same.

    Returns
    -------
    dict of str to int
        The counts of what is added, as `JobProgress.add` takes them.

    Raises
    ------
    UserError
        A file is still being written, or has a line that is none of this job's results.
    """
    counts = dict.fromkeys(("answered", "failed", "prompt_tokens", "generated_tokens"), 0)
    paths = rank_files(results.path)
    answered = np.zeros(len(source), bool)
    for file in {results, errors} if paths else ():
        answered[file.answered(source)[0]] = True
    for path in paths:
        with ResultsFile("--output", path) as file:
            file.answered(source)  # which refuses a file of another job
            with writing("--output", path), open(path, "rb") as lines:
                while some := list(islice(lines, _LINES)):
                    _add_new(some, answered, source, counts, {True: results, False: errors})
            with writing("--output", path):
                os.unlink(path)
    return counts


def _add_new(lines: Sequence[bytes], answered: np.ndarray, source: JobInput,
             counts: dict[str, int], files: Mapping[bool, ResultsFile]) -> None:
    """Add those of a file's lines that answer what has no answer yet."""
    found: dict[bool, list[bytes]] = {True: [], False: []}
    keys, fine = zip(*map(key_of, lines), strict=True)
    for line, place, good in zip(lines, source.find(np.array(keys, np.uint64)), fine, strict=True):
        if place < 0 or not answered[place]:
            found[good].append(line.rstrip(b"\n"))
        if place >= 0 and not answered[place]:
            answered[place] = True
            _count(counts, line, good)
    for good, new in found.items():
        files[good].add(new)


def _count(counts: dict[str, int], line: bytes, fine: bool) -> None:
    counts["answered"] += 1
    counts["failed"] += not fine
    response = _ANSWER.decode(line).response
    if response is not None and response.body.usage is not None:
        counts["prompt_tokens"] += response.body.usage.prompt_tokens
        counts["generated_tokens"] += response.body.usage.completion_tokens


def _digest(source: JobInput) -> bytes:
    return hashlib.blake2b(source.keys.tobytes(), digest_size=16).digest()
