"""A CSV file of a benchmark: a row for each thing measured, there for the next run to go on with.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.atomic import open_atomic
from flexgen_h2o.files.checks import check_writable, writing
from flexgen_h2o.files.rows import RowsFile, cell, csv_line


class RowTable:
    """The rows of a file and those that come; each is on disk when `add` returns.

    The file is `path`.partial until `finish`, as of any `RowsFile`.

    Parameters
    ----------
    path : str
    columns, key : sequence of str
        All of them, and those whose values tell the rows apart.
    flag : str
        Whose value `path` is.

    Raises
    ------
    UserError
        It cannot be written, or holds other rows than these.
    """

    def __init__(self, path: str, columns: Sequence[str], key: Sequence[str], *,
                 flag: str = "--out"):
        check_writable(flag, path)
        self._path, self._flag = path, flag
        self.columns, self._key = tuple(columns), tuple(key)
        self.file = RowsFile(path, columns)
        partial = self.file.partial
        if os.path.exists(path) and partial.exists():
            raise UserError(f"both {path} and {partial} are there: remove the older one")
        found = _whole_rows(flag, partial if partial.exists() else Path(path), self.columns)
        self._rows = {self._key_of(row): row for row in found}
        if partial.exists():
            self.file.count = len(found)

    def _key_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """The key of a row, as the file has it."""
        return tuple(str(cell(row[name])) for name in self._key)

    def find(self, row: Mapping[str, object]) -> dict[str, str] | None:
        """The row of the same key, as text; None if it is still to be measured."""
        return self._rows.get(self._key_of(row))

    def add(self, row: dict[str, object]) -> None:
        """Write what was measured in place of a row of the same key. `UserError` if it cannot
        write."""
        key, text = self._key_of(row), {name: str(cell(row[name])) for name in self.columns}
        with writing(self._flag, self._path):
            if os.path.exists(self._path):  # whole, and now to grow
                os.replace(self._path, self.file.partial)
                self.file.count = len(self._rows)
            if key in self._rows:
                self._rewrite(self._rows | {key: text})
            else:
                self.file.write(row)
        self._rows[key] = text

    def _rewrite(self, rows: Mapping[tuple[str, ...], dict[str, str]]) -> None:
        with open_atomic(self.file.partial) as file:
            file.write(csv_line(self.columns))
            file.writelines(csv_line(row.values()) for row in rows.values())

    def rows(self) -> list[dict[str, str]]:
        """All of them, as text, in the order of the file."""
        return list(self._rows.values())

    def finish(self) -> None:
        """Give the file its name."""
        if self.file.count:
            self.file.finish()


def _whole_rows(flag: str, path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a file; a last one without its end, as a killed run leaves it, is cut off."""
    try:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        reader = csv.DictReader(io.StringIO(content[:whole].decode("utf-8"), newline=""),
                                strict=True)
        rows = list(reader)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot go on with {flag} {path}: {error}") from None
    if not whole:
        return []
    if tuple(reader.fieldnames or ()) != columns or any(
            None in row or None in row.values() for row in rows):
        raise UserError(f"{flag} {path} has other columns than are to be written: choose another")
    if whole < len(content):
        os.truncate(path, whole)
    return rows
