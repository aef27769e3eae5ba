"""The safetensors format: strict parsing of headers, and writing tensor by tensor.

The safetensors library returns tensors, not offsets, and reads through mmap, whose resident pages
count in addition to the copy. The engine streams weights from the checkpoint's bytes and needs
offsets. A file is 8 bytes of header length, a JSON header, and the data.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from xxhash import xxh3_64

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import pread_all
from flexgen_h2o.models.checkpoint import TensorInfo
from flexgen_h2o.storage.disk import Extent

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64",
}
# Older releases of torch lack some of these; a file that uses one is then refused by name.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {code: getattr(torch, name) for code, name in _TORCH_NAMES.items() if hasattr(torch, name)}
)
_CODES = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})
# The reference allows 100 MB, which a hostile file turns into gigabytes of lists. Models need 8.
_MAX_HEADER = 16 << 20
_MAX_DIMS = 16
_CHECKSUMS = "xxh3_64"  # metadata key: the checksums of all tensors, in file order
_DIGITS = 16
_LENGTH_BYTES = 8
_DATA_ALIGNMENT = 64
_READ_CHUNK = 16 << 20


def read_header(path: Path, fd: int) -> dict[str, TensorInfo]:
    """Read and check the header of a safetensors file.

    Parameters
    ----------
    path : Path
        Name of the file, for error messages and extents.
    fd : int
        The file, open for reading.

    Returns
    -------
    dict of str to TensorInfo
        In file order. The extents are inside the file, contiguous and without overlap, and their
        sizes agree with dtype and shape.

    Raises
    ------
    UserError
        If the file is truncated (with the number of missing bytes) or is not valid safetensors.
    """
    size = os.fstat(fd).st_size
    length = int.from_bytes(pread_all(fd, _LENGTH_BYTES, 0), "little")
    if size < _LENGTH_BYTES:
        raise UserError(_truncated(path, _LENGTH_BYTES - size))
    if not 2 <= length <= _MAX_HEADER:
        raise UserError(f"{path} is not a safetensors file: its header length is {length}")
    data_start = _LENGTH_BYTES + length
    if size < data_start:
        raise UserError(_truncated(path, data_start - size))
    raw = bytearray(length)
    pread_exactly(fd, memoryview(raw), _LENGTH_BYTES, path)
    entries = _parse(path, bytes(raw))
    metadata = entries.pop("__metadata__", None)
    infos = {name: _entry(path, name, entry, data_start) for name, entry in entries.items()}
    ordered = sorted(infos.items(), key=_position)
    end = data_start
    for name, info in ordered:
        if info.extent.offset != end:
            raise UserError(
                f"{path} is damaged: tensor {name} starts at byte {info.extent.offset}, "
                f"where the one before it ends at {end}"
            )
        end += info.extent.nbytes
    if size < end:
        raise UserError(_truncated(path, end - size))
    if size > end:
        raise UserError(f"{path} is damaged: {size - end} bytes follow its last tensor")
    checksums = _checksums(metadata, len(ordered))
    return {name: replace(info, checksum=checksum)
            for (name, info), checksum in zip(ordered, checksums, strict=True)}


def pread_exactly(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` (writable bytes) from byte `offset` of the open file `fd`.

    Thread-safe: it does not use the file position. It releases the GIL.

    Raises
    ------
    UserError
        If the file ends early or cannot be read; `path` is named.
    """
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done : done + _READ_CHUNK]], offset + done)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        if got == 0:
            raise UserError(_truncated(path, len(view) - done))
        done += got


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any dtype as writable bytes."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def write_safetensors(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Callable[[str], Iterable[torch.Tensor]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a safetensors file tensor by tensor.

    The header is padded with spaces so that the data starts at a multiple of 64 bytes. Its metadata
    have the checksums of the tensors.

    Parameters
    ----------
    path : Path
        The file to create. It is synchronized to disk when the function returns.
    layout : mapping of str to (torch.dtype, tuple of int)
        The tensors, in file order.
    chunks : callable
        Given a name, yields the elements in row-major order, as contiguous CPU tensors of the
        dtype in `layout`.
    progress : callable, optional
        Called with (bytes done, total bytes) after each chunk.

    Raises
    ------
    OSError
        If the file cannot be written.
    ValueError
        If the chunks of a tensor do not add up to its shape.
    """
    header, total = _header_of(layout, ["0" * _DIGITS] * len(layout))
    written, checksums = 0, []
    with open(path, "xb") as file:
        file.write(header)
        for name, (dtype, shape) in layout.items():
            expected = written + math.prod(shape) * dtype.itemsize
            checksum = xxh3_64()
            for chunk in chunks(name):
                if chunk.dtype != dtype:
                    raise ValueError(f"{name}: a piece is {chunk.dtype}, not {dtype}")
                checksum.update(bytes_view(chunk))
                written += file.write(bytes_view(chunk))
                if progress is not None:
                    progress(written, total)
            if written != expected:
                raise ValueError(f"{name}: its pieces end {written - expected:+d} bytes off")
            checksums.append(checksum.hexdigest())
        file.seek(0)
        file.write(_header_of(layout, checksums)[0])
        file.flush()
        os.fsync(file.fileno())  # the folder is renamed next, and trusted from then on
        # The engine reads with O_DIRECT, so the page cache is not needed.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _header_of(layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], checksums: Sequence[str]
               ) -> tuple[bytes, int]:
    metadata = {"format": "pt", _CHECKSUMS: "".join(checksums)}
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _DATA_ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, end


def _parse(path: Path, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("duplicate key")
        return entries

    try:
        entries = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(entries, dict):
        raise UserError(f"{path} is not a safetensors file: its header is not a JSON object")
    return entries


def _checksums(metadata: object, count: int) -> list[int | None]:
    """Return the checksums of `count` tensors; None for each if the metadata lack any."""
    stored = metadata.get(_CHECKSUMS) if isinstance(metadata, dict) else None
    if not isinstance(stored, str) or not re.fullmatch(f"[0-9a-f]{{{_DIGITS * count}}}", stored):
        return [None] * count
    return [int(stored[start : start + _DIGITS], 16) for start in range(0, len(stored), _DIGITS)]


def _entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    fields = entry if isinstance(entry, dict) else {}
    code, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and isinstance(code, str)
            and len(shape) <= _MAX_DIMS):
        raise UserError(f"{path} is damaged: its header does not describe tensor {name} properly")
    if code not in DTYPES:
        raise UserError(
            f"{path}: tensor {name} has dtype {code}, which this engine does not know; "
            "use a checkpoint in F32, F16 or BF16"
        )
    start, end = offsets
    dtype = DTYPES[code]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise UserError(
            f"{path} is damaged: tensor {name} has {end - start} bytes, "
            f"but {code} of shape {tuple(shape)} takes {math.prod(shape) * dtype.itemsize}"
        )
    return TensorInfo(dtype, tuple(shape), Extent(path, data_start + start, end - start))


def _counts(value: object) -> bool:
    # type() and not isinstance(): JSON's true is an int to Python.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63
                                           for item in value)


def _position(item: tuple[str, TensorInfo]) -> tuple[int, int]:
    # Empty tensors share their offset with the tensor after them, so they sort before it.
    return item[1].extent.offset, item[1].extent.nbytes


def _truncated(path: Path, missing: int) -> str:
    return f"{path} is truncated: {missing} bytes are missing; download or copy it again"
