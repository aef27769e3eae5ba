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

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import check_writable, open_atomic, writing

_SEPARATORS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def cell(value: object, digits: int = 6) -> object:
    """A value as a CSV file holds it: empty for None, so many digits of a float."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else value


def csv_cell(value: object) -> object:
    """A flag's value as `cell`, a truth in YAML's words, spaces in a tuple."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(str(csv_cell(each)) for each in value)
    return cell(value)


def csv_line(values: Iterable[object], *, digits: int = 6, end: str = "\n") -> str:
    """A line of a CSV file."""
    line = io.StringIO()
    csv.writer(line, lineterminator=end).writerow([cell(value, digits) for value in values])
    return line.getvalue()


def write_csv(path: str | os.PathLike, columns: Sequence[str], rows: Iterable[Mapping[str, object]],
              *, digits: int = 4, flag: str = "--out") -> None:
    """Write a CSV file whole, or not at all, and the folder that it is in.

    Columns that a row lacks are empty. Raises `UserError`, which names the `flag`, if it cannot
    write.
    """
    with writing(flag, str(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as file:
            file.write(csv_line(columns))
            file.writelines(csv_line(map(row.get, columns), digits=digits) for row in rows)


def append_whole(file: io.FileIO, data: bytes) -> None:
    """Write `data` at the end of an open file, in one go; all of it or nothing. OSError if it
    cannot."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except BaseException:
        file.truncate(start)
        raise


def one_line(text: str) -> str:
    """JSON as a line for readers that split lines as Python's `splitlines` does: what JSON itself
    leaves in a text of the characters at which it splits is escaped."""
    return text.translate(_SEPARATORS)


class GrowingFile:
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
            append_whole(file, data)
        self.count += count
        return len(data)

    def finish(self) -> None:
        """Give the file its name."""
        self.partial.replace(self._path)


class RowsFile(GrowingFile):
    """A CSV file, of which each row is on disk when `write` returns; `path`.partial until `finish`.

    OSError if it cannot write. Lines end with `end`.
    """

    def __init__(self, path: str, columns: Sequence[str], *, end: str = "\n"):
        super().__init__(path)
        self._columns, self._end = tuple(columns), end

    def write(self, row: Mapping[str, object]) -> None:
        """Add a row; the first one replaces what an earlier run has left."""
        header = "" if self.count else csv_line(self._columns, end=self._end)
        self._add(header + csv_line([row[name] for name in self._columns], end=self._end))


class LinesFile(GrowingFile):
    """A .jsonl file, of which each line is on disk when `write` returns; `path`.partial until
    `finish`. OSError if it cannot write.
    """

    def write(self, record: Mapping[str, object]) -> None:
        """Add a line; the first one replaces what an earlier run has left."""
        self._add(one_line(json.dumps(record, ensure_ascii=False)) + "\n")


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


# A CSV file of a benchmark: a row for each thing measured, there for the next run to go on with.


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


# A CSV file that many runs and machines append to.


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
