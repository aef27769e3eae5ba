"""A run of the engine's command line in a process of its own, and what became of it."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexgen_h2o.cli.run_config import RunConfig

OK, TOO_LARGE, TIME, FAILED = "ok", "does not fit", "timed out", "failed"
"""Values of `Outcome.status`."""
_REFUSALS = ("the run does not fit", "no policy was found that fits")
"""First words of the memory plan and the planner when there is too little memory."""
_TAIL = 400  # characters of an error that is not one line
_GRACE = 10  # seconds in which a run that is stopped may remove what it has offloaded


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes
    ----------
    status : str
        `OK`, `TOO_LARGE`, `TIME` or `FAILED`.
    reason : str
        One line; empty if it is `OK`.
    row : mapping of str to str
        Its row of results, the columns of `results.CSV_COLUMNS`; empty unless it is `OK`.
    """

    status: str
    reason: str = ""
    row: Mapping[str, str] = field(default_factory=dict)


def run_engine(config: RunConfig, *, timeout: float | None = None) -> Outcome:
    """Run `flex_opt` with these flags; what they say of results and printing is replaced.

    Parameters
    ----------
    config : RunConfig
    timeout : float, optional
        Seconds after which it is stopped.
    """
    with tempfile.TemporaryDirectory(prefix="engine-run-") as folder:
        flags, result = Path(folder) / "flags.yaml", Path(folder) / "row.csv"
        replace(config, output=None, csv=str(result), trace=None, log_file="auto", no_log=True,
                verbose=0).save(flags)
        status, errors = _waited(
            [sys.executable, "-m", "flexgen_h2o.flex_opt", "--config", str(flags)], timeout)
        if status is None:
            return Outcome(TIME, f"stopped after {timeout:g} s")
        if status:
            return _failure(status, errors)
        with open(result, newline="", encoding="utf-8") as file:
            (row,) = csv.DictReader(file)
    return Outcome(OK, row=row)


def _failure(status: int, errors: str) -> Outcome:
    """The outcome that an exit status and the text on stderr stand for."""
    if status == -signal.SIGKILL:
        return Outcome(TOO_LARGE, "killed, as the system does for want of memory")
    said = [line.removeprefix("error: ") for line in errors.splitlines()
            if line.startswith("error: ")]
    if said:
        return Outcome(TOO_LARGE if said[-1].startswith(_REFUSALS) else FAILED, said[-1])
    return Outcome(FAILED, f"exit status {status}: {' '.join(errors[-_TAIL:].split())}")


def _waited(command: Sequence[str], timeout: float | None) -> tuple[int | None, str]:
    """Exit status of a command, None if it took too long, and what it wrote on stderr."""
    # In a session of its own: Ctrl-C at the terminal reaches it once, from here.
    worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, errors="replace",
                              start_new_session=True)
    try:
        _, errors = worker.communicate(timeout=timeout)
        return worker.returncode, errors
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if worker.poll() is None:
            _stop(worker)


def _stop(worker: subprocess.Popen) -> None:
    """End a run as Ctrl-C does, which empties its offload folder; kill it if that takes long."""
    try:
        worker.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            worker.communicate(timeout=_GRACE)
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.communicate()
