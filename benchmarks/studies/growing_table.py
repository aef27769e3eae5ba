"""A file of rows that grows from run to run: those that it has are known again."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexgen_h2o.files.rows import csv_line


class GrowingTable:
    """A CSV file of `columns`, of which those of `key` say which row it is.

    Parameters
    ----------
    path : str
        Made if it is not there.
    columns, key : sequence of str
    common : mapping
        Columns that all new rows share.
    """

    def __init__(self, path: str, columns: Sequence[str], key: Sequence[str], common: Mapping):
        self._path, self._columns, self._key = Path(path), tuple(columns), tuple(key)
        self._common = dict(common)
        if not self._path.exists():
            self._path.write_text(csv_line(self._columns), encoding="utf-8")

    def find(self, **row) -> dict[str, str] | None:
        """The file's row of this key, None if it has none."""
        wanted = {name: str((self._common | row).get(name, "")) for name in self._key}
        with self._path.open(newline="", encoding="utf-8") as file:
            return next((old for old in csv.DictReader(file)
                         if all(old[name] == wanted[name] for name in self._key)), None)

    def add(self, **row) -> None:
        """Write a row."""
        row = self._common | row
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(csv_line(map(row.get, self._columns)))
