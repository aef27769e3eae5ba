"""The interface of quantized tensors, and a checkpoint that dequantizes them when they are read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import INTEGER_BITS, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference.matrix import pack_matrix
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo, fill_rows

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HALF_ERROR = 2.0**-11  # relative error of rounding to float16, except for subnormal numbers
_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: some tens of MB with all temporary tensors


@dataclass(frozen=True)
class Codes:
    """Quantized rows: an element is ``(code - zero point) * scale``.

    Attributes
    ----------
    codes : uint8 Tensor [rows, columns]
    scales, zeros : float32 Tensor [rows, groups]
        Zero points are in units of codes.
    group_of : int64 Tensor [columns]
        The group of each column.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def every(self, step: int) -> Codes:
        """Return rows 0, step, 2 * step, ..."""
        return replace(self, codes=self.codes[::step], scales=self.scales[::step],
                       zeros=self.zeros[::step])

    def values(self) -> Tensor:
        """Return the dequantized rows, float32 [rows, columns]."""
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return zeros.neg_().add_(self.codes).mul_(scales)

    def repack(self, layout: MatrixLayout) -> Tensor | None:
        """Return the same codes in a layout of these rows, uint8 [layout.nbytes].

        Zero points become ``-zero * scale``, rounded to float16. Returns None if a group of the
        layout is not within a group of these codes, or float16 does not hold the scales.
        """
        first = self.group_of[:: layout.group]
        groups = first.repeat_interleave(layout.group)[: len(self.group_of)]
        if not torch.equal(groups, self.group_of):
            return None
        halves = self.scales.half()
        zeros = (-self.zeros * halves.float()).half()
        near = (halves.float() - self.scales).abs() <= _HALF_ERROR * self.scales.abs()
        if not near.all() or not zeros.isfinite().all():
            return None
        rows, columns = self.codes.shape
        codes = torch.zeros(layout.tiles * MATRIX_TILE, layout.groups * layout.group,
                            dtype=torch.int32)
        codes[:rows, :columns] = self.codes
        parts = torch.zeros(2, len(codes), layout.groups, dtype=torch.float16)
        parts[0, :rows], parts[1, :rows] = halves[:, first], zeros[:, first]
        return pack_matrix(codes, parts[0], parts[1], layout)


class RowReader:
    """Reads rows of a quantized tensor, counted over all axes but the last.

    A subclass overrides `codes`, or `values` if its format has no integer codes.
    """

    def codes(self, first: int, stop: int) -> Codes | None:
        """Return rows first:stop as codes; None if the format has no codes."""
        return None

    def values(self, first: int, stop: int) -> Tensor:
        """Return rows first:stop dequantized, float32 [stop - first, columns]."""
        codes = self.codes(first, stop)
        assert codes is not None
        return codes.values()

    def repack(self, rows: range, layout: MatrixLayout) -> Tensor | None:
        """Return the codes of rows in a layout of them, uint8 [layout.nbytes].

        Returns None if the layout cannot hold the codes.
        """
        codes = self.codes(rows[0], rows[-1] + 1)
        return None if codes is None else codes.every(rows.step).repack(layout)


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A tensor that a checkpoint stores as several parts, whose dtypes and shapes are checked.

    Attributes
    ----------
    checkpoint : Checkpoint
    name : str
        The common prefix of the parts' names.
    shape : tuple of int
        The dequantized shape: [outputs, inputs], or [experts, outputs, inputs].
    parts : tuple of str
        The names of the parts.
    levels : int or None
        The highest code; None if the format has no codes.
    """

    checkpoint: Checkpoint = field(repr=False)
    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    levels: int | None = None

    @property
    def rows(self) -> int:
        """The product of all axes but the last."""
        return math.prod(self.shape[:-1])

    def fits(self, layout: MatrixLayout) -> bool:
        """Return True if a layout has enough bits for all codes."""
        return not layout.mxfp4 and self.levels is not None and self.levels <= layout.levels

    @abstractmethod
    def open(self) -> RowReader:
        """Return a reader, which holds the parts that are not stored row by row."""


class DequantizingCheckpoint(Checkpoint):
    """A quantized checkpoint, presented as floating-point tensors.

    Quantized tensors have the dtype float32, in which they are computed. Values are rounded once,
    to the dtype of the tensor that they are read into. Parts of quantized tensors are not among
    the names.

    Parameters
    ----------
    inner : Checkpoint
        Closed with this one.
    tensors : mapping of str to QuantizedTensor
        The quantized tensors of `inner`.

    Raises
    ------
    UserError
        If `inner` also has a tensor of a quantized tensor's name.
    """

    def __init__(self, inner: Checkpoint, tensors: Mapping[str, QuantizedTensor]):
        self.source, self.absent, self._inner = inner.source, inner.absent, inner
        self._tensors = tensors
        parts = {name for tensor in tensors.values() for name in tensor.parts}
        plain = [name for name in inner.names() if name not in parts]
        duplicate = next((name for name in plain if name in tensors), None)
        if duplicate is not None:
            raise UserError(f"{self.source} has a tensor {duplicate} and its quantized parts, too; "
                            "get the model again")
        self._names = dict.fromkeys([*plain, *tensors])

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._tensors:
            return self._inner.info(name)
        return TensorInfo(torch.float32, self._tensors[name].shape, None)

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: Tensor) -> None:
        if name not in self._tensors:
            self._inner.read_part(name, start, out)
            return
        reader = self._tensors[name].open()

        def values(first: int, stop: int) -> Tensor:
            rows = reader.values(first, stop)
            if not bool(rows.isfinite().all()):
                raise UserError(f"{self.source}: tensor {name} has scales or elements that are not "
                                "finite; it is damaged: get it again")
            return rows

        fill_rows(out, start, info.shape[-1], values)

    def read_quantized(self, name: str, layout: MatrixLayout, out: Tensor,
                       rows: range | None = None) -> bool:
        tensor = self._tensors.get(name)
        if tensor is None or layout.bits not in INTEGER_BITS or not tensor.fits(layout):
            return False
        rows = range(tensor.rows) if rows is None else rows
        if (len(rows), tensor.shape[-1]) != (layout.outputs, layout.inputs):
            raise ValueError(f"{name} is of shape {tensor.shape}, and not as {layout}")
        reader, end = tensor.open(), 0
        step = max(1, _CHUNK_ELEMENTS // layout.inputs // MATRIX_TILE) * MATRIX_TILE
        for first in range(0, len(rows), step):
            chunk = rows[first : first + step]
            part = replace(layout, outputs=len(chunk))
            repacked = reader.repack(chunk, part)
            if repacked is None:
                return False
            begin, end = end, end + part.nbytes
            out[begin:end] = repacked
        return True

    def close(self) -> None:
        self._inner.close()


def check_part(checkpoint: Checkpoint, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise `UserError` unless the checkpoint has a part, in one of these dtypes."""
    if name not in checkpoint.names():
        raise UserError(f"{checkpoint.source} has no tensor {name}, without which a quantized "
                        "weight cannot be read; is it complete?")
    dtype = checkpoint.info(name).dtype
    if dtype not in dtypes:
        words = " or ".join(str(allowed).removeprefix("torch.") for allowed in dtypes)
        raise UserError(f"{checkpoint.source}: tensor {name} is stored as "
                        f"{str(dtype).removeprefix('torch.')}, not {words}; it is no part of "
                        "a checkpoint of its quant_method")


def check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    """Raise `UserError` unless a part has this shape."""
    shape = checkpoint.info(name).shape
    if shape != tuple(expected):
        raise UserError(f"{checkpoint.source}: tensor {name} has shape {list(shape)}, not "
                        f"{list(expected)} as quantization_config and its weight call for; do they "
                        "belong together?")


def check_not_empty(checkpoint: Checkpoint, name: str, dims: int | None = None) -> None:
    """Raise `UserError` for a part without elements, or without `dims` axes (None: at least 2)."""
    shape = checkpoint.info(name).shape
    if not all(shape) or (len(shape) < 2 if dims is None else len(shape) != dims):
        raise UserError(f"{checkpoint.source}: tensor {name} has shape {list(shape)}, which is no "
                        "quantized weight; it is damaged")


def read_raw(checkpoint: Checkpoint, name: str, first: int | None = None,
             stop: int | None = None) -> Tensor:
    """Return rows first:stop of a tensor [rows, columns], or all of a tensor, in its own dtype."""
    info = checkpoint.info(name)
    if first is None or stop is None:
        out = torch.empty(info.shape, dtype=info.dtype)
        checkpoint.read_part(name, 0, out)
        return out
    columns = info.shape[-1]
    out = torch.empty(stop - first, columns, dtype=info.dtype)
    checkpoint.read_part(name, first * columns, out)
    return out


def read_group_indices(checkpoint: Checkpoint, name: str, groups: int) -> Tensor:
    """Return the group of each input, int64; raise `UserError` if one is not below `groups`."""
    indices = read_raw(checkpoint, name).long()
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= groups:
        raise UserError(f"{checkpoint.source}: tensor {name} names group "
                        f"{high if low >= 0 else low}, but there are {groups}; it is damaged: get "
                        "it again")
    return indices


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of int32 words, from the lowest bits on.

    Parameters
    ----------
    words : int32 Tensor [...]
    bits : int
        2, 4 or 8.

    Returns
    -------
    uint8 Tensor [..., 32 / bits]
    """
    octets = words.contiguous().unsqueeze(-1).view(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (octets.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)
