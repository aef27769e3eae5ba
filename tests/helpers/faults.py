"""Small jobs in which a call of the operating system fails: each call of each kind in turn.

`sweep` starts a process with the library of fault_shim.c. That process forks a child for each
point, which is a fault and the number of the call that fails. A child runs a job of `fault_jobs`
with the fault, looks for what is left behind, and runs the job again without it.

    PYTHONPATH=tests:. python -m helpers.faults --csv benchmarks/results/faults.csv

tries every point and writes the counts.
"""

import argparse
import contextlib
import csv
import ctypes
import datetime
import errno
import faulthandler
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.subprocesses import environment

HANG = 40  # seconds that a child may take, far more than on a busy machine
HALF = -1
"""In place of an error number: transfer half of the bytes."""
KINDS = ("open", "read", "write", "sync", "change", "map", "allocate")
"""Kinds of calls, in the order of the shim. "change": a rename, removal, new folder or new size."""


@dataclass(frozen=True)
class Fault:
    """A fault: the kind of call, the error number or `HALF`, and whether later calls fail too."""

    kind: str
    error: int
    stays: bool = False

    @property
    def name(self) -> str:
        """Name for people."""
        error = "short" if self.error == HALF else errno.errorcode[self.error]
        return f"{self.kind} {error}{' from there on' if self.stays else ''}"


FAULTS = (Fault("open", errno.EIO), Fault("open", errno.EMFILE), Fault("read", errno.EIO),
          Fault("read", errno.EIO, stays=True), Fault("read", HALF), Fault("write", errno.EIO),
          Fault("write", errno.ENOSPC, stays=True), Fault("write", HALF), Fault("sync", errno.EIO),
          Fault("change", errno.EIO), Fault("change", errno.ENOSPC, stays=True),
          Fault("map", errno.ENOMEM), Fault("allocate", errno.ENOMEM),
          Fault("allocate", errno.ENOMEM, stays=True))


def build_shim(folder: Path) -> Path | None:
    """Compile the shim into a folder; None if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "fault_shim.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-Wall", "-o", str(library),
                    str(Path(__file__).with_name("fault_shim.c")), "-ldl", "-lpthread"], check=True)
    return library


class Shim:
    """The functions of the shim, in a process that was started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])

    def watch(self, folder: Path | None) -> None:
        """Count calls on files below a folder from now on; None: count nothing."""
        self._library.faults_watch(os.fsencode(folder or ""))

    def arm(self, fault: Fault, number: int) -> None:
        """Let call number `number` of the fault's kind fail."""
        self._library.faults_arm(KINDS.index(fault.kind), ctypes.c_long(number), fault.error,
                                 fault.stays)

    def disarm(self) -> None:
        """Let all calls succeed."""
        self._library.faults_disarm()

    def count(self, kind: str) -> int:
        """Return how many calls of a kind there have been."""
        return self._library.faults_count(KINDS.index(kind))

    @property
    def failed(self) -> int:
        """How many calls have failed."""
        return self._library.faults_made()

    def log(self, file: int) -> None:
        """Log changes into an open file; -1 ends that."""
        self._library.faults_log(file)

    def mark(self, text: str) -> None:
        """Add a mark to the log."""
        self._library.faults_mark(text.encode())


def sweep(shim: Path, jobs: Sequence[str], model: str, root: Path, *, points: int | None = None,
          allocations: int | None = None, step: int = 1) -> Iterator[dict[str, Any]]:
    """Run jobs once for each point.

    Parameters
    ----------
    shim : Path
        The compiled library.
    jobs : sequence of str
        Keys of `fault_jobs.JOBS`.
    model : str
        Folder of a tiny model with a tokenizer of words.
    root : Path
        Empty folder for the jobs' files.
    points : int, optional
        Points of each fault of a file, spread over all calls. Default: every call.
    allocations : int, optional
        Points of each fault of an allocation. Default: every allocation.
    step : int
        Try every `step`-th fault, others with each job.

    Yields
    ------
    dict
        For each point: job; fault; number, which counts calls; calls, of a run without a fault;
        outcome ("completed", "refused", "not reached" or "bug"); message, which says what
        is wrong.
    """
    request = {"jobs": jobs, "model": model, "root": str(root), "points": points,
               "allocations": allocations, "step": step}
    folders = Path(__file__).parents[2], Path(__file__).parents[1]
    with subprocess.Popen(
            [sys.executable, "-m", "helpers.faults", "--child", json.dumps(request)],
            stdout=subprocess.PIPE, text=True,
            env=environment(*folders, LD_PRELOAD=str(shim), OMP_NUM_THREADS="1",
                            TOKENIZERS_PARALLELISM="false", PYTHONMALLOC="malloc")) as child:
        assert child.stdout is not None
        yield from map(json.loads, child.stdout)
    if child.returncode:
        raise RuntimeError(f"the process that forks has ended with status {child.returncode}")


# The process that forks, and its children


def _fork_points(request: dict[str, Any]) -> None:
    """Run the points of jobs, and print a line of JSON for each."""
    import torch

    from helpers.fault_jobs import JOBS
    from helpers.internals import allow_forks

    torch.set_num_threads(1)
    shim = Shim()
    for place, name in enumerate(request["jobs"]):
        root = Path(request["root"], name)
        root.mkdir()
        job = JOBS[name](request["model"], root, shim)
        job.prepare()
        allow_forks()
        gc.collect()
        gc.freeze()
        faults = [fault for number, fault in enumerate(FAULTS)
                  if (number + place) % request["step"] == 0]
        points = dict.fromkeys(KINDS, request["points"]) | {"allocate": request["allocations"]}
        for result in _points(job, root, shim, faults, points):
            print(json.dumps({"job": name, **result}), flush=True)


def _points(job: Any, root: Path, shim: Shim, faults: Sequence[Fault],
            points: Mapping[str, int | None]) -> Iterator[dict[str, Any]]:
    """Yield the result of each point of a job."""
    clean = _in_child(job, root, lambda: _clean(job, shim))
    if clean["outcome"] != "completed":
        raise RuntimeError(clean["message"])
    for place, fault in enumerate(faults):
        calls = clean["counts"][fault.kind]
        for number in _numbers(calls, points[fault.kind], len(root.name) + place):
            result = _in_child(job, root, lambda f=fault, n=number: _attempt(job, shim, f, n))
            yield {"fault": fault.name, "calls": calls, "number": number, **result}


def _numbers(count: int, points: int | None, first: int) -> list[int]:
    """Return which of `count` calls fail, from 1 on: `points` of them, others for each `first`."""
    if points is None or points >= count:
        return [*range(1, count + 1)]
    step = count / points
    return sorted({1 + int((point + first * 0.382 % 1) * step) for point in range(points)})


def _in_child(job: Any, root: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns in a forked child, which has the job's files in a new folder."""
    report, log = root / "report", root / "log"
    for path in (report, log):
        path.unlink(missing_ok=True)
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir()
    job.begin()
    child = os.fork()
    if child == 0:
        signal.alarm(HANG)  # ends a hang, wherever it is
        file = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.dump_traceback_later(HANG - 5, file=file)
        try:
            result = work()
        except BaseException:
            result = {"outcome": "bug", "message": traceback.format_exc()}
        report.write_text(json.dumps(result))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = log.read_text()[-6000:]
    if status == 0:
        result = json.loads(report.read_text())
        return {"outcome": "bug", "message": text} if "Traceback" in text else result
    end = "a hang" if status == -signal.SIGALRM else f"exit status {status}"
    return {"outcome": "bug", "message": f"{end}\n{text}"}


def _clean(job: Any, shim: Shim) -> dict[str, Any]:
    """Run a job without a fault, and count its calls."""
    shim.watch(job.folder.parent)
    refusal = job.work()
    counts = {kind: shim.count(kind) for kind in KINDS}
    shim.watch(None)
    assert refusal is None, refusal
    assert job.left() == [], job.left()
    return {"outcome": "completed", "message": "", "counts": counts}


def _attempt(job: Any, shim: Shim, fault: Fault, number: int) -> dict[str, Any]:
    """Run a job with a fault, then without it."""
    before = _held()
    shim.watch(job.folder.parent)
    shim.arm(fault, number)
    refusal = job.work()
    failed = shim.failed
    shim.disarm()
    shim.watch(None)
    job.check(refusal)
    if not failed and refusal is None:
        return {"outcome": "not reached", "message": ""}
    if fault.kind not in ("open", "change"):  # files cannot be removed then, until the next run
        assert job.left() == [], f"left behind by {refusal!r}: {job.left()}"
    gc.collect()
    after = _held()
    assert after == before, f"{refusal!r}: held {after}, before {before}"
    job.again()
    assert (left := job.left(removed=fault.kind not in ("open", "change"))) == [], left
    return {"outcome": "completed" if refusal is None else "refused", "message": refusal or ""}


def _held() -> dict[str, Any]:
    """Return what this process could leak: threads, and open files except locks of the cache."""
    files = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.endswith(("/.used", "/.used (deleted)", "/fd")):
                files[target] += 1
    return {"threads": sorted(thread.name for thread in threading.enumerate()), "files": files}


# The command


def main() -> None:
    """Try every point of every job, and write their counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--csv", default="benchmarks/results/faults.csv")
    parser.add_argument("--jobs", nargs="*", help="default: all")
    parser.add_argument("--points", type=int,
                        help="points of each fault of a file; default: every call")
    parser.add_argument("--allocations", type=int,
                        help="points of each fault of an allocation; default: every allocation")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _fork_points(json.loads(options.child))
        return
    from helpers.fault_jobs import JOBS, make_model

    rows: dict[tuple[str, str], Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(Path(folder))
        if shim is None:
            raise SystemExit("this needs Linux and a C compiler")
        model, root = make_model(Path(folder)), Path(folder, "jobs")
        root.mkdir()
        for result in sweep(shim, options.jobs or [*JOBS], model, root, points=options.points,
                            allocations=options.allocations):
            row = rows.setdefault((result["job"], result["fault"]), Counter(calls=result["calls"]))
            row.update(("points", result["outcome"]))
            if result["outcome"] == "bug":
                print("{job}, {fault} {number}:\n{message}".format(**result), file=sys.stderr)
            _write(options.csv, rows)


def _write(path: str, rows: dict[tuple[str, str], Counter[str]]) -> None:
    """Write the counts so far."""
    from flexgen_h2o.metrics.provenance import source_commit

    columns = ("calls", "points", "completed", "refused", "not reached", "bug")
    end = datetime.date.today().isoformat(), source_commit()
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["job", "fault", *columns, "date", "commit"])
        writer.writerows([*names, *(row[name] for name in columns), *end]
                         for names, row in rows.items())


if __name__ == "__main__":
    main()
