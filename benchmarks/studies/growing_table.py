"""A file of rows that grows from run to run: those that it has are known again."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexgen_h2o.files.rows import append_row, check_header
from flexgen_h2o.files.writing import check_writable, writing

INPUT = "input_digest"
"""The column with the `digest` of what the rows were made of."""


def digest(texts: Sequence[object]) -> str:
    """16 hex digits that stand for these texts, or for tasks made of them."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


class GrowingTable:
    """A CSV file of `columns`, of which those of `key` say which row it is.

    Parameters
    ----------
    path : str
        Made with the first row if it is not there.
    columns, key : sequence of str
    common : mapping
        Columns that all new rows share.

    Raises
    ------
    UserError
        It cannot be written, or has other columns.
    """

    def __init__(self, path: str, columns: Sequence[str], key: Sequence[str], common: Mapping):
        check_writable("--csv", path)
        check_header(path, columns, flag="--csv")
        self._path, self._columns, self._key = Path(path), tuple(columns), tuple(key)
        self._common = dict(common)

    def find(self, **row) -> dict[str, str] | None:
        """The file's row of this key, None if it has none."""
        if not os.path.exists(self._path):
            return None
        wanted = {name: str((self._common | row).get(name, "")) for name in self._key}
        with self._path.open(newline="", encoding="utf-8") as file:
            return next((old for old in csv.DictReader(file)
                         if all(old[name] == wanted[name] for name in self._key)), None)

    def add(self, **row) -> None:
        """Write a row. `UserError` if it cannot be written."""
        with writing("--csv", str(self._path)):
            append_row(self._path, self._columns, self._common | row, flag="--csv")
