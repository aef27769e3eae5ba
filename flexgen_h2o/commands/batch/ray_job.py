"""A job on Ray Data: replicas of a model take windows of its requests, on one machine or many.

The process that runs the command reads the input and writes the results, so that nothing but the
model has to be on the other machines. Resume is by the results file, as without Ray. Ray's own
checkpoint (``CheckpointConfig``) is not used here: it keeps the ids of rows that a write of Ray's
has written, in files of its own beside that write's, where this job's lines are written in order
into one file by this process; with a second record of what is answered, the two could disagree
after a crash, and a job could not be gone on with without Ray.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_h2o.cli.launch import llm_arguments, open_llm
from flexgen_h2o.cli.replica_resources import PROCESS_BYTES, ReplicaResources, planned_bytes
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.input import JobInput, check_line, read_line, reading
from flexgen_h2o.commands.batch.job import Job
from flexgen_h2o.commands.batch.preparation import count, encoder_of, largest_block
from flexgen_h2o.commands.batch.progress import JobProgress
from flexgen_h2o.commands.batch.results import ResultsFile, key_of
from flexgen_h2o.distributed.ray_cluster import (
    machines,
    map_batches,
    one_reader_here,
    pool,
    ray_cluster,
)
from flexgen_h2o.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_NOWHERE = -1
"""The place of a line that is the message of a `UserError`: of one that is raised there, Ray tells
here the text alone, in a trace."""

_SHARES = 4
"""Windows of each replica at least, so that none waits long for the last one."""


class RayJob:
    """A job's requests on their way through replicas.

    Parameters
    ----------
    source : JobInput
    options : BatchOptions
    results, errors : ResultsFile
        For lines of answers, and of requests that failed; they may be the same.
    progress : JobProgress
    """

    def __init__(self, source: JobInput, options: BatchOptions, *, results: ResultsFile,
                 errors: ResultsFile, progress: JobProgress):
        self._source, self._options = source, options
        self._results, self._errors, self._progress = results, errors, progress

    def run(self, left: np.ndarray, should_end: Callable[[], bool]) -> None:
        """Answer the requests of these places in the input; asks after each window if it is to end.

        Raises
        ------
        UserError
            Ray is not there or has too little room, a replica cannot run, or dies again and again.
        """
        options = self._options
        asked = _memory(options, self._source)
        with ExitStack() as unheard, ray_cluster(options.ray_address) as ray:
            gpus = _gpus(options.run, ray)
            resources = replace(asked, num_gpus=gpus).fitted(machines(ray), options.replicas)
            try:
                with closing(self._answers(ray, left, resources)) as tables:
                    try:
                        self._collect(tables, left, should_end)
                    finally:  # Ray prints that the windows under way have failed
                        unheard.enter_context(redirect_stdout(io.StringIO()))
            except ray.exceptions.RayTaskError:
                raise  # a fault of the code there
            except ray.exceptions.RayError as error:
                raise UserError(f"Ray has given up ({type(error).__name__}): "
                                f"{str(error).strip()[:600]}") from None

    def _answers(self, ray: Any, left: np.ndarray, resources: ReplicaResources
                 ) -> Generator[pyarrow.Table, None, None]:
        """Tables of lines, as they come."""
        options, context = self._options, ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        size = _window(options, len(left))
        # The lines of a window are read when a replica is about to want them, on this machine.
        lines = map_batches(
            ray.data.from_arrow(list(_windows(self._source, left, size))), _read, batch_size=None,
            batch_format="pyarrow", fn_kwargs={"path": self._source.path}, **one_reader_here(ray))
        run = replace(options.run, memory_limit=resources.planned_bytes)
        answered = map_batches(
            lines, JobReplica, batch_size=size, batch_format="pyarrow",
            fn_constructor_kwargs={"options": options, "run": run, "path": self._source.path,
                                   "threads": resources.num_cpus},
            **pool(ray, options.replicas), **resources.arguments())
        yield from answered.iter_batches(batch_size=None, batch_format="pyarrow",
                                         prefetch_batches=0)

    def _collect(self, tables: Iterable[pyarrow.Table], left: np.ndarray,
                 should_end: Callable[[], bool]) -> None:
        """Write the lines, each request's once: a window that is done again may come again."""
        waiting = np.zeros(len(self._source), bool)
        waiting[left] = True
        for table in tables:
            if table["place"][0].as_py() == _NOWHERE:
                raise UserError(table["line"][0].as_py().decode())
            rows = [row for row in table.to_pylist() if waiting[row["place"]]]
            waiting[[row["place"] for row in rows]] = False
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
    """The host memory of a replica: ``--memory-limit``, or what the longest requests take by the
    memory plan, for which all of them are counted."""
    config = options.run
    if config.memory_limit is not None:
        return ReplicaResources(config.memory_limit + PROCESS_BYTES)
    load = largest_block(config, count(source, encoder_of(config), options))
    planned = planned_bytes(llm_arguments(config), load,
                            has_gpu=config.device.startswith("cuda"))
    return ReplicaResources(planned + PROCESS_BYTES)


def _gpus(config: RunConfig, ray: Any) -> int:
    """GPUs of a replica: one if it is to compute there, or where the cluster has any."""
    if config.device == "auto":
        return int(any(node.get("GPU", 0) >= 1 for node in machines(ray)))
    return int(config.device.startswith("cuda"))


def _window(options: BatchOptions, left: int) -> int:
    """Requests of a window: ``--window``, but so few that each replica gets some windows, and no
    fewer than a block takes."""
    config = options.run
    block = config.resolved_gpu_batch_size * config.resolved_num_gpu_batches
    return min(options.window, max(block, -(-left // (_SHARES * options.replicas))))


def _windows(source: JobInput, left: np.ndarray, size: int) -> Iterator[pyarrow.Table]:
    """The index of each window's lines."""
    import pyarrow  # only now: Ray brings it

    for start in range(0, len(left), size):
        places = left[start:start + size]
        yield pyarrow.table({
            "place": pyarrow.array(places, pyarrow.int64()), "offset": source.offsets[places],
            "key": source.keys[places], "number": source.numbers[places],
            "kind": source.kinds[places]})


def _read(table: pyarrow.Table, path: str) -> pyarrow.Table:
    """Add the lines of a window to its index."""
    import pyarrow

    try:
        with reading(path), open(path, "rb") as file:
            lines = [read_line(file, offset, path) for offset in table["offset"].to_pylist()]
    except UserError as error:
        return _message(error)
    return table.append_column("line", pyarrow.array(lines, pyarrow.large_binary()))


def _message(error: UserError) -> pyarrow.Table:
    """A table of a line that ends the job."""
    import pyarrow

    return pyarrow.table({"place": [_NOWHERE],
                          "line": pyarrow.array([str(error).encode()], pyarrow.large_binary())})


class JobReplica:
    """A copy of the model that answers windows of requests, as Ray Data's ``map_batches`` calls it.

    Parameters
    ----------
    options : BatchOptions
    run : RunConfig
        How the model runs here.
    path : str
        The input's, for messages.
    threads : int
        Threads that compute.
    """

    def __init__(self, options: BatchOptions, run: RunConfig, path: str, threads: int):
        import torch

        torch.set_num_threads(threads)
        self._options, self._path = options, path
        self._refused: UserError | None = None
        try:
            self._llm = open_llm(run, progress=False)
        except UserError as error:
            # Ray would start it again and again. As the answer to a window it reaches the user.
            self._refused = error

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Lines of answers and of failures: columns place, line, failed, and the tokens of the
        prompts and those generated, which stand in the first row."""
        if table["place"][0].as_py() == _NOWHERE:
            return table
        try:
            return self._answered(table)
        except UserError as error:
            return _message(error)

    def _answered(self, table: pyarrow.Table) -> pyarrow.Table:
        import pyarrow

        if self._refused is not None:
            raise self._refused
        window = _Window(table, self._path)
        results, errors, counts = _Collected(), _Collected(), _Counted()
        Job(self._llm, window, self._options, results=results, errors=errors, progress=counts,
            should_end=lambda: False).run(range(len(window.keys)))
        lines = errors.lines + results.lines
        zeros = [0] * (len(lines) - 1)
        return pyarrow.table({
            "place": pyarrow.array([window.places[key_of(line)[0]] for line in lines],
                                   pyarrow.int64()),
            "line": pyarrow.array(lines, pyarrow.large_binary()),
            "failed": [True] * len(errors.lines) + [False] * len(results.lines),
            "prompt_tokens": [counts.prompt_tokens, *zeros],
            "generated_tokens": [counts.generated_tokens, *zeros]})


class _Window:
    """The lines of a window by their places in it; `places` has those in the input by key."""

    def __init__(self, table: pyarrow.Table, path: str):
        self.keys, self.numbers, self.kinds = (
            table[name].to_numpy() for name in ("key", "number", "kind"))
        self.places = dict(zip(self.keys.tolist(), table["place"].to_pylist(), strict=True))
        self._lines, self._path = table["line"], path

    def line(self, place: int) -> bytes:
        """The bytes of a line. Raises `UserError` if the input has been changed."""
        line = self._lines[place].as_py()
        check_line(line, self, place, self._path)
        return line


class _Collected:
    """Lines of results, kept."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def add(self, lines: Sequence[bytes]) -> None:
        """Keep lines."""
        self.lines += lines


class _Counted:
    """Tokens of a window, counted."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = 0

    def add(self, *, answered: int, failed: int = 0, prompt_tokens: int = 0,
            generated_tokens: int = 0, device_bytes: int = 0) -> None:
        """Count tokens."""
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
