"""Figures of sweeps: throughput and latency against batch size, throughput against KV budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from plotting import (
    GREY,
    LINES,
    Row,
    beside,
    distinct,
    entitle,
    log_numbers,
    measured_where,
    positive,
)

from flexgen_h2o.cli.results import CSV_COLUMNS, EVICTION, SETTINGS
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.figures import new_figure
from flexgen_h2o.metrics.trace import GB

NEEDED = (*EVICTION, "gpu_batch_size", "num_gpu_batches", "num_prompts", "prefill_seconds",
          "decode_seconds", "total_tokens_per_second", "kv_cache_bytes", "full_kv_cache_bytes",
          "projected")
"""Needed columns. Files of `flex_opt --csv` have them, too, also of older versions."""
OK, FULL = "ok", "full"
SIZES = ("hh_ratio", "recent_ratio", "num_heavy_hitter_tokens", "num_window_length")
"""Settings of the cache size."""
_PLACE = ("sweep", "flags", "repeat", "status", "reason")
_FIRST = ("hh_ratio", "weight_bits", "cache_bits")  # preferred in labels

Key = tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """The repeats of a cell: (low, median, high) of each figure."""

    x: float
    figures: Mapping[str, tuple[float, float, float]]
    repeats: int
    projected: bool


@dataclass(frozen=True)
class Line:
    """The points of a combination of settings, by x, and the x of failed runs."""

    label: str
    points: tuple[Point, ...]
    failed: tuple[tuple[float, Row], ...] = ()


def by_outcome(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows with figures and those of failed runs.

    Eviction settings are cleared in rows of a full cache. Raises `UserError` if no run succeeded.
    """
    ran, failed = [], []
    for row in rows:
        if is_full(row):
            row = {**row, **dict.fromkeys(EVICTION, ""), "eviction": FULL}
        (ran if row.get("status", OK) == OK else failed).append(row)
    if not ran:
        raise UserError("--csv has no row of a run that succeeded")
    return ran, failed


def is_full(row: Row) -> bool:
    """Return whether nothing is evicted; by the flag if the run failed."""
    return row["eviction"] == FULL or (not row["eviction"] and row["hh_ratio"] == "1")


def labels_of(row: Row) -> list[str]:
    """Return the sweep's own columns: grid keys that are not result columns."""
    return [name for name in row if name not in (*CSV_COLUMNS, *_PLACE)]


def telling(rows: Sequence[Row], columns: Iterable[str], ignored: Sequence[str] = ()) -> list[str]:
    """Return the fewest columns that distinguish rows as well as all of them.

    Parameters
    ----------
    rows : sequence of Row
    columns : iterable of str
        Earlier ones are preferred.
    ignored : sequence of str
        Columns that already distinguish rows.

    Returns
    -------
    list of str
        Columns with the most values first.
    """
    varying = [name for name in columns if len({row[name] for row in rows}) > 1]
    order = sorted(varying, key=lambda name: -len({row[name] for row in rows}))
    telling_columns: list[str] = []
    for name in order:
        firsts: dict[Key, str] = {}
        keys = (*ignored, *telling_columns)
        if any(firsts.setdefault(tuple(row[key] for key in keys), row[name]) != row[name]
               for row in rows):
            telling_columns.append(name)
    return telling_columns


def ordered_settings(row: Row, *, without: Iterable[str] = ()) -> list[str]:
    """Return the columns that may distinguish lines, preferred ones first."""
    names = dict.fromkeys((*labels_of(row), *_FIRST, *SETTINGS, "host", "device", "prompt_len",
                           "gen_len", "gpu_batch_size", "num_gpu_batches"))
    return [name for name in names if name in row and name not in without]


def label(row: Row, columns: Sequence[str]) -> str:
    """Return the label of a line; empty if there is only one line."""
    full = is_full(row) and any(name in EVICTION for name in columns)
    parts = [f"{name} {row[name] or 'unset'}" for name in columns
             if not (full and name in EVICTION)]
    return ", ".join([*parts, "full cache"] if full else parts)


def point(x: float, rows: Sequence[Row], figures: Mapping[str, Callable[[Row], float]]) -> Point:
    """Return the repeats of a cell as one point."""
    ranges = {}
    for name, figure in figures.items():
        values = [figure(row) for row in rows]
        ranges[name] = (min(values), median(values), max(values))
    return Point(x, ranges, len(rows), any(row["projected"] == "true" for row in rows))


def grouped(rows: Iterable[Row], columns: Sequence[str]) -> dict[Key, list[Row]]:
    """Group rows by their values of some columns."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row)
    return groups


def check_number_of(lines: Sequence[Line]) -> None:
    """Raise `UserError` for more lines than there are styles."""
    if len(lines) > len(LINES):
        raise UserError(f"{len(lines)} lines are too many for one figure: choose by --only, such "
                        f"as --only {lines[0].label.split(',')[0].replace(' ', '=')}")


def draw_line(axes, line: Line, figure: str, look: Mapping) -> None:
    """Draw a line's medians with bars from lowest to highest; projected points are hollow."""
    low, middle, high = zip(*(point.figures[figure] for point in line.points), strict=True)
    xs = [point.x for point in line.points]
    errors = [[m - a for m, a in zip(middle, low, strict=True)],
              [b - m for m, b in zip(middle, high, strict=True)]]
    axes.errorbar(xs, middle, yerr=errors if any(map(any, errors)) else None, capsize=3,
                  label=line.label, **look)
    hollow = [(x, y) for x, y, point in zip(xs, middle, line.points, strict=True)
              if point.projected]
    if hollow:
        axes.plot(*zip(*hollow, strict=True), linestyle="none", zorder=3,
                  marker=look["marker"], color=look["color"], markerfacecolor="white")


def notes(lines: Sequence[Line], failed: Sequence[Row]) -> list[str]:
    """Return the caption: repeats, projections and omitted rows."""
    points, notes_lines = [each for line in lines for each in line.points], []
    if any(each.repeats > 1 for each in points):
        notes_lines.append("Medians of repeats, with bars from the lowest to the highest.")
    if any(each.projected for each in points):
        notes_lines.append("Hollow marks: projected from the first steps.")
    if failed:
        runs = f"{len(failed)} run{'s' if len(failed) > 1 else ''}"
        notes_lines.append(f"Left out: {runs} without figures "
                           f"({', '.join(distinct(failed, 'status'))}).")
    return notes_lines


def common_settings(rows: Sequence[Row]) -> str:
    """Return model and lengths, if all rows share them."""
    words = [", ".join(distinct(rows, name)) for name in ("model", "dtype")]
    lengths = [distinct(rows, name) for name in ("prompt_len", "gen_len")]
    if all(len(values) == 1 for values in lengths):
        words.append(f"{float(lengths[0][0]):.0f}+{lengths[1][0]} tokens")
    return ", ".join(word for word in words if word)


BATCH = "batch"
"""Added column: sequences of a block."""


def block_seconds(row: Row) -> float:
    """Return the seconds of a block, prefill and decode."""
    blocks = math.ceil(positive(row, "num_prompts") / float(row[BATCH]))
    return (positive(row, "prefill_seconds") + positive(row, "decode_seconds")) / blocks


BATCH_FIGURES = {
    "throughput": lambda row: positive(row, "total_tokens_per_second"),
    "step": lambda row: positive(row, "latency_p50_seconds"),
    "block": block_seconds,
}
_PANELS = {"throughput": ("Throughput", "generated tokens/s"),
           "step": ("Latency of a token", "seconds of a decode step, median"),
           "block": ("Latency of a block", "seconds of prefill and decode")}
_CROSS = {"marker": "x", "markeredgewidth": 3, "linestyle": "none"}


def batch_lines(rows: Sequence[Row]) -> tuple[list[Line], list[Row]]:
    """Return a line for each combination of settings, and the failed runs without a line.

    Raises `UserError` if no run succeeded, or a figure is missing.
    """
    ran, failed = by_outcome(rows)
    splits = distinct(ran, "num_gpu_batches")
    ran = [{**row, BATCH: f"{_sequences(row):g}"} for row in ran]
    columns = telling(ran, ordered_settings(ran[0], without=("gpu_batch_size", BATCH)), (BATCH,))
    crosses, remaining = _crosses(failed, columns, splits)
    lines = []
    for key, group in grouped(ran, columns).items():
        points = [point(float(batch), repeats, BATCH_FIGURES)
                  for (batch,), repeats in grouped(group, [BATCH]).items()]
        points.sort(key=lambda point: point.x)
        lines.append(Line(label(group[0], columns), tuple(points),
                          tuple(crosses.pop(key, {}).items())))
    return lines, remaining + [row for batches in crosses.values() for row in batches.values()]


def _sequences(row: Row) -> float:
    return positive(row, "gpu_batch_size") * positive(row, "num_gpu_batches")


def _crosses(failed: Sequence[Row], columns: Sequence[str], splits: Sequence[str]
             ) -> tuple[dict[tuple[str, ...], dict[float, Row]], list[Row]]:
    """Return failed runs by line and batch size, and those of unknown batch size.

    Rows of failed runs have only the flags of the grid. If all other rows have the same
    num_gpu_batches, failed runs have it, too.
    """
    by_batch: dict[tuple[str, ...], dict[float, Row]] = {}
    left = []
    for row in failed:
        split = row["num_gpu_batches"] or (splits[0] if len(splits) == 1 else "")
        if row["gpu_batch_size"] and split:
            batch = _sequences({**row, "num_gpu_batches": split})
            by_batch.setdefault(tuple(row[name] for name in columns), {})[batch] = row
        else:
            left.append(row)
    return by_batch, left


def draw_batch(rows: Sequence[Row]):
    """Return the figure. Raises `UserError`, also for too many lines."""
    lines, remaining = batch_lines(rows)
    check_number_of(lines)
    figure = new_figure(16, 6.4)
    panels = dict(zip(BATCH_FIGURES, figure.subplots(1, 3), strict=True))
    batches = [point.x for line in lines for point in line.points]
    batches += [batch for line in lines for batch, _ in line.failed]
    for name, axes in panels.items():
        _panel(axes, name, lines, batches)
    cross = _mark_failures(panels["throughput"], lines)
    handles, labels = panels["step"].get_legend_handles_labels()
    if cross is not None:
        handles, labels = [*handles, cross], [*labels, cross.get_label()]
    if any(labels):
        beside(figure, handles, labels)
    entitle(figure, f"Throughput and latency against batch: {common_settings(rows)}",
            notes(lines, remaining), where=measured_where(rows))
    return figure


def _panel(axes, name: str, lines: Sequence[Line], batches: Sequence[float]) -> None:
    title, unit = _PANELS[name]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line, look in zip(lines, LINES, strict=False):
        draw_line(axes, line, name, look)
    axes.set(title=title, ylabel=unit, xlabel="batch: sequences of a block",
             xlim=(min(batches) / 1.3, max(batches) * 1.3))
    log_numbers(axes.xaxis, batches, base=2)
    log_numbers(axes.yaxis, [each.figures[name][1] for line in lines for each in line.points])
    axes.grid(color="0.9")


def _mark_failures(axes, lines: Sequence[Line]):
    """Draw a cross at the bottom for each failed run, in its line's colour.

    Returns a handle for the legend, or None.
    """
    reasons: dict[str, None] = {}
    for height, (line, look) in enumerate(zip(lines, LINES, strict=False)):
        for batch, row in line.failed:
            axes.plot([batch], [0.03 + 0.05 * height], transform=axes.get_xaxis_transform(),
                      color=look["color"], **_CROSS)
            reasons[row["status"]] = None
    return axes.plot([], [], color=GREY, label=", ".join(reasons), **_CROSS)[0] if reasons else None


BUDGET_FIGURES = {"throughput": lambda row: positive(row, "total_tokens_per_second")}


def percent(row: Row) -> float:
    """Return the KV cache bytes in percent of a full cache in 16 bits."""
    return 100 * positive(row, "kv_cache_bytes") / positive(row, "full_kv_cache_bytes")


def budget_lines(rows: Sequence[Row]) -> tuple[list[Line], list[Row]]:
    """Return a line for each combination of settings except cache sizes, and the failed runs.

    Runs with a full cache end all lines of otherwise equal settings. Raises `UserError` if no run
    succeeded, or a figure is missing.
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
    lines = []
    for group in grouped(evicting, columns).values():
        shared = tuple(group[0][name] for name in common)
        points = grouped({id(row): row for row in [*group, *ends.get(shared, ())]}.values(),
                         ("eviction", *SIZES, "kv_cache_bytes", "full_kv_cache_bytes"))
        lines.append(Line(label(group[0], columns), tuple(sorted(
            (point(percent(repeats[0]), repeats, BUDGET_FIGURES) for repeats in points.values()),
            key=lambda each: each.x))))
    return lines, failed


def draw_budget(rows: Sequence[Row]):
    """Return the figure. Raises `UserError`, also for too many lines."""
    lines, failed = budget_lines(rows)
    check_number_of(lines)
    figure = new_figure(10, 6.4)
    axes = figure.subplots()
    for line, look in zip(lines, LINES, strict=False):
        draw_line(axes, line, "throughput", look)
    axes.set(xlabel="KV cache, % of a full one with nothing compressed", xlim=(0, None),
             ylabel="generated tokens/s", ylim=(0, None))
    axes.grid(color="0.9")
    full_bytes = {positive(row, "full_kv_cache_bytes") for row in by_outcome(rows)[0]}
    if len(full_bytes) == 1:
        _in_bytes(axes, full_bytes.pop())
    if any(line.label for line in lines):
        axes.legend(frameon=False, handlelength=3)
    entitle(figure, f"Throughput against KV budget\n{common_settings(rows)}",
            notes(lines, failed), where=measured_where(rows))
    return figure


def _in_bytes(axes, full_bytes: float) -> None:
    """Add an axis in bytes on top."""
    unit, scale = ("GB", GB) if full_bytes >= GB else ("MB", 1e6)
    top = axes.secondary_xaxis("top", functions=(lambda share: share / 100 * full_bytes / scale,
                                                 lambda amount: amount * scale / full_bytes * 100))
    top.set_xlabel(f"KV cache, {unit}")
