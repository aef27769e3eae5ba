"""Style of the figures, and the rows that they read."""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from flexgen_h2o.errors import UserError

GREY = "0.35"
_STYLE = {"font.size": 13, "axes.titlesize": 14, "axes.labelsize": 13, "legend.fontsize": 12,
          "xtick.labelsize": 12, "ytick.labelsize": 12, "figure.titlesize": 17,
          "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
          "hatch.linewidth": 0.8, "lines.linewidth": 2.0, "lines.markersize": 8,
          "svg.hashsalt": "flexgen_h2o"}  # the same rows make the same SVG
_LETTERS_PER_INCH = 13.0  # of the caption


@contextmanager
def slide_style() -> Iterator[None]:
    """Context with fonts and lines for a slide."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def entitle(figure, title: str, notes: Sequence[str], *, where: str) -> None:
    """Add a title, and a caption with a line for each note and one with the machine."""
    figure.suptitle(title, fontweight="bold", x=0.01, ha="left")
    width = int(figure.get_figwidth() * _LETTERS_PER_INCH)
    lines = [line for text in (*notes, f"Measured on {where}.")
             for line in textwrap.wrap(text, width)]
    figure.supxlabel("\n".join(lines), fontsize=10, color=GREY, x=0.01, ha="left")


def beside(figure, handles: Sequence, labels: Sequence[str]) -> None:
    """Add a legend right of all panels, with lines long enough to show dashes."""
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3)


Row = Mapping[str, str]
_MAX_NAMED = 3  # of hosts or commits in a caption


def read_rows(path: str, required: Iterable[str]) -> list[dict[str, str]]:
    """Return all rows of a CSV file as text.

    Raises `UserError` if the file is missing, is not CSV in UTF-8, has no rows or lacks one of the
    `required` columns.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            names, rows = reader.fieldnames or (), list(reader)
    except OSError as error:
        raise UserError(f"cannot read --csv {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"--csv {path} is not a CSV file in UTF-8") from None
    lacks = [name for name in required if name not in names]
    if lacks:
        raise UserError(f"--csv {path} has no column {lacks[0]}: this figure is not of such rows")
    if not rows:
        raise UserError(f"--csv {path} has no rows")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UserError(f"--csv {path} line {number} has more or fewer cells than columns")
    return rows


def chosen(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """Return the rows selected by ``--only COLUMN=VALUE``.

    Several values of a column match any of them. Raises `UserError` if no row is left.
    """
    conditions: dict[str, set[str]] = {}
    for condition in only:
        column, equals, value = condition.partition("=")
        if not equals or column not in rows[0]:
            raise UserError(f"--only takes COLUMN=VALUE with a column of the file, got "
                            f"{condition!r}")
        conditions.setdefault(column, set()).add(value)
    matching = [row for row in rows
                if all(row[name] in values for name, values in conditions.items())]
    if not matching:
        raise UserError(f"no row has --only {' '.join(only)}")
    return matching


def positive(row: Row, name: str) -> float:
    """Return a cell's number. Raises `UserError` unless it is above 0."""
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"column {name} of --csv has {row[name]!r} where a number above 0 must be")
    return value


def distinct(rows: Sequence[Mapping], name: str) -> list[str]:
    """Return the distinct non-empty values of a column, in order."""
    return list(dict.fromkeys(str(row[name]) for row in rows if row.get(name) not in (None, "")))


def measured_where(rows: Sequence[Mapping]) -> str:
    """Return machine, dates and versions of rows, as far as known."""
    days = sorted({date[:10] for date in distinct(rows, "date")})
    parts = [_some(rows, "host"), _some(rows, "cpu"), _some(rows, "threads", "threads {}"),
             _some(rows, "device", "device {}"),
             " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
             _some(rows, "version", "flexgen_h2o {}"), _some(rows, "commit", "commit {}"),
             _some(rows, "torch", "torch {}")]
    return ", ".join(part for part in parts if part) or "machine unknown"


def _some(rows: Sequence[Mapping], name: str, form: str = "{}") -> str:
    values = distinct(rows, name)
    others = len(values) - _MAX_NAMED
    shown = "/".join(values[:_MAX_NAMED]) + (f" and {others} more" if others > 0 else "")
    return form.format(shown) if values else ""
