"""A walk through the header of a GGUF file, before a library believes its counts and lengths.

The gguf library takes what lies past the end of a file for empty: a list that says that it has 2^60
numbers is read without end. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from flexgen_h2o.errors import UserError

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number of each type."""

_STRING, _LIST = 8, 9
_VERSIONS = (2, 3)
_MOST = {"values": 1 << 12, "tensors": 1 << 17}
# Of all lists: the words, scores, kinds and merges of half a million tokens. The library takes
# 20 us and a kilobyte for each.
_MOST_ENTRIES = 1 << 21
_MOST_TEXT = 64 << 20
_MOST_DIMS = 4


def check_header(source: Path) -> None:
    """Hold the header of a GGUF file against the file's size and against what models have.

    Raises `UserError` where a count or a length is beyond either, or a list holds lists.
    """
    try:
        with open(source, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            _Header(source, data).walk()
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise UserError(f"{source} is not a usable GGUF file or is truncated") from error


class _Header:
    """A place in a file's header, from its beginning to its end."""

    def __init__(self, source: Path, data: mmap.mmap):
        self._source, self._data = source, data
        self._at, self._entries, self._order = 0, 0, "<"

    def walk(self) -> None:
        if self._data[:4] != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        self._skip(4)
        if self._data[4:6] == b"\0\0":  # a version of a few bits, from a machine of the other order
            self._order = ">"
        version = self._number(4)
        if version not in _VERSIONS:
            raise self._damaged(f"version {version} is none of {_VERSIONS}")
        tensors, values = self._count("tensors"), self._count("values")
        for _ in range(values):
            self._text()
            self._value(self._number(4))
        for _ in range(tensors):
            self._text()
            dims = self._number(4)
            if not 1 <= dims <= _MOST_DIMS:
                raise self._damaged(f"a tensor has {dims} dimensions")
            self._skip(8 * dims + 4)
            if self._number(8) > len(self._data):
                raise self._damaged("a tensor lies past its end")

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _LIST:
            inner, count = self._number(4), self._number(8)
            self._entries += count
            if self._entries > _MOST_ENTRIES:
                raise self._damaged(f"a list of {count} entries is longer than any model's")
            if inner == _STRING:
                for _ in range(count):
                    self._text()
            else:
                self._skip(count * self._size(inner))
        else:
            self._skip(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise self._damaged(f"a value is of the unknown type {kind}")
        return _SIZES[kind]

    def _count(self, what: str) -> int:
        found = self._number(8)
        if found > _MOST[what]:
            raise self._damaged(f"{found} {what} are more than any model has")
        return found

    def _text(self) -> None:
        length = self._number(8)
        if length > _MOST_TEXT:
            raise self._damaged(f"a text of {length} bytes is longer than any model's")
        self._skip(length)

    def _number(self, size: int) -> int:
        self._skip(size)
        (number,) = struct.unpack_from(f"{self._order}{'I' if size == 4 else 'Q'}", self._data,
                                       self._at - size)
        return number

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise self._damaged(f"its header goes on past its {len(self._data)} bytes")

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self._source} is not a usable GGUF file or is truncated: {why}")
