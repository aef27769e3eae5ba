"""Vectors of the KV cache on a GPU: quantized groups, and how cached vectors are read and written.

A vector is handled as two halves: a byte of 4-bit values holds an element of each half, and rotary
embeddings rotate one half with the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.cache_layout import GroupLayout
from flexgen_h2o.kernels.triton.common import ceil_div, in_units, power_of_2, unit_stride

GROUP_ELEMENTS = 4096
"""Elements per program."""


@triton.jit
def _scaled(codes, rows, live, element, FIRST: tl.constexpr, LAST: tl.constexpr,
            LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Dequantize [rows, elements] to float32, zero + scale * value, for groups FIRST to LAST.

    Scales are loaded once per row and group, and broadcast in registers. The product is exact in
    float32, so a fused multiply-add gives the reference's result.
    """
    CODES: tl.constexpr = LENGTH * BITS // 8
    halves = (rows + (CODES + CODES % 2)).to(tl.pointer_type(tl.float16))
    scales = tl.load(halves + FIRST, mask=live, other=0).to(tl.float32)[:, None]
    zeros = tl.load(halves + LENGTH // GROUP + FIRST, mask=live, other=0).to(tl.float32)[:, None]
    for group in tl.static_range(FIRST + 1, LAST + 1):
        scale = tl.load(halves + group, mask=live, other=0).to(tl.float32)
        zero = tl.load(halves + (LENGTH // GROUP + group), mask=live, other=0).to(tl.float32)
        in_group = (element // GROUP == group)[None, :]
        scales = tl.where(in_group, scale[:, None], scales)
        zeros = tl.where(in_group, zero[:, None], zeros)
    # Integer to float: OR into the low bits of 2 ** 23, then subtract it. This is exact, and faster
    # than a conversion.
    exact = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return zeros + scales * exact


@triton.jit
def load_elements(rows, live, element, in_vector, FIRST: tl.constexpr, LAST: tl.constexpr,
                  LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Load elements of vectors at `rows`: [rows, elements], 0 unless live and in the vector.

    Plain vectors (BITS of 16) keep their dtype. Quantized ones become float32; their elements are
    within groups FIRST to LAST.
    """
    mask = live[:, None] & in_vector[None, :]
    if BITS == 4:
        HALF: tl.constexpr = LENGTH // 2
        values = tl.load(rows[:, None] + (element % HALF)[None, :], mask=mask, other=0)
        values = tl.where((element < HALF)[None, :], values & 15, values >> 4)
    else:
        values = tl.load(rows[:, None] + element[None, :], mask=mask, other=0)
    if BITS != 16:
        values = _scaled(values, rows, live, element, FIRST, LAST, LENGTH, GROUP, BITS)
        # Elements outside of the vector would be the zero point.
        values = tl.where(in_vector[None, :], values, 0.0)
    return values


@triton.jit
def load_halves(rows, live, LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
                WIDTH: tl.constexpr):
    """Load both halves of vectors at pointers `rows`, [rows, WIDTH] each; see `load_elements`."""
    HALF: tl.constexpr = LENGTH // 2
    GROUPS: tl.constexpr = LENGTH // GROUP
    lane = tl.arange(0, WIDTH)
    in_half = lane < HALF
    if BITS == 4:
        both = tl.load(rows[:, None] + lane[None, :], mask=live[:, None] & in_half[None, :],
                       other=0)
        low = _scaled(both & 15, rows, live, lane, 0, (HALF - 1) // GROUP, LENGTH, GROUP, BITS)
        high = _scaled(both >> 4, rows, live, lane + HALF, HALF // GROUP, GROUPS - 1, LENGTH,
                       GROUP, BITS)
        low, high = tl.where(in_half[None, :], low, 0.0), tl.where(in_half[None, :], high, 0.0)
    else:
        low = load_elements(rows, live, lane, in_half, 0, (HALF - 1) // GROUP, LENGTH, GROUP, BITS)
        high = load_elements(rows, live, lane + HALF, in_half, HALF // GROUP, GROUPS - 1, LENGTH,
                             GROUP, BITS)
    return low, high


@triton.jit
def _partners(rows, live, places, cos, sin, element, ROTARY: tl.constexpr, LENGTH: tl.constexpr,
              GROUP: tl.constexpr, BITS: tl.constexpr):
    """Return cosines, signed sines and partner elements of a rotation to `places` [rows, 1]."""
    HALF: tl.constexpr = ROTARY // 2
    turning = element < ROTARY
    mask = live[:, None] & turning[None, :]
    place = places * HALF + (element % HALF)[None, :]
    c = tl.load(cos + place, mask=mask, other=1.0)
    s = tl.load(sin + place, mask=mask, other=0.0)
    first = element < HALF
    partner = tl.where(first, element + HALF, element - HALF)
    other = load_elements(rows, live, partner, turning, 0, LENGTH // GROUP - 1, LENGTH, GROUP,
                          BITS)
    return c, tl.where(first[None, :], -s, s), other.to(tl.float32)


@triton.jit
def load_rotated(rows, live, places, cos, sin, ROTARY: tl.constexpr, LENGTH: tl.constexpr,
                 GROUP: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Load both halves of vectors, rotated in float32 to `places` unless ROTARY is 0."""
    low, high = load_halves(rows, live, LENGTH, GROUP, BITS, WIDTH)
    lane = tl.arange(0, WIDTH)
    if ROTARY > 0:
        places = places.to(tl.int64)[:, None]
        low, high = low.to(tl.float32), high.to(tl.float32)
    if ROTARY == LENGTH:  # the halves are each other's partners: nothing is read twice
        mask = live[:, None] & (lane < LENGTH // 2)[None, :]
        place = places * (LENGTH // 2) + lane[None, :]
        c = tl.load(cos + place, mask=mask, other=1.0)
        s = tl.load(sin + place, mask=mask, other=0.0)
        low, high = low * c - high * s, high * c + low * s
    elif ROTARY > 0:
        c, s, other = _partners(rows, live, places, cos, sin, lane, ROTARY, LENGTH, GROUP, BITS)
        low = tl.where((lane < LENGTH // 2)[None, :], low * c + other * s, 0.0)
        if ROTARY > LENGTH // 2:
            c, s, other = _partners(rows, live, places, cos, sin, lane + LENGTH // 2, ROTARY,
                                    LENGTH, GROUP, BITS)
            high = tl.where((lane < LENGTH // 2)[None, :], high * c + other * s, 0.0)
    return low, high


@triton.jit
def _half_below(x):
    """Compute `reference.attention.half_below`."""
    nearest = x.to(tl.float16)
    down = tl.where(x < 0, 1, -1) * (nearest.to(tl.float32) > x).to(tl.int32)
    return (nearest.to(tl.int16, bitcast=True) + down.to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _values(x, mask, element):
    """Load float32 [rows, parts, members], clamped to float16's range."""
    values = tl.load(x[:, None, None] + element[None], mask=mask, other=0).to(tl.float32)
    return tl.minimum(tl.maximum(values, -65504.0), 65504.0)


@triton.jit
def _codes(x, packed, live, part, in_vector, LENGTH: tl.constexpr, GROUP: tl.constexpr,
           BITS: tl.constexpr):
    """Quantize half groups to [rows, parts, members], and store scales and zero points of groups.

    A half group computes the scale of its whole group. That reads every element twice, from the
    cache, and avoids exchanges between threads.
    """
    CODES: tl.constexpr = LENGTH * BITS // 8
    GROUPS: tl.constexpr = LENGTH // GROUP
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    inside = (member < GROUP)[None, None, :]
    valid = live[:, None, None] & in_vector[None, :, None]
    group = part // 2
    values = _values(x, valid & inside, group[:, None] * GROUP + member[None, :])
    low = tl.min(tl.where(inside, values, float("inf")), axis=2)
    high = tl.max(tl.where(inside, values, float("-inf")), axis=2)
    zero = _half_below(low + 0.0)  # of both zeros, the positive one
    extent = zero.to(tl.float32) - high
    levels = tl.full(extent.shape, 2**BITS - 1, tl.float32)
    scale = tl.abs(_half_below(tl.div_rn(extent, levels)).to(tl.float32))  # rounded up
    halves = (packed + (CODES + CODES % 2)).to(tl.pointer_type(tl.float16))[:, None]
    first_half = live[:,
                      None] & (in_vector & (part % 2 == 0))[None, :]  # one of a group's two halves
    tl.store(halves + group[None, :], scale.to(tl.float16), mask=first_half)
    tl.store(halves + (GROUPS + group)[None, :], zero, mask=first_half)

    member = tl.arange(0, triton.next_power_of_2(GROUP // 2))
    inside = (member < GROUP // 2)[None, None, :]
    values = _values(x, valid & inside, part[:, None] * (GROUP // 2) + member[None, :])
    # A scale of 0 is replaced by the smallest float16: all values of that group quantize to 0.
    steps = tl.broadcast_to(tl.maximum(scale, 5.9604644775390625e-08)[:, :, None], values.shape)
    ratio = tl.div_rn(values - zero.to(tl.float32)[:, :, None], steps)
    # Adding 1.5 * 2 ** 23 leaves no bits for a fraction: round to nearest, ties to even.
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int32), valid & inside


@triton.jit
def store_packed(x, packed, live, LENGTH: tl.constexpr, GROUP: tl.constexpr,
                 BITS: tl.constexpr):
    """Quantize vectors at pointers x [rows] to `packed` [rows], with the reference's bytes."""
    CODES: tl.constexpr = LENGTH * BITS // 8
    GROUPS: tl.constexpr = LENGTH // GROUP
    part = tl.arange(0, triton.next_power_of_2(GROUPS))  # of the half groups of either half
    member = tl.arange(0, triton.next_power_of_2(GROUP // 2))
    low, mask = _codes(x, packed, live, part, part < GROUPS, LENGTH, GROUP, BITS)
    high, mask = _codes(x, packed, live, part + GROUPS, part < GROUPS, LENGTH, GROUP, BITS)
    place = packed[:, None, None] + (part[:, None] * (GROUP // 2) + member[None, :])[None]
    if BITS == 4:
        tl.store(place, (low | (high << 4)).to(tl.uint8), mask=mask)
    else:
        tl.store(place, low.to(tl.uint8), mask=mask)
        tl.store(place + LENGTH // 2, high.to(tl.uint8), mask=mask)
    if CODES % 2 == 1:
        tl.store(packed + CODES, tl.zeros(live.shape, tl.uint8), mask=live)


@triton.jit
def _quantize(x, packed, rows, x_stride, LENGTH: tl.constexpr, GROUP: tl.constexpr,
              BITS: tl.constexpr, NBYTES: tl.constexpr, ROWS: tl.constexpr):
    """Quantize ROWS vectors."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    store_packed(x + row * x_stride, packed + row * NBYTES, row < rows, LENGTH, GROUP, BITS)


@triton.jit
def _dequantize(packed, out, rows, stride, LENGTH: tl.constexpr, GROUP: tl.constexpr,
                BITS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
                ROWS: tl.constexpr):
    """Dequantize ROWS vectors."""
    HALF: tl.constexpr = LENGTH // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    low, high = load_halves(packed + row * stride * UNIT, live, LENGTH, GROUP, BITS, WIDTH)
    lane = tl.arange(0, WIDTH)
    mask = live[:, None] & (lane < HALF)[None, :]
    place = out + row[:, None] * LENGTH + lane[None, :]
    tl.store(place, low, mask=mask)
    tl.store(place + HALF, high, mask=mask)


def quantize_groups(x: Tensor, layout: GroupLayout) -> Tensor:
    """Run `reference.attention.quantize_groups`, with identical bytes."""
    packed = x.new_empty((*x.shape[:-1], layout.nbytes), dtype=torch.uint8)
    vectors = unit_stride(x.reshape(-1, layout.length))
    tile = max(1, GROUP_ELEMENTS // power_of_2(layout.length))
    if len(vectors):
        _quantize[(ceil_div(len(vectors), tile),)](
            vectors, packed, len(vectors), vectors.stride(0), layout.length, layout.group,
            layout.bits, layout.nbytes, tile)
    return packed


def dequantize_groups(packed: Tensor, layout: GroupLayout) -> Tensor:
    """Run `reference.attention.dequantize_groups`."""
    length = layout.length
    out = packed.new_empty((*packed.shape[:-1], length), dtype=torch.float32)
    flat = packed.reshape(-1, layout.nbytes)
    if flat.stride(1) != 1 or flat.stride(0) % 2 or flat.data_ptr() % 2:
        flat = flat.clone(memory_format=torch.contiguous_format)  # float16 is read at even bytes
    tile = max(1, GROUP_ELEMENTS // power_of_2(length))
    unit, (stride,) = in_units(flat)
    if len(flat):
        _dequantize[(ceil_div(len(flat), tile),)](
            flat, out, len(flat), stride, length, layout.group, layout.bits,
            power_of_2(length // 2), unit, tile)
    return out
