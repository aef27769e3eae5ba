"""Child processes: memory cgroups, jobs of a comparison, runs of the engine's command line."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.trace import GB

OK, REFUSED, MEMORY, TIME, FAILED = "ok", "refused", "out of memory", "timed out", "failed"
"""Values of `status`. All but the first come with a reason, and without figures."""
LOADING = " in loading"
"""Follows `MEMORY` and `TIME` if loading failed, as it would at any batch size."""
TOO_LARGE = "does not fit"
"""Status of a run that the memory plan or the planner refused."""
MOUNT = Path("/sys/fs/cgroup")
_LIMITS = ("memory.limit_in_bytes", "memory.max")  # of version 1, of version 2


class MemoryGroup:
    """A memory cgroup (v1 or v2), removed when the context ends.

    Raises `UserError` if there is no memory controller, or it needs root.

    `limit`: bytes of memory, page cache included.
    """

    def __init__(self, limit: int):
        self._limit = limit

    def __enter__(self) -> MemoryGroup:
        v1 = (MOUNT / "memory").is_dir()
        parent = MOUNT / "memory" if v1 else MOUNT
        files = (_LIMITS[0], "memory.max_usage_in_bytes", "memory.oom_control"
                 ) if v1 else (_LIMITS[1], "memory.peak", "memory.events")
        self._folder = parent / f"flexgen_h2o-{os.getpid()}"
        self._peak, self._events = self._folder / files[1], self._folder / files[2]
        try:
            self._folder.mkdir()
            (self._folder / files[0]).write_text(str(self._limit))
        except OSError as error:
            self.__exit__()
            raise UserError(f"no memory cgroup can be made in {parent} ({error.strerror}): run as "
                            "root where there is a memory controller, or leave the limit out"
                            ) from error
        return self

    @property
    def members_file(self) -> Path:
        """The file for `enter_loaded`, for a process that enters after loading."""
        return self._folder / "cgroup.procs"

    def enter(self) -> None:
        """Move the calling process into the group, as `preexec_fn` of a child."""
        enter(self.members_file)

    def peak(self) -> int:
        """Return the peak memory in bytes, page cache included."""
        return int(self._peak.read_text())

    def kills(self) -> int:
        """Return the number of processes that the OOM killer ended in this group."""
        lines = (line.split() for line in self._events.read_text().splitlines())
        return sum(int(count) for name, count in lines if name == "oom_kill")

    def __exit__(self, *exception) -> None:
        for _ in range(20):  # a group is busy until the kernel has reaped its last process
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)


def enter(members_file: Path) -> None:
    """Move the calling process into a group. Later allocations count there."""
    members_file.write_text(str(os.getpid()))


def enter_loaded(members_file: Path) -> int:
    """Move the calling process into a group after loading. Return the bytes that it holds.

    These stay charged to the old group, so they are subtracted from the limit. Raises `MemoryError`
    if they exceed it.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # without glibc
        ctypes.CDLL(None).malloc_trim(0)
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {words[0]: int(words[1]) << 10 for words in lines if words[0].startswith("Rss")}
    resident = sizes["RssAnon:"] + sizes["RssShmem:"]
    file = next(path for path in map(members_file.with_name, _LIMITS) if path.exists())
    limit = int(file.read_text())
    if resident >= limit:
        raise MemoryError(f"it holds {resident / GB:.2f} GB when it has loaded")
    file.write_text(str(limit - resident))
    enter(members_file)
    return resident


def drop_page_cache() -> bool:
    """Drop the page cache, so that reads are charged to the reader. Return whether it worked."""
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return True
    return False


BENCHMARKS = Path(__file__).parent
WORKER = ("-m", "worker")
TUNED = ("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:"
         "glibc.malloc.trim_threshold=17179869184")
"""glibc tuned for large temporaries: huge pages, nothing returned to the system."""


def run_job(job: dict, *, threads: int, timeout: int, memory: int | None, scratch: Path) -> dict:
    """Run a job of `worker.py` in a process with a memory limit and a timeout.

    Raises `UserError` if no memory cgroup can be made.

    Parameters
    ----------
    job : dict
        Keys of `worker.py`. `scratch`, a temporary folder, is added. With `limited_after_load`, the
        process enters its cgroup through `members_file` after loading. With `same_load`, a failure
        before the end of loading gets the suffix `LOADING`. With `environment`, a folder below the
        repository, it runs with that folder's Python if there is one.
    threads : int
        Compute threads.
    timeout : int
        Seconds until the process is killed.
    memory : int or None
        Bytes of its memory cgroup, page cache included; None for no limit.
    scratch : Path
        Folder for offloaded data.

    Returns
    -------
    dict
        `status`, with a `reason` or the results of the worker, and `page_cache`.
    """
    dropped = drop_page_cache()
    scratch.mkdir(parents=True, exist_ok=True)
    limited = nullcontext() if memory is None else MemoryGroup(memory)
    with tempfile.TemporaryDirectory(prefix="compare-", dir=scratch) as folder, limited as group:
        answer, loaded = Path(folder) / "answer.json", Path(folder) / "loaded"
        job = job | {"scratch": folder, "answer": str(answer), "loaded": str(loaded)}
        first = group
        if group is not None and job.get("limited_after_load"):
            job["members_file"], first = str(group.members_file), None
        status, text = _spawn(job, first, threads=threads, timeout=timeout)
        if status == 0:
            result = json.loads(answer.read_text(encoding="utf-8"))
        elif status is None:
            result = {"status": TIME, "reason": f"killed after {timeout} s"}
        elif status == -signal.SIGKILL:
            result = {"status": MEMORY, "reason": "killed, as the system does for want of memory"}
        elif status < 0:
            killer = signal.Signals(-status).name
            result = {"status": FAILED, "reason": f"killed by {killer}: {text}"}
        else:
            result = {"status": FAILED, "reason": f"exit status {status}: {text}"}
        # The killed process may be a child of the worker.
        if result["status"] in (FAILED, MEMORY) and group is not None and group.kills():
            result = {"status": MEMORY, "reason": f"killed at the limit of {memory / GB:.3g} GB"}
        if result["status"] in (MEMORY, TIME) and job.get("same_load") and not loaded.exists():
            result["status"] += LOADING
        if result["status"] == OK and group is not None:
            result["peak_memory"] = group.peak() + result.get("held", 0)
    return result | {"page_cache": "dropped before" if dropped else "as it was"}


def _spawn(job: dict, group: MemoryGroup | None, *, threads: int, timeout: int
           ) -> tuple[int | None, str]:
    """Return the worker's exit status, None after a timeout, and the end of its stderr."""
    python = sys.executable
    if job.get("environment"):
        own = BENCHMARKS.parent / job["environment"] / "bin" / "python"
        python = str(own) if own.exists() else python  # without it, the worker says what is missing
    # Programs of packages are beside Python, such as ninja, which DeepSpeed needs.
    programs = os.pathsep.join((os.path.dirname(python), os.environ.get("PATH", "")))
    paths = (str(BENCHMARKS), str(BENCHMARKS.parent), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GLIBC_TUNABLES": TUNED,
                                "PATH": programs,
                                "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    worker = subprocess.Popen(
        [python, *WORKER], env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=None if group is None else group.enter)
    try:
        _, errors = worker.communicate(json.dumps(job), timeout=timeout)
        return worker.returncode, " ".join(errors[-_TAIL:].split())
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if worker.poll() is None:  # with the children of the worker
            os.killpg(worker.pid, signal.SIGKILL)
            worker.communicate()


_REFUSALS = ("the run does not fit", "no policy was found that fits")
"""First words of the memory plan's and the planner's refusals."""
_TAIL = 400  # characters of an error that is not one line
_GRACE = 10  # seconds for a stopped run to remove its offload folder


@dataclass(frozen=True)
class Outcome:
    """Outcome of an engine run."""

    status: str
    """`OK`, `TOO_LARGE`, `TIME` or `FAILED`."""
    reason: str = ""  # one line; empty if the status is `OK`
    row: Mapping[str, str] = field(default_factory=dict)
    """The result row, with `results.CSV_COLUMNS`; empty unless the status is `OK`."""


def run_engine(config: RunConfig, *, timeout: float | None = None) -> Outcome:
    """Run `flex_opt` with these flags, except those of output files and printing.

    `timeout`: seconds until the run is stopped.
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
    """Return the outcome for an exit status and stderr."""
    if status == -signal.SIGKILL:
        return Outcome(TOO_LARGE, "killed, as the system does for want of memory")
    said = [line.removeprefix("error: ") for line in errors.splitlines()
            if line.startswith("error: ")]
    if said:
        return Outcome(TOO_LARGE if said[-1].startswith(_REFUSALS) else FAILED, said[-1])
    return Outcome(FAILED, f"exit status {status}: {' '.join(errors[-_TAIL:].split())}")


def _waited(command: Sequence[str], timeout: float | None) -> tuple[int | None, str]:
    """Return the exit status of a command, None after a timeout, and its stderr."""
    # In a new session: Ctrl-C at the terminal reaches it once, from this process.
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
    """Interrupt a run, which empties its offload folder; kill it after the grace period."""
    try:
        worker.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            worker.communicate(timeout=_GRACE)
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.communicate()
