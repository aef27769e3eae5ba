"""Wait policy of idle OpenMP threads: spin, or sleep while other processes need the CPUs.

Between parallel regions libgomp's threads spin for milliseconds, so that the next region starts at
once. With other busy processes the spinning threads take CPU time from the threads that they wait
for, and a decode step takes ten times as long. The spin count is fixed when libgomp is loaded, with
one exception: threads sleep almost at once while there are more OpenMP threads than CPUs (libgomp's
manual, ``GOMP_SPINCOUNT``). `IdleTeam` creates that condition with a team of threads that do
nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flexgen_h2o.kernels.cpu import library as cpu_library

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables that set the wait policy. If one is set, `OpenMPWaitPolicy` is a no-op."""

WINDOW = 0.5
"""Seconds over which CPU usage is measured. The kernel counts it in steps of 0.01 s."""

BUSY_CPUS = 0.25
"""CPUs used by other processes, beyond those that this one leaves free, above which threads sleep.
"""


class IdleTeam:
    """A team of more OpenMP threads than CPUs that does nothing. It exists until `close`."""

    def __init__(self) -> None:
        self._end, started = threading.Event(), threading.Event()

        def keep_team() -> None:
            try:
                cpu_library.idle_team(len(os.sched_getaffinity(0)) + 1)
            finally:
                started.set()
            self._end.wait()  # the team ends with its thread

        self._thread = threading.Thread(target=keep_team, name="idle-team", daemon=True)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """End the team."""
        self._end.set()
        self._thread.join()


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Return the seconds that the CPUs of this process have been busy, summed over all processes.

    Returns None if the system does not report it.
    """
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        # user, nice and system; skip idle and iowait; irq, softirq and steal
        ticks = [sum(map(int, values[:3] + values[5:8])) for name, *values in lines
                 if name in cpus]
    except (OSError, AttributeError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(cpus) else None


class OpenMPWaitPolicy:
    """Lets idle OpenMP threads sleep during runs while other processes need the CPUs.

    It is a no-op if the environment sets the wait policy (`WAIT_VARIABLES`), without the C++
    kernels, with one thread, and where the system does not report CPU usage. Results do not depend
    on it.
    """

    def __init__(self) -> None:
        self._team: IdleTeam | None = None
        self._always_sleep = False
        disabled = (any(name in os.environ for name in WAIT_VARIABLES)
                    or cpu_library.missing() is not None)
        self._last = None if disabled else self._usage()

    @staticmethod
    def _usage() -> tuple[float, float, float] | None:
        """Return the time, and the busy seconds of all processes and of this one."""
        busy = busy_seconds()
        return None if busy is None else (time.monotonic(), busy, time.process_time())

    @contextmanager
    def applied(self, *, sleep: bool = False) -> Iterator[None]:
        """Apply the policy within the context, and restore the default at its end.

        With `sleep`, idle threads always sleep: other threads of this process need the CPUs between
        parallel regions.
        """
        try:
            self._always_sleep = sleep
            self.update()
            yield
        finally:
            if self._team is not None:
                self._team.close()
                self._team = None

    def update(self) -> None:
        """Measure CPU usage since the last update, and switch the policy; at most once a `WINDOW`.
        """
        if self._last is None:
            return
        if self._always_sleep:
            if self._team is None and torch.get_num_threads() > 1:
                self._team = IdleTeam()
            return
        if time.monotonic() < self._last[0] + WINDOW:
            return
        usage = self._usage()
        if usage is None:
            return
        elapsed, busy, process_seconds = (
            now - last for now, last in zip(usage, self._last, strict=True))
        self._last = usage
        threads = torch.get_num_threads()
        free = max(len(os.sched_getaffinity(0)) - threads, 0)
        sleep = threads > 1 and (busy - process_seconds) / elapsed > free + BUSY_CPUS
        if sleep and self._team is None:
            self._team = IdleTeam()
        elif not sleep and self._team is not None:
            self._team.close()
            self._team = None
