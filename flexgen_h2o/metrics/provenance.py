"""When, with which code and on which machine a figure was measured."""

from __future__ import annotations

import contextlib
import datetime
import platform
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import psutil

from flexgen_h2o.config.version import VERSION
from flexgen_h2o.metrics.trace import DEVICE_MEMORY, PROCESS_MEMORY, Trace


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; of an ARM, for which Linux has none, the numbers of its maker and of
    its part."""
    numbers: dict[str, str] = {}
    with contextlib.suppress(OSError), open(info, encoding="utf-8") as file:
        for line in file:
            name, _, value = map(str.strip, line.partition(":"))
            if name == "model name":
                return value
            if name in ("CPU implementer", "CPU part"):
                numbers.setdefault(name, value)
    name = platform.processor() or platform.machine()
    return ", ".join((name, *(f"{key} {value}" for key, value in numbers.items())))


def package_version(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def source_commit() -> str:
    """Short hash of the checkout that runs, ``-dirty`` when it is changed; empty outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


ORIGIN = ("date", "version", "commit", "host")
"""Columns of `origin`."""


def origin() -> dict[str, str]:
    """When, with which code and on which machine a row was measured."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "version": VERSION, "commit": source_commit(),
            "host": platform.node()}


# Memory over time: a thread that samples it into a trace while a run goes on. No torch.


EVERY = 0.1  # seconds: a sample takes some 20 us, and a step of a large model longer than this


@contextmanager
def sampled_memory(trace: Trace, device_bytes: Callable[[], int | None], *, every: float = EVERY
                   ) -> Iterator[None]:
    """Sample memory into a trace during the body of a ``with`` statement, and at both of its ends.

    Of a disabled trace there is no thread; of any other it ends with the body, also when that
    raises.

    Parameters
    ----------
    trace : Trace
        Gets the resident bytes of this process, and those of the device.
    device_bytes : callable () -> int or None
        Bytes in use on the device; None where it has no memory of its own. Called by any thread.
    every : float
        Seconds between samples.
    """
    if not trace.enabled:
        yield
        return
    process, stop = psutil.Process(), threading.Event()

    def sample() -> None:
        now = time.perf_counter()
        trace.sample(PROCESS_MEMORY, now, process.memory_info().rss)
        device = device_bytes()
        if device is not None:
            trace.sample(DEVICE_MEMORY, now, device)

    def work() -> None:
        while not stop.wait(every):
            sample()

    sample()
    thread = threading.Thread(target=work, name="memory samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sample()


def peak_process_bytes() -> int:
    """Most memory that this process has had resident, in bytes."""
    # Not getrusage's ru_maxrss where there is a choice: a process inherits its parent's through
    # exec (fs/exec.c), and a benchmark would report its launcher.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
