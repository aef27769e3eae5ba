"""The comparison of gpu-check, and its steps within a deadline."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import strsignal
from typing import Any, NamedTuple

from compare import Cells
from comparison import Comparison, Table, load
from processes import TIME, run_job

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import report_partial_rows

BENCHMARKS = Path(__file__).parent
CONFIG = BENCHMARKS.parent / "configs" / "compare_gpu_check.yaml"
MIN_SECONDS = 20.0
"""Least seconds to start a system; none loads faster."""


class Deadline:
    """A deadline in seconds from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


class CheckStep(NamedTuple):
    """A step, which is skipped with at most `reserve` seconds left."""

    kind: str
    name: str
    call: Callable[[], Any]
    reserve: float = 0.0


def run_steps(steps: Iterable[CheckStep], deadline: Deadline, skip: Callable[[CheckStep], None]
              ) -> None:
    """Run steps in turn; pass those without time left to `skip`."""
    for step in steps:
        if deadline.left() > step.reserve:
            step.call()
        else:
            skip(step)


def run_side_by_side(call: Callable[[int], Any], numbers: Iterable[int], deadline: Deadline,
                     max_processes: int) -> tuple[dict[int, Any], dict[int, str]]:
    """Call `call` for each number in a new process, at most `max_processes` at a time.

    Returns the results, and reasons for processes that ended without one, both by number. Numbers
    without time left are in neither.
    """
    context = multiprocessing.get_context("spawn")
    waiting, results, ended = deque(numbers), {}, {}
    running: dict[Any, tuple[int, BaseProcess]] = {}  # by the pipe, later by the process's sentinel
    try:
        while (waiting or running) and deadline.left() > 0:
            while waiting and len(running) < max_processes:
                number = waiting.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(call, number, sender),
                                          daemon=True)
                process.start()
                running[receiver] = number, process
                sender.close()  # the pipe ends with the process
            for ready in wait(list(running), max(0.0, deadline.left())):
                number, process = running.pop(ready)
                if isinstance(ready, Connection):
                    with ready, suppress(EOFError, OSError):  # no result, or half of it
                        results[number] = ready.recv()
                    running[process.sentinel] = number, process
                else:
                    process.join()
                    if number not in results:
                        ended[number] = f"its process ended with {_status(process.exitcode)}"
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return results, ended


def _send_result(call: Callable[[int], Any], number: int, sender: Connection) -> None:
    sender.send(call(number))


def _status(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {-code} ({strsignal(-code)})"


class WrittenModel:
    """A model of random weights that is written in the background unless it exists.

    `models`: folder of the models' folders. `model` and `dtype`: a published OPT shape, which names
    the folder, and the dtype.
    """

    def __init__(self, models: Path, model: str, dtype: str):
        self.folder, self._maker = models / model, None
        if not self.folder.is_dir():
            models.mkdir(parents=True, exist_ok=True)
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `ready`)
            self._maker = subprocess.Popen(
                [sys.executable, str(BENCHMARKS / "make_checkpoint.py"), "--model",
                 f"facebook/{model}", "--out", str(self.folder), "--dtype", dtype],
                stdout=subprocess.DEVNULL, stderr=self._log)

    def ready(self, seconds: float) -> None:
        """Wait at most `seconds` until it is written. Raises `UserError` on failure."""
        if self._maker is None:
            return
        try:
            status = self._maker.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.folder} could not be written in time: make it beforehand with "
                            "benchmarks/make_checkpoint.py") from None
        finally:
            self.stop()
        if status:
            raise UserError(f"{self.folder} could not be written: {self._said}")

    def stop(self) -> None:
        """Stop writing, and remove partial files."""
        maker, self._maker = self._maker, None
        if maker is not None:
            if maker.poll() is None:
                maker.kill()
                maker.wait()
            shutil.rmtree(self.folder.with_name(f"{self.folder.name}.building"),
                          ignore_errors=True)
            self._log.seek(0)
            self._said = " ".join(self._log.read()[-400:].split())
            self._log.close()


def compare(path: Path, checkpoint: WrittenModel, deadline: Deadline,
            run: Callable[..., dict] = run_job) -> list[dict[str, str]]:
    """Run the comparison of `CONFIG`, write its file and return its rows.

    A system without time left has a row that says so. `run` runs a job like `run_job`.

    Raises `UserError` if the model is missing, or the machine's rates cannot be measured.
    """
    checkpoint.ready(deadline.left() - MIN_SECONDS)
    config = load(CONFIG, models=checkpoint.folder.parent)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        table = Table(os.path.join(folder, path.name))
        within = partial(_within, run, config, deadline, Path(folder), {})
        with report_partial_rows(table.file):
            Cells(config, table, within).run()
        table.finish()
        rows = table.rows()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(folder, path.name).read_bytes())
    return rows


def _within(run: Callable[..., dict], config: Comparison, deadline: Deadline, scratch: Path,
            rates: dict, job: dict, memory: int | None) -> dict:
    """Run a job within the deadline. Rates are measured once."""
    if job["kind"] == "rates" and rates:
        return rates
    left = deadline.left()
    if left < MIN_SECONDS:
        return {"status": TIME, "reason": "no time was left", "page_cache": "as it was"}
    limit = min(job.get("timeout") or config.timeout, int(left))
    result = run(job, threads=config.threads, timeout=limit, memory=memory, scratch=scratch)
    if job["kind"] == "rates":
        rates |= result
    return result
