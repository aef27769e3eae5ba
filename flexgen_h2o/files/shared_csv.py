"""A CSV file that many runs and machines append to."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Mapping, Sequence

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import append_whole, csv_line


def append_row(path: str | os.PathLike, columns: Sequence[str], row: Mapping[str, object], *,
               flag: str, digits: int = 6) -> None:
    """Append a row under the header `columns`, which a new or empty file gets first.

    A row is one write, and writers take turns, so that parallel runs share a file. With nothing
    changed, raises `UserError` when the file has another header, OSError if it cannot write.
    """
    line = csv_line(map(row.get, columns), digits=digits)
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        _check_header(file, path, columns, flag)
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            line = csv_line(columns) + line
        else:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        append_whole(file, line.encode("utf-8"))


def check_header(path: str | os.PathLike, columns: Sequence[str], *, flag: str) -> None:
    """Raise `UserError` when `path` has another header, so that it shows before a long run."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            _check_header(file, path, columns, flag)


def _check_header(file: io.IOBase, path: str | os.PathLike, columns: Sequence[str], flag: str
                  ) -> None:
    found = file.readline(1 << 16)
    if found and found.rstrip(b"\r\n") != csv_line(columns).strip().encode():
        raise UserError(f"{path} has other columns than this version writes: choose a new {flag}")
