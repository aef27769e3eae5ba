"""Memory over time: a thread that samples it into a trace while a run goes on. No torch."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from flexgen_h2o.metrics.trace import DEVICE_MEMORY, PROCESS_MEMORY, Trace

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
