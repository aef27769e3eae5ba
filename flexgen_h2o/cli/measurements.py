"""Flags and CSV file of commands that measure rows, or read measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flexgen_h2o.cli.parser import check_files
from flexgen_h2o.cli.values import flag
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.metrics.figures import check_plot

Row = dict[str, Any]


def csv_flag(subject: str) -> Any:
    """Return the field ``--csv``; each row is of a `subject`."""
    return flag("path", None, shown="none", metavar="FILE",
                help=f"write a row per {subject}; an existing file is replaced. Until the run "
                "ends, the file is FILE.partial")


def plot_flag(subject: str) -> Any:
    """Return the field ``--plot``, which draws `subject`."""
    return flag("path", None, shown="none", metavar="FILE.png",
                help=f"draw {subject}; also .svg and .pdf")


def from_csv_flag() -> Any:
    """Return the field ``--from-csv``."""
    return flag("path", None, shown="none", metavar="FILE",
                help="run nothing: print the table, and draw --plot, from a file of --csv")


def check_outputs(options: Any, outputs: Iterable[tuple[str, str]] = ()) -> None:
    """Raise `UserError` for a plot that cannot be drawn, and for two flags with the same file.

    `outputs` has more (field, file) pairs, for files that are derived from a field.
    """
    if options.plot is not None:
        check_plot("--plot", options.plot)
    check_files(options, ("input_path", "from_csv", "csv", "plot"), outputs)


def collected(path: str | None, columns: Sequence[str], rows: Iterable[Mapping[str, object]]
              ) -> list[Row]:
    """Return all rows. With a path, write each to that CSV file before taking the next one.

    Raises `UserError` if the file cannot be written. Errors of the rows get the name of the file
    with the rows before them.
    """
    if path is None:
        return [{**row} for row in rows]
    file = CsvWriter(path, columns)
    all_rows: list[Row] = []
    with report_partial_rows(file):
        for row in rows:
            all_rows.append({**row})
            with catch_write_errors("--csv", path):
                file.write(row)
    with catch_write_errors("--csv", path):
        file.finish()
    return all_rows
