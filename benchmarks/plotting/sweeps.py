"""Rows of a sweep as lines: which settings tell lines apart, and medians of repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from flexgen_h2o.cli.results import CSV_COLUMNS, EVICTION, SETTINGS
from flexgen_h2o.errors import UserError
from plotting.looks import LINES
from plotting.rows import Row, distinct

NEEDED = (*EVICTION, "gpu_batch_size", "num_gpu_batches", "num_prompts", "prefill_seconds",
          "decode_seconds", "total_tokens_per_second", "kv_cache_bytes", "full_kv_cache_bytes",
          "projected")
"""Columns; a file that `flex_opt --csv` wrote has them too, also one from before there were all of
`CSV_COLUMNS`."""
OK, FULL = "ok", "full"
SIZES = ("hh_ratio", "recent_ratio", "num_heavy_hitter_tokens", "num_window_length")
"""Settings that say how much of a cache is kept."""
_PLACE = ("sweep", "flags", "repeat", "status", "reason")
_FIRST = ("hh_ratio", "weight_bits", "cache_bits")  # what a label says if others would do as well

Key = tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """Medians of a cell's repeats, with the lowest and highest: figure to (low, median, high)."""

    x: float
    figures: Mapping[str, tuple[float, float, float]]
    repeats: int
    projected: bool


@dataclass(frozen=True)
class Line:
    """The points of one combination of settings, by x; and x of its runs that failed."""

    label: str
    points: tuple[Point, ...]
    failed: tuple[tuple[float, Row], ...] = ()


def by_outcome(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows with figures, and those of runs that did not succeed.

    Settings of eviction are empty in rows of a full cache, for which they mean nothing. Raises
    `UserError` where no run succeeded.
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
    """True if nothing is evicted; where a run failed, its flag tells."""
    return row["eviction"] == FULL or (not row["eviction"] and row["hh_ratio"] == "1")


def labels_of(row: Row) -> list[str]:
    """The columns that are a sweep's own: keys of its grid that are no columns of results."""
    return [name for name in row if name not in (*CSV_COLUMNS, *_PLACE)]


def telling(rows: Sequence[Row], columns: Iterable[str], given: Sequence[str] = ()) -> list[str]:
    """The fewest of some columns that tell rows apart as all of them do.

    Parameters
    ----------
    rows : sequence of Row
    columns : iterable of str
        If several would do, the earlier is taken.
    given : sequence of str
        Columns that tell rows apart already.

    Returns
    -------
    list of str
        In the order in which they were chosen: those with the most values first.
    """
    varying = [name for name in columns if len({row[name] for row in rows}) > 1]
    order = sorted(varying, key=lambda name: -len({row[name] for row in rows}))
    kept: list[str] = []
    for name in order:
        seen: dict[Key, str] = {}
        keys = (*given, *kept)
        if any(seen.setdefault(tuple(row[key] for key in keys), row[name]) != row[name]
               for row in rows):
            kept.append(name)
    return kept


def ordered_settings(row: Row, *, without: Iterable[str] = ()) -> list[str]:
    """All columns that may tell lines apart, in the order in which they are preferred."""
    names = dict.fromkeys((*labels_of(row), *_FIRST, *SETTINGS, "host", "device", "prompt_len",
                           "gen_len", "gpu_batch_size", "num_gpu_batches"))
    return [name for name in names if name in row and name not in without]


def label(row: Row, columns: Sequence[str]) -> str:
    """A line's settings in words; an empty text where all lines are alike."""
    full = is_full(row) and any(name in EVICTION for name in columns)
    parts = [f"{name} {row[name] or 'unset'}" for name in columns
             if not (full and name in EVICTION)]
    return ", ".join([*parts, "full cache"] if full else parts)


def point(x: float, rows: Sequence[Row], figures: Mapping[str, Callable[[Row], float]]) -> Point:
    """The repeats of a cell as one point."""
    found = {}
    for name, of in figures.items():
        values = [of(row) for row in rows]
        found[name] = (min(values), median(values), max(values))
    return Point(x, found, len(rows), any(row["projected"] == "true" for row in rows))


def grouped(rows: Iterable[Row], columns: Sequence[str]) -> dict[Key, list[Row]]:
    """Rows by their values of some columns."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row)
    return groups


def check_number_of(lines: Sequence[Line]) -> None:
    """Raise `UserError` for more lines than can be told apart."""
    if len(lines) > len(LINES):
        raise UserError(f"{len(lines)} lines are too many for one figure: choose by --only, such "
                        f"as --only {lines[0].label.split(',')[0].replace(' ', '=')}")


def draw_line(axes, line: Line, figure: str, look: Mapping) -> None:
    """A line's medians, with bars from the lowest to the highest; projected ones are hollow."""
    low, middle, high = zip(*(each.figures[figure] for each in line.points), strict=True)
    xs = [each.x for each in line.points]
    errors = [[m - a for m, a in zip(middle, low, strict=True)],
              [b - m for m, b in zip(middle, high, strict=True)]]
    axes.errorbar(xs, middle, yerr=errors if any(map(any, errors)) else None, capsize=3,
                  label=line.label, **look)
    hollow = [(x, y) for x, y, each in zip(xs, middle, line.points, strict=True) if each.projected]
    if hollow:
        axes.plot(*zip(*hollow, strict=True), linestyle="none", zorder=3,
                  marker=look["marker"], color=look["color"], markerfacecolor="white")


def notes(lines: Sequence[Line], failed: Sequence[Row]) -> list[str]:
    """The caption of a figure: repeats, projections, and rows that have no place in it."""
    points, found = [each for line in lines for each in line.points], []
    if any(each.repeats > 1 for each in points):
        found.append("Medians of repeats, with bars from the lowest to the highest.")
    if any(each.projected for each in points):
        found.append("Hollow marks: projected from the first steps.")
    if failed:
        found.append(f"Left out: {len(failed)} run{'s' if len(failed) > 1 else ''} without figures "
                     f"({', '.join(distinct(failed, 'status'))}).")
    return found


def common_settings(rows: Sequence[Row]) -> str:
    """Model and lengths, where all rows share them."""
    words = [", ".join(distinct(rows, name)) for name in ("model", "dtype")]
    lengths = [distinct(rows, name) for name in ("prompt_len", "gen_len")]
    if all(len(values) == 1 for values in lengths):
        words.append(f"{float(lengths[0][0]):.0f}+{lengths[1][0]} tokens")
    return ", ".join(word for word in words if word)
