"""Memory over the time of a run, with its phases: what a trace has sampled."""

from __future__ import annotations

from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import COLOURS, new_figure
from flexgen_h2o.metrics.trace import DEVICE_MEMORY, GB, PHASES, PROCESS_MEMORY, Trace
from plotting.looks import beside, entitle
from plotting.rows import measured_where, what_ran

_LOOKS = {PROCESS_MEMORY: {"color": COLOURS["blue"], "linestyle": "-"},
          DEVICE_MEMORY: {"color": COLOURS["purple"], "linestyle": "-."}}
_NAMES = {PROCESS_MEMORY: "process, resident", DEVICE_MEMORY: "device, allocated"}
_SHADES = {"prefill": {"facecolor": COLOURS["sky"], "alpha": 0.35},
           "decode": {"facecolor": COLOURS["yellow"], "alpha": 0.35}}


def curves(trace: Trace, name: str) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds since the trace was begun and gigabytes, by memory.

    Raises `UserError` where nothing was sampled; `name` is that of the file.
    """
    found: dict[str, tuple[list[float], list[float]]] = {}
    for what, at, nbytes in sorted(trace.samples(), key=lambda sample: sample[1]):
        times, sizes = found.setdefault(what, ([], []))
        times.append(at)
        sizes.append(nbytes / GB)
    if not found:
        raise UserError(f"{name} has no samples of memory: write it anew with --trace")
    return found


def draw(path: str, *, limit: int | None = None):
    """The figure of the trace in a file; `limit` is in bytes. `UserError` if it is no such file."""
    trace = Trace.read_chrome(path)
    found = curves(trace, path)
    figure = new_figure(12, 6.2)
    axes = figure.subplots()
    _shade(axes, trace)
    for what, (times, sizes) in found.items():
        peak = max(range(len(sizes)), key=sizes.__getitem__)
        axes.plot(times, sizes, label=f"{_NAMES.get(what, what)}, at most {sizes[peak]:.3g} GB",
                  **_LOOKS.get(what, {"color": COLOURS["green"], "linestyle": ":"}))
        axes.plot([times[peak]], [sizes[peak]], marker="o", linestyle="none", clip_on=False,
                  color=axes.lines[-1].get_color())
    if limit is not None:
        axes.axhline(limit / GB, color=COLOURS["vermillion"], linestyle="--",
                     label=f"limit, {limit / GB:.3g} GB")
    ends = [time for times, _ in found.values() for time in times]
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
    """The phases of all blocks in the background, each named once."""
    named = set()
    for name, lane, start, end, _ in trace.spans():
        if lane == PHASES and name in _SHADES:
            axes.axvspan(start, end, label=None if name in named else name, linewidth=0,
                         **_SHADES[name])
            named.add(name)
