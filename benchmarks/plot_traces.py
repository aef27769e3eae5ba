"""Figures of traces: time by link and compute, and memory over time."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plotting import beside, entitle, measured_where, what_ran

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import COLOURS, new_figure
from flexgen_h2o.metrics.report import LaneTime, phases
from flexgen_h2o.metrics.trace import (
    COMPUTE,
    DEVICE_MEMORY,
    GB,
    LINKS,
    PHASES,
    PROCESS_MEMORY,
    Trace,
)

PREFILL, STEP, ALL_STEPS = "prefill", "a decode step", "decode, all steps"
IDLE = "idle"
_COLOURS = {COMPUTE: COLOURS["blue"], IDLE: "0.6", **dict(zip(LINKS, (
    COLOURS["vermillion"], COLOURS["orange"], COLOURS["green"], COLOURS["sky"]), strict=True))}
_HIDDEN = "////"
_LETTERS = 30  # of a panel's label, on a line


@dataclass(frozen=True)
class BarPart:
    """A phase of a run: seconds in all and by lane, with `IDLE`."""

    name: str
    wall: float
    lanes: dict[str, LaneTime]


def parts(trace: Trace, name: str) -> list[BarPart]:
    """Return the prefill of all blocks and the mean decode step, or all steps if uncounted.

    Raises `UserError` if the trace in file `name` has no phases.
    """
    paths = []
    steps = trace.about.get("decode_steps")
    for phase in phases(trace.spans()):
        if phase.wall <= 0:
            continue
        title, share = phase.name, 1.0
        if phase.name == "decode":
            known = isinstance(steps, int) and steps > 0
            title, share = (STEP, 1 / steps) if known else (ALL_STEPS, 1.0)
        lanes = {lane: LaneTime(time.busy * share, time.alone * share, time.nbytes * share)
                 for lane, time in phase.lanes.items()}
        idle = phase.idle * share
        paths.append(BarPart(title, phase.wall * share, lanes | {IDLE: LaneTime(idle, idle, 0.0)}))
    if not paths:
        raise UserError(f"{name} has no phases: a run that generates something writes them")
    return paths


def label(about: dict[str, object], name: str) -> str:
    """Return the title of a row of panels: file name, model, batch size and cache."""
    words = [name, what_ran(about)]
    if about.get("kv_cache_bytes") and about.get("full_kv_cache_bytes"):
        share = about["kv_cache_bytes"] / about["full_kv_cache_bytes"]
        words.append(f"KV cache: {100 * share:.0f} % of a full one")
    return "\n".join(line for text in words for line in textwrap.wrap(text, _LETTERS))


def draw_breakdown(paths: Sequence[str]):
    """Return the figure of some traces, a row of panels each. Raises `UserError`."""
    traces = [Trace.read_chrome(path) for path in paths]
    all_parts = [{part.name: part for part in parts(trace, path)}
                 for trace, path in zip(traces, paths, strict=True)]
    columns = list(dict.fromkeys(name for trace_parts in all_parts for name in trace_parts))
    lanes = list(dict.fromkeys(lane for trace_parts in all_parts for part in trace_parts.values()
                               for lane in part.lanes if lane != IDLE)) + [IDLE]
    usual = (COMPUTE, *LINKS)
    lanes.sort(key=lambda lane: (lane == IDLE,
                                 usual.index(lane) if lane in usual else len(usual)))
    figure = new_figure(3.5 + 6.2 * len(columns), 1.6 + len(paths) * (1.3 + 0.45 * len(lanes)))
    grid = figure.subplots(len(paths), len(columns), squeeze=False, sharex="col", sharey=True)
    for line, trace_parts, trace, path in zip(grid, all_parts, traces, paths, strict=True):
        for axes, name in zip(line, columns, strict=True):
            if name in trace_parts:
                _bars(axes, trace_parts[name], lanes)
            else:
                axes.set_axis_off()
        line[0].set_ylabel(label(trace.about, Path(path).stem), rotation=0, ha="right",
                           va="center", multialignment="left", labelpad=16, fontsize=12)
    for axes, name in zip(grid[-1], columns, strict=True):
        longest = max(trace_parts[name].wall for trace_parts in all_parts if name in trace_parts)
        _scale(axes, longest)
    beside(figure, *_legend())
    entitle(figure, "Where the time goes, by link and compute",
            ["Lanes work side by side: their bars do not add up to the time taken."],
            where=measured_where([trace.about for trace in traces]))
    return figure


def _bars(axes, part: BarPart, lanes: Sequence[str]) -> None:
    """Draw a bar for each lane: time alone, then time overlapped with others."""
    for place, lane in enumerate(lanes):
        time = part.lanes.get(lane)
        if time is None:
            continue
        colour = _COLOURS.get(lane, COLOURS["purple"])
        axes.barh(place, time.alone, height=0.7, color=colour)
        axes.barh(place, time.busy - time.alone, left=time.alone, height=0.7, facecolor="white",
                  edgecolor=colour, hatch=_HIDDEN)
        axes.annotate(f"{_seconds(time.busy)}, {100 * time.busy / part.wall:.0f} %",
                      (time.busy, place), (6, 0), textcoords="offset points", va="center",
                      fontsize=11, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.axvline(part.wall, color=COLOURS["black"], linestyle="--", linewidth=1.5)
    axes.set_title(f"{part.name}: {_seconds(part.wall)}", loc="left")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _scale(axes, maximum: float) -> None:
    """Scale an axis in seconds or milliseconds, with space for labels."""
    from matplotlib.ticker import FuncFormatter

    unit, scale = ("seconds", 1) if maximum >= 1 else ("milliseconds", 1e3)
    axes.set_xlim(0, 1.3 * maximum)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * scale:g}"))
    axes.set_xlabel(unit)


def _legend() -> tuple[list, list[str]]:
    """Return handles and labels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color="0.4"), Patch(facecolor="white", edgecolor="0.4", hatch=_HIDDEN),
               Line2D([], [], color="black", linestyle="--", linewidth=1.5)]
    return handles, ["busy alone", "busy while\nothers are too", "time taken"]


_LOOKS = {PROCESS_MEMORY: {"color": COLOURS["blue"], "linestyle": "-"},
          DEVICE_MEMORY: {"color": COLOURS["purple"], "linestyle": "-."}}
_NAMES = {PROCESS_MEMORY: "process, resident", DEVICE_MEMORY: "device, allocated"}
_SHADES = {"prefill": {"facecolor": COLOURS["sky"], "alpha": 0.35},
           "decode": {"facecolor": COLOURS["yellow"], "alpha": 0.35}}


def curves(trace: Trace, name: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return (seconds, gigabytes) curves by kind of memory.

    Raises `UserError` if the trace in file `name` has no samples.
    """
    by_name: dict[str, tuple[list[float], list[float]]] = {}
    for memory, at, nbytes in sorted(trace.samples(), key=lambda sample: sample[1]):
        times, sizes = by_name.setdefault(memory, ([], []))
        times.append(at)
        sizes.append(nbytes / GB)
    if not by_name:
        raise UserError(f"{name} has no samples of memory: run again with --trace")
    return by_name


def draw_memory(path: str, *, limit: int | None = None):
    """Return the figure of a trace; `limit` is in bytes. Raises `UserError`."""
    trace = Trace.read_chrome(path)
    lines = curves(trace, path)
    figure = new_figure(12, 6.2)
    axes = figure.subplots()
    _shade(axes, trace)
    for what, (times, sizes) in lines.items():
        peak = max(range(len(sizes)), key=sizes.__getitem__)
        axes.plot(times, sizes, label=f"{_NAMES.get(what, what)}, at most {sizes[peak]:.3g} GB",
                  **_LOOKS.get(what, {"color": COLOURS["green"], "linestyle": ":"}))
        axes.plot([times[peak]], [sizes[peak]], marker="o", linestyle="none", clip_on=False,
                  color=axes.lines[-1].get_color())
    if limit is not None:
        axes.axhline(limit / GB, color=COLOURS["vermillion"], linestyle="--",
                     label=f"limit, {limit / GB:.3g} GB")
    ends = [time for times, _ in lines.values() for time in times]
    ends += [time for span in trace.spans() if span[1] == PHASES for time in span[2:4]]
    axes.set(xlabel="seconds since the start", ylabel="memory, GB", xlim=(0, max(ends)))
    axes.set_ylim(0, None)
    axes.margins(y=0.1)
    axes.grid(color="0.9")
    beside(figure, *axes.get_legend_handles_labels())
    entitle(figure, f"Memory over time\n{what_ran(trace.about) or Path(path).stem}",
            ["Resident memory leaves out the page cache, which a cgroup's limit counts."],
            where=measured_where([trace.about]))
    return figure


def _shade(axes, trace: Trace) -> None:
    """Shade the phases of all blocks, each named once."""
    named = set()
    for name, lane, start, end, _ in trace.spans():
        if lane == PHASES and name in _SHADES:
            axes.axvspan(start, end, label=None if name in named else name, linewidth=0,
                         **_SHADES[name])
            named.add(name)
