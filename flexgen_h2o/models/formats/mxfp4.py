"""MXFP4 as gpt-oss ships it: 4-bit floats in blocks of 32 that share a power of two.

``X_blocks`` [..., rows, blocks, 16] uint8: element 2 * i of a block in the low half of byte i, and
2 * i + 1 in its high half; a sign bit, two of exponent, one of mantissa. ``X_scales`` [..., rows,
blocks] uint8: the exponent, plus 127. The name of a tensor here is ``X_blocks``, its shape [...,
rows, 32 * blocks]; transformers' ``X`` is its transpose in the last two axes. Source: OCP
Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference.matrix import pack_mxfp4
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.formats.base import (
    Codes,
    QuantizedTensor,
    RowReader,
    check_not_empty,
    check_part,
    check_shape,
)
from flexgen_h2o.models.quantization import Quantization

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16  # of a block
# Twice the eight magnitudes, which are integers. Codes are raised by the largest of them.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_MIDDLE = max(_DOUBLED)
_BIAS, _NAN = 127, 255


@dataclass(frozen=True)
class _Blocks(QuantizedTensor, RowReader):
    def open(self) -> RowReader:
        return self

    def fits(self, layout: MatrixLayout) -> bool:
        return layout.mxfp4 or super().fits(layout)

    def repack(self, rows: range, layout: MatrixLayout) -> Tensor | None:
        if not layout.mxfp4:
            return super().repack(rows, layout)
        blocks, exponents = self._parts(rows[0], rows[-1] + 1)
        return pack_mxfp4(blocks[:: rows.step], exponents[:: rows.step], layout)

    def codes(self, first: int, stop: int) -> Codes:
        packed, exponents = self._parts(first, stop)
        numbers = torch.tensor([_MIDDLE + number for number in _DOUBLED]
                               + [_MIDDLE - number for number in _DOUBLED], dtype=torch.uint8)
        pairs = torch.stack((packed & 0x0F, packed >> 4), dim=-1)
        codes = numbers[pairs.flatten(1).int()]
        scales = torch.ldexp(torch.full(exponents.shape, 0.5), exponents.int() - _BIAS)
        return Codes(codes, scales, torch.full_like(scales, _MIDDLE),
                     torch.arange(self.shape[-1]) // (2 * _BYTES))

    def _parts(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return blocks uint8 [rows, blocks, 16] and exponents [rows, blocks] as stored."""
        blocks = self.shape[-1] // (2 * _BYTES)
        packed = torch.empty(stop - first, blocks, _BYTES, dtype=torch.uint8)
        self.checkpoint.read_part(self.name + _BLOCKS, first * blocks * _BYTES, packed)
        exponents = torch.empty(stop - first, blocks, dtype=torch.uint8)
        self.checkpoint.read_part(self.name + _SCALES, first * blocks, exponents)
        if bool((exponents == _NAN).any()):
            raise UserError(f"{self.checkpoint.source}: tensor {self.name}{_SCALES} holds scales "
                            "that are no numbers; it is damaged: get it again")
        return packed, exponents


def find_mxfp4(checkpoint: Checkpoint, settings: Quantization) -> dict[str, QuantizedTensor]:
    """Return the MXFP4 tensors of a checkpoint: see `formats.FORMATS`."""
    tensors: dict[str, QuantizedTensor] = {}
    for blocks in checkpoint.names():
        if not blocks.endswith(_BLOCKS):
            continue
        name = blocks.removesuffix(_BLOCKS)
        check_part(checkpoint, blocks, (torch.uint8,))
        check_part(checkpoint, name + _SCALES, (torch.uint8,))
        check_not_empty(checkpoint, blocks)
        shape = checkpoint.info(blocks).shape
        check_shape(checkpoint, blocks, (*shape[:-1], _BYTES))
        if len(shape) < 3:
            raise UserError(f"{checkpoint.source}: tensor {blocks} has shape {list(shape)}, which "
                            "is no matrix of blocks; it is damaged")
        check_shape(checkpoint, name + _SCALES, shape[:-1])
        tensors[blocks] = _Blocks(checkpoint, name, (*shape[:-2], shape[-2] * 2 * _BYTES),
                                (blocks, name + _SCALES), 2 * _MIDDLE)
    return tensors
