"""Reading of quantized caches in decode attention, without dequantizing each element.

`decode._read` computes every element from its value, scale and zero point, and is bound by that
arithmetic. Here a thread loads whole words of quantized values, masks values without shifting them,
and uses them as float32 integers. They are up to 65536 times too large; the query's elements, and
the results at the end, are divided by that factor. Scales and zero points are applied to sums: for
a key, ``sum(q * (zero + scale * value))`` is ``zero * sum(q) + scale * sum(q * value)``, and for
values the probabilities are scaled. A vector must have one group, or one per half.

For a batch of 64 with 32 heads of 128 and 1,024 slots each, an H200 takes 0.12 ms with 4 bits
(`_read`: 0.24), and 0.175 ms with 8 bits (0.227).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.kernels.triton.common import configs, soft_capped

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.0e38)
"""A finite number below every logit, so that differences are never NaN."""

_SECOND = tl.constexpr(1 / 256)
_THIRD = tl.constexpr(1 / 65536)
_UPPER = tl.constexpr(1 / 16)
"""Factors that correct values masked from the second byte of a word, the third byte (with 4 bits,
where it is not shifted down), and the upper half of a byte."""

EXACT = 0x4B000000
"""2 ** 23 in float32, to whose low bits integers are ORed. It is an argument of the kernel because
mask and OR are one instruction only if not both operands are constants."""


def reads_codes(slots: Tensor, unit: int, length: int, layout: CacheLayout | None, rotary: int
                ) -> bool:
    """Return True if `read_codes` supports a cache whose strides are multiples of `unit` bytes."""
    return (layout is not None and rotary == 0 and unit % 4 == 0 and slots.data_ptr() % 4 == 0
            and length % 8 == 0 and length <= 2 * min(layout.keys.group, layout.values.group))


@triton.jit
def _code(word, MASK: tl.constexpr, exact):
    """Return the bits MASK of a word, without a shift, as a float32 integer."""
    return ((word & MASK) | exact).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _eight(low, high, exact, BITS: tl.constexpr):
    """Return the values of elements 4 w to 4 w + 3 of both halves, given words w.

    With 4 bits, one word has both halves. The third byte is shifted down where its values would
    reach 2 ** 23.
    """
    if BITS == 4:
        up = low >> 16
        codes = (_code(low, 0xF, exact), _code(low, 0xF00, exact), _code(low, 0xF0000, exact),
                 _code(up, 0xF00, exact), _code(low, 0xF0, exact), _code(low, 0xF000, exact),
                 _code(up, 0xF0, exact), _code(up, 0xF000, exact))
    else:
        up, over = low >> 16, high >> 16
        codes = (_code(low, 0xFF, exact), _code(low, 0xFF00, exact), _code(up, 0xFF, exact),
                 _code(up, 0xFF00, exact), _code(high, 0xFF, exact), _code(high, 0xFF00, exact),
                 _code(over, 0xFF, exact), _code(over, 0xFF00, exact))
    return codes


@triton.jit
def _divided(x0, x1, x2, x3, x4, x5, x6, x7, BITS: tl.constexpr):
    """Correct sums or factors of the values of `_eight`, which are too large."""
    if BITS == 4:
        x2, x4, x5, x6, x7 = x2 * _THIRD, x4 * _UPPER, x5 * _UPPER, x6 * _UPPER, x7 * _UPPER
    return x0, x1 * _SECOND, x2, x3 * _SECOND, x4, x5 * _SECOND, x6, x7 * _SECOND


@triton.jit
def _words(vectors, word, live, HALF: tl.constexpr, BITS: tl.constexpr):
    """Load words of values [.., words] of both halves of vectors; with 4 bits they are the same."""
    place = vectors.to(tl.pointer_type(tl.uint32))[:, :, None] + word[None, None, :]
    mask = live[:, :, None] & (word < HALF // 4)[None, None, :]
    low = tl.load(place, mask=mask, other=0)
    high = low
    if BITS == 8:
        high = tl.load(place + HALF // 4, mask=mask, other=0)
    return low, high


@triton.jit
def _pair(word):
    """Return the two float16 of a word, as float32."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scales(vectors, live, LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Load the scales of the first and second half of vectors, then the zero points."""
    pairs = (vectors + LENGTH * BITS // 8).to(tl.pointer_type(tl.uint32))
    if GROUP == LENGTH:
        s0, z0 = _pair(tl.load(pairs, mask=live, other=0))
        s1, z1 = s0, z0
    else:
        s0, s1 = _pair(tl.load(pairs, mask=live, other=0))
        z0, z1 = _pair(tl.load(pairs + 1, mask=live, other=0))
    return s0, s1, z0, z1


@triton.jit
def _query(query, word, scale, ELEMENT: tl.constexpr, HALF: tl.constexpr):
    """Load one query element per word, times scale: float32 [1, 1, words]."""
    x = tl.load(query + word * 4 + ELEMENT, mask=word < HALF // 4, other=0).to(tl.float32)
    return (x * scale)[None, None, :]


@triton.autotune(
    configs({"TURNS": 2, "BLOCK": 4}, ({"TURNS": 8, "BLOCK": 4}, 1, 1),
            ({"TURNS": 4, "BLOCK": 4}, 1, 2), ({"TURNS": 4, "BLOCK": 16}, 4, 1)),
    key=["LENGTH", "BITS", "VALUE_BITS", "LONG"], cache_results=True)
@triton.jit
def read_codes(q, q_row, q_head, slots, s_kind, s_row, s_head, s_slot, metadata, b_row, b_head,
               logits, parts, stats, selected, kv_heads, n, split, scale, cap, positions, window,
               exact, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SHARERS: tl.constexpr,
               LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
               VALUE_GROUP: tl.constexpr, VALUE_BITS: tl.constexpr, WORDS: tl.constexpr,
               UNIT: tl.constexpr, LONG: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """Do what `decode._read` does, for one query head per program and without rotation.

    A program handles BLOCK * TURNS slots at once, so that many loads are in flight, with a softmax
    for each of the BLOCK. A half vector has WORDS words of four elements.
    """
    HALF: tl.constexpr = LENGTH // 2
    pair = tl.program_id(0) // SHARERS
    sequence = (pair // kv_heads).to(tl.int64)
    head = (pair % kv_heads).to(tl.int64)
    cached = tl.load(metadata + sequence)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, cached)
    if first >= last:
        return
    word = tl.arange(0, WORDS)
    query = q + sequence * q_row + (head * SHARERS + tl.program_id(0) % SHARERS) * q_head
    q0, q1 = _query(query, word, scale, 0, HALF), _query(query, word, scale, 1, HALF)
    q2, q3 = _query(query, word, scale, 2, HALF), _query(query, word, scale, 3, HALF)
    query += HALF
    q4, q5 = _query(query, word, scale, 0, HALF), _query(query, word, scale, 1, HALF)
    q6, q7 = _query(query, word, scale, 2, HALF), _query(query, word, scale, 3, HALF)
    sum_low, sum_high = tl.sum(q0 + q1 + q2 + q3, axis=2), tl.sum(q4 + q5 + q6 + q7, axis=2)
    q0, q1, q2, q3, q4, q5, q6, q7 = _divided(q0, q1, q2, q3, q4, q5, q6, q7, BITS)
    row = tl.program_id(0).to(tl.int64)
    slots += (sequence * s_row + head * s_head) * UNIT
    maximum = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    zero_low, zero_high = tl.zeros_like(total), tl.zeros_like(total)
    a0 = tl.zeros((BLOCK, WORDS), tl.float32)
    a1, a2, a3, a4 = tl.zeros_like(a0), tl.zeros_like(a0), tl.zeros_like(a0), tl.zeros_like(a0)
    a5, a6, a7 = tl.zeros_like(a0), tl.zeros_like(a0), tl.zeros_like(a0)
    lane = tl.arange(0, TURNS)[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]
    for start in range(first, last, TURNS * BLOCK):
        slot = start + lane
        live = slot < last
        at = slot
        if selected is not None:
            at = tl.load(selected + pair.to(tl.int64) * n + slot, mask=live, other=0)
        keys = slots + at.to(tl.int64) * s_slot * UNIT
        values = keys + s_kind * UNIT
        k_low, k_high = _words(keys, word, live, HALF, BITS)
        s0, s1, z0, z1 = _scales(keys, live, LENGTH, GROUP, BITS)
        v_low, v_high = _words(values, word, live, HALF, VALUE_BITS)
        t0, t1, y0, y1 = _scales(values, live, LENGTH, VALUE_GROUP, VALUE_BITS)
        x0, x1, x2, x3, x4, x5, x6, x7 = _eight(k_low, k_high, exact, BITS)
        lower = x0 * q0 + x1 * q1 + x2 * q2 + x3 * q3
        upper = x4 * q4 + x5 * q5 + x6 * q6 + x7 * q7
        if GROUP == LENGTH:
            logit = tl.sum(lower + upper, axis=2) * s0 + z0 * (sum_low + sum_high)
        else:
            logit = tl.sum(lower * s0[:, :, None] + upper * s1[:, :, None], axis=2)
            logit += z0 * sum_low + z1 * sum_high
        if CAPPED:
            logit = soft_capped(logit, cap) * LOG2_E
        visible = live
        if WINDOWED:
            tokens = tl.load(metadata + tl.num_programs(0) // (kv_heads * SHARERS) + sequence)
            position = tl.load(positions + sequence * b_row + head * b_head + slot, mask=live,
                               other=0)
            visible = live & (position > tokens - 1 - window)
        logit = tl.where(visible, logit, float("-inf"))
        if logits is not None:
            tl.store(logits + row * n + slot, logit, mask=live)
        new = tl.maximum(maximum, tl.max(logit, axis=1))
        shrink, p = tl.exp2(maximum - new), tl.exp2(logit - new[:, None])
        maximum = new
        total = total * shrink + tl.sum(p, axis=1)
        zero_low = zero_low * shrink + tl.sum(p * y0, axis=1)
        zero_high = zero_high * shrink + tl.sum(p * y1, axis=1)
        p0, p1, less = (p * t0)[:, :, None], (p * t1)[:, :, None], shrink[:, None]
        x0, x1, x2, x3, x4, x5, x6, x7 = _eight(v_low, v_high, exact, VALUE_BITS)
        a0 = a0 * less + tl.sum(p0 * x0, axis=1)
        a1 = a1 * less + tl.sum(p0 * x1, axis=1)
        a2 = a2 * less + tl.sum(p0 * x2, axis=1)
        a3 = a3 * less + tl.sum(p0 * x3, axis=1)
        a4 = a4 * less + tl.sum(p1 * x4, axis=1)
        a5 = a5 * less + tl.sum(p1 * x5, axis=1)
        a6 = a6 * less + tl.sum(p1 * x6, axis=1)
        a7 = a7 * less + tl.sum(p1 * x7, axis=1)
    highest = tl.max(maximum, axis=0)
    weight = tl.exp2(maximum - highest)
    place = row * tl.num_programs(1) + tl.program_id(1)
    everyone = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(stats + place, highest)
    tl.store(stats + everyone + place, tl.sum(total * weight, axis=0))
    zero_low = tl.sum(zero_low * weight, axis=0)
    zero_high = tl.sum(zero_high * weight, axis=0)
    weight = weight[:, None]
    a0, a1, a2, a3, a4, a5, a6, a7 = _divided(
        tl.sum(a0 * weight, axis=0), tl.sum(a1 * weight, axis=0), tl.sum(a2 * weight, axis=0),
        tl.sum(a3 * weight, axis=0), tl.sum(a4 * weight, axis=0), tl.sum(a5 * weight, axis=0),
        tl.sum(a6 * weight, axis=0), tl.sum(a7 * weight, axis=0), VALUE_BITS)
    valid = word < HALF // 4
    out = parts + place * LENGTH + word * 4
    tl.store(out, a0 + zero_low, mask=valid)
    tl.store(out + 1, a1 + zero_low, mask=valid)
    tl.store(out + 2, a2 + zero_low, mask=valid)
    tl.store(out + 3, a3 + zero_low, mask=valid)
    out += HALF
    tl.store(out, a4 + zero_high, mask=valid)
    tl.store(out + 1, a5 + zero_high, mask=valid)
    tl.store(out + 2, a6 + zero_high, mask=valid)
    tl.store(out + 3, a7 + zero_high, mask=valid)
