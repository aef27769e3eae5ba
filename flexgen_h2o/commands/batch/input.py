"""The input of a job: a file of lines of which an index stays in memory, and no line.

A line's key, 64 bits, is a hash of its id and its bytes; results carry it, so that what has been
answered is found again wherever the line stands. A line takes 21 bytes of the index.
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

from flexgen_h2o.commands.batch.requests import BadRequest, own_id, read_object
from flexgen_h2o.errors import UserError

MOST_BYTES = 16 << 20
"""The most that is read of a line: a longer one is refused."""
FINE, BROKEN, DUPLICATE = 0, 1, 2
"""The kinds of lines: with an id, without one that can be read, with that of an earlier line."""
_BOM = b"\xef\xbb\xbf"


class RequestLines(Protocol):
    """Lines of a job's input by their places: all of a `JobInput`, or those of a window of it.

    The arrays are `JobInput`'s.
    """

    keys: np.ndarray
    numbers: np.ndarray
    kinds: np.ndarray

    def line(self, place: int) -> bytes:
        """The bytes of a line. Raises `UserError` if they are not those of its key."""


class JobInput:
    """The lines of a job's input that are not blank, counted from 0.

    Parameters
    ----------
    path : str
        A regular file, for it is read again and again.
    progress : callable (int, int), optional
        Told the bytes that have been indexed, and those of the file.

    Attributes
    ----------
    keys : numpy array of uint64
        Of each line.
    numbers : numpy array of uint32
        Its number in the file, from 1.
    kinds : numpy array of uint8
        FINE, BROKEN or DUPLICATE.
    offsets : numpy array of uint64
        Bytes before it.

    Raises
    ------
    UserError
        The file cannot be read, is no regular file or has no lines.
    """

    def __init__(self, path: str, *, progress: Callable[[int, int], None] | None = None):
        self.path = path
        with reading(path):
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed by close)
        try:
            found = os.fstat(self._file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"--input {path} is no regular file, and its lines are read twice: "
                                "save it as one")
            with reading(path):
                self._index(found.st_size, progress or (lambda done, total: None))
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

    def line(self, place: int) -> bytes:
        """The bytes of a line, cut after MOST_BYTES.

        Raises `UserError` if they are not those that the index was made of.
        """
        line = read_line(self._file, int(self.offsets[place]), self.path)
        check_line(line, self, place, self.path)
        return line

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The places of lines by their keys, int64 like `keys` in shape; -1 where there is none."""
        order = self._order
        at = np.minimum(np.searchsorted(self.keys, keys, sorter=order), len(order) - 1)
        return np.where(self.keys[order[at]] == keys, order[at], -1)

    @cached_property
    def _order(self) -> np.ndarray:
        """Places by their keys."""
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
            name = _id(line, number)
            kind = BROKEN if name is None else FINE
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
        """Each line and where it begins; of one that is too long, only its beginning."""
        offset = 0
        while line := self._file.readline(MOST_BYTES):
            yield offset, line
            while not line.endswith(b"\n") and len(line) == MOST_BYTES:
                offset += len(line)
                line = self._file.readline(MOST_BYTES)
            offset += len(line)

    def _mark_duplicates(self, ids: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        again = order[1:][ids[order][1:] == ids[order][:-1]]
        self.kinds[again] = DUPLICATE
        for place in again:
            self.keys[place] ^= np.uint64(_mixed(int(self.numbers[place])))


def read_line(file: BinaryIO, offset: int, path: str) -> bytes:
    """The bytes of a line of an input by the bytes before it, cut after MOST_BYTES.

    Raises `UserError` if it cannot be read.
    """
    with reading(path):
        file.seek(offset)
        return _stripped(file.readline(MOST_BYTES))


def check_line(line: bytes, lines: RequestLines, place: int, path: str) -> None:
    """Raise `UserError` if these are not the bytes that the index of the input was made of."""
    number, kind = int(lines.numbers[place]), int(lines.kinds[place])
    if _key(line, _id(line, number) or "", number, kind) != int(lines.keys[place]):
        raise UserError(f"--input {path} has been changed while the job runs (line "
                        f"{number}): start it again")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise `UserError` in place of the OSError of a file that could not be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read --input {path}: {error.strerror}") from None


def _stripped(line: bytes) -> bytes:
    return line.removeprefix(_BOM).strip()


def _id(line: bytes, number: int) -> str | None:
    """The id of a line; None where it cannot be read or is too long."""
    if len(line) >= MOST_BYTES:
        return None
    try:
        return own_id(read_object(line), number)
    except BadRequest:
        return None


def _key(line: bytes, name: str, number: int, kind: int) -> int:
    """The key of a line. It holds the line's number where the id does not tell it from others."""
    found = hashlib.blake2b(name.encode() + b"\n" + line, digest_size=8).digest()
    return int.from_bytes(found, "big") ^ (0 if kind == FINE else _mixed(number))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(number: int) -> int:
    return number * 0x9E3779B97F4A7C15 % 2**64
