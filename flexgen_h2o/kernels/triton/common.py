"""Helpers of the Triton kernels: launch shapes, and how cached vectors are read and written.

A vector is handled as two halves: a 4-bit byte holds an element of each, and rotary embeddings
turn one with the other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from flexgen_h2o.config import limits
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.dispatch import gpu_of

EMPTY = tl.constexpr(limits.EMPTY)
FEWEST = 16
"""The shortest side of a matrix that `tl.dot` takes."""


def interpreted() -> bool:
    """True if kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def configs(small: dict[str, int], *tuned: tuple[dict[str, int], int, int]) -> list[triton.Config]:
    """Launch shapes for `triton.autotune`: (constants, warps, stages) each.

    The interpreter gets one, `small`: blocks so short that small tensors have several.
    """
    if interpreted():
        return [triton.Config(small)]
    return [triton.Config(constants, num_warps=warps, num_stages=stages)
            for constants, warps, stages in tuned]


@contextmanager
def one_layout(eviction: EvictionArguments) -> Iterator[EvictionArguments]:
    """Within it, scores, positions and ranks have the same strides, which is all that kernels know.

    Where they do not, they are copies that are written back at the end.
    """
    states = [x for x in eviction[:3] if x is not None]
    if all(x.stride() == (*states[0].stride()[:2], 1) for x in states):
        yield eviction
        return
    copies = [x.clone(memory_format=torch.contiguous_format) for x in states]
    yield EvictionArguments(*copies, *(None,) * (3 - len(states)), *eviction[3:])
    for x, copy in zip(states, copies, strict=True):
        x.copy_(copy)


@functools.lru_cache(maxsize=32)
def device_ints(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """int32 rows on a device: all layers of a run ask for the same few."""
    return torch.tensor(rows, dtype=torch.int32, device=device)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes some 2 us of the host, and a layer asks 50 times."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The lowest power of two that is n or more; faster than Triton's, see `ceil_div`."""
    return 1 << max(0, n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Programs that a device runs side by side, at least."""
    gpu = gpu_of(device)
    return 1 if gpu is None else gpu.multiprocessors


def starts(lengths: Sequence[int]) -> list[int]:
    """First row of each of several packed sequences."""
    begins, total = [], 0
    for length in lengths:
        begins.append(total)
        total += length
    return begins


def in_units(x: torch.Tensor) -> tuple[int, list[int]]:
    """The largest power of two (16 at most) that divides x's strides, and the strides in it.

    The compiler itself sees only whether an argument is a multiple of 16. A record of 72 bytes is
    none, and would be read byte by byte.

    Where one does not fit into 32 bits they come in ones, whatever is read by bytes then: in units
    it might fit, and the kernel's product with the unit would not.
    """
    return _in_units(x.stride()[:-1])


def slots_in_units(slots: torch.Tensor, layout: CacheLayout | None) -> tuple[int, list[int]]:
    """The same of slots of `CacheLayout`, the first stride being that from a key to its value."""
    kind, *others = slots.stride()[:-1]
    return _in_units([layout.keys.nbytes if layout is not None and layout.mixed else kind, *others])


def _in_units(strides: Sequence[int]) -> tuple[int, list[int]]:
    unit = functools.reduce(int.__or__, strides, 16)
    unit = unit & -unit if max(strides) < 2**31 else 1
    return unit, [stride // unit for stride in strides]


def record_shape(length: int, layout: CacheLayout | None) -> dict[str, int]:
    """Constants of the kernels that read or write slots: bits and groups of keys and values."""
    if layout is None:
        return {"BITS": 16, "GROUP": length, "VALUE_BITS": 16, "VALUE_GROUP": length}
    keys, values = layout.keys, layout.values
    return {"BITS": keys.bits, "GROUP": keys.group, "VALUE_BITS": values.bits,
            "VALUE_GROUP": values.group}


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself if its last dimension is contiguous, else a copy that is."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _scaled(codes, rows, live, element, FIRST: tl.constexpr, LAST: tl.constexpr,
            LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """float32 [rows, elements] of codes: zero + scale * code, for elements in groups FIRST to LAST.

    Scales come one per row and group, not one per element, and are spread in registers. The
    product is exact in float32, so a fused multiply-add gives the reference's result.
    """
    CODES: tl.constexpr = LENGTH * BITS // 8
    halves = (rows + (CODES + CODES % 2)).to(tl.pointer_type(tl.float16))
    scales = tl.load(halves + FIRST, mask=live, other=0).to(tl.float32)[:, None]
    zeros = tl.load(halves + LENGTH // GROUP + FIRST, mask=live, other=0).to(tl.float32)[:, None]
    for group in tl.static_range(FIRST + 1, LAST + 1):
        scale = tl.load(halves + group, mask=live, other=0).to(tl.float32)
        zero = tl.load(halves + (LENGTH // GROUP + group), mask=live, other=0).to(tl.float32)
        mine = (element // GROUP == group)[None, :]
        scales, zeros = tl.where(mine, scale[:, None], scales), tl.where(mine, zero[:, None], zeros)
    # A code in the low bits of 2 ** 23: an OR and a subtraction, which are faster than a
    # conversion, and as exact.
    exact = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return zeros + scales * exact


@triton.jit
def load_elements(rows, live, element, wanted, FIRST: tl.constexpr, LAST: tl.constexpr,
                  LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Some elements of vectors at `rows`: [rows, elements], 0 unless live and wanted.

    Plain vectors (16 "bits") keep their dtype; of records, all elements lie in groups FIRST to
    LAST, and the result is float32.
    """
    mask = live[:, None] & wanted[None, :]
    if BITS == 4:
        HALF: tl.constexpr = LENGTH // 2
        values = tl.load(rows[:, None] + (element % HALF)[None, :], mask=mask, other=0)
        values = tl.where((element < HALF)[None, :], values & 15, values >> 4)
    else:
        values = tl.load(rows[:, None] + element[None, :], mask=mask, other=0)
    if BITS != 16:
        values = _scaled(values, rows, live, element, FIRST, LAST, LENGTH, GROUP, BITS)
        # Elements that are not wanted would come out as the zero point.
        values = tl.where(wanted[None, :], values, 0.0)
    return values


@triton.jit
def load_halves(rows, live, LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
                WIDTH: tl.constexpr):
    """Both halves of vectors at `rows`, [rows, WIDTH] each; see `load_elements`."""
    HALF: tl.constexpr = LENGTH // 2
    GROUPS: tl.constexpr = LENGTH // GROUP
    lane = tl.arange(0, WIDTH)
    wanted = lane < HALF
    if BITS == 4:
        both = tl.load(rows[:, None] + lane[None, :], mask=live[:, None] & wanted[None, :],
                       other=0)
        low = _scaled(both & 15, rows, live, lane, 0, (HALF - 1) // GROUP, LENGTH, GROUP, BITS)
        high = _scaled(both >> 4, rows, live, lane + HALF, HALF // GROUP, GROUPS - 1, LENGTH,
                       GROUP, BITS)
        low, high = tl.where(wanted[None, :], low, 0.0), tl.where(wanted[None, :], high, 0.0)
    else:
        low = load_elements(rows, live, lane, wanted, 0, (HALF - 1) // GROUP, LENGTH, GROUP, BITS)
        high = load_elements(rows, live, lane + HALF, wanted, HALF // GROUP, GROUPS - 1, LENGTH,
                             GROUP, BITS)
    return low, high


@triton.jit
def _partners(rows, live, places, cos, sin, element, ROTARY: tl.constexpr, LENGTH: tl.constexpr,
              GROUP: tl.constexpr, BITS: tl.constexpr):
    """Factors of a rotation by `places` [rows, 1]: cosines, signed sines and the partner
    elements."""
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
    """Both halves of vectors, rotated in float32 to `places`, unless ROTARY is 0."""
    low, high = load_halves(rows, live, LENGTH, GROUP, BITS, WIDTH)
    lane = tl.arange(0, WIDTH)
    if ROTARY > 0:
        places = places.to(tl.int64)[:, None]
        low, high = low.to(tl.float32), high.to(tl.float32)
    if ROTARY == LENGTH:  # the halves turn with each other: nothing is read twice
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
    """See `reference.half_below`."""
    nearest = x.to(tl.float16)
    down = tl.where(x < 0, 1, -1) * (nearest.to(tl.float32) > x).to(tl.int32)
    return (nearest.to(tl.int16, bitcast=True) + down.to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit
def _values(x, mask, element):
    """float32 [rows, parts, members] within float16's range."""
    values = tl.load(x[:, None, None] + element[None], mask=mask, other=0).to(tl.float32)
    return tl.minimum(tl.maximum(values, -65504.0), 65504.0)


@triton.jit
def _codes(x, records, live, part, wanted, LENGTH: tl.constexpr, GROUP: tl.constexpr,
           BITS: tl.constexpr):
    """Codes [rows, parts, members] of half groups; scales and zeros of whole groups are stored.

    A half group sees its whole group for the scale. That reads every element twice, from the
    cache, and spares all shuffling between threads.
    """
    CODES: tl.constexpr = LENGTH * BITS // 8
    GROUPS: tl.constexpr = LENGTH // GROUP
    member = tl.arange(0, triton.next_power_of_2(GROUP))
    inside = (member < GROUP)[None, None, :]
    there = live[:, None, None] & wanted[None, :, None]
    group = part // 2
    values = _values(x, there & inside, group[:, None] * GROUP + member[None, :])
    low = tl.min(tl.where(inside, values, float("inf")), axis=2)
    high = tl.max(tl.where(inside, values, float("-inf")), axis=2)
    zero = _half_below(low + 0.0)  # of two zeros the positive one
    extent = zero.to(tl.float32) - high
    levels = tl.full(extent.shape, 2**BITS - 1, tl.float32)
    scale = tl.abs(_half_below(tl.div_rn(extent, levels)).to(tl.float32))  # rounded up
    halves = (records + (CODES + CODES % 2)).to(tl.pointer_type(tl.float16))[:, None]
    whole = live[:, None] & (wanted & (part % 2 == 0))[None, :]  # one of a group's two halves
    tl.store(halves + group[None, :], scale.to(tl.float16), mask=whole)
    tl.store(halves + (GROUPS + group)[None, :], zero, mask=whole)

    member = tl.arange(0, triton.next_power_of_2(GROUP // 2))
    inside = (member < GROUP // 2)[None, None, :]
    values = _values(x, there & inside, part[:, None] * (GROUP // 2) + member[None, :])
    # The smallest float16 above 0 in place of 0: then the group is constant and its codes are 0.
    steps = tl.broadcast_to(tl.maximum(scale, 5.9604644775390625e-08)[:, :, None], values.shape)
    ratio = tl.div_rn(values - zero.to(tl.float32)[:, :, None], steps)
    # Adding 1.5 * 2 ** 23 leaves no bits for a fraction: round to nearest, ties to even.
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int32), there & inside


@triton.jit
def store_records(x, records, live, LENGTH: tl.constexpr, GROUP: tl.constexpr,
                  BITS: tl.constexpr):
    """Quantize vectors at pointers x [rows] to records at `records` [rows], byte for byte."""
    CODES: tl.constexpr = LENGTH * BITS // 8
    GROUPS: tl.constexpr = LENGTH // GROUP
    part = tl.arange(0, triton.next_power_of_2(GROUPS))  # of the half groups of either half
    member = tl.arange(0, triton.next_power_of_2(GROUP // 2))
    low, mask = _codes(x, records, live, part, part < GROUPS, LENGTH, GROUP, BITS)
    high, mask = _codes(x, records, live, part + GROUPS, part < GROUPS, LENGTH, GROUP, BITS)
    place = records[:, None, None] + (part[:, None] * (GROUP // 2) + member[None, :])[None]
    if BITS == 4:
        tl.store(place, (low | (high << 4)).to(tl.uint8), mask=mask)
    else:
        tl.store(place, low.to(tl.uint8), mask=mask)
        tl.store(place + LENGTH // 2, high.to(tl.uint8), mask=mask)
    if CODES % 2 == 1:
        tl.store(records + CODES, tl.zeros(live.shape, tl.uint8), mask=live)


@triton.jit
def soft_capped(x, cap):
    """cap * tanh(x / cap)."""
    size = tl.exp2(tl.abs(x) * (-2.0 * 1.4426950408889634 / cap))
    capped = (1.0 - size) / (1.0 + size) * cap
    return tl.where(x < 0, -capped, capped)
