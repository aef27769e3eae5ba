"""CSV and JSONL files of results: written row by row, appended to, read back."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexgen_h2o.errors import UserError


def _csv_line(cells: Sequence[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def csv_cell(value: object) -> object:
    """A value as the file holds it: empty for None, six digits of a float, spaces in a tuple."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(str(csv_cell(each)) for each in value)
    return f"{value:.6g}" if isinstance(value, float) else value


def cell(value: object) -> object:
    """A value as a CSV file holds it: empty for None, six digits of a float."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


class _Growing:
    """A file that is under its name when it is whole, and until then `path`.partial.

    What was added is on disk when `_add` returns, so that a run that is stopped keeps what it has,
    and a file never holds a part of it. OSError if it cannot write.
    """

    def __init__(self, path: str):
        self._path = Path(path)
        self.partial = Path(f"{path}.partial")
        self.count = 0

    def _add(self, text: str) -> None:
        data = text.encode("utf-8")
        # Unbuffered: what does not fit on the disk would be tried again when the file is closed.
        with open(self.partial, "ab" if self.count else "wb", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                file.truncate(start)
                raise
        self.count += 1

    def finish(self) -> None:
        """Give the file its name."""
        self.partial.replace(self._path)


class RowsFile(_Growing):
    """A CSV file, of which each row is on disk when `write` returns; `path`.partial until `finish`.

    OSError if it cannot write.
    """

    def __init__(self, path: str, columns: Sequence[str]):
        super().__init__(path)
        self._columns = tuple(columns)

    def write(self, row: dict[str, object]) -> None:
        """Add a row; the first one replaces what an earlier run has left."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if not self.count:
            writer.writeheader()
        writer.writerow({name: cell(row[name]) for name in self._columns})
        self._add(text.getvalue())


class LinesFile(_Growing):
    """A .jsonl file, of which each line is on disk when `write` returns; `path`.partial until
    `finish`. OSError if it cannot write.
    """

    def write(self, record: dict[str, object]) -> None:
        """Add a line; the first one replaces what an earlier run has left."""
        self._add(json.dumps(record, ensure_ascii=False) + "\n")


@contextmanager
def keeping(file: RowsFile | LinesFile | None, what: str = "rows measured") -> Iterator[None]:
    """Tell of a run that stops early where its rows are."""
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        if file is None or not file.count:
            raise
        where = f"({what} before that: {file.partial})"
        raise type(error)(f"{error} {where}".lstrip()) from None


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
