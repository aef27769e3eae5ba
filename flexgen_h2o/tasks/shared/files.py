"""Files that tasks write: rows that survive a run that is stopped, and where they come from."""

from __future__ import annotations

import csv
import datetime
import errno
import io
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import flexgen_h2o
from flexgen_h2o.errors import UserError
from flexgen_h2o.results import source_commit

ORIGIN = ("date", "version", "commit", "host")
"""Columns of `origin`."""


def origin() -> dict[str, str]:
    """When, with which code and on which machine a row was measured."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "version": flexgen_h2o.__version__, "commit": source_commit(),
            "host": platform.node()}


def check_writable(flag: str, path: str) -> None:
    """Raise `UserError` for a result that could not be written, before anything is computed."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise UserError(f"{flag} {path} is not a regular file")
    folder = os.path.dirname(path) or "."
    try:
        tempfile.TemporaryFile(dir=folder).close()  # only trying tells
    except OSError as error:
        raise UserError(f"cannot write {flag} into the folder {folder}: {error.strerror}") from None


def check_folder(flag: str, folder: str, paths: Iterable[str]) -> None:
    """Raise `UserError` for a folder in which these files could not be written; it may be absent.
    """
    if os.path.isdir(folder):
        for path in paths:
            check_writable(flag, path)
        return
    above = folder
    while not os.path.lexists(above):  # the first that is there will hold the new ones
        above = os.path.dirname(above.rstrip(os.sep)) or "."
    if not os.path.isdir(above):
        raise UserError(f"{flag} {folder} cannot be a folder: {above} is a file")
    check_writable(flag, os.path.join(above, "file"))


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
