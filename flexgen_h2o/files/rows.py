"""CSV and JSONL files of results: written row by row, appended to, read back."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.atomic import open_atomic
from flexgen_h2o.files.checks import writing

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
