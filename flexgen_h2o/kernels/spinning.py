"""The waiting of idle OpenMP threads: spinning where the CPUs are theirs, asleep where others want
them.

Between parallel regions libgomp's threads spin for milliseconds, so that the next region starts at
once. Beside other processes that is time taken from the threads they wait for, and a decode step
takes ten times as long. How long they spin is fixed when libgomp is loaded, but for one case: they
sleep almost at once while there are more OpenMP threads than CPUs (libgomp's manual,
``GOMP_SPINCOUNT``). So as long as other processes want the CPUs, or other threads of a run do, a
team that does nothing is kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flexgen_h2o.kernels import cpu_library

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""In the environment, these say how threads wait, and nothing here changes it."""

WINDOW = 0.5
"""Seconds over which the use of the CPUs is measured: it is counted in 0.01 s."""

WANTED = 0.25
"""CPUs that others use beyond those that are left to them, from which on threads should sleep."""


class IdleTeam:
    """More OpenMP threads than CPUs, which do nothing, from making it to `close`."""

    def __init__(self) -> None:
        self._end, made = threading.Event(), threading.Event()

        def keep() -> None:
            try:
                cpu_library.idle_team(len(os.sched_getaffinity(0)) + 1)
            finally:
                made.set()
            self._end.wait()  # the team ends with its thread

        self._thread = threading.Thread(target=keep, name="idle-team", daemon=True)
        self._thread.start()
        made.wait()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that the CPUs of this process have worked, for all processes; None where none says
    so."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        # user, nice, system; past idle and iowait, irq, softirq, steal
        ticks = [sum(map(int, values[:3] + values[5:8])) for name, *values in lines
                 if name in mine]
    except (OSError, AttributeError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(mine) else None


class Spinning:
    """Has idle OpenMP threads sleep during runs while other processes want the CPUs.

    It does nothing where the environment says how threads wait (`SETTINGS`), without the C++
    kernels, with one thread, and where the system does not say how busy the CPUs are. No result
    depends on it.
    """

    def __init__(self) -> None:
        self._team: IdleTeam | None = None
        self._asleep = False
        self._left_alone = (any(name in os.environ for name in SETTINGS)
                            or cpu_library.missing() is not None)
        self._before = None if self._left_alone else self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds by the clock, of the CPUs for all processes, and for this one."""
        busy = busy_seconds()
        return None if busy is None else (time.monotonic(), busy, time.process_time())

    @contextmanager
    def watched(self, *, asleep: bool = False) -> Iterator[None]:
        """Look at once, and end with threads waiting as they did before. `asleep`: threads of this
        process want the CPUs between parallel regions, and so the others sleep all the time."""
        try:
            self._asleep = asleep
            self.look()
            yield
        finally:
            if self._team is not None:
                self._team.close()
                self._team = None

    def look(self) -> None:
        """See who has used the CPUs since the last look, unless that was just now."""
        if self._before is None:
            return
        if self._asleep:
            if self._team is None and torch.get_num_threads() > 1:
                self._team = IdleTeam()
            return
        if time.monotonic() < self._before[0] + WINDOW:
            return
        now = self._now()
        if now is None:
            return
        clock, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        threads = torch.get_num_threads()
        left = max(len(os.sched_getaffinity(0)) - threads, 0)
        wanted = threads > 1 and (busy - own) / clock > left + WANTED
        if wanted and self._team is None:
            self._team = IdleTeam()
        elif not wanted and self._team is not None:
            self._team.close()
            self._team = None
