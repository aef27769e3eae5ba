"""CSV and JSONL files of results: written row by row, appended to, read back."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_yaml
from flexgen_h2o.files.writing import catch_write_errors, open_atomic

_SEPARATORS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


def format_cell(value: object, digits: int = 6) -> object:
    """Return a value as a CSV cell: empty for None, a float with `digits` digits."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else value


def format_flag_value(value: object) -> object:
    """Return a flag's value as a CSV cell: booleans as in YAML, tuples separated by spaces."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(str(format_flag_value(item)) for item in value)
    return format_cell(value)


def format_csv_line(values: Iterable[object], *, digits: int = 6, end: str = "\n") -> str:
    """Return a line of a CSV file."""
    line = io.StringIO()
    csv.writer(line, lineterminator=end).writerow([format_cell(value, digits) for value in values])
    return line.getvalue()


def append_all(file: io.FileIO, data: bytes) -> None:
    """Append `data` to an open file with one write, completely or not at all. Raises OSError."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except BaseException:
        file.truncate(start)
        raise


def escape_line_breaks(text: str) -> str:
    """Escape the characters in JSON at which Python's `splitlines` would split a line."""
    return text.translate(_SEPARATORS)


class PartialFile:
    """A file that is called `path`.partial until it is complete.

    Rows are written when `_add` returns, completely or not at all, so that a stopped run keeps its
    rows. Methods raise OSError.

    `ending`: suffix of the incomplete file; empty: it has its final name from the beginning.
    """

    def __init__(self, path: str, *, ending: str = ".partial"):
        self._path = Path(path)
        self.partial = Path(f"{path}{ending}")
        self.count = 0

    def _add(self, text: str, count: int = 1) -> int:
        """Append the text of `count` rows; the first call replaces the file of an earlier run.

        Return the number of bytes.
        """
        data = text.encode("utf-8")
        # Unbuffered: a buffer that does not fit on the disk would be written again at close.
        with open(self.partial, "ab" if self.count else "wb", buffering=0) as file:
            append_all(file, data)
        self.count += count
        return len(data)

    def finish(self) -> None:
        """Rename the file to its final name."""
        self.partial.replace(self._path)


class CsvWriter(PartialFile):
    """A CSV file that is written row by row: `path`.partial until `finish`. Raises OSError.

    Lines end with `end`.
    """

    def __init__(self, path: str, columns: Sequence[str], *, end: str = "\n"):
        super().__init__(path)
        self._columns, self._end = tuple(columns), end

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row; the first one replaces the file of an earlier run."""
        header = "" if self.count else format_csv_line(self._columns, end=self._end)
        self._add(header + format_csv_line([row[name] for name in self._columns], end=self._end))


class JsonlWriter(PartialFile):
    """A .jsonl file that is written line by line: `path`.partial until `finish`. Raises OSError."""

    def write(self, record: Mapping[str, object]) -> None:
        """Append a line; the first one replaces the file of an earlier run."""
        self._add(escape_line_breaks(json.dumps(record, ensure_ascii=False)) + "\n")


@contextmanager
def report_partial(done: Callable[[], str]) -> Iterator[None]:
    """Add the text of `done`, unless empty, to the error of a run that stops early."""
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        text = done()
        if not text:
            raise
        raise type(error)(f"{error} ({text})".lstrip()) from None


def report_partial_rows(file: CsvWriter | JsonlWriter | None, rows_text: str = "rows measured"
                        ) -> AbstractContextManager[None]:
    """Add the name of the partial file to the error of a run that stops early."""
    return report_partial(lambda: f"{rows_text} before that: {file.partial}"
                          if file is not None and file.count else "")


def collect_rows(path: str | None, columns: Sequence[str], rows: Iterable[Mapping[str, object]]
                 ) -> list[dict[str, Any]]:
    """Return all rows. With a path, write each to that CSV file before taking the next one.

    Raises `UserError` if the file cannot be written. Errors of the rows get the name of the file
    with the rows before them.
    """
    if path is None:
        return [{**row} for row in rows]
    file = CsvWriter(path, columns)
    all_rows: list[dict[str, Any]] = []
    with report_partial_rows(file):
        for row in rows:
            all_rows.append({**row})
            with catch_write_errors("--csv", path):
                file.write(row)
    with catch_write_errors("--csv", path):
        file.finish()
    return all_rows


def read_csv(path: str, headers: Sequence[Sequence[str]], *, texts: Collection[str],
             may_lack: Collection[str]) -> list[dict[str, object]]:
    """Read the file of --from-csv: rows of texts and numbers, None for an empty number.

    Raises `UserError` if the file is missing, is not CSV in UTF-8, has other columns, or a row is
    malformed.

    `headers`: the allowed headers. `texts` and `may_lack`: columns of text, and columns of numbers
    that may be empty.
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
        if None in values or None in values.values():  # too many or too few cells
            raise ValueError
        return {name: text if name in texts else
                None if text == "" and name in may_lack else float(text)
                for name, text in values.items()}
    except ValueError:
        raise UserError(f"--from-csv {path} line {number} is not a row of this task") from None


def append_row(path: str | os.PathLike, columns: Sequence[str], row: Mapping[str, object], *,
               digits: int = 6) -> None:
    """Append a row to a CSV file that parallel runs share; a new file gets the header `columns`.

    A row is one write under a file lock. Raises `UserError`, and changes nothing, if the file has
    another header; raises OSError if it cannot be written.
    """
    line = format_csv_line(map(row.get, columns), digits=digits)
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        _check_header(file, path, columns)
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            line = format_csv_line(columns) + line
        else:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        append_all(file, line.encode("utf-8"))


def check_header(path: str | os.PathLike, columns: Sequence[str]) -> None:
    """Raise `UserError` if `path` has another header. Call it before a long run."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            _check_header(file, path, columns)


def _check_header(file: io.IOBase, path: str | os.PathLike, columns: Sequence[str]) -> None:
    line = file.readline(1 << 16)
    if line and line.rstrip(b"\r\n") != format_csv_line(columns).strip().encode():
        raise UserError(f"{path} has other columns than this version writes: choose a new file")


class SettingsFile:
    """The settings of a file of results, in `path`.config.yaml.

    `flag` and `path`: the flag of the file of results, for messages, and the file. `settings`:
    plain YAML values. `deciding`: names of settings that must be equal to continue the file.
    """

    def __init__(self, flag: str, path: str, settings: Mapping[str, object],
                 deciding: Sequence[str]):
        self._flag, self._results = flag, path
        self.path = f"{path}.config.yaml"
        self._settings = dict(settings)
        self._deciding = tuple(deciding)

    def check(self) -> None:
        """Raise `UserError` unless the results were made with the same settings."""
        advice = "choose another file, or delete this one"
        if not os.path.exists(self.path):
            raise UserError(f"{self._flag} {self._results} exists without {self.path}, so that it "
                            f"cannot be resumed: {advice}")
        saved = read_yaml(self._flag, self.path)
        saved = saved if isinstance(saved, dict) else {}
        for name in self._deciding:
            if saved.get(name, False) != self._settings[name]:  # a newer switch was off
                raise UserError(f"{self._flag} {self._results} was made with {name} "
                                f"{saved.get(name)!r}, now it is {self._settings[name]!r}: "
                                f"{advice}")

    def write(self) -> None:
        """Write the settings to disk atomically, before there are results. Raises OSError."""
        with open_atomic(self.path) as file:
            yaml.safe_dump(self._settings, file, sort_keys=False, allow_unicode=True)


class ResumableJsonl(PartialFile):
    """A .jsonl file that a later run continues, with its options in `path`.config.yaml.

    Nothing is written before the first line. A last line without a line break, left by a killed
    run, is skipped, and truncated by the next write.

    `flag` and `path`: the flag of the file, for messages, and the file. `options` and `deciding`:
    see `SettingsFile`.
    """

    def __init__(self, flag: str, path: str, options: Mapping[str, object],
                 deciding: Sequence[str]):
        super().__init__(path, ending="")
        self._flag = flag
        self.path = path
        self._settings_file = SettingsFile(flag, path, options, deciding)
        self._complete_bytes = 0  # bytes of complete lines

    def read(self) -> list[dict]:
        """Return the lines of an earlier run, if there was one.

        Raises `UserError` if its options differ or if they are not lines of results.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self._flag} {self.path}: {error.strerror}") from None
        if content:
            self._settings_file.check()
        self._complete_bytes = content.rfind(b"\n") + 1
        lines = content[: self._complete_bytes].split(b"\n")[:-1]
        rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        self.count = len(rows)
        return rows

    def _row(self, number: int, line: bytes) -> dict:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{self._flag} {self.path} line {number} is not a line of results: "
                            "delete the file")
        return row

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Append lines. Raises OSError."""
        if self._complete_bytes:
            os.truncate(self.path, self._complete_bytes)
        else:
            self._settings_file.write()
        self._complete_bytes += self._add("".join(json.dumps(row) + "\n" for row in rows),
                                          len(rows))
