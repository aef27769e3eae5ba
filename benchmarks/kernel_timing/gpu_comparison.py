"""The part of gpu-check that compares systems, in the time that is left to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, NamedTuple

from comparison.cells import Cells
from comparison.config import Comparison, load
from comparison.processes import run_job
from comparison.rows import TIME, Table

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import keeping

BENCHMARKS = Path(__file__).parents[1]
CONFIG = BENCHMARKS.parent / "configs" / "compare_gpu_check.yaml"
LEAST = 20.0
"""Seconds under which no system is started: none loads in fewer."""


class Deadline:
    """Seconds that are left of so many, by a clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


class CheckStep(NamedTuple):
    """A part of the whole; it is left out with no more than `reserve` seconds left."""

    kind: str
    name: str
    call: Callable[[], Any]
    reserve: float = 0.0


def run_steps(steps: Iterable[CheckStep], deadline: Deadline, skip: Callable[[CheckStep], None]
              ) -> None:
    """All of them in turn; those for which there is no time are given to `skip`."""
    for step in steps:
        if deadline.left() > step.reserve:
            step.call()
        else:
            skip(step)


def run_side_by_side(pool: Pool, call: Callable[[int], Any], numbers: Iterable[int],
                     deadline: Deadline) -> dict[int, Any]:
    """Results of `call` by number, from a pool's processes; without those for which there was no
    time, or whose process died."""
    waiting = {number: pool.apply_async(call, (number,)) for number in numbers}
    found = {}
    while waiting and deadline.left() > 0:
        done = [number for number, result in waiting.items() if result.ready()]
        found |= {number: waiting.pop(number).get() for number in done}
        for result in list(waiting.values())[:1]:
            result.wait(min(1.0, max(0.0, deadline.left())))
    return found


class WrittenModel:
    """A model of random weights that is written beside other work, unless it is there.

    Parameters
    ----------
    models : Path
        Folder of the models' folders.
    model, dtype : str
        The folder's name, of a published OPT shape, and the weights' dtype.
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
        """Wait until it is written, so long at most. Raises `UserError` if it is not."""
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
        """End the writing, if it is under way, and remove what is half written."""
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
            do: Callable[..., dict] = run_job) -> list[dict[str, str]]:
    """Run the comparison of `CONFIG` and write its file, anew; its rows.

    A system that the time does not suffice for has a row that says so. `do` runs a job, as
    `run_job` does.

    Raises
    ------
    UserError
        There is no model, or the machine's rates cannot be measured.
    """
    checkpoint.ready(deadline.left() - LEAST)
    config = load(CONFIG, models=checkpoint.folder.parent)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        table = Table(os.path.join(folder, path.name))
        within = partial(_within, do, config, deadline, Path(folder), {})
        with keeping(table.file):
            Cells(config, table, within).run()
        table.finish()
        rows = table.rows()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Path(folder, path.name).read_bytes())
    return rows


def _within(do: Callable[..., dict], config: Comparison, deadline: Deadline, scratch: Path,
            rates: dict, job: dict, memory: int | None) -> dict:
    """Run a job in the time that is left. Rates are measured once."""
    if job["kind"] == "rates" and rates:
        return rates
    left = deadline.left()
    if left < LEAST:
        return {"status": TIME, "reason": "no time was left", "page_cache": "as it was"}
    limit = min(job.get("timeout") or config.timeout, int(left))
    found = do(job, threads=config.threads, timeout=limit, memory=memory, scratch=scratch)
    if job["kind"] == "rates":
        rates |= found
    return found
