"""A job in a process of its own: under a memory limit and a time limit, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from shared.memory_group import MemoryGroup, drop_page_cache

from comparison.rows import FAILED, LOADING, MEMORY, OK, TIME
from flexgen_h2o.metrics.trace import GB

BENCHMARKS = Path(__file__).parents[1]
WORKER = ("-m", "comparison.worker")
TUNED = ("glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:"
         "glibc.malloc.trim_threshold=17179869184")
"""glibc's allocator at its best for large temporaries: huge pages, nothing returned to the system.
"""
_TAIL = 400  # characters of an error


def run_job(job: dict, *, threads: int, timeout: int, memory: int | None, scratch: Path) -> dict:
    """Run a job of `comparison.worker` and say how it went.

    Parameters
    ----------
    job : dict
        As `comparison.worker` reads it; it gets `scratch`, a folder that is gone afterwards. If it
        `loads_beyond` the limit, it gets the group's `door`, and goes in when it has loaded. If it
        `loads_alike` at every batch, memory or time that ends before that has ended in `LOADING`.
    threads : int
        That compute.
    timeout : int
        Seconds after which it is killed.
    memory : int or None
        Bytes of its memory cgroup, page cache included; None: no limit.
    scratch : Path
        Folder for what it offloads.

    Returns
    -------
    dict
        `status`, with `reason` if that is not `OK`, else what the worker has found; `page_cache`.

    Raises
    ------
    UserError
        No memory cgroup can be made.
    """
    dropped = drop_page_cache()
    scratch.mkdir(parents=True, exist_ok=True)
    limited = nullcontext() if memory is None else MemoryGroup(memory)
    with tempfile.TemporaryDirectory(prefix="compare-", dir=scratch) as folder, limited as group:
        answer, loaded = Path(folder) / "answer.json", Path(folder) / "loaded"
        job = job | {"scratch": folder, "answer": str(answer), "loaded": str(loaded)}
        first = group
        if group is not None and job.get("loads_beyond"):
            job["door"], first = str(group.door), None
        status, text = _spawn(job, first, threads=threads, timeout=timeout)
        if status == 0:
            found = json.loads(answer.read_text(encoding="utf-8"))
        elif status is None:
            found = {"status": TIME, "reason": f"killed after {timeout} s"}
        elif status == -signal.SIGKILL:
            found = {"status": MEMORY, "reason": "killed, as the system does for want of memory"}
        else:
            found = {"status": FAILED, "reason": f"exit status {status}: {text}"}
        # It may have been a process that the worker had started, and then waited for in vain.
        if found["status"] in (FAILED, MEMORY) and group is not None and group.kills():
            found = {"status": MEMORY, "reason": f"killed at the limit of {memory / GB:.3g} GB"}
        if found["status"] in (MEMORY, TIME) and job.get("loads_alike") and not loaded.exists():
            found["status"] += LOADING
        if found["status"] == OK and group is not None:
            found["peak_memory"] = group.peak() + found.get("held", 0)
    return found | {"page_cache": "dropped before" if dropped else "as it was"}


def _spawn(job: dict, group: MemoryGroup | None, *, threads: int, timeout: int
           ) -> tuple[int | None, str]:
    """Exit status of the worker, None if it took too long, and the end of its errors."""
    # Beside this Python are the programs of packages, such as the ninja that DeepSpeed builds with.
    programs = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GLIBC_TUNABLES": TUNED,
                                "PATH": programs, "PYTHONPATH": os.pathsep.join(filter(
                                    None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))}
    worker = subprocess.Popen(
        [sys.executable, *WORKER], env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=None if group is None else group.enter)
    try:
        _, errors = worker.communicate(json.dumps(job), timeout=timeout)
        return worker.returncode, " ".join(errors[-_TAIL:].split())
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if worker.poll() is None:  # its session, as a system may have started processes too
            os.killpg(worker.pid, signal.SIGKILL)
            worker.communicate()
