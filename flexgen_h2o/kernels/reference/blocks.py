"""Specification of GGUF blocks: dequantization, and conversion to quantized matrices.

Values equal the gguf package's Python reference bit for bit. Each decoder takes blocks,
uint8 [blocks, bytes]. A block of 256 elements has 8 or 16 groups; each group has an integer scale,
and the block a float16 factor for them. Sources: ggml-common.h and ggml-quants.c of llama.cpp, and
gguf/quants.py, with the same order of float32 operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import GGMLType, MatrixLayout
from flexgen_h2o.kernels.reference.matrix import pack_matrix, pack_mxfp4

_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NOT_A_NUMBER = 255  # an exponent of MXFP4


class Coded(NamedTuple):
    """Blocks whose elements are ``scale * (code - middle) + zero``.

    Attributes
    ----------
    codes : uint8 Tensor [blocks, elements]
    scales : float32 Tensor [blocks, groups]
    middle : int
        The code of the value 0, for types without zero points.
    zeros : float32 Tensor [blocks, groups] or None
    """

    codes: Tensor
    scales: Tensor
    middle: int = 0
    zeros: Tensor | None = None


def dequantize(packed: Tensor, kind: GGMLType) -> Tensor:
    """Return the values of whole rows of blocks.

    Parameters
    ----------
    packed : uint8 Tensor [rows, bytes]
    kind : GGMLType

    Returns
    -------
    float32 Tensor [rows, elements]
    """
    if kind.name in _PLAIN:
        return packed.contiguous().view(_PLAIN[kind.name]).float()
    codes, scales, middle, zeros = _DECODERS[kind.name](packed.reshape(-1, kind.nbytes))
    numbers = codes.view(*scales.shape, -1).float() - middle
    values = scales[..., None] * numbers
    if zeros is not None:
        values += zeros[..., None]
    return values.view(len(packed), -1)


def repack(packed: Tensor, kind: GGMLType, layout: MatrixLayout) -> Tensor | None:
    """Convert rows of blocks to the bytes of a quantized matrix, without a second quantization.

    Codes do not change. A group's scale is rounded to float16, and so is its zero point if the type
    has one (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K); for the other types the zero point is an exact multiple
    of the rounded scale. An element differs from `dequantize` by at most 2^-11 of
    ``|scale * code| + |zero|``, or of ``|element|`` without a zero point; where scale or zero point
    are subnormal in float16, by at most 2^-25 * (code + 1). Types with one float16 scale per block
    (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL) and MXFP4 are exact.

    Parameters
    ----------
    packed : uint8 Tensor [rows, bytes]
    kind : GGMLType
        One with codes.
    layout : MatrixLayout
        One that `kind.fits`; its outputs are the rows.

    Returns
    -------
    uint8 Tensor [layout.nbytes] or None
        None if a scale or a zero point is not finite in float16.
    """
    rows = len(packed)
    blocks = packed.reshape(-1, kind.nbytes)
    if layout.mxfp4:
        exponents, codes = blocks[:, 0].view(rows, -1), interleave_nibbles(blocks[:, 1:])
        if bool((exponents == _NOT_A_NUMBER).any()):
            return None
        return pack_mxfp4(codes.view(rows, -1, codes.shape[1]), exponents, layout)
    codes, scales, middle, zeros = _DECODERS[kind.name](blocks)
    scales = scales.half()
    halves = torch.stack((scales, -middle * scales if zeros is None else zeros.half()))
    if not bool(halves.isfinite().all()):
        return None
    parts = torch.zeros(2, layout.tiles * MATRIX_TILE, layout.groups, dtype=torch.float16)
    parts[:, :rows] = halves.view(2, rows, -1).repeat_interleave(kind.group // layout.group, -1)
    filled = torch.zeros(layout.tiles * MATRIX_TILE, layout.inputs, dtype=torch.int32)
    filled[:rows] = codes.view(rows, -1)
    return pack_matrix(filled, parts[0], parts[1], layout)


def interleave_nibbles(codes: Tensor) -> Tensor:
    """Reorder 4-bit codes so that neighbours share a byte, uint8 [..., 16].

    Byte j of a GGUF block holds elements j (low half) and j + 16 (high half). Byte j of the result
    holds elements 2j and 2j + 1.
    """
    elements = torch.cat((codes & 15, codes >> 4), dim=-1)
    return elements[..., 0::2] | elements[..., 1::2] << 4


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _split(codes: Tensor, *, bits: int, run: int) -> Tensor:
    """Unpack codes of a few bits to uint8 [blocks, elements].

    A run of `run` bytes holds `run` codes in its lowest bits, then `run` codes in the next bits,
    and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs = codes.reshape(len(codes), -1, 1, run)
    return ((runs >> shifts) & (2**bits - 1)).view(len(codes), -1)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """Unpack codes of Q5_0 and Q5_1: the highest bits in 4 bytes at `at`, then the others."""
    high = _split(blocks[:, at : at + 4], bits=1, run=1)
    return _split(blocks[:, at + 4 :], bits=4, run=16) | high << 4


def _q4_0(blocks: Tensor) -> Coded:
    return Coded(_split(blocks[:, 2:], bits=4, run=16), _half(blocks, 0), 8)


def _q4_1(blocks: Tensor) -> Coded:
    codes = _split(blocks[:, 4:], bits=4, run=16)
    return Coded(codes, _half(blocks, 0), zeros=_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Coded:
    return Coded(_five_bits(blocks, 2), _half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> Coded:
    return Coded(_five_bits(blocks, 4), _half(blocks, 0), zeros=_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Coded:
    return Coded(blocks[:, 2:] ^ 0x80, _half(blocks, 0), 128)  # int8 + 128


def _q2_k(blocks: Tensor) -> Coded:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    return Coded(_split(blocks[:, 16:80], bits=2, run=32), scales, zeros=-minima)


def _q3_k(blocks: Tensor) -> Coded:
    packed = blocks[:, 96:108]
    small = _split(packed[:, :8], bits=4, run=8) | _split(packed[:, 8:], bits=2, run=4) << 4
    high = _split(blocks[:, :32], bits=1, run=32)  # 0 subtracts 4
    low = _split(blocks[:, 32:96], bits=2, run=32)
    return Coded(low | high << 2, _half(blocks, 108) * (small.float() - 32), 4)


def _small_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 6-bit scales and minima from 12 bytes to uint8 [blocks, 8] each.

    Bytes 0 to 3 hold scales 0 to 3, and bytes 4 to 7 minima 0 to 3, in their lower 6 bits. Their
    upper 2 bits are the upper bits of scales and minima 4 to 7, whose lower 4 bits are in bytes 8
    to 11.
    """
    first, second, last = packed.reshape(len(packed), 3, 4).unbind(1)
    scales = torch.cat((first & 63, (last & 15) | ((first >> 2) & 48)), 1)
    return scales, torch.cat((second & 63, (last >> 4) | ((second >> 2) & 48)), 1)


def _scales_and_zeros(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and zero points of Q4_K and Q5_K, float32 [blocks, 8]."""
    scales, minima = _small_scales(blocks[:, 4:16])
    return _half(blocks, 0) * scales.float(), -(_half(blocks, 2) * minima.float())


def _q4_k(blocks: Tensor) -> Coded:
    scales, zeros = _scales_and_zeros(blocks)
    return Coded(_split(blocks[:, 16:], bits=4, run=32), scales, zeros=zeros)


def _q5_k(blocks: Tensor) -> Coded:
    scales, zeros = _scales_and_zeros(blocks)
    high = _split(blocks[:, 16:48], bits=1, run=32)
    return Coded(_split(blocks[:, 48:], bits=4, run=32) | high << 4, scales, zeros=zeros)


def _q6_k(blocks: Tensor) -> Coded:
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    high = _split(blocks[:, 128:192], bits=2, run=32)
    return Coded(_split(blocks[:, :128], bits=4, run=64) | high << 4, scales, 32)


def _looked_up(codes: Tensor) -> Tensor:
    """Return the values of IQ4 codes plus 128, uint8."""
    return (torch.tensor(_NON_LINEAR) + 128).to(torch.uint8)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Coded:
    return Coded(_looked_up(_split(blocks[:, 2:], bits=4, run=16)), _half(blocks, 0), 128)


def _iq4_xs(blocks: Tensor) -> Coded:
    high = _split(blocks[:, 2:4], bits=2, run=1)
    small = _split(blocks[:, 4:8], bits=4, run=1) | high << 4
    codes = _looked_up(_split(blocks[:, 8:], bits=4, run=16))
    return Coded(codes, _half(blocks, 0) * (small.float() - 32), 128)


def _mxfp4(blocks: Tensor) -> Coded:
    """Decode doubled values, with halved powers of two; the lowest two powers are subnormal."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    numbers = (torch.tensor(_FP4) + 12).to(torch.uint8)
    codes = numbers[_split(blocks[:, 1:], bits=4, run=16).int()]
    return Coded(codes, bits.view(torch.float32), 12)


_PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})

_DECODERS: Mapping[str, Callable[[Tensor], Coded]] = MappingProxyType({
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4})
