"""Quantization in groups, in few vectorised passes. See `reference` for the specification."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexgen_h2o.kernels.reference import FLOAT16_MAX, half_below
from flexgen_h2o.storage.quantization import GroupLayout

# Elements treated at once: the float32 temporaries of a piece then stay in the CPU's caches.
PIECE = 1 << 20


def quantize_groups(x: Tensor, layout: GroupLayout) -> Tensor:
    """See `reference.quantize_groups`, whose bytes these are."""
    records = torch.empty(*x.shape[:-1], layout.nbytes, dtype=torch.uint8, device=x.device)
    used = layout.length * layout.bits // 8
    rows, places = x.reshape(-1, layout.length), records.view(-1, layout.nbytes)
    for some in _pieces(len(rows), layout):
        values = rows[some].to(torch.float32, copy=True).clamp_(-FLOAT16_MAX, FLOAT16_MAX)
        grouped = values.view(-1, layout.groups, layout.group)
        zeros = half_below(grouped.amin(-1))
        scales = half_below((zeros.float() - grouped.amax(-1)).div_(layout.levels)).abs_()
        steps = scales.float().clamp_min_(2.0**-24)
        grouped.sub_(zeros.float()[..., None]).div_(steps[..., None])
        codes = values.round_()
        if layout.bits == 4:
            low, high = codes.chunk(2, dim=-1)
            codes = torch.add(low, high, alpha=16)
        # By way of int8: there are vector instructions from float to that, and none to uint8.
        places[some, :used] = codes.sub_(128).to(torch.int8).view(torch.uint8).bitwise_xor_(128)
        places[some, used : layout.code_bytes] = 0
        halves = places[some, layout.code_bytes :].view(torch.float16)
        halves[:, : layout.groups], halves[:, layout.groups :] = scales, zeros
    return records


def dequantize_groups(records: Tensor, layout: GroupLayout) -> Tensor:
    """See `reference.dequantize_groups`."""
    out = torch.empty(*records.shape[:-1], layout.length, device=records.device)
    rows, places = records.reshape(-1, layout.nbytes), out.view(-1, layout.length)
    for some in _pieces(len(rows), layout):
        unpack(rows[some], layout, out=places[some])
        stretch_(places[some], scales_and_zeros(rows[some], layout))
    return out


def unpack(records: Tensor, layout: GroupLayout, *, out: Tensor) -> None:
    """Write the codes of records [..., nbytes] to a float32 tensor [..., length]."""
    if layout.bits == 8:
        out.copy_(records[..., : layout.length])
        return
    half = layout.length // 2
    # Contiguous first: bytes in short runs take several times as long to mask and shift.
    codes = records[..., :half].contiguous()
    out[..., :half] = codes & 15
    out[..., half:] = codes >> 4


def scales_and_zeros(records: Tensor, layout: GroupLayout) -> Tensor:
    """The scales and zero points of records [..., nbytes]: float32 [2, groups, ...]."""
    halves = records[..., layout.code_bytes :]
    strides = halves.stride()[:-1]
    if halves.storage_offset() % 2 or any(stride % 2 for stride in strides):
        halves = halves.clone(memory_format=torch.contiguous_format)
    halves = halves.view(torch.float16).movedim(-1, 0)
    # Made contiguous as float16: converting strided scalars is many times slower.
    return halves.contiguous().float().unflatten(0, (2, layout.groups))


def stretch_(codes: Tensor, affine: Tensor) -> Tensor:
    """Codes [..., length] to values in place; affine is from `scales_and_zeros`."""
    grouped = codes.unflatten(-1, (affine.shape[1], -1))
    scales, zeros = affine.movedim(1, -1)[..., None]
    grouped.mul_(scales).add_(zeros)
    return codes


def _pieces(rows: int, layout: GroupLayout) -> Iterator[slice]:
    count = max(1, PIECE // layout.length)
    return (slice(start, start + count) for start in range(0, rows, count))
