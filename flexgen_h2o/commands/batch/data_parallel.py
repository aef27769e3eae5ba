"""A job on several replicas of a model, which answer windows of the same input.

Replicas are processes that a launcher has started, or actors of Ray Data.

Replica 0 writes the results file. Every other replica writes its own file beside it
(OUTPUT.rank1 and so on). Replica 0 merges these files at the end. The next start, with or without
several processes, merges files that a killed job has left.

With Ray, the process of the command reads the input and writes the results: other machines need
only the model. A job resumes from its results file, with or without Ray. Ray's checkpoints
(``CheckpointConfig``) are not used: they would be a second record of answered requests, which could
contradict the results file after a crash.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from flexgen_h2o.cli.launch import (
    PROCESS_BYTES,
    ReplicaResources,
    llm_arguments,
    open_llm,
    open_on_ranks,
    planned_bytes,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch.estimate import largest_block, load_tokenizer, scan_input
from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.job import Job, JobProgress
from flexgen_h2o.distributed.ray_cluster import (
    Replica,
    machines,
    map_here,
    map_replicas,
    ray_cluster,
)
from flexgen_h2o.distributed.replicas import ReplicaRank, WindowQueue, window_size
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.requests.input import JobInput, catch_read_errors, check_line, read_line
from flexgen_h2o.requests.results import ResultsFile, request_key
from flexgen_h2o.storage.free_memory import free_memory

if TYPE_CHECKING:
    import pyarrow

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


_ERROR = -1
"""Place of a row whose line is the message of a `UserError`. Ray reports an exception of a replica
only as the text of a trace."""


class RayJob:
    """Runs a job's requests on replicas.

    `results` and `errors`: files for answers and for failures; may be the same.
    """

    def __init__(self, source: JobInput, options: BatchOptions, *, results: ResultsFile,
                 errors: ResultsFile, progress: JobProgress):
        self._source, self._options = source, options
        self._results, self._errors, self._progress = results, errors, progress

    def run(self, remaining: np.ndarray, should_end: Callable[[], bool]) -> None:
        """Answer the requests at these indices of the input.

        Raises `UserError` if ray is missing or too small, or a replica cannot run or dies
        repeatedly.

        `should_end` is called after each window.
        """
        options = self._options
        resources = _memory(options, self._source)
        with ExitStack() as muted, ray_cluster(options.ray_address) as ray:
            gpus = _gpus(options.run, ray)
            resources = replace(resources, num_gpus=gpus).fitted(machines(ray), options.replicas)
            try:
                with closing(self._answers(ray, remaining, resources)) as tables:
                    try:
                        self._collect(tables, remaining, should_end)
                    finally:  # Ray prints that running windows have failed
                        muted.enter_context(redirect_stdout(io.StringIO()))
            except ray.exceptions.RayTaskError:
                raise  # a bug in the replica
            except ray.exceptions.RayError as error:
                raise UserError(f"Ray has given up ({type(error).__name__}): "
                                f"{str(error).strip()[:600]}") from None

    def _answers(self, ray: Any, remaining: np.ndarray, resources: ReplicaResources
                 ) -> Generator[pyarrow.Table, None, None]:
        """Yield tables of result lines as replicas return them."""
        options, context = self._options, ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        config = options.run
        size = window_size(len(remaining), options.replicas, limit=options.window,
                           block=config.resolved_gpu_batch_size * config.resolved_num_gpu_batches)
        # The lines of a window are read shortly before a replica needs them.
        lines = map_here(
            ray, ray.data.from_arrow(list(_windows(self._source, remaining, size))), _read,
            batch_size=None, batch_format="pyarrow", fn_kwargs={"path": self._source.path})
        run = replace(config, memory_limit=resources.memory_limit)
        answered = map_replicas(
            ray, lines, JobReplica, options.replicas, batch_size=size, batch_format="pyarrow",
            fn_constructor_kwargs={"options": options, "run": run, "path": self._source.path,
                                   "threads": resources.num_cpus},
            **resources.arguments())
        yield from answered.iter_batches(batch_size=None, batch_format="pyarrow",
                                         prefetch_batches=0)

    def _collect(self, tables: Iterable[pyarrow.Table], remaining: np.ndarray,
                 should_end: Callable[[], bool]) -> None:
        """Write the lines, one for each request: a repeated window may return its lines twice."""
        waiting = np.zeros(len(self._source), bool)
        waiting[remaining] = True
        for table in tables:
            if table["index"][0].as_py() == _ERROR:
                raise UserError(table["line"][0].as_py().decode())
            rows = [row for row in table.to_pylist() if waiting[row["index"]]]
            waiting[[row["index"] for row in rows]] = False
            self._errors.add([row["line"] for row in rows if row["failed"]])
            self._results.add([row["line"] for row in rows if not row["failed"]])
            self._progress.add(
                answered=len(rows), failed=sum(row["failed"] for row in rows),
                prompt_tokens=sum(row["prompt_tokens"] for row in rows),
                generated_tokens=sum(row["generated_tokens"] for row in rows))
            if should_end():
                return
        if waiting.any():
            raise UserError(f"{waiting.sum()} requests came back from Ray without an answer")


def _memory(options: BatchOptions, source: JobInput) -> ReplicaResources:
    """Return the host memory of a replica: ``--memory-limit``, or the memory plan's for the longest
    requests."""
    config = options.run
    if config.memory_limit is not None:
        return ReplicaResources(config.memory_limit + PROCESS_BYTES)
    load = largest_block(config, scan_input(source, load_tokenizer(config), options))
    planned = planned_bytes(llm_arguments(config), load,
                            has_gpu=config.device.startswith("cuda"))
    return ReplicaResources(planned + PROCESS_BYTES)


def _gpus(config: RunConfig, ray: Any) -> int:
    """Return the GPUs of a replica, 0 or 1; with ``--device auto`` 1 if the cluster has any."""
    if config.device == "auto":
        return int(any(node.get("GPU", 0) >= 1 for node in machines(ray)))
    return int(config.device.startswith("cuda"))


def _windows(source: JobInput, remaining: np.ndarray, size: int) -> Iterator[pyarrow.Table]:
    """Yield an index table of each window's lines."""
    import pyarrow  # installed with Ray

    for start in range(0, len(remaining), size):
        indices = remaining[start:start + size]
        yield pyarrow.table({
            "index": pyarrow.array(indices, pyarrow.int64()), "offset": source.offsets[indices],
            "key": source.keys[indices], "number": source.numbers[indices],
            "kind": source.kinds[indices]})


def _read(table: pyarrow.Table, path: str) -> pyarrow.Table:
    """Return the index table of a window with a column of lines."""
    import pyarrow

    try:
        with catch_read_errors(path), open(path, "rb") as file:
            lines = [read_line(file, offset, path) for offset in table["offset"].to_pylist()]
    except UserError as error:
        return _error_table(error)
    return table.append_column("line", pyarrow.array(lines, pyarrow.large_binary()))


def _error_table(error: UserError) -> pyarrow.Table:
    """Return a table that ends the job with an error."""
    import pyarrow

    return pyarrow.table({"index": [_ERROR],
                          "line": pyarrow.array([str(error).encode()], pyarrow.large_binary())})


class JobReplica(Replica):
    """Replica that answers windows of requests.

    `run`: configuration of the replica's model. `path`: path of the input, for messages. `threads`:
    threads that compute.
    """

    def __init__(self, options: BatchOptions, run: RunConfig, path: str, threads: int):
        super().__init__(partial(open_llm, run, progress=False), threads)
        self._options, self._path = options, path

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return result lines: columns index, line, failed, and in the first row the sums
        prompt_tokens and generated_tokens."""
        if table["index"][0].as_py() == _ERROR:
            return table
        try:
            return self._answer(table)
        except UserError as error:
            return _error_table(error)

    def _answer(self, table: pyarrow.Table) -> pyarrow.Table:
        import pyarrow

        window = _Window(table, self._path)
        results, errors, counts = _ResultList(), _ResultList(), _TokenCounter()
        Job(self.model, window, self._options, results=results, errors=errors, progress=counts,
            should_end=lambda: False).run(range(len(window.keys)))
        lines = errors.lines + results.lines
        zeros = [0] * (len(lines) - 1)
        return pyarrow.table({
            "index": pyarrow.array([window.indices[request_key(line)[0]] for line in lines],
                                   pyarrow.int64()),
            "line": pyarrow.array(lines, pyarrow.large_binary()),
            "failed": [True] * len(errors.lines) + [False] * len(results.lines),
            "prompt_tokens": [counts.prompt_tokens, *zeros],
            "generated_tokens": [counts.generated_tokens, *zeros]})


class _Window:
    """The lines of a window, in place of a `JobInput`. `indices` are those in the input, by key."""

    def __init__(self, table: pyarrow.Table, path: str):
        self.keys, self.numbers, self.kinds = (
            table[name].to_numpy() for name in ("key", "number", "kind"))
        self.indices = dict(zip(self.keys.tolist(), table["index"].to_pylist(), strict=True))
        self._lines, self._path = table["line"], path

    def line(self, index: int) -> bytes:
        """Return a line. Raises `UserError` if the input has changed."""
        line = self._lines[index].as_py()
        check_line(line, self, index, self._path)
        return line


class _ResultList:
    """A `ResultsFile` in memory."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def add(self, lines: Sequence[bytes]) -> None:
        """Append lines."""
        self.lines += lines


class _TokenCounter:
    """A `JobProgress` that sums the tokens of a window."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = 0

    def add(self, *, answered: int, failed: int = 0, prompt_tokens: int = 0,
            generated_tokens: int = 0, device_bytes: int = 0) -> None:
        """Add to the sums."""
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
