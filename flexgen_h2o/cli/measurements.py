"""Flags, CSV and plot of tasks that measure rows, or read those that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flexgen_h2o.cli import parser
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.figures import check_plot

Row = dict[str, object]


def articles_flag() -> Any:
    """The field ``--input-path`` of options that take articles."""
    return flag("path", None, shown="none", metavar="FILE.jsonl",
                help="articles: text under `article`")


def csv_flag(subject: str) -> Any:
    """The field ``--csv``; a row is for each `subject`."""
    return flag("path", None, shown="none", metavar="FILE",
                help=f"write a row for each {subject}, anew; FILE.partial until all are in")


def plot_flag(what: str) -> Any:
    """The field ``--plot``, which draws `what`."""
    return flag("path", None, shown="none", metavar="FILE.png",
                help=f"draw {what} (or .svg, .pdf)")


def from_csv_flag() -> Any:
    """The field ``--from-csv``."""
    return flag("path", None, shown="none", metavar="FILE",
                help="run nothing: table, and --plot, of a file that --csv wrote")


def check_source(options: Any) -> None:
    """Raise `UserError` unless options say what is measured, or what was."""
    if (options.input_path is None) == (options.from_csv is None):
        raise UserError("give --input-path, a .jsonl file of articles, or --from-csv")


def check_outputs(options: Any, others: Iterable[tuple[str, str]] = ()) -> None:
    """Raise `UserError` for a plot that cannot be drawn, and for two files of one name.

    `others` are names of fields and of more files that come of them.
    """
    if options.plot is not None:
        check_plot("--plot", options.plot)
    parser.check_files(options, ("input_path", "from_csv", "csv", "plot"), others)


def report(options: Any, *, read: Callable[[str], list[Row]], measure: Callable[[], list[Row]],
           show: Callable[[list[Row]], None], draw: Callable[[Sequence[Row], str], None]) -> None:
    """Measure, or read what was measured; show the rows and draw their plot.

    Parameters
    ----------
    options : dataclass
        With `csv`, `plot` and `from_csv`.
    read : callable
        Rows of the file that ``--from-csv`` names.
    measure : callable
        New rows, which it writes to ``--csv``.
    show, draw : callable
        Print rows; draw them to a file.

    Raises
    ------
    UserError
        A file cannot be written, which is found before anything is measured, or cannot be read.
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
    """All of the rows, each of which is in ``--csv``'s file, if there is one, when the next is
    asked for.

    Raises
    ------
    UserError
        The file cannot be written; or what the rows raise, with the name of the file that has the
        rows before.
    """
    file = None if path is None else CsvWriter(path, columns)
    found: list[Row] = []
    with report_partial_rows(file):
        for row in rows:
            found.append({**row})
            if file is not None:
                with catch_write_errors("--csv", path):
                    file.write(row)
    if file is not None:
        with catch_write_errors("--csv", path):
            file.finish()
    return found
