"""Throughput and latency against batch: the rows of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexgen_h2o.metrics.figures import new_figure
from plotting.looks import GREY, LINES, beside, entitle, log_numbers
from plotting.rows import Row, distinct, measured_where, positive
from plotting.sweeps import (
    Line,
    by_outcome,
    check_number_of,
    common_settings,
    draw_line,
    grouped,
    label,
    notes,
    ordered_settings,
    point,
    telling,
)

BATCH = "batch"
"""A column that rows get here: sequences of a block."""


def block_seconds(row: Row) -> float:
    """Seconds of a block, its prefill and its decode: until all of its sequences are done."""
    blocks = math.ceil(positive(row, "num_prompts") / float(row[BATCH]))
    return (positive(row, "prefill_seconds") + positive(row, "decode_seconds")) / blocks


FIGURES = {
    "throughput": lambda row: positive(row, "total_tokens_per_second"),
    "step": lambda row: positive(row, "latency_p50_seconds"),
    "block": block_seconds,
}
_PANELS = {"throughput": ("Throughput", "generated tokens/s"),
           "step": ("Latency of a token", "seconds of a decode step, median"),
           "block": ("Latency of a block", "seconds of prefill and decode")}
_CROSS = {"marker": "x", "markeredgewidth": 3, "linestyle": "none"}


def lines(rows: Sequence[Row]) -> tuple[list[Line], list[Row]]:
    """A line for each combination of settings, and the failed runs that have no place on one.

    Raises `UserError` if no run succeeded, or a figure is missing.
    """
    ran, failed = by_outcome(rows)
    splits = distinct(ran, "num_gpu_batches")
    ran = [{**row, BATCH: f"{_sequences(row):g}"} for row in ran]
    columns = telling(ran, ordered_settings(ran[0], without=("gpu_batch_size", BATCH)), (BATCH,))
    crosses, left = _crosses(failed, columns, splits)
    found = []
    for key, mine in grouped(ran, columns).items():
        points = [point(float(batch), repeats, FIGURES)
                  for (batch,), repeats in grouped(mine, [BATCH]).items()]
        found.append(Line(label(mine[0], columns), tuple(sorted(points, key=lambda each: each.x)),
                          tuple(crosses.pop(key, {}).items())))
    return found, left + [row for some in crosses.values() for row in some.values()]


def _sequences(row: Row) -> float:
    return positive(row, "gpu_batch_size") * positive(row, "num_gpu_batches")


def _crosses(failed: Sequence[Row], columns: Sequence[str], splits: Sequence[str]
             ) -> tuple[dict[tuple[str, ...], dict[float, Row]], list[Row]]:
    """Failed runs by line and batch, and those whose batch is not known.

    Of a failed run the file has the flags of the grid alone; one number of batches in all others is
    its own too.
    """
    found: dict[tuple[str, ...], dict[float, Row]] = {}
    left = []
    for row in failed:
        split = row["num_gpu_batches"] or (splits[0] if len(splits) == 1 else "")
        if row["gpu_batch_size"] and split:
            batch = _sequences({**row, "num_gpu_batches": split})
            found.setdefault(tuple(row[name] for name in columns), {})[batch] = row
        else:
            left.append(row)
    return found, left


def draw(rows: Sequence[Row]):
    """The figure. Errors as of `lines`, and of too many lines."""
    found, left = lines(rows)
    check_number_of(found)
    figure = new_figure(16, 6.4)
    panels = dict(zip(FIGURES, figure.subplots(1, 3), strict=True))
    batches = [each.x for line in found for each in line.points]
    batches += [batch for line in found for batch, _ in line.failed]
    for name, axes in panels.items():
        _panel(axes, name, found, batches)
    cross = _mark_failures(panels["throughput"], found)
    handles, labels = panels["step"].get_legend_handles_labels()
    if cross is not None:
        handles, labels = [*handles, cross], [*labels, cross.get_label()]
    if any(labels):
        beside(figure, handles, labels)
    entitle(figure, f"Throughput and latency against batch: {common_settings(rows)}",
            notes(found, left), where=measured_where(rows))
    return figure


def _panel(axes, name: str, found: Sequence[Line], batches: Sequence[float]) -> None:
    title, unit = _PANELS[name]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line, look in zip(found, LINES, strict=False):
        draw_line(axes, line, name, look)
    axes.set(title=title, ylabel=unit, xlabel="batch: sequences of a block",
             xlim=(min(batches) / 1.3, max(batches) * 1.3))
    log_numbers(axes.xaxis, batches, base=2)
    log_numbers(axes.yaxis, [each.figures[name][1] for line in found for each in line.points])
    axes.grid(color="0.9")


def _mark_failures(axes, found: Sequence[Line]):
    """A cross at the bottom for each run that failed, in its line's colour.

    Returns one for the legend, or None if there are none.
    """
    reasons: dict[str, None] = {}
    for height, (line, look) in enumerate(zip(found, LINES, strict=False)):
        for batch, row in line.failed:
            axes.plot([batch], [0.03 + 0.05 * height], transform=axes.get_xaxis_transform(),
                      color=look["color"], **_CROSS)
            reasons[row["status"]] = None
    return axes.plot([], [], color=GREY, label=", ".join(reasons), **_CROSS)[0] if reasons else None
