"""Time of a run by phase and lane of its trace, and the resource that bound it. No torch.

A lane is *busy* during the union of its spans, and *alone* while it is and no other lane is: that
is what it costs and nothing hides. The busiest lane binds: whatever else gets faster, the phase
can't take less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_h2o.metrics.intervals import Interval, common, minus, seconds, union
from flexgen_h2o.metrics.links import GB
from flexgen_h2o.metrics.run_stats import over
from flexgen_h2o.metrics.trace import COMPUTE, PHASES, WAITING

Spans = Sequence[tuple[str, str, float, float, int]]
"""Spans of a trace, one each: (name, lane, start, end, bytes)."""


@dataclass(frozen=True)
class LaneTime:
    """Seconds that a lane was busy and alone in a phase, and the bytes that it moved there.

    Bytes of a transfer that is in a phase in part count by its share of the time.
    """

    busy: float
    alone: float
    nbytes: float


@dataclass(frozen=True)
class PhaseTime:
    """One phase of all blocks: its seconds, those in which no lane was busy, and its lanes."""

    name: str
    wall: float
    idle: float
    lanes: dict[str, LaneTime]

    def bound(self) -> str:
        """The busiest lane, or ``idle`` if there was nothing to do for longer; and its share."""
        busy = {lane: time.busy for lane, time in self.lanes.items()} | {"idle": self.idle}
        name = max(busy, key=busy.__getitem__)
        return f"{self.name} {name} ({_share(busy[name], self.wall)})"


def phases(spans: Spans) -> list[PhaseTime]:
    """The phases of a trace, in their order. What lies outside of them all is left out.

    Compute is not busy where it waits for a transfer, although its spans go on.
    """
    lanes = list(dict.fromkeys(lane for _, lane, *_ in spans if lane not in (PHASES, WAITING)))
    names = dict.fromkeys(name for name, lane, *_ in spans if lane == PHASES)
    busy = {lane: union((s[2], s[3]) for s in spans if s[1] == lane) for lane in lanes}
    if COMPUTE in busy:
        waiting = union((s[2], s[3]) for s in spans if s[1] == WAITING)
        busy[COMPUTE] = minus(busy[COMPUTE], waiting)
    return [_phase(name, spans, busy) for name in names]


def _phase(name: str, spans: Spans, busy: dict[str, list[Interval]]) -> PhaseTime:
    windows = union((s[2], s[3]) for s in spans if s[:2] == (name, PHASES))
    mine = {lane: common(intervals, windows) for lane, intervals in busy.items()}
    moved = dict.fromkeys(mine, 0.0)
    for _, lane, start, end, nbytes in spans:
        if lane in moved and end > start:
            moved[lane] += nbytes * seconds(common([(start, end)], windows)) / (end - start)
    times = {}
    for lane, intervals in mine.items():
        others = union(i for other, some in mine.items() if other != lane for i in some)
        times[lane] = LaneTime(seconds(intervals), seconds(minus(intervals, others)), moved[lane])
    any_busy = union(i for some in mine.values() for i in some)
    return PhaseTime(name, seconds(windows), seconds(minus(windows, any_busy)),
                     {lane: time for lane, time in times.items() if time.busy})


def table(spans: Spans) -> str:
    """Each phase and its lanes as text in aligned columns; the last line says what bound them."""
    found = [phase for phase in phases(spans) if phase.wall > 0]
    if not found:
        return "breakdown: nothing was computed"
    lines = []
    for phase in found:
        lines.append(_line(f"{phase.name}, s", f"{phase.wall:.3f}", "of it", "alone, s", "GB",
                           "GB/s"))
        for lane, time in phase.lanes.items():
            moved, rate = time.nbytes / GB, over(time.nbytes / GB, time.busy)
            figures = (f"{moved:.3f}", f"{rate:.4g}") if moved else ()
            lines.append(_line(f"  {lane}", f"{time.busy:.3f}", _share(time.busy, phase.wall),
                               f"{time.alone:.3f}", *figures))
        lines.append(_line("  idle", f"{phase.idle:.3f}", _share(phase.idle, phase.wall)))
    return "\n".join([*lines, "bound by: " + ", ".join(phase.bound() for phase in found)])


def _line(name: str, *figures: str) -> str:
    return f"{name:<18}" + "".join(f"{figure:>10}" for figure in figures)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
