"""Figure of a comparison: throughput by system with rooflines, a panel for each scenario."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from baselines.ours import Ours
from comparison import BEST, EQUAL
from plotting import GREY, Row, beside, distinct, entitle, measured_where, positive
from processes import OK, REFUSED

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import COLOURS, new_figure

NEEDED = ("scenario", "model", "dtype", "prompt_len", "gen_len", "memory_gb", "device_memory_gb",
          "system", "documented", "at", "batch", "status", "reason", "tokens_per_s", "projected",
          "prefill_roofline_s", "decode_step_roofline_s")
"""Needed columns."""
_OTHERS, _OURS, _HATCH = COLOURS["orange"], COLOURS["blue"], "///"
_LETTERS = 50  # of a panel's title, on a line
_ROOM = 1.0  # space for labels, in lengths of the longest bar


@dataclass(frozen=True)
class Bar:
    """A system in a scenario.

    Attributes
    ----------
    system : str
    ours : bool
        Whether this is the engine itself.
    batch : int
    rate, roofline : float or None
        Generated tokens per second, measured and by the roofline; None if it did not run.
    projected : bool
    why : str
        Why it did not run, in short.
    """

    system: str
    ours: bool
    batch: int
    rate: float | None
    roofline: float | None
    projected: bool
    why: str


def panels(rows: Sequence[Row], *, scenarios: Sequence[str], at: str | None
           ) -> dict[str, list[Row]]:
    """Return the rows of each scenario to draw.

    Parameters
    ----------
    rows : sequence of Row
    scenarios : sequence of str
        Only these, in this order; all by default.
    at : str or None
        BEST or EQUAL; scenarios without such rows are omitted. None: BEST where measured.

    Raises
    ------
    UserError
        A scenario or its rows are missing, or a system has several rows.
    """
    known = distinct(rows, "scenario")
    by_title: dict[str, list[Row]] = {}
    for name in scenarios or known:
        if name not in known:
            raise UserError(f"--scenario {name} is not in --csv: it has {', '.join(known)}")
        at_batch = {which: [row for row in rows if row["scenario"] == name and row["at"] == which]
                    for which in (BEST, EQUAL)}
        of_panel = at_batch[at or (BEST if at_batch[BEST] else EQUAL)]
        systems = [row["system"] for row in of_panel]
        twice = next((system for system in systems if systems.count(system) > 1), None)
        if twice is not None:
            raise UserError(f"--csv has several rows of {twice} in {name}: say which by --only, "
                            "such as --only host=NAME")
        if of_panel:
            by_title[name] = of_panel
    if not by_title:
        raise UserError(f"--csv has no rows measured at {at or f'{BEST} or {EQUAL}'}")
    return by_title


def bar(row: Row) -> Bar:
    """Return the bar of a row. Raises `UserError` for missing figures."""
    batch, tokens = positive(row, "batch"), positive(row, "gen_len")
    rate = roofline = None
    if row["status"] == OK:
        rate = positive(row, "tokens_per_s")
        roofline = batch * tokens / (positive(row, "prefill_roofline_s")
                                     + (tokens - 1) * positive(row, "decode_step_roofline_s"))
    return Bar(row["system"], row["documented"] == Ours.documented, int(batch), rate, roofline,
               row["projected"] == "True", "" if rate is not None else _why(row))


def _why(row: Row) -> str:
    """Return the reason of a row without figures, short enough for a slide."""
    if row["status"] != REFUSED:
        return row["status"]
    for words, short in (("CUDA", "needs CUDA"), ("is not installed", "not installed"),
                         ("names no checkout", "no checkout")):
        if words in row["reason"]:
            return short
    return textwrap.shorten(row["reason"], 40, placeholder=" ...")


def best_of_others(bars: Sequence[Bar]) -> float | None:
    """Return the tokens per second of the fastest other system; None if none ran."""
    return max((bar.rate for bar in bars if not bar.ours and bar.rate is not None),
               default=None)


def draw(rows: Sequence[Row], *, scenarios: Sequence[str] = (), at: str | None = None):
    """Return the figure; see `panels` for parameters and errors."""
    by_title = panels(rows, scenarios=scenarios, at=at)
    columns = 1 if len(by_title) == 1 else 2 if len(by_title) in (2, 4) else 3
    lines = -(-len(by_title) // columns)
    sizes = [len(bars) for bars in by_title.values()]
    row_sizes = [max(sizes[start: start + columns]) for start in range(0, len(sizes), columns)]
    figure = new_figure(max(6 * columns, 9), 1.6 * lines + 0.42 * sum(row_sizes) + 1.6)
    grid = figure.subplots(lines, columns, squeeze=False, height_ratios=row_sizes).ravel()
    for place, (axes, (name, bars)) in enumerate(zip(grid, by_title.items(), strict=False)):
        _panel(axes, name, bars)
        axes.set_ylim(row_sizes[place // columns] - 0.4, -0.6)  # bars of one height
    spare = grid[len(by_title):]
    for axes in spare:
        axes.set_axis_off()
    handles = _handles([bar(row) for bars in by_title.values() for row in bars])
    if len(spare):
        spare[0].legend(handles=handles, loc="center left", frameon=False)
    elif columns == 1:
        beside(figure, handles, [handle.get_label() for handle in handles])
    else:
        figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False,
                      borderaxespad=0.8)  # clear of the title
    drawn = [row for bars in by_title.values() for row in bars]
    notes = ["Multiples: over the fastest of the other systems in the same panel.", _limits(drawn)]
    entitle(figure, "Throughput by system", [note for note in notes if note],
            where=measured_where(drawn))
    return figure


def _limits(rows: Sequence[Row]) -> str:
    if not distinct(rows, "memory_gb"):
        return ""
    return ("Memory limits are of a cgroup, which counts the page cache"
            + (" (dropped before)." if distinct(rows, "page_cache") == ["dropped before"] else "."))


def _panel(axes, name: str, rows: Sequence[Row]) -> None:
    bars = [bar(row) for row in rows]
    best = best_of_others(bars)
    drawn = [value for system_bar in bars for value in (system_bar.rate, system_bar.roofline)
             if value is not None]
    axes.set_xscale("log")
    low, high = (min(drawn) / 3, max(drawn)) if drawn else (1, 10)
    axes.set_xlim(low, high * (high / low) ** _ROOM)
    powers = range(math.floor(math.log10(low)) + 1, math.ceil(math.log10(high)) + 1)
    axes.set_xticks([10.0**power for power in powers], [f"{10.0**power:g}" for power in powers])
    axes.set_xticks([], minor=True)
    at_best = rows[0]["at"] == BEST
    for place, system_bar in enumerate(bars):
        if system_bar.rate is None:
            axes.annotate(f"✕ {system_bar.why}", (0, place), (6, 0), va="center", color=GREY,
                          xycoords=("axes fraction", "data"), textcoords="offset points",
                          fontsize=12, style="italic")
            continue
        axes.barh(place, system_bar.rate - low, left=low, height=0.66, edgecolor="white",
                  color=_OURS if system_bar.ours else _OTHERS,
                  hatch=_HATCH if system_bar.projected else None)
        if system_bar.roofline is not None:
            axes.plot([system_bar.roofline], [place], linestyle="none", **_ROOFLINE)
        end = max(system_bar.rate, system_bar.roofline or 0)
        axes.annotate(_words(system_bar, best, at_best), (end, place), (8, 0),
                      textcoords="offset points", va="center", fontsize=12)
    axes.set_yticks(range(len(bars)), [system_bar.system for system_bar in bars])
    for label, system_bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if system_bar.ours else "normal")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9")
    axes.set_xlabel("generated tokens/s")
    conditions = _conditions(rows[0], at_best)
    axes.annotate(conditions, (0, 1), (0, 5), xycoords="axes fraction", fontsize=11,
                  textcoords="offset points", va="bottom", color=GREY)
    axes.set_title(name, loc="left", fontweight="bold", pad=10 + 14 * len(conditions.splitlines()))


_ROOFLINE = {"marker": "|", "markersize": 17, "markeredgewidth": 3, "color": COLOURS["black"]}


def _words(system_bar: Bar, best: float | None, at_best: bool) -> str:
    """Return the label at a bar's end."""
    words = f"{system_bar.rate:.3g}" if system_bar.rate < 1000 else f"{system_bar.rate:.0f}"
    if system_bar.ours and best is not None:
        words += f" ({system_bar.rate / best:.2g}x)"
    return words + (f", batch {system_bar.batch}" if at_best else "")


def _conditions(row: Row, at_best: bool) -> str:
    """Return the title of a panel: what its bars share."""
    lengths = f"{positive(row, 'prompt_len'):.0f}+{row['gen_len']} tokens"
    limits = [f"in {positive(row, name):g}\xa0GB{suffix}"
              for name, suffix in (("memory_gb", ""), ("device_memory_gb", " of the GPU"))
              if row[name]]
    model = ", ".join([f"{row['model']} in {row['dtype']}", lengths, *limits])
    batch = "each at its best batch" if at_best else f"all at batch {row['batch']}"
    return "\n".join([*textwrap.wrap(model, _LETTERS), batch])


def _handles(bars: Sequence[Bar]) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [Patch(color=_OTHERS, label="other systems"), Patch(color=_OURS, label="this engine")]
    if any(bar.projected for bar in bars):
        handles.append(Patch(facecolor="0.6", edgecolor="white", hatch=_HATCH,
                             label="projected from the first steps"))
    if any(bar.roofline is not None for bar in bars):
        handles.append(Line2D([], [], linestyle="none", label="roofline: the maximum that disk,\n"
                              "memory and processor allow at this batch", **_ROOFLINE))
    return handles
