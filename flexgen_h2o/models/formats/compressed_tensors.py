"""compressed-tensors as llm-compressor ships them: packed integers, or 8-bit weights with scales.

pack-quantized, with n = 32 / bits codes in an int32 from the lowest bits on: ``weight_packed``
[rows, columns / n], ``weight_scale`` [rows, groups], ``weight_shape`` (rows, columns), and where it
is not symmetric ``weight_zero_point`` [rows / n, groups], packed along the rows; ``weight_g_idx``
[columns] is the group of each column where they are out of order. Codes and zero points are raised
by half their range. int-quantized: ``weight`` int8, ``weight_zero_point`` int8; float-quantized:
``weight`` float8; both with ``weight_scale`` for the tensor, each row, group or block. An element
is ``(code - zero point) * scale``. Source: PackedQuantizationCompressor and
NaiveQuantizationCompressor of compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.formats.packed import (
    FLOATS,
    CodedRows,
    Codes,
    Packed,
    Rows,
    check_filled,
    check_shape,
    group_indices,
    part,
    raw,
    unpacked,
)
from flexgen_h2o.models.formats.scaled import (
    FLOAT8,
    ScaleGrid,
    grid,
    scaled_floats,
    scaled_integers,
)
from flexgen_h2o.models.quantization import Quantization

_PACKED, _SCALE, _ZERO, _GROUPS = "_packed", "_scale", "_zero_point", "_g_idx"


@dataclass(frozen=True, kw_only=True)
class _Integers(Packed):
    scales: ScaleGrid
    bits: int

    def opened(self) -> Rows:
        group_of, name = self.scales.group_of, self.name + _GROUPS
        if name in self.parts:
            group_of = group_indices(self.checkpoint, name, -(-self.shape[-1]
                                                              // self.scales.block[1]))
        return _IntegerRows(self, group_of)


@dataclass(frozen=True)
class _IntegerRows(CodedRows):
    matrix: _Integers
    group_of: Tensor

    def codes(self, first: int, stop: int) -> Codes:
        matrix, bits = self.matrix, self.matrix.bits
        words = raw(matrix.checkpoint, matrix.name + _PACKED, first, stop)
        codes = unpacked(words, bits).flatten(1)[:, : matrix.shape[-1]]
        scales = matrix.scales.rows(first, stop)
        zeros = torch.full_like(scales, 1 << bits - 1)
        if matrix.name + _ZERO in matrix.parts:
            zeros = self._zeros(first, stop)
        return Codes(codes, scales, zeros, self.group_of)

    def _zeros(self, first: int, stop: int) -> Tensor:
        """Zero points of some rows, float32 [stop - first, groups]."""
        per_word = 32 // self.matrix.bits
        begin, end = first // per_word, -(-stop // per_word)
        words = raw(self.matrix.checkpoint, self.matrix.name + _ZERO, begin, end)
        zeros = unpacked(words.T, self.matrix.bits).flatten(1).T  # [rows, groups]
        return zeros[first - begin * per_word : stop - begin * per_word].float()


def find(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
    """The quantized tensors of a checkpoint by the names of the weights that they stand for;
    UserError where a part is wrong."""
    found: dict[str, Packed] = {}
    for each in checkpoint.names():
        dtype, name = checkpoint.info(each).dtype, each.removesuffix(_PACKED)
        if each.endswith(f".weight{_PACKED}"):
            found[name] = _packed(checkpoint, name, settings)
        elif each.endswith(".weight") and dtype in FLOAT8:
            found[name] = scaled_floats(checkpoint, name, name + _SCALE, settings.block)
        elif each.endswith(".weight") and dtype == torch.int8:
            found[name] = scaled_integers(checkpoint, name, name + _SCALE, name + _ZERO)
    return found


def _packed(checkpoint: Checkpoint, name: str, settings: Quantization) -> _Integers:
    """A pack-quantized matrix, checked."""
    parts = [name + suffix for suffix in (_PACKED, _SCALE, "_shape")]
    part(checkpoint, parts[0], (torch.int32,))
    part(checkpoint, parts[1], FLOATS)
    part(checkpoint, parts[2], (torch.int64, torch.int32))
    check_filled(checkpoint, parts[0], axes=2)
    check_shape(checkpoint, parts[2], (2,))
    rows, columns = shape = tuple(raw(checkpoint, parts[2]).tolist())
    stored = checkpoint.info(parts[0]).shape
    bits = [each for each in settings.bits if stored == (rows, -(-columns * each // 32))]
    if len(bits) != 1 or columns < 1:
        raise UserError(f"{checkpoint.source}: tensor {parts[0]} has shape {list(stored)}, which "
                        f"holds no weight {list(shape)} of {' or '.join(map(str, settings.bits))} "
                        "bits; do config.json and weights belong together?")
    scales = grid(checkpoint, parts[1], shape)
    if name + _ZERO in checkpoint.names():
        part(checkpoint, name + _ZERO, (torch.int32,))
        groups = -(-columns // scales.block[1])
        check_shape(checkpoint, name + _ZERO, (-(-rows * bits[0] // 32), groups))
        parts.append(name + _ZERO)
    if name + _GROUPS in checkpoint.names():
        part(checkpoint, name + _GROUPS, (torch.int32, torch.int64))
        check_shape(checkpoint, name + _GROUPS, (columns,))
        parts.append(name + _GROUPS)
    return _Integers(checkpoint, name, shape, tuple(parts), (1 << bits[0]) - 1, scales=scales,
                     bits=bits[0])
