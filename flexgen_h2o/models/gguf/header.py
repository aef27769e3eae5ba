"""The header of a GGUF file: its metadata and the offsets of its tensors. No torch.

Every count and length is checked against the file's size and against the largest models before it
is used, so that a damaged or hostile file costs no more than a good one. The gguf package does not
check them, and imports numpy.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.config.weight_layout import BLOCK_TYPES, UNSUPPORTED_TYPES, GGMLType
from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.files.readers import check_checkpoint_file

Value = bool | int | float | str | tuple[bool | int | float, ...]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}
"""Format characters of `struct` by the type of a number."""

_STRING, _LIST = 8, 9
_VERSIONS = (2, 3)
_MAX_COUNTS = {"values": 1 << 12, "tensors": 1 << 17}
_MAX_ENTRIES = 1 << 21  # of all lists: tokens, scores, types and merges of a large vocabulary
_MAX_TEXT = 64 << 20
_MAX_NAME = 1 << 10
_MAX_KEPT = 1 << 12  # bytes of a string, or numbers of a list; longer ones are skipped
_MAX_DIMS = 4
_ALIGNMENTS = {1 << power for power in range(17)}
_LENGTH = struct.Struct("<Q")
_OTHER_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")
_SPLIT = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a GGUF file: rows of blocks.

    Attributes
    ----------
    ggml_type : GGMLType
    shape : tuple of int
        The last size is the length of a row.
    offset, nbytes : int
        Position and size in the file.
    source : Path
        The file, one of several of a split model.
    """

    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: Path


@dataclass(frozen=True)
class GgufHeader:
    """A GGUF file's description of a model.

    Attributes
    ----------
    source : Path
        The file, or the first of several.
    values : mapping
        By key: numbers, short strings, and short lists of numbers.
    tensors : mapping of str to StoredTensor
        The tensors of all files.
    files : tuple of Path
        All files of the model.
    """

    source: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file of a path: itself, or the file in a folder without other weights.

    A GGUF file is recognized by its suffix or its first four bytes. Raises `UserError` for a folder
    with the files of several models.
    """
    if os.path.isfile(path):  # Path.is_file raises some errors
        return path if _is_gguf(path) else None
    if not os.path.isdir(path) or any(any(path.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        return None
    files = [file for file in sorted(path.glob("*")) if os.path.isfile(file) and _is_gguf(file)
             and not file.name.startswith("mmproj")]  # an image encoder
    first = [file for file in files
             if (match := _SPLIT.fullmatch(file.name)) is None or int(match[2]) == 1]
    if len(first) > 1:
        raise UserError(f"{path} holds several GGUF files: give one of them, such as {first[0]}")
    return next(iter(first), None)


def _is_gguf(path: Path) -> bool:
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_header(source: Path) -> GgufHeader:
    """Read the header of a GGUF file, including the other files of a split model.

    Raises
    ------
    UserError
        If a file is missing, unreadable or damaged, if a count or length exceeds the file or any
        model, or if the type of a tensor is not supported.
    """
    header = _read_one(source)
    count = header.values.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return header
    match = _SPLIT.fullmatch(source.name)
    if match is None or int(match[3]) != count:
        raise UserError(f"{source} is one of {short_repr(count)} files of a model: give them their "
                        f"names again, such as NAME-00001-of-{count:05d}.gguf")
    files = [source.with_name(f"{match[1]}-{number:05d}-of-{match[3]}{match[4]}")
             for number in range(1, count + 1)]
    if int(match[2]) != 1:
        raise UserError(f"{source} is file {int(match[2])} of a model's {count}: give the first, "
                        f"{files[0].name}")
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise UserError(f"there is no {missing}, which is one of the {count} files of this model: "
                        "download or copy it")
    tensors = dict(header.tensors)
    for file in files[1:]:
        split_tensors = _read_one(file).tensors
        twice = next((name for name in split_tensors if name in tensors), None)
        if twice is not None:
            raise UserError(f"{file} has a tensor {twice}, as another file of the model: get them "
                            "again")
        tensors.update(split_tensors)
    expected = header.values.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise UserError(f"{source} and the other files of the model have {len(tensors)} tensors, "
                        f"and not {short_repr(expected)}: get them again")
    return replace(header, tensors=tensors, files=tuple(files))


def _read_one(source: Path) -> GgufHeader:
    try:
        with (open(check_checkpoint_file(source), "rb") as file,
              mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data):
            return _Parser(source, data).header()
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise UserError(f"{source} is not a usable GGUF file or is truncated") from error


class _Parser:
    """Reads the header of a mapped file from its beginning to its end."""

    def __init__(self, source: Path, data: mmap.mmap):
        self._source, self._data = source, data
        self._at, self._entries = 0, 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise self._damaged("it does not begin with GGUF")
        self._skip(4)
        if self._data[4:6] == b"\0\0":  # the version in the other byte order
            raise UserError(f"{self._source} is a big-endian GGUF file, which is not supported: "
                            "convert the model again on a little-endian machine")
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._damaged(f"version {version} is none of {_VERSIONS}")
        num_tensors, count = self._count("tensors"), self._count("values")
        values: dict[str, Value] = {}
        for _ in range(count):
            key = self._name()
            value = self._value(self._number("I"))
            if key in values:
                raise self._damaged(f"it has two values {key}")
            if value is not None:
                values[key] = value
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._name()
            if name in entries:
                raise self._damaged(f"it has two tensors {name}")
            entries[name] = self._tensor()
        start = self._start(values.get("general.alignment", 32))
        tensors = {name: self._placed(name, shape, kind, start + offset)
                   for name, (shape, kind, offset) in entries.items()}
        return GgufHeader(self._source, values, tensors, (self._source,))

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Read the shape, type and offset of a tensor."""
        dims = self._number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._damaged(f"a tensor has {dims} dimensions")
        shape = tuple(int(self._number("Q")) for _ in range(dims))[::-1]
        return shape, int(self._number("I")), int(self._number("Q"))

    def _start(self, alignment: Value) -> int:
        """Return the offset of the tensors' data, which follow the header."""
        if alignment not in _ALIGNMENTS:
            raise self._damaged(f"an alignment of {short_repr(alignment)} bytes is not supported")
        return -(-self._at // int(alignment)) * int(alignment)

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        if kind not in BLOCK_TYPES:
            called = UNSUPPORTED_TYPES.get(kind, f"number {kind}")
            raise UserError(f"{self._source}: tensor {name} is of the GGUF type {called}, which is "
                            "not supported; use another quantization of this model, such as Q4_K_M")
        if not all(shape):  # the size of the file bounds none of its other sizes
            raise UserError(f"{self._source}: tensor {name} is empty, of shape {shape}")
        block = BLOCK_TYPES[kind]
        if shape[-1] % block.elements:
            raise self._damaged(f"tensor {name} has rows of {shape[-1]} elements, in blocks of "
                                f"{block.elements}")
        nbytes = math.prod(shape) // block.elements * block.nbytes
        if offset + nbytes > len(self._data):
            raise self._damaged(f"tensor {name} lies past its end")
        return StoredTensor(block, shape, offset, nbytes, self._source)

    def _value(self, kind: int) -> Value | None:
        """Read a value; return None for strings and lists that are too long."""
        if kind == _STRING:
            text = self._text()
            return None if len(text) > _MAX_KEPT else self._decoded(text)
        if kind != _LIST:
            return self._number(self._letter(kind))
        inner, count = int(self._number("I")), int(self._number("Q"))
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise self._damaged(f"a list of {count} entries is longer than any model's")
        if inner == _STRING:
            self._skip_texts(count)
            return None
        letters = f"<{count}{self._letter(inner)}"
        begin = self._at
        self._skip(struct.calcsize(letters))
        return struct.unpack_from(letters, self._data, begin) if count <= _MAX_KEPT else None

    def _skip_texts(self, count: int) -> None:
        """Skip strings: vocabularies have hundreds of thousands."""
        data, at, unpack = self._data, self._at, _LENGTH.unpack_from
        last = len(data) - _LENGTH.size
        for _ in range(count):
            if at > last:
                at += _LENGTH.size  # past the end
                break
            (length,) = unpack(data, at)
            if length > _MAX_TEXT:
                raise self._damaged(f"a text of {length} bytes is longer than any model's")
            at += _LENGTH.size + length
        self._at = at
        self._skip(0)

    def _letter(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"a value is of the unknown type {kind}")
        return _NUMBERS[kind]

    def _count(self, kind: str) -> int:
        count = int(self._number("Q"))
        if count > _MAX_COUNTS[kind]:
            raise self._damaged(f"{count} {kind} are more than any model has")
        return count

    def _name(self) -> str:
        begin, length = self._at + 8, self._text_length()
        if length > _MAX_NAME:
            raise self._damaged(f"a name of {length} bytes is longer than any model's")
        return self._decoded(self._data[begin : begin + length])

    def _text(self) -> bytes:
        begin, length = self._at + 8, self._text_length()
        return self._data[begin : begin + min(length, _MAX_KEPT + 1)]

    def _text_length(self) -> int:
        """Skip a string and return its length."""
        length = int(self._number("Q"))
        if length > _MAX_TEXT:
            raise self._damaged(f"a text of {length} bytes is longer than any model's")
        self._skip(length)
        return length

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a text of it is not UTF-8: {text[:40]!r}") from error

    def _number(self, letter: str) -> Any:
        begin = self._at
        self._skip(struct.calcsize(f"<{letter}"))
        (number,) = struct.unpack_from(f"<{letter}", self._data, begin)
        return number

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise self._damaged(f"its header goes on past its {len(self._data)} bytes")

    def _damaged(self, why: str) -> UserError:
        return UserError(f"{self._source} is not a usable GGUF file or is truncated: {why}")


class Metadata:
    """Checked access to the values of a GGUF file, by keys without the architecture's prefix.

    Methods raise `UserError` for a value of another type or out of range, and for a missing key
    without a default.

    Parameters
    ----------
    header : GgufHeader

    Attributes
    ----------
    architecture : str
        The value of `general.architecture`, or "unknown".
    tensors : mapping of str to StoredTensor
    """

    def __init__(self, header: GgufHeader):
        self.source, self.tensors = header.source, header.tensors
        self._values = header.values
        self.architecture = str(self._values.get("general.architecture", "unknown"))

    def count(self, key: str, default: int | None = None, *, least: int = 1,
              layer: int | None = None) -> int:
        """Return an integer from `least`, or from the default if that is less, to 2^31 - 1.

        A value with a number for each layer must have equal ones, unless `layer` is given.
        """
        least = least if default is None else min(least, default)
        value = self._value(key, default)
        if isinstance(value, tuple) and layer is not None and layer < len(value):
            value = value[layer]
        if isinstance(value, tuple) and len(set(value)) == 1:  # one number per layer
            value = value[0]
        if isinstance(value, tuple) and all(type(number) is int for number in value):
            raise UserError(f"{self.source}: its layers differ in {key}; one number for all layers "
                            "is needed")
        if type(value) is not int or not least <= value < 1 << 31:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._value(key, default)
        if isinstance(value, (bool, str, tuple)) or not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value)
        return decimal(float(value))

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value)
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value)
        return value

    def flags(self, key: str, length: int) -> tuple[bool, ...] | None:
        """Return one boolean per layer; None if the key is missing or has a single number."""
        value = self._values.get(self._full(key))
        if value is None or type(value) is int:
            return None
        if not isinstance(value, tuple) or len(value) != length or set(value) - {0, 1}:
            raise self._wrong(key, value)
        return tuple(map(bool, value))

    def layer_numbers(self, key: str) -> tuple[float, ...]:
        """Return one finite number per layer."""
        value, layers = self._value(key, None), self.count("block_count")
        if not isinstance(value, tuple) or len(value) != layers or not all(
                math.isfinite(number) for number in value):
            raise self._wrong(key, value)
        return value

    def token(self, name: str) -> int | None:
        """Return the id of a special token, such as "eos"; None if the file has none."""
        key = f"tokenizer.ggml.{name}_token_id"
        return self.count(key, least=0) if key in self._values else None

    def has(self, key: str) -> bool:
        """Return True if the file has this key."""
        return self._full(key) in self._values

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor; raise `UserError` if the file has none of that name."""
        if name not in self.tensors:
            raise UserError(f"{self.source} has no tensor {name}; it is incomplete")
        return self.tensors[name]

    def _full(self, key: str) -> str:
        whole = key.startswith(("general.", "tokenizer.", "split.", "xielu."))
        return key if whole else f"{self.architecture}.{key}"

    def _value(self, key: str, default: Value | None) -> Value:
        value = self._values.get(self._full(key), default)
        if value is None:
            raise UserError(f"{self.source} has no value {self._full(key)}; it is incomplete")
        return value

    def _wrong(self, key: str, value: object) -> UserError:
        return UserError(f"{self.source}: its value {self._full(key)} makes no sense: "
                         f"{short_repr(value)}")


def decimal(value: float) -> float:
    """Return the short decimal number that a float32 was rounded from, such as 1e-06."""
    return float(f"{value:.7g}")
