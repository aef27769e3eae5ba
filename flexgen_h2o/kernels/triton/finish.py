"""The last launches of decode attention on a GPU, after `decode` has read the cache.

One launch combines the partial softmaxes, attends to the new token, updates scores, evicts, and
writes the new token to its slot. Launches on a stream are ordered, so every read of the cache is
done by then. If it has few programs with many slots each, another launch before it scores slots in
parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.kernels.arguments import EvictionArguments, VariantArguments
from flexgen_h2o.kernels.triton.common import (
    EMPTY,
    ceil_div,
    interpreted,
    multiprocessors,
    power_of_2,
    slots_in_units,
    soft_capped,
    vector_format,
)
from flexgen_h2o.kernels.triton.decode_quantized import LOG2_E, LOWEST
from flexgen_h2o.kernels.triton.groups import load_rotated, store_packed

FINISH_ELEMENTS = 8192
"""Elements per iteration of a program of `_finish`."""
SCORE_LOGITS = 1024
"""Logits per iteration of a program of `_score_part`."""


class PartialAttention(NamedTuple):
    """Partial attention over the cache: a softmax for each split of its slots.

    Attributes
    ----------
    logits : Tensor or None
        float32 [sequences, heads, n], to base 2; None without an eviction state.
    parts : Tensor
        float32 [sequences, heads, splits, length]: weighted sums of values.
    stats : Tensor
        float32 [2, sequences, heads, splits]: maximum of the logits, and sum of weights.
    n, split : int
        Slots of the cache, and slots per split.
    scale : float
        Factor of logits, to base 2 unless they are soft-capped.
    """

    logits: Tensor | None
    parts: Tensor
    stats: Tensor
    n: int
    split: int
    scale: float


@triton.jit
def _new_logits(q, q_row, q_head, k, cos, sin, sequence, head, cached, scale, cap,
                HEADS: tl.constexpr, CAPPED: tl.constexpr, TALL: tl.constexpr,
                LENGTH: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """Return the logits of a group's query heads with the new token's key: [TALL]."""
    g = tl.arange(0, TALL)
    zero = tl.arange(0, 1)
    q_low, q_high = load_rotated(q + sequence * q_row + (head * HEADS + g) * q_head, g < HEADS,
                                 tl.zeros_like(g) + cached, cos, sin, ROTARY, LENGTH, LENGTH, 16,
                                 WIDTH)
    k_low, k_high = load_rotated(k + zero, zero == 0, zero + cached, cos, sin, ROTARY, LENGTH,
                                 LENGTH, 16, WIDTH)
    logit = scale * tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)
                           + q_high.to(tl.float32) * k_high.to(tl.float32), axis=1)
    if CAPPED:
        logit = soft_capped(logit, cap) * LOG2_E
    return logit


@triton.jit
def _denominators(stats, rows, new_logit, sink_logits, head, count, splits, everyone,
                  HEADS: tl.constexpr, TALL: tl.constexpr, SPLITS: tl.constexpr):
    """Return the maximum and sum of the whole softmax, [TALL] each: splits, new token, sink."""
    g = tl.arange(0, TALL)
    part = tl.arange(0, SPLITS)
    valid = (g < HEADS)[:, None] & (part < count)[None, :]
    place = stats + rows[:, None] * splits + part[None, :]
    maxima = tl.load(place, mask=valid, other=LOWEST)
    totals = tl.load(place + everyone, mask=valid, other=0.0)
    maximum = tl.maximum(tl.max(maxima, axis=1), new_logit)
    sink = new_logit
    if sink_logits is not None:
        sink = tl.load(sink_logits + head * HEADS + g, mask=g < HEADS, other=0.0) * LOG2_E
        maximum = tl.maximum(maximum, sink)
    total = tl.sum(tl.exp2(maxima - maximum[:, None]) * totals,
                   axis=1) + tl.exp2(new_logit - maximum)
    if sink_logits is not None:
        total += tl.exp2(sink - maximum)
    return maximum, total


@triton.jit
def _combine(parts, stats, v, out, rows, live, new_logit, maximum, total, count, splits,
             LENGTH: tl.constexpr, CHUNK: tl.constexpr):
    """Combine the splits and the new token to the output of each head."""
    lane = tl.arange(0, triton.next_power_of_2(LENGTH))
    value = tl.load(v + lane, mask=lane < LENGTH, other=0).to(tl.float32)
    result = tl.exp2(new_logit - maximum)[:, None] * value[None, :]
    for start in range(0, count, CHUNK):
        split = start + tl.arange(0, CHUNK)
        mask = live[:, None] & (split < count)[None, :]
        index = rows[:, None] * splits + split[None, :]
        weight = tl.exp2(tl.load(stats + index, mask=mask, other=LOWEST) - maximum[:, None])
        chunk = tl.load(parts + index[:, :, None] * LENGTH + lane[None, None, :],
                        mask=mask[:, :, None] & (lane < LENGTH)[None, None, :], other=0.0)
        result += tl.sum(chunk * weight[:, :, None], axis=1)
    tl.store(out + rows[:, None] * LENGTH + lane[None, :],
             (result / total[:, None]).to(out.dtype.element_ty),
             mask=live[:, None] & (lane < LENGTH)[None, :])


@triton.jit
def _score(logits, scores, positions, rows, heads, lse, first, last, tokens, recent, n, decay,
           sinks, window, MEAN: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr):
    """Add attention weights to the scores of slots first to last, and find the best victim.

    Returns its score, position and slot. Each lane keeps the best victim of its own slots; threads
    compare them once at the end.
    """
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("inf"), tl.float32)
    oldest = tl.full((BLOCK,), EMPTY, tl.int32)
    victim = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, last, BLOCK):
        slot = start + lane
        live = slot < last
        logit = tl.load(logits + rows[:, None] * n + slot[None, :],
                        mask=heads[:, None] & live[None, :], other=float("-inf"))
        received = tl.sum(tl.exp2(logit - lse[:, None]), axis=0)
        score = tl.load(scores + slot, mask=live, other=0.0) * decay + received
        tl.store(scores + slot, score, mask=live)
        position = tl.load(positions + slot, mask=live, other=EMPTY)
        may = live & (position >= sinks) & (position < tokens - recent)
        if MEAN:
            score = tl.div_rn(score, tl.maximum(tokens - position, 1).to(tl.float32))
        if WINDOWED:  # tokens outside of the next window are evicted first
            score = tl.where(position > tokens - window, score, float("-inf"))
        may = may & ((score < best) | ((score == best) & (position < oldest)))
        best = tl.where(may, score, best)
        oldest = tl.where(may, position, oldest)
        victim = tl.where(may, slot, victim)
    return _lowest(best, oldest, victim)


@triton.jit
def _lowest(scores, positions, slots):
    """Return score, position and slot of the lowest score; of equal scores, the oldest token."""
    score = tl.min(scores, axis=0)
    position = tl.min(tl.where(scores == score, positions, EMPTY), axis=0)
    is_lowest = (scores == score) & (positions == position)
    return score, position, tl.min(tl.where(is_lowest, slots, EMPTY), axis=0)


@triton.jit
def _score_part(q, q_row, q_head, k, k_row, k_head, metadata, scores, positions, b_row, b_head,
                cos, sin, logits, stats, lowest, victims, kv_heads, n, split, splits, part, scale,
                cap, window, sink_logits, decay, sinks, HEADS: tl.constexpr, CAPPED: tl.constexpr,
                WINDOWED: tl.constexpr, TALL: tl.constexpr, LENGTH: tl.constexpr,
                WIDTH: tl.constexpr, ROTARY: tl.constexpr, MEAN: tl.constexpr,
                SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `_score` of one part of the slots of one KV head.

    Writes the lowest score of each part to lowest [.., head, part], and the position and slot of
    its token to victims, int32 [2, .., head, part].
    """
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    sequences = tl.num_programs(0) // kv_heads
    cached = tl.load(metadata + sequence)
    first = tl.program_id(1) * part
    if first >= cached:
        return
    g = tl.arange(0, TALL)
    rows = tl.program_id(0).to(tl.int64) * HEADS + g
    new_logit = _new_logits(q, q_row, q_head, k + sequence * k_row + head * k_head, cos, sin,
                            sequence, head, cached, scale, cap, HEADS, CAPPED, TALL, LENGTH, WIDTH,
                            ROTARY)
    maximum, total = _denominators(stats, rows, new_logit, sink_logits, head,
                                   tl.cdiv(cached, split), splits,
                                   tl.num_programs(0).to(tl.int64) * HEADS * splits, HEADS, TALL,
                                   SPLITS)
    state = sequence * b_row + head * b_head
    score, position, slot = _score(
        logits, scores + state, positions + state, rows, g < HEADS, maximum + tl.log2(total), first,
        tl.minimum(first + part, cached), tl.load(metadata + sequences + sequence),
        tl.load(metadata + 2 * sequences + sequence), n, decay, sinks, window, MEAN, WINDOWED,
        BLOCK)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    everyone = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(lowest + place, score)
    tl.store(victims + place, position)
    tl.store(victims + everyone + place, slot)


@triton.jit
def _lowest_part(lowest, victims, count, score_parts, PARTS: tl.constexpr):
    """Return the slot to evict, the best of the `count` parts that `_score_part` wrote."""
    part = tl.arange(0, PARTS)
    live = part < count
    place = tl.program_id(0).to(tl.int64) * score_parts + part
    everyone = tl.num_programs(0).to(tl.int64) * score_parts
    _, _, slot = _lowest(tl.load(lowest + place, mask=live, other=float("inf")),
                         tl.load(victims + place, mask=live, other=EMPTY),
                         tl.load(victims + everyone + place, mask=live, other=0))
    return slot


@triton.jit
def _note(scores, positions, ranks, place, score, cached, tokens, full, BLOCK: tl.constexpr):
    """Add the new token in slot `place` to the eviction state of one head."""
    # Wait for threads that store this score, and read this position.
    tl.debug_barrier()
    tl.store(scores + place, score)
    tl.store(positions + place, tokens - 1)
    if ranks is not None:
        evicted_rank = tl.load(ranks + place)
        tl.debug_barrier()  # every thread has read it before it changes
        lane = tl.arange(0, BLOCK)
        for start in range(0, cached * full, BLOCK):
            slot = start + lane
            rank = tl.load(ranks + slot, mask=slot < cached, other=-1)
            tl.store(ranks + slot, rank - 1, mask=(slot < cached) & (rank > evicted_rank))
        tl.debug_barrier()
        tl.store(ranks + place, cached - full)


@triton.jit
def _finish(q, q_row, q_head, k, k_row, k_head, v, v_row, v_head, out, slots, s_kind, s_row,
            s_head, s_slot, metadata, scores, positions, ranks, b_row, b_head, cos, sin, logits,
            parts, stats, lowest, victims, written_slots, fixed_slots, kv_heads, n, split, splits,
            part, score_parts, scale, cap, window, sink_logits, decay, sinks, HEADS: tl.constexpr,
            CAPPED: tl.constexpr, WINDOWED: tl.constexpr, TALL: tl.constexpr,
            LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
            VALUE_GROUP: tl.constexpr, VALUE_BITS: tl.constexpr, WIDTH: tl.constexpr,
            ROTARY: tl.constexpr, UNIT: tl.constexpr, MEAN: tl.constexpr, SPLITS: tl.constexpr,
            PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the output of one KV head, update its eviction state, and cache the new token.

    All in-place updates are here, but scores are updated by `_score_part` if `lowest` and `victims`
    are given. Without an eviction state the new token takes slot `fixed_slots`, or the next one.
    """
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    sequences = tl.num_programs(0) // kv_heads
    cached = tl.load(metadata + sequence)
    g = tl.arange(0, TALL)
    zero = tl.arange(0, 1)
    k += sequence * k_row + head * k_head
    v += sequence * v_row + head * v_head
    new_logit = _new_logits(q, q_row, q_head, k, cos, sin, sequence, head, cached, scale, cap,
                            HEADS, CAPPED, TALL, LENGTH, WIDTH, ROTARY)
    rows = tl.program_id(0).to(tl.int64) * HEADS + g
    count = tl.cdiv(cached, split)
    maximum, total = _denominators(stats, rows, new_logit, sink_logits, head, count, splits,
                                   tl.num_programs(0).to(tl.int64) * HEADS * splits, HEADS, TALL,
                                   SPLITS)
    _combine(parts, stats, v, out, rows, g < HEADS, new_logit, maximum, total, count, splits,
             LENGTH, CHUNK)
    place = cached
    if fixed_slots is not None:
        place = tl.load(fixed_slots + sequence)
    if scores is not None:
        tokens = tl.load(metadata + sequences + sequence)
        recent = tl.load(metadata + 2 * sequences + sequence)
        full = tl.load(metadata + 3 * sequences + sequence)
        state = sequence * b_row + head * b_head
        lse = maximum + tl.log2(total)
        if lowest is not None:
            victim = _lowest_part(lowest, victims, tl.cdiv(cached, part), score_parts, PARTS)
        else:
            _, _, victim = _score(logits, scores + state, positions + state, rows, g < HEADS, lse,
                                  0, cached, tokens, recent, n, decay, sinks, window, MEAN,
                                  WINDOWED, BLOCK)
        place = tl.where(full == 1, victim, cached)
        received = tl.sum(tl.where(g < HEADS, tl.exp2(new_logit - lse), 0.0), axis=0)
        _note(scores + state, positions + state, None if ranks is None else ranks + state, place,
              received, cached, tokens, full, BLOCK)
    tl.store(written_slots + tl.program_id(0), place.to(tl.int64))
    slots += (sequence * s_row + head * s_head + place.to(tl.int64) * s_slot) * UNIT
    values = slots + s_kind * UNIT
    if BITS == 16:
        lane = tl.arange(0, triton.next_power_of_2(LENGTH))
        tl.store(slots + lane, tl.load(k + lane, mask=lane < LENGTH), mask=lane < LENGTH)
        tl.store(values + lane, tl.load(v + lane, mask=lane < LENGTH), mask=lane < LENGTH)
    else:
        store_packed(k + zero, slots + zero, zero == 0, LENGTH, GROUP, BITS)
        store_packed(v + zero, values + zero, zero == 0, LENGTH, VALUE_GROUP, VALUE_BITS)


def _score_slots(n: int, programs: int, device: torch.device) -> int:
    """Return the slots per program of `_score_part`; n if `_finish` computes the scores.

    `_finish` does if its programs fill the device, or have few slots. With 32,768 slots an H100
    takes 0.22 ms with parts and 0.29 without for 32 heads, 0.087 and 0.112 for 8 KV heads of 4
    query heads. With 8,192 slots the launch costs what the parts save.
    """
    least, target_programs = (16, 8) if interpreted() else (1024, 4 * multiprocessors(device))
    if programs >= target_programs // 4 or n < 16 * least:
        return n
    return max(least, power_of_2(ceil_div(n * programs, target_programs)))


def finish(q: Tensor, k: Tensor, v: Tensor, read: PartialAttention, *, slots: Tensor,
           metadata: Tensor, layout: CacheLayout | None, variant: VariantArguments,
           eviction: EvictionArguments, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output and the written slots of `decode_attention`, given the partial attention.

    Arguments are those of `decode.attend_slots`.
    """
    scores, positions, ranks, cos, sin, mean, decay, sinks, window = eviction[:9]
    (sequences, heads, length), kv_heads, n = q.shape, k.shape[1], read.n
    out, written_slots = q.new_empty(q.shape), q.new_empty((sequences, kv_heads), dtype=torch.int64)
    pairs, group = sequences * kv_heads, heads // kv_heads
    splits = max(1, ceil_div(n, read.split))
    tall, wide = power_of_2(group), power_of_2(length)
    stride = (0, 0) if scores is None else scores.stride()[:2]
    unit, strides = slots_in_units(slots, layout)
    part = max(1, n if scores is None else _score_slots(n, pairs, q.device))
    score_parts, lowest, victims = max(1, ceil_div(n, part)), None, None
    softmax = {"HEADS": group, "TALL": tall, "LENGTH": length, "MEAN": mean,
               "WIDTH": power_of_2(length // 2), "CAPPED": variant.softcap > 0,
               "WINDOWED": window > 0, "ROTARY": 0 if ranks is None else 2 * cos.shape[-1],
               "SPLITS": power_of_2(splits)}
    # Few warps and few logits per thread: 2,048 programs of 1,024 slots each take 0.011 ms on an
    # H200 with 1 warp and 256 slots per iteration; with all slots at once 0.015 ms with 2 warps,
    # 0.058 with 4 and 0.102 with 8. Long caches with few heads have few programs, and up to 16
    # warps. Groups get more warps than single heads, since some spill otherwise.
    width = power_of_2(n)
    warps = max(1, min(16, tall * width // (1024 if group == 1 else 512)))
    block = max(16, min(width, max(256, tall * width // 4) // tall, FINISH_ELEMENTS // tall))
    chunk = max(1, min(power_of_2(splits), FINISH_ELEMENTS // (tall * wide)))
    if score_parts > 1:
        lowest = q.new_empty(pairs * score_parts, dtype=torch.float32)
        victims = q.new_empty(2 * pairs * score_parts, dtype=torch.int32)
        _score_part[(pairs, score_parts)](
            q, *q.stride()[:2], k, *k.stride()[:2], metadata, scores, positions, *stride, cos, sin,
            read.logits, read.stats, lowest, victims, kv_heads, n, read.split, splits, part,
            read.scale, variant.softcap, window, variant.sink_logits, decay, sinks, **softmax,
            BLOCK=max(16, min(part, SCORE_LOGITS // tall)), num_warps=4)
    _finish[(pairs,)](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], out, slots, *strides, metadata,
        scores, positions, ranks, *stride, cos, sin, read.logits, read.parts, read.stats, lowest,
        victims, written_slots, places, kv_heads, n, read.split, splits, part, score_parts,
        read.scale, variant.softcap, window, variant.sink_logits, decay, sinks, **softmax,
        UNIT=unit, **vector_format(length, layout), PARTS=power_of_2(score_parts), CHUNK=chunk,
        BLOCK=block, num_warps=warps)
    return out, written_slots
