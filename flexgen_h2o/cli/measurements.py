"""Flags, CSV file and plot of commands that measure rows, or read measured ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flexgen_h2o.cli.parser import check_files
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.figures import check_plot

Row = dict[str, Any]


def articles_flag() -> Any:
    """Return the field ``--input-path`` of options that take articles."""
    return flag("path", None, shown="none", metavar="FILE.jsonl",
                help="articles, a JSON object per line: the text in `article`")


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


def check_source(options: Any) -> None:
    """Raise `UserError` unless either ``--input-path`` or ``--from-csv`` is given."""
    if (options.input_path is None) == (options.from_csv is None):
        raise UserError("give --input-path, a .jsonl file of articles, or --from-csv")


def check_outputs(options: Any, outputs: Iterable[tuple[str, str]] = ()) -> None:
    """Raise `UserError` for a plot that cannot be drawn, and for two flags with the same file.

    `outputs` has more (field, file) pairs, for files that are derived from a field.
    """
    if options.plot is not None:
        check_plot("--plot", options.plot)
    check_files(options, ("input_path", "from_csv", "csv", "plot"), outputs)


def report(options: Any, *, read: Callable[[str], list[Row]], measure: Callable[[], list[Row]],
           show: Callable[[list[Row]], None], draw: Callable[[Sequence[Row], str], None]) -> None:
    """Measure rows, or read measured ones; print them and draw their plot.

    Raises `UserError` if a file cannot be read or written. Files are checked before anything is
    measured.

    Parameters
    ----------
    options : dataclass
        With `csv`, `plot` and `from_csv`.
    read : callable
        Returns the rows of the file that ``--from-csv`` names.
    measure : callable
        Returns new rows, and writes them to ``--csv``.
    show, draw : callable
        Print rows; draw them to a file.
    """
    for name in ("csv", "plot"):
        if getattr(options, name) is not None:
            check_writable(flag_name(name), getattr(options, name))
    rows = measure() if options.from_csv is None else read(options.from_csv)
    show(rows)
    if options.plot is not None:
        with catch_write_errors("--plot", options.plot):
            draw(rows, options.plot)


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
