"""Provenance of a measurement, and samples of memory during a run. No torch."""

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
    """Return the name of the processor.

    Linux has no names for ARM processors: there it is the numbers of implementer and part.
    """
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
    """Return the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def source_commit() -> str:
    """Return the short hash of the checkout, ``-dirty`` if modified; empty outside of one."""
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
    """Return when, with which version and on which machine a row is measured."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "version": VERSION, "commit": source_commit(),
            "host": platform.node()}


SAMPLE_INTERVAL = 0.1  # seconds; a sample takes some 20 us


@contextmanager
def sampled_memory(trace: Trace, device_bytes: Callable[[], int | None], *,
                   interval: float = SAMPLE_INTERVAL) -> Iterator[None]:
    """Sample memory into a trace during the body of a ``with`` statement, and at both ends.

    A thread takes the samples; a disabled trace starts none. It ends with the body, also when that
    raises.

    Parameters
    ----------
    trace : Trace
        Gets the resident bytes of this process and the bytes in use on the device.
    device_bytes : callable () -> int or None
        Returns the bytes in use on the device; None if it has no separate memory. It is called
        from any thread.
    interval : float
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
        while not stop.wait(interval):
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
    """Return the peak resident memory of this process, in bytes."""
    # Prefer VmHWM to getrusage's ru_maxrss, which a process inherits through exec (fs/exec.c): a
    # benchmark would report the peak of its launcher.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
