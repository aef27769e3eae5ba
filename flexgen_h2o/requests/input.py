"""The input of a job: an index of the lines of a file. The lines themselves stay on disk.

The key of a line is a 64-bit hash of its id and its bytes. Results contain it, so that a job
resumes also if lines were moved. A line takes 21 bytes of the index.
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import BinaryIO, Protocol

import numpy as np

from flexgen_h2o.errors import UserError
from flexgen_h2o.requests.request import BadRequest, read_object, request_id

MAX_LINE_BYTES = 16 << 20
"""Bytes that are read of a line. A longer line is refused."""
VALID, INVALID, DUPLICATE = 0, 1, 2
"""Kinds of lines: with an id, without a readable id, with the id of an earlier line."""
_BOM = b"\xef\xbb\xbf"


class UnreadableInput(UserError):
    """The system reports an error for the input."""


class RequestLines(Protocol):
    """Lines of a job's input: a `JobInput`, or a window of it. The arrays are as in `JobInput`."""

    keys: np.ndarray
    numbers: np.ndarray
    kinds: np.ndarray

    def line(self, index: int) -> bytes:
        """Return the bytes of a line. Raises `UserError` if they do not match its key."""


class JobInput:
    """The lines of a job's input, without blank lines.

    Raises `UserError` if the file cannot be read, is not a regular file, or has no lines.

    Parameters
    ----------
    path : str
        A regular file, because it is read several times.
    progress : callable (int, int), optional
        Called with the bytes indexed so far and the bytes of the file.

    Attributes
    ----------
    keys : numpy array of uint64
        Key of each line.
    numbers : numpy array of uint32
        Its number in the file, from 1.
    kinds : numpy array of uint8
        VALID, INVALID or DUPLICATE.
    offsets : numpy array of uint64
        Its offset in bytes.
    """

    def __init__(self, path: str, *, progress: Callable[[int, int], None] | None = None):
        self.path = path
        with catch_read_errors(path):
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed by close)
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"--input {path} is not a regular file, and its lines are read "
                                "twice: save it as one")
            with catch_read_errors(path):
                self._index(status.st_size, progress or (lambda done, total: None))
            if not len(self.keys):
                raise UserError(f"--input {path} holds no requests: write one a line")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> JobInput:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.keys)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def line(self, index: int) -> bytes:
        """Return the first MAX_LINE_BYTES of a line. Raises `UserError` if the line has changed."""
        line = read_line(self._file, int(self.offsets[index]), self.path)
        check_line(line, self, index, self.path)
        return line

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the indices of lines by their keys, as an int64 array; -1 for unknown keys."""
        order = self._order
        at = np.minimum(np.searchsorted(self.keys, keys, sorter=order), len(order) - 1)
        return np.where(self.keys[order[at]] == keys, order[at], -1)

    @cached_property
    def _order(self) -> np.ndarray:
        """Places in the order of their keys."""
        return np.argsort(self.keys, kind="stable")

    def _index(self, size: int, progress: Callable[[int, int], None]) -> None:
        offsets, keys, ids = array("Q"), array("Q"), array("Q")
        numbers, kinds = array("I"), array("B")
        for number, (offset, line) in enumerate(self._lines(), 1):
            line = _stripped(line)
            if number % 1024 == 0:
                progress(offset, size)
            if not line:
                continue
            name = _read_id(line, number)
            kind = INVALID if name is None else VALID
            offsets.append(offset)
            numbers.append(number)
            kinds.append(kind)
            keys.append(_key(line, name or "", number, kind))
            ids.append(_hash(f"line {number}" if name is None else f"id {name}"))
        progress(size, size)
        self.offsets = np.frombuffer(offsets, np.uint64)
        self.keys, self.numbers = np.frombuffer(keys, np.uint64), np.frombuffer(numbers, np.uint32)
        self.kinds = np.frombuffer(kinds, np.uint8)
        self._mark_duplicates(np.frombuffer(ids, np.uint64))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the first MAX_LINE_BYTES of each line."""
        offset = 0
        while line := self._file.readline(MAX_LINE_BYTES):
            yield offset, line
            while not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                offset += len(line)
                line = self._file.readline(MAX_LINE_BYTES)
            offset += len(line)

    def _mark_duplicates(self, ids: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        duplicates = order[1:][ids[order][1:] == ids[order][:-1]]
        self.kinds[duplicates] = DUPLICATE
        for index in duplicates:
            self.keys[index] ^= np.uint64(_mix(int(self.numbers[index])))


def read_line(file: BinaryIO, offset: int, path: str) -> bytes:
    """Return the first MAX_LINE_BYTES of the line at an offset.

    Raises `UserError` if it cannot be read.
    """
    with catch_read_errors(path):
        file.seek(offset)
        return _stripped(file.readline(MAX_LINE_BYTES))


def check_line(line: bytes, lines: RequestLines, index: int, path: str) -> None:
    """Raise `UserError` if the bytes of a line differ from those that were indexed."""
    number, kind = int(lines.numbers[index]), int(lines.kinds[index])
    if _key(line, _read_id(line, number) or "", number, kind) != int(lines.keys[index]):
        raise UserError(f"--input {path} has been changed while the job runs (line "
                        f"{number}): start it again")


@contextmanager
def catch_read_errors(path: str) -> Iterator[None]:
    """Turn the OSError of a file that cannot be read into `UnreadableInput`."""
    try:
        yield
    except OSError as error:
        raise UnreadableInput(f"cannot read --input {path}: {error.strerror}") from None


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(_BOM).strip()


def _read_id(line: bytes, number: int) -> str | None:
    """Return the id of a line, or None if it cannot be read or the line is too long."""
    if len(line) >= MAX_LINE_BYTES:
        return None
    try:
        return request_id(read_object(line), number)
    except BadRequest:
        return None


def _key(line: bytes, name: str, number: int, kind: int) -> int:
    """Return the key of a line. The line's number is part of it if the id is not unique."""
    digest = hashlib.blake2b(name.encode() + b"\n" + line, digest_size=8).digest()
    return int.from_bytes(digest, "big") ^ (0 if kind == VALID else _mix(number))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mix(number: int) -> int:
    return number * 0x9E3779B97F4A7C15 % 2**64
