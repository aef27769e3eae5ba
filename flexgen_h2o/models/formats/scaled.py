"""FP8 and compressed-tensors: weights with a grid of scales.

FP8 (DeepSeek, Qwen3): ``weight`` [rows, columns] float8 and ``weight_scale_inv`` [rows / 128,
columns / 128], rounded up, or one number. An element is ``weight * weight_scale_inv`` of its block.
Scales of activations are ignored: activations are not quantized. Source: DeepSeek-V3's
inference/kernel.py, and FineGrainedFP8 of transformers.

compressed-tensors (llm-compressor), an element is ``(code - zero point) * scale``:

- pack-quantized, n = 32 / bits codes in an int32 from the lowest bits on: ``weight_packed`` [rows,
  columns / n], ``weight_scale`` [rows, groups], ``weight_shape`` (rows, columns). Asymmetric
  weights have ``weight_zero_point`` [rows / n, groups], packed along the rows. ``weight_g_idx``
  [columns] is the group of each column if they are not in order. Codes and zero points are raised
  by half their range.
- int-quantized: ``weight`` int8, ``weight_zero_point`` int8, and
- float-quantized: ``weight`` float8; both with ``weight_scale`` per tensor, row, group or block.

Source: PackedQuantizationCompressor and NaiveQuantizationCompressor of compressed-tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.formats.base import (
    FLOATS,
    Codes,
    QuantizedTensor,
    RowReader,
    check_not_empty,
    check_part,
    check_shape,
    read_group_indices,
    read_raw,
    unpack,
)
from flexgen_h2o.models.quantization import Quantization

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PACKED, _SCALE, _ZERO, _GROUPS = "_packed", "_scale", "_zero_point", "_g_idx"
_SCALES = (*FLOATS, *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []))


@dataclass(frozen=True)
class ScaleGrid:
    """A tensor with one number for each block of a larger tensor [..., rows, columns].

    Attributes
    ----------
    checkpoint : Checkpoint
    name : str
        A tensor [..., rows / block rows, columns / block columns], rounded up, or of one element.
    shape : tuple of int
        Shape of the larger tensor.
    block : tuple of int
        Rows and columns of a block.
    """

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    def rows(self, first: int, stop: int) -> Tensor:
        """Return the numbers of rows first:stop, float32 [stop - first, columns / block columns].
        """
        stored = self.checkpoint.info(self.name).shape
        if math.prod(stored) == 1:
            number = read_raw(self.checkpoint, self.name).float()
            return number.reshape(1, 1).expand(stop - first, 1)
        rows = torch.arange(first, stop)
        entry, row = rows // self.shape[-2], rows % self.shape[-2]
        grid_rows = entry * stored[-2] + row // self.block[0]
        begin, end = int(grid_rows[0]), int(grid_rows[-1]) + 1
        return read_raw(self.checkpoint, self.name, begin, end).float()[grid_rows - begin]

    @property
    def group_of(self) -> Tensor:
        """The column of `rows` that belongs to each column of the tensor, int64 [columns]."""
        return torch.arange(self.shape[-1]) // self.block[1]


def _scale_grid(checkpoint: Checkpoint, name: str, shape: tuple[int, ...],
                block: tuple[int, int] | None = None) -> ScaleGrid:
    """Return the grid `name` of a tensor of `shape`.

    Without a block size it follows from the shape of the grid. Raises `UserError` if the shapes do
    not fit together.
    """
    stored = checkpoint.info(name).shape
    rows, columns = shape[-2:]
    if math.prod(stored) == 1:
        return ScaleGrid(checkpoint, name, shape, (rows, columns))
    if len(stored) == len(shape) and all(stored):
        high, wide = stored[-2:]
        size = block or (-(-rows // high), -(-columns // wide))
        fits = (high, wide) == (-(-rows // size[0]), -(-columns // size[1]))
        even = block or (rows % high, columns % wide) == (0, 0)
        if fits and even and stored[:-2] == shape[:-2]:
            return ScaleGrid(checkpoint, name, shape, size)
    blocks = f" in blocks of {list(block)}" if block else ""
    raise UserError(f"{checkpoint.source}: tensor {name} has shape {list(stored)}, which holds no "
                    f"scales of a weight {list(shape)}{blocks}; do they belong together?")


@dataclass(frozen=True, kw_only=True)
class _ScaledFloats(QuantizedTensor, RowReader):
    """float8 times scales."""

    scales: ScaleGrid

    def open(self) -> RowReader:
        return self

    def values(self, first: int, stop: int) -> Tensor:
        values = read_raw(self.checkpoint, self.name, first, stop).float()
        return values.mul_(self.scales.rows(first, stop)[:, self.scales.group_of])


@dataclass(frozen=True, kw_only=True)
class _ScaledIntegers(QuantizedTensor, RowReader):
    """int8 minus zero points, if there are any, times scales."""

    scales: ScaleGrid
    zeros: ScaleGrid | None

    def open(self) -> RowReader:
        return self

    def codes(self, first: int, stop: int) -> Codes:
        codes = read_raw(self.checkpoint, self.name, first, stop).view(torch.uint8) ^ 0x80  # + 128
        scales = self.scales.rows(first, stop)
        zeros = torch.full_like(scales, 128.0)
        if self.zeros is not None:
            zeros += self.zeros.rows(first, stop)
        return Codes(codes, scales, zeros, self.scales.group_of)


def _scaled_floats(checkpoint: Checkpoint, weight: str, scale: str,
                   block: tuple[int, int] | None) -> _ScaledFloats:
    """Check and return a float8 weight."""
    check_not_empty(checkpoint, weight)
    check_part(checkpoint, scale, _SCALES)
    shape = checkpoint.info(weight).shape
    return _ScaledFloats(checkpoint, weight, shape, (weight, scale),
                         scales=_scale_grid(checkpoint, scale, shape, block))


def _scaled_integers(checkpoint: Checkpoint, weight: str, scale: str, zero: str) -> _ScaledIntegers:
    """Check and return an int8 weight."""
    check_not_empty(checkpoint, weight)
    check_part(checkpoint, scale, FLOATS)
    shape = checkpoint.info(weight).shape
    scales, zeros = _scale_grid(checkpoint, scale, shape), None
    parts: tuple[str, ...] = (weight, scale)
    if zero in checkpoint.names():
        check_part(checkpoint, zero, (torch.int8,))
        zeros, parts = _scale_grid(checkpoint, zero, shape), (*parts, zero)
        if zeros.block != scales.block:
            raise UserError(f"{checkpoint.source}: tensors {scale} and {zero} differ in shape; "
                            "do they belong together?")
    return _ScaledIntegers(checkpoint, weight, shape, parts, 255, scales=scales, zeros=zeros)


@dataclass(frozen=True, kw_only=True)
class _PackedIntegers(QuantizedTensor):
    scales: ScaleGrid
    bits: int

    def open(self) -> RowReader:
        group_of, name = self.scales.group_of, self.name + _GROUPS
        if name in self.parts:
            groups = -(-self.shape[-1] // self.scales.block[1])
            group_of = read_group_indices(self.checkpoint, name, groups)
        return _PackedReader(self, group_of)


@dataclass(frozen=True)
class _PackedReader(RowReader):
    matrix: _PackedIntegers
    group_of: Tensor

    def codes(self, first: int, stop: int) -> Codes:
        matrix, bits = self.matrix, self.matrix.bits
        words = read_raw(matrix.checkpoint, matrix.name + _PACKED, first, stop)
        codes = unpack(words, bits).flatten(1)[:, : matrix.shape[-1]]
        scales = matrix.scales.rows(first, stop)
        zeros = torch.full_like(scales, 1 << bits - 1)
        if matrix.name + _ZERO in matrix.parts:
            zeros = self._zeros(first, stop)
        return Codes(codes, scales, zeros, self.group_of)

    def _zeros(self, first: int, stop: int) -> Tensor:
        """Return the zero points of rows first:stop, float32 [stop - first, groups]."""
        per_word = 32 // self.matrix.bits
        begin, end = first // per_word, -(-stop // per_word)
        words = read_raw(self.matrix.checkpoint, self.matrix.name + _ZERO, begin, end)
        zeros = unpack(words.T, self.matrix.bits).flatten(1).T  # [rows, groups]
        return zeros[first - begin * per_word : stop - begin * per_word].float()


def find_compressed_tensors(checkpoint: Checkpoint,
                            settings: Quantization) -> dict[str, QuantizedTensor]:
    """Return the compressed-tensors tensors of a checkpoint: see `formats.FORMATS`."""
    tensors: dict[str, QuantizedTensor] = {}
    for stored in checkpoint.names():
        dtype, name = checkpoint.info(stored).dtype, stored.removesuffix(_PACKED)
        if stored.endswith(f".weight{_PACKED}"):
            tensors[name] = _packed_integers(checkpoint, name, settings)
        elif stored.endswith(".weight") and dtype in FLOAT8:
            tensors[name] = _scaled_floats(checkpoint, name, name + _SCALE, settings.block)
        elif stored.endswith(".weight") and dtype == torch.int8:
            tensors[name] = _scaled_integers(checkpoint, name, name + _SCALE, name + _ZERO)
    return tensors


def _packed_integers(checkpoint: Checkpoint, name: str, settings: Quantization) -> _PackedIntegers:
    """Check and return a pack-quantized matrix."""
    parts = [name + suffix for suffix in (_PACKED, _SCALE, "_shape")]
    check_part(checkpoint, parts[0], (torch.int32,))
    check_part(checkpoint, parts[1], FLOATS)
    check_part(checkpoint, parts[2], (torch.int64, torch.int32))
    check_not_empty(checkpoint, parts[0], dims=2)
    check_shape(checkpoint, parts[2], (2,))
    rows, columns = shape = tuple(read_raw(checkpoint, parts[2]).tolist())
    stored = checkpoint.info(parts[0]).shape
    bits = [width for width in settings.bits if stored == (rows, -(-columns * width // 32))]
    if len(bits) != 1 or columns < 1:
        raise UserError(f"{checkpoint.source}: tensor {parts[0]} has shape {list(stored)}, which "
                        f"holds no weight {list(shape)} of {' or '.join(map(str, settings.bits))} "
                        "bits; do config.json and weights belong together?")
    scales = _scale_grid(checkpoint, parts[1], shape)
    if name + _ZERO in checkpoint.names():
        check_part(checkpoint, name + _ZERO, (torch.int32,))
        groups = -(-columns // scales.block[1])
        check_shape(checkpoint, name + _ZERO, (-(-rows * bits[0] // 32), groups))
        parts.append(name + _ZERO)
    if name + _GROUPS in checkpoint.names():
        check_part(checkpoint, name + _GROUPS, (torch.int32, torch.int64))
        check_shape(checkpoint, name + _GROUPS, (columns,))
        parts.append(name + _GROUPS)
    return _PackedIntegers(checkpoint, name, shape, tuple(parts), (1 << bits[0]) - 1,
                           scales=scales, bits=bits[0])


def find_fp8(checkpoint: Checkpoint, settings: Quantization) -> dict[str, QuantizedTensor]:
    """Return the FP8 tensors of a checkpoint: see `formats.FORMATS`."""
    return {name: _scaled_floats(checkpoint, name, f"{name}_scale_inv", settings.block)
            for name in checkpoint.names()
            if checkpoint.info(name).dtype in FLOAT8
            and not name.endswith(("activation_scale", "input_scale"))}
