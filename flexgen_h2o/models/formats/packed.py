"""GPTQ and AWQ, with codes packed into int32 words and stored by input, and MXFP4.

GPTQ (GPTQModel, AutoGPTQ, optimum), with n = 32 / bits codes in a word from the lowest bits on:

===============  ======================  ====================================================
``qweight``      [inputs / n, outputs]   int32, packed along the inputs
``qzeros``       [groups, outputs / n]   int32, packed along the outputs
``scales``       [groups, outputs]
``g_idx``        [inputs]                the group of each input; without it they are in order
===============  ======================  ====================================================

An element is ``scales[g] * (code - zero)`` with g = g_idx[input]. The format "gptq" stores zero
points less one in each field of a word, "gptq_v2" stores them unchanged. Source: gptqmodel's
BaseQuantLinear and convert_gptq_v1_to_v2_format.

AWQ (AutoAWQ's "gemm") packs eight 4-bit codes along the outputs: ``qweight`` [inputs, outputs / 8],
``qzeros`` [groups, outputs / 8], ``scales`` [groups, outputs]. From the lowest bits on, a word
holds outputs 0, 2, 4, 6, 1, 3, 5, 7. An element is ``(code - zero) * scale``. Source: AutoAWQ,
packing_utils.

MXFP4 as gpt-oss ships it has 4-bit floats in blocks of 32 that share a power of two. ``X_blocks``
[..., rows, blocks, 16] uint8: element 2 * i of a block in the low half of byte i, and 2 * i + 1 in
its high half; a sign bit, two of exponent, one of mantissa. ``X_scales`` [..., rows, blocks] uint8:
the exponent, plus 127. The name of a tensor here is ``X_blocks``, its shape [..., rows,
32 * blocks]; transformers' ``X`` is its transpose in the last two axes. Source: OCP Microscaling
Formats (MX) Specification 1.0.
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


_WEIGHT = ".qweight"
_AWQ_BITS, _AWQ_CODES = 4, 8
_AWQ_FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of a word that holds outputs 0 to 7


@dataclass(frozen=True)
class _GptqReader(RowReader):
    """Reads matrices by output that are stored by input.

    Attributes
    ----------
    words : int32 Tensor
        GPTQ: [inputs / n, outputs]; AWQ: [inputs, outputs / 8].
    zeros : uint8 Tensor [groups, outputs]
    scales : float32 Tensor [groups, outputs]
    group_of : int64 Tensor [inputs]
    bits : int
    """

    words: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: Tensor
    bits: int

    def codes(self, first: int, stop: int) -> Codes:
        zeros, scales = (
            parameter[:, first:stop].T.float() for parameter in (self.zeros, self.scales))
        return Codes(self._unpack(first, stop), scales, zeros, self.group_of)

    def _unpack(self, first: int, stop: int) -> Tensor:
        """Return the codes of outputs first:stop, uint8 [stop - first, inputs]."""
        return unpack(self.words[:, first:stop].T, self.bits).flatten(1)


class _AwqReader(_GptqReader):
    def _unpack(self, first: int, stop: int) -> Tensor:
        begin, end = first // _AWQ_CODES, -(-stop // _AWQ_CODES)
        codes = _unpack_awq(self.words[:, begin:end])
        return codes[:, first - begin * _AWQ_CODES : stop - begin * _AWQ_CODES].T


@dataclass(frozen=True, kw_only=True)
class _Gptq(QuantizedTensor):
    bits: int
    group: int
    zeros_below: bool

    def open(self) -> RowReader:
        qweight, qzeros, scales = (read_raw(self.checkpoint, name) for name in self.parts[:3])
        if self.zeros_below:
            # Add one to each field of a word, with the carries of the subtraction.
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            qzeros = (qzeros.long() + ones).to(torch.int32)  # wraps
        if len(self.parts) == 3:
            group_of = torch.arange(self.shape[-1]) // self.group
        else:
            group_of = read_group_indices(self.checkpoint, self.parts[3], len(scales))
        return _GptqReader(qweight, unpack(qzeros, self.bits).flatten(1), scales, group_of,
                           self.bits)


@dataclass(frozen=True, kw_only=True)
class _Awq(QuantizedTensor):
    group: int

    def open(self) -> RowReader:
        qweight, qzeros, scales = (read_raw(self.checkpoint, name) for name in self.parts)
        group_of = torch.arange(self.shape[-1]) // self.group
        return _AwqReader(qweight, _unpack_awq(qzeros), scales, group_of, _AWQ_BITS)


def _unpack_awq(words: Tensor) -> Tensor:
    """Return the codes of int32 words [rows, words], uint8 [rows, 8 * words]."""
    return unpack(words, _AWQ_BITS)[..., _AWQ_FIELDS].flatten(1)


def find_gptq(checkpoint: Checkpoint, settings: Quantization) -> dict[str, QuantizedTensor]:
    """Return the GPTQ tensors of a checkpoint: see `formats.FORMATS`."""
    (bits,) = settings.bits
    tensors: dict[str, QuantizedTensor] = {}
    for name in _checked_names(checkpoint):
        parts = tuple(name + suffix for suffix in (_WEIGHT, ".qzeros", ".scales", ".g_idx"))
        words, outputs = checkpoint.info(parts[0]).shape
        inputs, groups = words * 32 // bits, checkpoint.info(parts[2]).shape[0]
        group = settings.group_size or inputs
        check_shape(checkpoint, parts[2], (-(-inputs // group), outputs))
        check_shape(checkpoint, parts[1], (groups, -(-outputs * bits // 32)))
        if parts[3] in checkpoint.names():
            check_part(checkpoint, parts[3], (torch.int32, torch.int64))
            check_shape(checkpoint, parts[3], (inputs,))
        else:
            parts = parts[:3]
        tensors[f"{name}.weight"] = _Gptq(checkpoint, name, (outputs, inputs), parts,
                                          (1 << bits) - 1, bits=bits, group=group,
                                          zeros_below=settings.zeros_below)
    return tensors


def find_awq(checkpoint: Checkpoint, settings: Quantization) -> dict[str, QuantizedTensor]:
    """Return the AWQ tensors of a checkpoint: see `formats.FORMATS`."""
    tensors: dict[str, QuantizedTensor] = {}
    for name in _checked_names(checkpoint):
        parts = tuple(name + suffix for suffix in (_WEIGHT, ".qzeros", ".scales"))
        inputs, words = checkpoint.info(parts[0]).shape
        group, outputs = settings.group_size or inputs, words * _AWQ_CODES
        groups = -(-inputs // group)
        check_shape(checkpoint, parts[1], (groups, words))
        check_shape(checkpoint, parts[2], (groups, outputs))
        tensors[f"{name}.weight"] = _Awq(checkpoint, name, (outputs, inputs), parts, 15,
                                         group=group)
    return tensors


def _checked_names(checkpoint: Checkpoint) -> list[str]:
    """Return the prefixes of quantized weights, whose parts have the right dtypes."""
    names = [name.removesuffix(_WEIGHT) for name in checkpoint.names() if name.endswith(_WEIGHT)]
    for name in names:
        for suffix, dtypes in ((_WEIGHT, (torch.int32,)), (".qzeros", (torch.int32,)),
                               (".scales", FLOATS)):
            check_part(checkpoint, name + suffix, dtypes)
            check_not_empty(checkpoint, name + suffix, dims=2)
    return names
