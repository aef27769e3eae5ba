"""Selection of a prompt's heavy hitters on a GPU, without a sort.

There are two launches. In the first, one program per sequence and KV head finds the lowest score
that stays by bisection over the bits of the scores, which it holds in registers, and writes the
eviction state. It needs all scores of its head. The second gathers keys and values, which are most
of the bytes, at the positions that the first one wrote; it needs no scores, so its grid can fill
the device with any number of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.triton.common import (
    EMPTY,
    ceil_div,
    device_ints,
    interpreted,
    one_layout,
    power_of_2,
    slots_in_units,
    starts,
    unit_stride,
    vector_format,
)
from flexgen_h2o.kernels.triton.groups import store_packed

MAX_IN_REGISTERS = 32768
"""Scores that a program of 16 warps holds, in 64 of the 128 registers of each thread. With 32 warps
and 64 registers per thread, the sums over threads spill."""


@triton.jit
def _keys(scores, stride, start, first, last, length, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return integers that are ordered like the scores of tokens start to start + BLOCK.

    Tokens outside of first to last are not candidates: they get the lowest integer, which is below
    those of all finite scores.
    """
    token = start + tl.arange(0, BLOCK)
    candidate = (token >= first) & (token < last)
    score = tl.zeros((BLOCK,), tl.float32)
    if scores is not None:
        score = tl.load(scores + token.to(tl.int64) * stride, mask=candidate, other=0.0)
    if MEAN:
        score = tl.div_rn(score, tl.maximum(length - token, 1).to(tl.float32))
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 is equal to 0.0
    bits = score.to(tl.int32, bitcast=True)
    # Floats are sign and magnitude: flip the magnitude of negative ones.
    return tl.where(candidate, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))


@triton.jit
def _count(keys, bound, scores, stride, first, last, length, MEAN: tl.constexpr,
           WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of keys that are at least `bound`."""
    if WHOLE:
        counts = (keys >= bound.to(tl.int32)).to(tl.int32)
    else:
        counts = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, length, BLOCK):
            keys = _keys(scores, stride, start, first, last, length, MEAN, BLOCK)
            counts += (keys >= bound.to(tl.int32)).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def threshold(scores, stride, first, last, length, heavy, MEAN: tl.constexpr,
               WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lowest key that stays, the number of keys above it, and the number equal to it.

    Bisection with the invariant that at least `heavy` keys are >= low, and fewer are >= high. It
    ends early once exactly `heavy` keys are >= low, usually after about 20 of 32 steps.
    """
    keys = _keys(scores, stride, 0, first, last, length, MEAN, BLOCK)
    low, high = tl.full((), -(2**31) + 1, tl.int64), tl.full((), 2**31 - 1, tl.int64)
    if WHOLE:  # saves some steps, for two passes over registers
        low = tl.min(tl.where(keys == -(2**31), 2**31 - 1, keys), axis=0).to(tl.int64)
        high = tl.max(keys, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        count = _count(keys, middle, scores, stride, first, last, length, MEAN, WHOLE, BLOCK)
        low = tl.where(count >= heavy, middle, low)
        high = tl.where(count > heavy, high, tl.where(count == heavy, middle + 1, middle))
    least = _count(keys, low, scores, stride, first, last, length, MEAN, WHOLE, BLOCK)
    num_above = _count(keys, low + 1, scores, stride, first, last, length, MEAN, WHOLE, BLOCK)
    return low.to(tl.int32), num_above, least - num_above


@triton.jit
def store_staying(scores, stride, first, last, length, bound, equals, num_equal, positions,
                  kept_scores, MEAN: tl.constexpr, CHUNK: tl.constexpr):
    """Write the tokens that stay in ascending order, and their scores unless `kept_scores` is None.

    These are the tokens outside of first to last, those with keys above `bound`, and the
    `num_equal` newest of the `equals` tokens with keys equal to it.
    """
    num_stored, num_seen = 0, 0
    for start in range(0, length, CHUNK):
        token = start + tl.arange(0, CHUNK)
        keys = _keys(scores, stride, start, first, last, length, MEAN, CHUNK)
        equal = (keys == bound) & (token >= first) & (token < last)
        # Of equal keys the newest stay: those with at least equals - needed of them before.
        before = num_seen + tl.cumsum(equal.to(tl.int32), axis=0)
        stays = (keys > bound) | (equal & (before > equals - num_equal))
        stays = (stays | (token < first) | (token >= last)) & (token < length)
        place = num_stored + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        tl.store(positions + place, token, mask=stays)
        if kept_scores is not None:
            tl.store(kept_scores + place,
                     tl.load(scores + token.to(tl.int64) * stride, mask=stays), mask=stays)
        num_seen += tl.sum(equal.to(tl.int32), axis=0)
        num_stored += tl.sum(stays.to(tl.int32), axis=0)


@triton.jit
def _choose(scores, m_head, m_row, cuts, kept_scores, positions, ranks, b_row, b_head, slots,
            sinks, MEAN: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
            CHUNK: tl.constexpr):
    """Write the eviction state of one KV head: the tokens that stay, then empty slots."""
    sequence, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length, heavy = tl.load(cuts + 4 * sequence + 1), tl.load(cuts + 4 * sequence + 2)
    recent = tl.load(cuts + 4 * sequence + 3)
    if scores is not None:
        scores += head * m_head + tl.load(cuts + 4 * sequence).to(tl.int64) * m_row
    state = sequence.to(tl.int64) * b_row + head * b_head
    first, last = sinks, length - recent
    num_kept = tl.minimum(length, heavy + recent + sinks)
    bound, num_equal, equals = tl.full((), 2**31 - 1, tl.int32), 0, 0  # above all finite scores
    if (num_kept < length) & (heavy > 0):
        bound, num_above, equals = threshold(scores, m_row, first, last, length, heavy, MEAN, WHOLE,
                                              BLOCK)
        num_equal = heavy - num_above
    elif num_kept == length:
        first, last = length, length  # all tokens stay, as sinks do
    store_staying(scores, m_row, first, last, length, bound, equals, num_equal, positions + state,
                  None if scores is None else kept_scores + state, MEAN, CHUNK)
    _fill(kept_scores, positions, ranks, state, num_kept, slots, scores is None, CHUNK)


@triton.jit
def _fill(kept_scores, positions, ranks, state, num_kept, slots, MASSLESS: tl.constexpr,
          CHUNK: tl.constexpr):
    """Write ranks, and the empty slots of the eviction state."""
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        empty = (slot >= num_kept) & (slot < slots)
        tl.store(kept_scores + state + slot, 0.0, mask=(slot < slots) if MASSLESS else empty)
        tl.store(positions + state + slot, EMPTY, mask=empty)
        if ranks is not None:
            tl.store(ranks + state + slot, tl.where(slot < num_kept, slot, 0), mask=slot < slots)


@triton.jit
def _gather(k, k_row, k_head, v, v_row, v_head, cuts, positions, b_row, b_head, slots, s_kind,
            s_row, s_head, s_slot, sinks, LENGTH: tl.constexpr, GROUP: tl.constexpr,
            BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_BITS: tl.constexpr,
            UNIT: tl.constexpr, ROWS: tl.constexpr):
    """Copy or quantize ROWS keys and values that stay into their slots."""
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    length = tl.load(cuts + 4 * sequence + 1)
    num_kept = tl.load(cuts + 4 * sequence + 2) + tl.load(cuts + 4 * sequence + 3) + sinks
    num_kept = tl.minimum(length, num_kept)
    live = slot < num_kept
    token = tl.load(positions + sequence.to(tl.int64) * b_row + head * b_head + slot, mask=live,
                    other=0)
    token = token.to(tl.int64) + tl.load(cuts + 4 * sequence)
    k += token * k_row + head * k_head
    v += token * v_row + head * v_head
    place = sequence.to(tl.int64) * s_row + head * s_head + slot.to(tl.int64) * s_slot
    place = slots + place * UNIT
    values = place + s_kind * UNIT
    if BITS == 16:
        lane = tl.arange(0, triton.next_power_of_2(LENGTH))[None, :]
        mask = live[:, None] & (lane < LENGTH)
        key = tl.load(k[:, None] + lane, mask=mask)
        value = tl.load(v[:, None] + lane, mask=mask)
        tl.store(place[:, None] + lane, key, mask=mask)
        tl.store(values[:, None] + lane, value, mask=mask)
    else:
        store_packed(k, place, live, LENGTH, GROUP, BITS)
        store_packed(v, values, live, LENGTH, VALUE_GROUP, VALUE_BITS)


def launch_shape(heavy: int, longest: int, *, mean: bool = False) -> dict[str, int | bool]:
    """Return constants of a program that selects among `heavy` scores of up to `longest` tokens.

    It has the fewest warps that can hold the scores, since each step synchronizes all of them: with
    prompts of 2,048 tokens an H200 takes 0.052 ms with 4 warps, 0.069 with 16. With `mean` it holds
    half as many, since divisors take registers too.
    """
    if interpreted():
        in_registers, chunk, warps = heavy <= 64, 32, 4
    else:
        capacity = MAX_IN_REGISTERS // (2 if mean else 1)
        in_registers, warps = heavy <= capacity, 4 if heavy <= capacity // 4 else 16
        chunk = 2048 if warps == 4 else 4096
    chunk = max(32, min(chunk, power_of_2(longest)))
    block = max(32, power_of_2(heavy)) if in_registers else chunk
    return {"WHOLE": in_registers, "BLOCK": block, "CHUNK": chunk, "num_warps": warps}


def select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[int],
                         slots: Tensor, layout: CacheLayout | None,
                         eviction: EvictionArguments) -> None:
    """Run `reference.attention.select_heavy_hitters`.

    `cuts` has three integers per prompt: the fields of `Cut`.
    """
    with one_layout(eviction) as eviction:
        _select_heavy_hitters(k, v, scores, cuts=cuts, slots=slots, layout=layout,
                              eviction=eviction)


def _select_heavy_hitters(k: Tensor, v: Tensor, scores: Tensor | None, *, cuts: Sequence[int],
                          slots: Tensor, layout: CacheLayout | None,
                          eviction: EvictionArguments) -> None:
    kept_scores, positions, ranks, _, _, mean, _, sinks, *_ = eviction
    lengths, heavy, recent = cuts[::3], cuts[1::3], cuts[2::3]
    if not kept_scores.numel():
        return
    k, v = unit_stride(k), unit_stride(v)
    table = device_ints(tuple(zip(starts(lengths), lengths, heavy, recent, strict=True)),
                        k.device)
    # Prompts whose selection does not depend on scores need no registers for them.
    max_candidates = max((n for n, h, r in zip(lengths, heavy, recent, strict=True)
                          if 0 < h < n - r - sinks), default=1)
    shape = launch_shape(max_candidates, max(lengths), mean=mean)
    kv_heads, length, state = k.shape[1], k.shape[2], kept_scores.stride()[:2]
    _choose[(len(lengths), kv_heads)](
        scores, *((0, 0) if scores is None else scores.stride()), table, kept_scores, positions,
        ranks, *state, kept_scores.shape[2], sinks, MEAN=mean, **shape)
    rows = max(1, 4096 // power_of_2(length))
    max_kept = max(min(n, h + r + sinks) for n, h, r in zip(lengths, heavy, recent, strict=True))
    unit, strides = slots_in_units(slots, layout)
    _gather[(ceil_div(max_kept, rows), len(lengths), kv_heads)](
        k, *k.stride()[:2], v, *v.stride()[:2], table, positions, *state, slots,
        *strides, sinks, LENGTH=length, **vector_format(length, layout), UNIT=unit, ROWS=rows)
