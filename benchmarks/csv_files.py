"""CSV files of benchmarks: written as a whole, or resumed by a later run."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, format_cell, format_csv_line
from flexgen_h2o.files.writing import catch_write_errors, check_writable, open_atomic


def write_csv(path: str | os.PathLike, columns: Sequence[str], rows: Iterable[Mapping[str, object]],
              *, digits: int = 4, flag: str = "--out") -> None:
    """Write a CSV file atomically, and create its folder.

    Missing columns of a row are empty. Raises `UserError`, which names the `flag`.
    """
    with catch_write_errors(flag, str(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            file.write(format_csv_line(columns))
            file.writelines(format_csv_line(map(row.get, columns), digits=digits) for row in rows)


class ResumableCsv:
    """A CSV file of measurements that a later run continues.

    A row is written when `add` returns. The file is `path`.partial until `finish`.

    Raises `UserError` if the file cannot be written, or has other columns.

    `columns` and `key`: all columns, and the columns that identify a row. `flag`: the flag of
    `path`, for messages.
    """

    def __init__(self, path: str, columns: Sequence[str], key: Sequence[str], *,
                 flag: str = "--out"):
        check_writable(flag, path)
        self._path, self._flag = path, flag
        self.columns, self._key = tuple(columns), tuple(key)
        self.file = CsvWriter(path, columns)
        partial = self.file.partial
        if os.path.exists(path) and partial.exists():
            raise UserError(f"both {path} and {partial} are there: remove the older one")
        rows = _whole_rows(flag, partial if partial.exists() else Path(path), self.columns)
        self._rows = {self._key_of(row): row for row in rows}
        if partial.exists():
            self.file.count = len(rows)

    def _key_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """Return the key of a row, as text."""
        return tuple(str(format_cell(row[name])) for name in self._key)

    def find(self, row: Mapping[str, object]) -> dict[str, str] | None:
        """Return the row with the same key, as text, or None."""
        return self._rows.get(self._key_of(row))

    def add(self, row: dict[str, object]) -> None:
        """Write a row, replacing one with the same key. Raises `UserError`."""
        key, text = self._key_of(row), {name: str(format_cell(row[name])) for name in self.columns}
        with catch_write_errors(self._flag, self._path):
            if os.path.exists(self._path):  # a complete file becomes partial again
                os.replace(self._path, self.file.partial)
                self.file.count = len(self._rows)
            if key in self._rows:
                self._rewrite(self._rows | {key: text})
            else:
                self.file.write(row)
        self._rows[key] = text

    def _rewrite(self, rows: Mapping[tuple[str, ...], dict[str, str]]) -> None:
        with open_atomic(self.file.partial) as file:
            file.write(format_csv_line(self.columns))
            file.writelines(format_csv_line(row.values()) for row in rows.values())

    def rows(self) -> list[dict[str, str]]:
        """Return all rows, as text, in the order of the file."""
        return list(self._rows.values())

    def finish(self) -> None:
        """Rename the file to its final name."""
        if self.file.count:
            self.file.finish()


def _whole_rows(flag: str, path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a file, and truncate a last row that a killed run left incomplete."""
    try:
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        reader = csv.DictReader(io.StringIO(content[:end].decode("utf-8"), newline=""),
                                strict=True)
        rows = list(reader)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot resume {flag} {path}: {error}") from None
    if not end:
        return []
    if tuple(reader.fieldnames or ()) != columns or any(
            None in row or None in row.values() for row in rows):
        raise UserError(f"{flag} {path} has other columns: choose another file")
    if end < len(content):
        os.truncate(path, end)
    return rows
