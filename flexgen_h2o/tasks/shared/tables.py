"""Rows of results, read back from the CSV file that a task wrote, and shown as aligned text."""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence

from flexgen_h2o.errors import UserError


def read_csv(path: str, headers: Sequence[Sequence[str]], *, texts: Collection[str],
             may_lack: Collection[str]) -> list[dict[str, object]]:
    """Rows of the file that --from-csv names: texts, numbers, None for an empty number.

    Parameters
    ----------
    headers : sequence of sequences of str
        The columns that a file may have.
    texts, may_lack : collection of str
        Columns that are no numbers, and those whose numbers may be empty.

    Raises
    ------
    UserError
        The file is missing, is not CSV in UTF-8, has other columns, or a row is no such row.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            if tuple(reader.fieldnames or ()) not in headers:
                raise UserError(f"--from-csv {path} has other columns than this task writes")
            return [_row(path, reader.line_num, values, texts=texts, may_lack=may_lack)
                    for values in reader]
    except OSError as error:
        raise UserError(f"cannot read --from-csv {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"--from-csv {path} is not a CSV file in UTF-8") from None


def _row(path: str, number: int, values: dict, *, texts: Collection[str],
         may_lack: Collection[str]) -> dict[str, object]:
    try:
        if None in values or None in values.values():  # a cell too many, or too few
            raise ValueError
        return {name: text if name in texts else
                None if text == "" and name in may_lack else float(text)
                for name, text in values.items()}
    except ValueError:
        raise UserError(f"--from-csv {path} line {number} is not a row of this task") from None


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as text in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]),
                                *map(str.rjust, line[1:], widths[1:])]) for line in lines)
