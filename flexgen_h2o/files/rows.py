"""CSV and JSONL files of results: written row by row, appended to, read back."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_yaml
from flexgen_h2o.files.writing import catch_write_errors, check_writable, open_atomic

_SEPARATORS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def format_cell(value: object, digits: int = 6) -> object:
    """A value as a CSV file holds it: empty for None, so many digits of a float."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else value


def format_flag_value(value: object) -> object:
    """A flag's value as `format_cell`, a truth in YAML's words, spaces in a tuple."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(str(format_flag_value(each)) for each in value)
    return format_cell(value)


def format_csv_line(values: Iterable[object], *, digits: int = 6, end: str = "\n") -> str:
    """A line of a CSV file."""
    line = io.StringIO()
    csv.writer(line, lineterminator=end).writerow([format_cell(value, digits) for value in values])
    return line.getvalue()


def write_csv(path: str | os.PathLike, columns: Sequence[str], rows: Iterable[Mapping[str, object]],
              *, digits: int = 4, flag: str = "--out") -> None:
    """Write a CSV file whole, or not at all, and the folder that it is in.

    Columns that a row lacks are empty. Raises `UserError`, which names the `flag`, if it cannot
    write.
    """
    with catch_write_errors(flag, str(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            file.write(format_csv_line(columns))
            file.writelines(format_csv_line(map(row.get, columns), digits=digits) for row in rows)


def append_all(file: io.FileIO, data: bytes) -> None:
    """Write `data` at the end of an open file, in one go; all of it or nothing. OSError if it
    cannot."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except BaseException:
        file.truncate(start)
        raise


def escape_line_breaks(text: str) -> str:
    """JSON as a line for readers that split lines as Python's `splitlines` does: what JSON itself
    leaves in a text of the characters at which it splits is escaped."""
    return text.translate(_SEPARATORS)


class PartialFile:
    """A file that is under its name when it is whole, and until then `path`.partial.

    What was added is on disk when `_add` returns, so that a run that is stopped keeps what it has,
    and a file never holds a part of it. OSError if it cannot write.

    Parameters
    ----------
    path : str
    ending : str
        Of the name until the file is whole; none if that is its own from the beginning.
    """

    def __init__(self, path: str, *, ending: str = ".partial"):
        self._path = Path(path)
        self.partial = Path(f"{path}{ending}")
        self.count = 0

    def _add(self, text: str, count: int = 1) -> int:
        """Add the text of `count` rows; the first ones replace what an earlier run has left.
        Returns the bytes of it.
        """
        data = text.encode("utf-8")
        # Unbuffered: what does not fit on the disk would be tried again when the file is closed.
        with open(self.partial, "ab" if self.count else "wb", buffering=0) as file:
            append_all(file, data)
        self.count += count
        return len(data)

    def finish(self) -> None:
        """Give the file its name."""
        self.partial.replace(self._path)


class CsvWriter(PartialFile):
    """A CSV file, of which each row is on disk when `write` returns; `path`.partial until `finish`.

    OSError if it cannot write. Lines end with `end`.
    """

    def __init__(self, path: str, columns: Sequence[str], *, end: str = "\n"):
        super().__init__(path)
        self._columns, self._end = tuple(columns), end

    def write(self, row: Mapping[str, object]) -> None:
        """Add a row; the first one replaces what an earlier run has left."""
        header = "" if self.count else format_csv_line(self._columns, end=self._end)
        self._add(header + format_csv_line([row[name] for name in self._columns], end=self._end))


class JsonlWriter(PartialFile):
    """A .jsonl file, of which each line is on disk when `write` returns; `path`.partial until
    `finish`. OSError if it cannot write.
    """

    def write(self, record: Mapping[str, object]) -> None:
        """Add a line; the first one replaces what an earlier run has left."""
        self._add(escape_line_breaks(json.dumps(record, ensure_ascii=False)) + "\n")


@contextmanager
def report_partial_rows(file: CsvWriter | JsonlWriter | None,
                        what: str = "rows measured") -> Iterator[None]:
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


# A CSV file of a benchmark: a row for each thing measured, there for the next run to go on with.


class ResumableCsv:
    """The rows of a file and those that come; each is on disk when `add` returns.

    The file is `path`.partial until `finish`, as of any `CsvWriter`.

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
        self.file = CsvWriter(path, columns)
        partial = self.file.partial
        if os.path.exists(path) and partial.exists():
            raise UserError(f"both {path} and {partial} are there: remove the older one")
        found = _whole_rows(flag, partial if partial.exists() else Path(path), self.columns)
        self._rows = {self._key_of(row): row for row in found}
        if partial.exists():
            self.file.count = len(found)

    def _key_of(self, row: Mapping[str, object]) -> tuple[str, ...]:
        """The key of a row, as the file has it."""
        return tuple(str(format_cell(row[name])) for name in self._key)

    def find(self, row: Mapping[str, object]) -> dict[str, str] | None:
        """The row of the same key, as text; None if it is still to be measured."""
        return self._rows.get(self._key_of(row))

    def add(self, row: dict[str, object]) -> None:
        """Write what was measured in place of a row of the same key. `UserError` if it cannot
        write."""
        key, text = self._key_of(row), {name: str(format_cell(row[name])) for name in self.columns}
        with catch_write_errors(self._flag, self._path):
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
            file.write(format_csv_line(self.columns))
            file.writelines(format_csv_line(row.values()) for row in rows.values())

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


# A CSV file that many runs and machines append to.


def append_row(path: str | os.PathLike, columns: Sequence[str], row: Mapping[str, object], *,
               flag: str, digits: int = 6) -> None:
    """Append a row under the header `columns`, which a new or empty file gets first.

    A row is one write, and writers take turns, so that parallel runs share a file. With nothing
    changed, raises `UserError` when the file has another header, OSError if it cannot write.
    """
    line = format_csv_line(map(row.get, columns), digits=digits)
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        _check_header(file, path, columns, flag)
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            line = format_csv_line(columns) + line
        else:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        append_all(file, line.encode("utf-8"))


def check_header(path: str | os.PathLike, columns: Sequence[str], *, flag: str) -> None:
    """Raise `UserError` when `path` has another header, so that it shows before a long run."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            _check_header(file, path, columns, flag)


def _check_header(file: io.IOBase, path: str | os.PathLike, columns: Sequence[str], flag: str
                  ) -> None:
    found = file.readline(1 << 16)
    if found and found.rstrip(b"\r\n") != format_csv_line(columns).strip().encode():
        raise UserError(f"{path} has other columns than this version writes: choose a new {flag}")


class SettingsFile:
    """The settings that a file of results was made with, in `path`.config.yaml.

    Parameters
    ----------
    flag, path : str
        The flag that names the file of results, for messages, and that file.
    settings : mapping
        Plain YAML values.
    deciding : sequence of str
        Those of them that must be the same to go on.
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
            raise UserError(f"{self._flag} {self._results} is there without {self.path}, so that "
                            f"it can't be gone on with: {advice}")
        saved = read_yaml(self._flag, self.path)
        saved = saved if isinstance(saved, dict) else {}
        for name in self._deciding:
            if name not in saved or saved[name] != self._settings[name]:
                raise UserError(f"{self._flag} {self._results} was made with {name} "
                                f"{saved.get(name)!r}, now it is {self._settings[name]!r}: "
                                f"{advice}")

    def write(self) -> None:
        """Write them to disk, whole or not at all. OSError if it cannot."""
        with open_atomic(self.path) as file:
            yaml.safe_dump(self._settings, file, sort_keys=False, allow_unicode=True)
            file.flush()
            os.fsync(file.fileno())  # a power cut would leave results without them


class ResumableJsonl(PartialFile):
    """Lines in their order, and the options that they were made with in `path`.config.yaml.

    Nothing is written before there is a line. A last line without its end is what a run was
    writing when it died: it is left out, and cut off when the next line comes.

    Parameters
    ----------
    flag, path : str
        The flag that names the file, for messages, and the file.
    options, deciding
        As `SettingsFile` takes them.
    """

    def __init__(self, flag: str, path: str, options: Mapping[str, object],
                 deciding: Sequence[str]):
        super().__init__(path, ending="")
        self._flag = flag
        self.path = path
        self._beside = SettingsFile(flag, path, options, deciding)
        self._whole = 0  # bytes up to the end of the last whole line

    def read(self) -> list[dict]:
        """The lines of an earlier run; none where there was none.

        Raises `UserError` when they were made with other options or are not lines of results.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read {self._flag} {self.path}: {error.strerror}") from None
        if content:
            self._beside.check()
        self._whole = content.rfind(b"\n") + 1
        lines = content[: self._whole].split(b"\n")[:-1]
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
        """Write more lines; they are in the file when this returns. OSError if it cannot."""
        if self._whole:
            os.truncate(self.path, self._whole)
        else:
            self._beside.write()
        self._whole += self._add("".join(json.dumps(row) + "\n" for row in rows), len(rows))
