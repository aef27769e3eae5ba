"""Checkpoints in safetensors and `pytorch_model.bin` files, and random weights of any shape."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import torch

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import (
    check_checkpoint_file,
    check_text_file,
    populate_mapped,
    read_checkpoint_json,
)
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo
from flexgen_h2o.models.formats import FORMATS
from flexgen_h2o.models.formats.base import DequantizingCheckpoint
from flexgen_h2o.models.quantization import quantization
from flexgen_h2o.models.safetensors_io import bytes_view, pread_exactly, read_header

_SAFETENSORS, _BIN = "model.safetensors", "pytorch_model.bin"
_CONVERT_BYTES = 4 << 20  # of scratch memory to convert dtypes; fits in the CPU's cache


class SafetensorsCheckpoint(Checkpoint):
    """Tensors of a safetensors file, or of a folder with one, sharded or not.

    Reads use preadv into the caller's memory, not mmap, whose resident pages would count twice.

    Parameters
    ----------
    path : Path or str
        A `.safetensors` file, or a folder with `model.safetensors` or
        `model.safetensors.index.json`.

    Raises
    ------
    UserError
        If a file is missing, truncated or damaged, or the index names a shard outside the
        folder.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.source = str(path)
        self._files: dict[Path, int] = {}
        try:
            self._infos, self.absent = _collect(path, _SAFETENSORS, self._open)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path) -> dict[str, TensorInfo]:
        try:
            self._files[file] = os.open(check_checkpoint_file(file), os.O_RDONLY | os.O_CLOEXEC)
            return read_header(file, self._files[file])
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        extent, flat = info.extent, out.view(-1)
        assert isinstance(extent.path, Path)  # only offload files are striped
        fd, width = self._files[extent.path], info.dtype.itemsize
        first = extent.offset + start * width
        if out.dtype == info.dtype:
            pread_exactly(fd, bytes_view(flat), first, extent.path)
            return
        # The scratch tensor is aligned for the stored dtype; the bytes in the file may not be.
        scratch = torch.empty(min(len(flat), _CONVERT_BYTES // width), dtype=info.dtype)
        for done in range(0, len(flat), max(1, len(scratch))):
            part = scratch[: len(flat) - done]
            pread_exactly(fd, bytes_view(part), first + done * width, extent.path)
            flat[done : done + len(part)].copy_(part)

    def close(self) -> None:
        """Close the shards. The checkpoint must not be read afterwards."""
        while self._files:
            os.close(self._files.popitem()[1])


class BinCheckpoint(Checkpoint):
    """Tensors of `pytorch_model.bin`, sharded or not, unpickled with weights_only.

    One shard is mapped at a time. Extents are None, because torch's zip format is internal.

    Parameters
    ----------
    folder : Path or str
        A folder with `pytorch_model.bin` or `pytorch_model.bin.index.json`, or one of these files.

    Raises
    ------
    UserError
        If a file is missing, damaged, not in torch's zip format or holds anything but
        tensors, or if the index names a shard outside the folder.
    """

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.source = str(folder)
        self._lock = threading.Lock()
        self._mapped: tuple[Path, dict[str, torch.Tensor]] | None = None
        self._file: dict[str, Path] = {}
        self._infos, self.absent = _collect(folder, _BIN, self._open)

    def _open(self, file: Path) -> dict[str, TensorInfo]:
        tensors = _load_bin(file)
        self._file.update(dict.fromkeys(tensors, file))
        return {key: TensorInfo(t.dtype, tuple(t.shape), None) for key, t in tensors.items()}

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        out.copy_(self._populated(name, self._tensor(name)))  # of any strides

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        tensor, end = self._tensor(name), start + out.numel()
        if tensor.is_contiguous():
            part = self._populated(name, tensor.view(-1)[start:end])
        else:
            part = self._populated(name, tensor).reshape(-1)[start:end]
        out.view(-1).copy_(part)

    def _populated(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a mapped tensor, or a part of one, with its pages in memory."""
        if tensor.numel():
            span = 1 + sum(stride * (size - 1)
                           for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            populate_mapped(self._file[name], tensor.data_ptr(), span * tensor.itemsize)
        return tensor

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a mapped tensor."""
        file = self._file[name]
        with self._lock:
            if self._mapped is None or self._mapped[0] != file:
                self._mapped = None  # unmap before the next is mapped
                self._mapped = (file, _load_bin(file))
            return self._mapped[1][name]

    def close(self) -> None:
        """Unmap the shard. The checkpoint must not be read afterwards."""
        with self._lock:
            self._mapped = None


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open the checkpoint of a folder: safetensors if there is any, else `.bin`.

    A checkpoint that is quantized according to config.json is dequantized when it is read.

    Parameters
    ----------
    path : Path or str
        A local folder, or one `.safetensors` or `.bin` file.

    Raises
    ------
    UserError
        If there is no checkpoint, or it cannot be used (see the two classes).
    """
    path = Path(path)
    config = path / "config.json"
    values = read_checkpoint_json(config) if config.exists() else None
    settings = quantization(values, str(path)) if isinstance(values, dict) else None
    plain = _open_plain(path)
    if settings is None:
        return plain
    try:
        if not isinstance(plain, SafetensorsCheckpoint):
            raise UserError(f"{path} is quantized, and such checkpoints must be safetensors; get "
                            f"the model with {_SAFETENSORS}")
        return DequantizingCheckpoint(plain, FORMATS[settings.method](plain, settings))
    except BaseException:
        plain.close()
        raise


def _open_plain(path: Path) -> Checkpoint:
    """Open a folder or file, with tensors as stored."""
    if path.is_file():
        return (BinCheckpoint if path.suffix == ".bin" else SafetensorsCheckpoint)(path)
    if not path.is_dir():
        raise UserError(f"no such folder: {path}; give a folder with a checkpoint")
    for kind, name in ((SafetensorsCheckpoint, _SAFETENSORS), (BinCheckpoint, _BIN)):
        if (path / name).exists() or (path / f"{name}.index.json").exists():
            return kind(path)
    raise UserError(
        f"no checkpoint in {path}: looked for {_SAFETENSORS} and {_BIN}, "
        "or either name followed by .index.json"
    )


def _collect(
    path: Path, name: str, open_shard: Callable[[Path], dict[str, TensorInfo]]
) -> tuple[dict[str, TensorInfo], dict[str, Path]]:
    """Return the tensors of the checkpoint `name` in a folder, or of the file `path`.

    The second result is `Checkpoint.absent`.
    """
    file = path / name if path.is_dir() else path
    index = path / f"{name}.index.json"
    if file.exists() or not index.exists():
        return open_shard(file), {}
    shards_of = _read_index(index)
    shards = {shard: open_shard(shard) for shard in dict.fromkeys(shards_of.values())}
    present = {tensor: shards[shard][tensor] for tensor, shard in shards_of.items()
               if tensor in shards[shard]}
    return present, {tensor: shard for tensor, shard in shards_of.items() if tensor not in present}


def _read_index(index: Path) -> dict[str, Path]:
    content = read_checkpoint_json(index)
    shards_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards_of, dict):
        raise UserError(f"{index} is not a checkpoint index: it lacks a weight_map")
    pairs = [(tensor, str(shard)) for tensor, shard in shards_of.items()]
    for _, shard in pairs:
        # Links are not resolved: in the hub's cache they leave the folder. PureWindowsPath splits
        # at both kinds of slash and knows drives.
        outside = PurePosixPath(shard).is_absolute() or PureWindowsPath(shard).drive
        if outside or ".." in PureWindowsPath(shard).parts or "\0" in shard or not shard:
            raise UserError(f"{index} names a shard outside its folder: {shard!r}; do not trust it")
    for shard in dict.fromkeys(shard for _, shard in pairs):
        if not os.path.isfile(index.parent / shard):
            raise UserError(f"missing shard {shard} (named in {index}); download or copy it")
    return {tensor: index.parent / shard for tensor, shard in pairs}


def _load_bin(file: Path) -> dict[str, torch.Tensor]:
    advice = "get the model in safetensors, or save it again with torch.save"
    check_text_file(file, sys.maxsize)
    try:
        with zipfile.ZipFile(file) as parts:
            # torch does not compress: ten compressed megabytes can unpack to ten gigabytes.
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts.infolist()):
                raise ValueError("compressed")
        loaded = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except Exception as error:  # unpickling untrusted bytes raises anything
        raise UserError(
            f"{file} is damaged, too old, or holds more than tensors, and was not loaded; {advice}"
        ) from error
    if not isinstance(loaded, dict):
        raise UserError(f"{file} holds a {type(loaded).__name__}, not named tensors; {advice}")
    return {
        name: tensor
        for name, tensor in loaded.items()
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    }


# Elements generated at a time: these fit in the L2 cache. Any multiple of 16 gives the same values,
# because torch's normal_ converts uniform numbers in groups of 16.
_BLOCK = 1 << 16
_GROUP = 16
_STD = 0.02
_EXPONENT = 127 - 7  # scales MXFP4's numbers, of standard deviation 2.9, to about _STD


class DummyCheckpoint(Checkpoint):
    """Seeded random weights of any shapes, generated when read.

    Values depend on the seed, the tensor's name and `dtype` only, not on the order of reads, the
    thread or the dtype of the destination. Matrices and biases are N(0, 0.02), weights of norms
    1 + N(0, 0.02). Values are drawn in float32 and rounded to `dtype`. 8- and 4-bit matrices are
    drawn as codes of the same mean and deviation, because quantizing 30 billion values would take
    most of an hour.

    Parameters
    ----------
    tensors : mapping of str to tuple of int
        Names and shapes.
    dtype : torch.dtype
        The stored dtype of the tensors.
    seed : int
        Any integer.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int
    ) -> None:
        self.source = "dummy weights"
        self._dtype, self._seed = dtype, seed
        self._infos = {
            name: TensorInfo(dtype, tuple(shape), None) for name, shape in tensors.items()
        }

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(self._seed_of(name))
        is_norm = len(info.shape) == 1 and not name.endswith("bias")
        flat = out.view(-1)
        size = min(_BLOCK, _rounded_up(len(flat)))
        scratch = torch.empty(size, dtype=torch.float32)
        for start in range(0, len(flat), max(1, size)):
            # Draw whole groups and drop the rest: normal_ draws a shorter tail differently, and
            # values would depend on where a block ends.
            count = min(size, len(flat) - start)
            block = scratch[: _rounded_up(count)]
            block.normal_(float(is_norm), _STD, generator=generator)
            drawn = block[:count]
            if out.dtype != self._dtype:
                drawn = drawn.to(self._dtype)
            flat[start : start + count].copy_(drawn)

    def _seed_of(self, name: str) -> int:
        # Python's hash() of a string differs between processes.
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:7], "little")

    def read_quantized(self, name: str, layout: MatrixLayout, out: torch.Tensor,
                       rows: range | None = None) -> bool:
        if rows is not None or layout.bits == 12:
            return False
        generator = np.random.Generator(np.random.SFC64(self._seed_of(name)))
        drawn = generator.integers(0, 2**64 - 1, layout.nbytes // 8, np.uint64, endpoint=True)
        out.copy_(torch.from_numpy(drawn.view(np.uint8)))
        if layout.mxfp4:
            out.view(-1, layout.block_bytes)[:, : layout.head_bytes] = _EXPONENT
            return True
        # Codes from 0 to `levels` have a deviation of about levels / sqrt(12).
        scale = _STD * math.sqrt(12) / layout.levels
        if layout.compact:
            mantissa, exponent = math.frexp(scale)
            heads = out.view(-1, layout.block_bytes)[:, : layout.head_bytes]
            heads[:, :MATRIX_TILE] = 16 * (exponent - 1 + 14) + round(32 * mantissa - 16)
            heads[:, MATRIX_TILE:] = 8 * layout.levels  # in sixteenths: half of the levels
            return True
        factors = out.view(-1, layout.block_bytes)[:, : 4 * MATRIX_TILE].view(torch.float16)
        factors[:, :MATRIX_TILE] = scale
        factors[:, MATRIX_TILE:] = -scale * layout.levels / 2
        return True


def _rounded_up(count: int) -> int:
    return math.ceil(count / _GROUP) * _GROUP
