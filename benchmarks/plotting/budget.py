"""Throughput against what of the KV cache is kept: the rows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.cli.results import EVICTION
from flexgen_h2o.metrics.figures import new_figure
from flexgen_h2o.metrics.trace import GB
from plotting.looks import LINES, entitle
from plotting.rows import Row, distinct, measured_where, positive
from plotting.sweeps import (
    SIZES,
    Line,
    by_outcome,
    check_number_of,
    common_settings,
    draw_line,
    grouped,
    is_full,
    label,
    labels_of,
    notes,
    ordered_settings,
    point,
    telling,
)

FIGURES = {"throughput": lambda row: positive(row, "total_tokens_per_second")}


def percent(row: Row) -> float:
    """Bytes of the KV cache as a share of those of one that keeps everything in 16 bits."""
    return 100 * positive(row, "kv_cache_bytes") / positive(row, "full_kv_cache_bytes")


def lines(rows: Sequence[Row]) -> tuple[list[Line], list[Row]]:
    """A line for each combination of settings but for sizes of the cache, and the failed runs.

    Runs with a full cache are where all lines of otherwise equal settings end. Raises `UserError`
    if no run succeeded, or a figure is missing.
    """
    ran, failed = by_outcome(rows)
    full = [row for row in ran if is_full(row)]
    evicting = [row for row in ran if not is_full(row)] or full
    names = labels_of(ran[0])
    columns = telling(evicting, names, SIZES)
    columns += telling(evicting, ordered_settings(ran[0], without=(*SIZES, *names)), columns)
    common = [name for name in columns if name not in EVICTION
              and set(distinct(full, name)) & set(distinct(evicting, name))]
    ends = grouped(full, common)
    found = []
    for mine in grouped(evicting, columns).values():
        shared = tuple(mine[0][name] for name in common)
        points = grouped({id(row): row for row in [*mine, *ends.get(shared, ())]}.values(),
                         ("eviction", *SIZES, "kv_cache_bytes", "full_kv_cache_bytes"))
        found.append(Line(label(mine[0], columns), tuple(sorted(
            (point(percent(repeats[0]), repeats, FIGURES) for repeats in points.values()),
            key=lambda each: each.x))))
    return found, failed


def draw(rows: Sequence[Row]):
    """The figure. Errors as of `lines`, and of too many lines."""
    found, failed = lines(rows)
    check_number_of(found)
    figure = new_figure(10, 6.4)
    axes = figure.subplots()
    for line, look in zip(found, LINES, strict=False):
        draw_line(axes, line, "throughput", look)
    axes.set(xlabel="KV cache, % of a full one with nothing compressed", xlim=(0, None),
             ylabel="generated tokens/s", ylim=(0, None))
    axes.grid(color="0.9")
    whole = {positive(row, "full_kv_cache_bytes") for row in by_outcome(rows)[0]}
    if len(whole) == 1:
        _in_bytes(axes, whole.pop())
    if any(line.label for line in found):
        axes.legend(frameon=False, handlelength=3)
    entitle(figure, f"Throughput against KV budget\n{common_settings(rows)}",
            notes(found, failed), where=measured_where(rows))
    return figure


def _in_bytes(axes, whole: float) -> None:
    """The same shares in bytes, along the top."""
    unit, scale = ("GB", GB) if whole >= GB else ("MB", 1e6)
    top = axes.secondary_xaxis("top", functions=(lambda share: share / 100 * whole / scale,
                                                 lambda amount: amount * scale / whole * 100))
    top.set_xlabel(f"KV cache, {unit}")
