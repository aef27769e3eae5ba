"""Blocks of GGUF files as float32 values, bit for bit those of gguf's own Python reference.

Each function takes blocks, uint8 [blocks, bytes], and gives float32 [blocks, elements]. A block of
256 elements has 8 or 16 groups with a small integer as scale each, under one float16 for all.
Sources: ggml-common.h and ggml-quants.c of llama.cpp, and gguf/quants.py, whose order of float32
operations is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from flexgen_h2o.models.gguf_kinds import KINDS

_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(packed: Tensor, kind: str) -> Tensor:
    """The values of whole rows of blocks.

    Parameters
    ----------
    packed : uint8 Tensor [rows, bytes]
    kind : str
        The name of one of `gguf_kinds.KINDS`.

    Returns
    -------
    float32 Tensor [rows, elements]
    """
    if kind in _PLAIN:
        return packed.contiguous().view(_PLAIN[kind]).float()
    size = next(each.nbytes for each in KINDS.values() if each.name == kind)
    return _DECODERS[kind](packed.reshape(-1, size)).view(len(packed), -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _split(codes: Tensor, *, bits: int, run: int) -> Tensor:
    """Codes of a few bits, uint8 [blocks, elements].

    The bytes come in runs of `run`; a run holds that many codes in its lowest bits, then that many
    in the next ones.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs = codes.reshape(len(codes), -1, 1, run)
    return ((runs >> shifts) & (2**bits - 1)).view(len(codes), -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_split(blocks[:, 2:], bits=4, run=16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _split(blocks[:, 4:], bits=4, run=16).float() + _half(blocks, 2)


def five_bits(blocks: Tensor, at: int) -> Tensor:
    """Codes of Q5_0 and Q5_1, uint8 [blocks, 32]: highest bits in 4 bytes at `at`, then the rest.
    """
    high = _split(blocks[:, at : at + 4], bits=1, run=1)
    return _split(blocks[:, at + 4 :], bits=4, run=16) | high << 4


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * five_bits(blocks, 4).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _grouped(blocks: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Codes as float32 [blocks, groups, elements of a group]."""
    return codes.reshape(len(blocks), scales.shape[1], -1).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = _grouped(blocks, _split(blocks[:, 16:80], bits=2, run=32), scales)
    return (scales[..., None] * codes - minima[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    small = _split(packed[:, :8], bits=4, run=8) | _split(packed[:, 8:], bits=2, run=4) << 4
    scales = _half(blocks, 108) * (small.float() - 32)
    high = _split(blocks[:, :32], bits=1, run=32)  # 0: 4 less
    low = _split(blocks[:, 32:96], bits=2, run=32)
    codes = _grouped(blocks, low | high << 2, scales) - 4
    return (scales[..., None] * codes).flatten(1)


def _small_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of 6 bits in 12 bytes, uint8 [blocks, 8] each.

    Four bytes hold the first four scales, four the first four minima, each with two bits of a later
    one on top; the last four bytes hold the low halves of the later scales and minima.
    """
    first, second, last = packed.view(len(packed), 3, 4).unbind(1)
    scales = torch.cat((first & 63, (last & 15) | ((first >> 2) & 48)), 1)
    return scales, torch.cat((second & 63, (last >> 4) | ((second >> 2) & 48)), 1)


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Those of Q4_K and Q5_K, float32 [blocks, 8]: a value is scale * code - minimum."""
    scales, minima = _small_scales(blocks[:, 4:16])
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = scales_and_minima(blocks)
    codes = _grouped(blocks, _split(blocks[:, 16:], bits=4, run=32), scales)
    return (scales[..., None] * codes - minima[..., None]).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = scales_and_minima(blocks)
    high = _split(blocks[:, 16:48], bits=1, run=32)
    codes = _grouped(blocks, _split(blocks[:, 48:], bits=4, run=32) | high << 4, scales)
    return (scales[..., None] * codes - minima[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    high = _split(blocks[:, 128:192], bits=2, run=32)
    codes = _grouped(blocks, _split(blocks[:, :128], bits=4, run=64) | high << 4, scales) - 32
    return (scales[..., None] * codes).flatten(1)


def _looked_up(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _looked_up(_split(blocks[:, 2:], bits=4, run=16), _NON_LINEAR)


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = _split(blocks[:, 2:4], bits=2, run=1)
    small = _split(blocks[:, 4:8], bits=4, run=1) | high << 4
    scales = _half(blocks, 0) * (small.float() - 32)
    codes = _looked_up(_split(blocks[:, 8:], bits=4, run=16), _NON_LINEAR)
    return (scales[..., None] * codes.view(len(blocks), 8, 32)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """Half of a power of two, as the table holds doubled values; the lowest two are subnormal."""
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32) * _looked_up(_split(blocks[:, 1:], bits=4, run=16), _FP4)


_PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})

_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4})
