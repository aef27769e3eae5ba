"""Replicas and pipelines: what was measured beside the ideal, and what the cost model says."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import COLOURS, new_figure
from plotting.looks import GREY, beside, entitle, log_numbers
from plotting.rows import Row, distinct, measured_where, positive

NEEDED = ("kind", "way", "processes", "model", "cache", "prompts", "hardware", "tokens_per_s",
          "ideal_tokens_per_s", "assumed", "conditions")
_COLOURS = {"one process": "0.6", "pipeline": COLOURS["blue"], "replicas": COLOURS["orange"]}
_HATCHES = {"replicas": "//"}
_WIDTH = 0.4


def draw(rows: Sequence[Row]):
    """A panel for each machine that is simulated, and one for what was measured, if anything was.

    Raises `UserError` for rows without a figure.
    """
    measured = [row for row in rows if row["kind"] == "measured"]
    clusters = distinct(rows, "hardware")
    panels = bool(measured) + len(clusters)
    if not any(row["tokens_per_s"] for row in rows):
        raise UserError("--csv has no row with tokens_per_s")
    figure = new_figure(6 * panels + 3, 6.5)
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    handles: dict[str, object] = {}
    if measured:
        _measured(found.pop(0), measured, handles)
    for axes, name in zip(found, clusters, strict=True):
        _simulated(axes, [row for row in rows if row["hardware"] == name], handles)
    beside(figure, list(handles.values()), list(handles))
    notes = [*(f"Measured beside other work: {words}." for words in distinct(rows, "conditions")),
             *(f"Simulated, assumed: {words}." for words in distinct(rows, "assumed"))]
    entitle(figure, "Replicas and a pipeline over several processes and machines", notes,
            where=measured_where(measured or rows))
    return figure


def _bar(axes, place: float, row: Row, width: float, handles: dict[str, object]) -> None:
    way, rate = row["way"], positive(row, "tokens_per_s")
    bars = axes.bar(place, rate, width, color=_COLOURS[way], hatch=_HATCHES.get(way),
                    edgecolor="white")
    handles.setdefault(way, bars[0])
    words = f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
    axes.annotate(words, (place, rate), (0, 3), textcoords="offset points", ha="center",
                  fontsize=10 if width > _WIDTH else 8, rotation=0 if width > _WIDTH else 90)


def _measured(axes, rows: Sequence[Row], handles: dict[str, object]) -> None:
    for place, row in enumerate(rows):
        _bar(axes, place, row, 2 * _WIDTH, handles)
        ideal = positive(row, "ideal_tokens_per_s")
        line, = axes.plot([place - _WIDTH, place + _WIDTH], [ideal, ideal], color="black")
        handles.setdefault("ideal: so many times one process", line)
    axes.set_xticks(range(len(rows)), [f"{row['way']}\nx {row['processes']}" for row in rows])
    axes.set_ylabel("generated tokens/s")
    axes.set_title(f"Measured: {rows[0]['model']}, a thread each", loc="left")
    axes.grid(axis="y", color="0.9")


def _simulated(axes, rows: Sequence[Row], handles: dict[str, object]) -> None:
    """A pair of bars for each model, cache and number of prompts, on a logarithmic axis."""
    jobs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        jobs.setdefault((row["model"], row["cache"], row["prompts"]), []).append(row)
    for place, pair in enumerate(jobs.values()):
        for side, row in zip((-0.5, 0.5), pair, strict=True):
            if row["tokens_per_s"]:
                _bar(axes, place + side * _WIDTH, row, _WIDTH, handles)
            else:
                axes.annotate("✕", (place + side * _WIDTH, 0.01), ha="center", color=GREY,
                              xycoords=("data", "axes fraction"))
    axes.set_yscale("log")
    log_numbers(axes.yaxis, [positive(row, "tokens_per_s") for row in rows if row["tokens_per_s"]])
    axes.set_xticks(range(len(jobs)), [f"{model.split('/')[-1]}, {cache}, {prompts} prompts"
                                       for model, cache, prompts in jobs], rotation=60, ha="right")
    axes.set_ylim(top=4 * axes.get_ylim()[1])  # room for the words above the bars
    axes.set_title(f"Simulated: {rows[0]['processes']} x {rows[0]['hardware']}", loc="left")
    axes.grid(axis="y", color="0.9")
