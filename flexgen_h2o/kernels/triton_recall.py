"""Recall on a GPU: the index, the choice by it, and attention over what was chosen.

A choice is three launches: logits of all tokens by the index, the weights that a group of query
heads gives to each, and a selection by bisection as of prompts (`triton_select`), without a sort.
Attention is that of `triton_decode` over the chosen slots alone. These may lie in page-locked host
memory: then only what is chosen crosses to the device, as it is read. Or the device holds a fast
set of them, and only what that lacks is copied to it: nothing waits for the host to say what.

All logits are to base 2 (`tl.exp2` is the device's own instruction).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config import limits
from flexgen_h2o.config.formats import GroupLayout
from flexgen_h2o.config.index_layout import IndexLayout
from flexgen_h2o.h2o.recall import QUERY_LEVELS
from flexgen_h2o.kernels import triton_decode
from flexgen_h2o.kernels.arguments import FormArguments
from flexgen_h2o.kernels.gpus import gpu_of, has_matrix_units
from flexgen_h2o.kernels.triton_common import (
    FEWEST,
    device_ints,
    in_units,
    interpreted,
    load_elements,
    soft_capped,
    unit_stride,
)
from flexgen_h2o.kernels.triton_select import MOST_IN_REGISTERS, store_staying, threshold

INDEX_TILE = tl.constexpr(limits.INDEX_TILE)
MEAN_SHIFT = tl.constexpr(limits.MEAN_SHIFT)
LEVELS = tl.constexpr(float(QUERY_LEVELS))
LOG2_E = tl.constexpr(1.4426950408889634)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding it to a small float32 leaves no bits for a fraction."""


@triton.jit
def _index(keys, k_row, k_head, k_slot, index, i_row, i_head, spans, LENGTH: tl.constexpr,
           RECORD: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
           INDEX_BITS: tl.constexpr, ROWS: tl.constexpr):
    """Index ROWS keys of one sequence's KV head; they are records of BITS in groups of RECORD."""
    PER: tl.constexpr = 8 // INDEX_BITS
    GROUPS: tl.constexpr = LENGTH // GROUP
    MANY: tl.constexpr = triton.next_power_of_2(GROUPS)
    WIDE: tl.constexpr = triton.next_power_of_2(GROUP // PER)
    sequence, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, token = tl.load(spans + 3 * sequence), tl.load(spans + 3 * sequence + 1)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = number < tl.load(spans + 3 * sequence + 2)
    keys += (sequence.to(tl.int64) * k_row + head * k_head) * UNIT
    rows = keys + (first + number).to(tl.int64) * k_slot * UNIT
    group, byte = tl.arange(0, MANY), tl.arange(0, WIDE)
    there = (group < GROUPS)[:, None] & (byte < GROUP // PER)[None, :]
    element = group[:, None] * GROUP + byte[None, :] * PER
    low = tl.full((ROWS, MANY), float("inf"), tl.float32)
    high = tl.full((ROWS, MANY), float("-inf"), tl.float32)
    values = ()
    for j in tl.static_range(PER):
        x = load_elements(rows, live, tl.reshape(element + j, (MANY * WIDE,)),
                          tl.reshape(there, (MANY * WIDE,)), 0, LENGTH // RECORD - 1, LENGTH,
                          RECORD, BITS)
        x = tl.reshape(x.to(tl.float32), (ROWS, MANY, WIDE))
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        low = tl.minimum(low, tl.min(tl.where(there[None], x, float("inf")), axis=2))
        high = tl.maximum(high, tl.max(tl.where(there[None], x, float("-inf")), axis=2))
        values += (x,)
    zero = low.to(tl.float16)
    levels = tl.full(low.shape, 2**INDEX_BITS - 1, tl.float32)
    scale = tl.div_rn(high - zero.to(tl.float32), levels)
    scale = tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16)
    # A constant group has codes 0.
    steps = tl.maximum(scale.to(tl.float32), 5.9604644775390625e-08)[:, :, None]
    steps = tl.broadcast_to(steps, (ROWS, MANY, WIDE))
    packed = tl.zeros((ROWS, MANY, WIDE), tl.int32)
    for j in tl.static_range(PER):
        ratio = tl.div_rn(values[j] - zero.to(tl.float32)[:, :, None], steps)
        ratio = tl.minimum(tl.maximum(ratio, 0.0), 2**INDEX_BITS - 1.0)
        packed |= ((ratio + ROUND) - ROUND).to(tl.int32) << (INDEX_BITS * j)
    CODES: tl.constexpr = LENGTH // PER
    place = token + number
    tile = index + sequence.to(tl.int64) * i_row + head * i_head
    tile += (place // INDEX_TILE).to(tl.int64) * (INDEX_TILE * (CODES + 4 * GROUPS))
    lane = place % INDEX_TILE
    row = group[:, None] * (GROUP // PER) + byte[None, :]
    tl.store((tile + lane)[:, None, None] + row[None] * INDEX_TILE, packed.to(tl.uint8),
             mask=live[:, None, None] & there[None])
    halves = (tile + CODES * INDEX_TILE).to(tl.pointer_type(tl.float16)) + lane
    mask = live[:, None] & (group < GROUPS)[None, :]
    tl.store(halves[:, None] + group[None, :] * INDEX_TILE, scale, mask=mask)
    tl.store(halves[:, None] + (GROUPS + group)[None, :] * INDEX_TILE, zero, mask=mask)


@triton.jit
def _logits(q, q_row, q_head, index, i_row, i_head, metadata, logits, stats, kv_heads, n, scale,
            cap, HEADS: tl.constexpr, TALL: tl.constexpr, CAPPED: tl.constexpr,
            LENGTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [pair, head, token] of BLOCK tokens by the index, and the maximum and the sum of their
    softmax in stats [2, pair, head, block].

    Codes of keys meet those of rounded queries on matrix units, whose sums are exact.
    """
    PER: tl.constexpr = 8 // BITS
    GROUPS: tl.constexpr = LENGTH // GROUP
    WIDE: tl.constexpr = triton.next_power_of_2(GROUP // PER)
    DEEP: tl.constexpr = WIDE if WIDE > 16 else 16
    pair, block = tl.program_id(0), tl.program_id(1)
    sequence, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    cached = tl.load(metadata + sequence)
    if block * BLOCK >= cached:
        return
    g = tl.arange(0, TALL)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < cached
    q += sequence * q_row + head * HEADS * q_head
    tile = index + sequence * i_row + head * i_head + (token % INDEX_TILE)
    tile += (token // INDEX_TILE).to(tl.int64) * (INDEX_TILE * (LENGTH // PER + 4 * GROUPS))
    halves = (index + sequence * i_row + head * i_head).to(tl.pointer_type(tl.float16))
    halves += (token // INDEX_TILE).to(tl.int64) * (INDEX_TILE * (LENGTH // PER + 4 * GROUPS) // 2)
    halves += INDEX_TILE * (LENGTH // PER) // 2 + token % INDEX_TILE
    byte = tl.arange(0, DEEP)
    there = byte < GROUP // PER
    total = tl.zeros((TALL, BLOCK), tl.float32)
    for group in range(GROUPS):
        place = q + g.to(tl.int64)[:, None] * q_head + (group * GROUP + byte * PER)[None, :]
        wanted = (g < HEADS)[:, None] & there[None, :]
        largest = tl.zeros((TALL,), tl.float32)
        for j in tl.static_range(PER):
            x = tl.load(place + j, mask=wanted, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        step = tl.div_rn(largest, tl.full((TALL,), LEVELS, tl.float32))
        divisor = tl.broadcast_to(tl.where(step > 0, step, 1.0)[:, None], (TALL, DEEP))
        row = group * (GROUP // PER) + byte
        codes = tl.load(tile[None, :] + row[:, None] * INDEX_TILE,
                        mask=there[:, None] & live[None, :], other=0)
        dots = tl.zeros((TALL, BLOCK), tl.float32)
        sums = tl.zeros((TALL,), tl.float32)
        for j in tl.static_range(PER):
            x = tl.load(place + j, mask=wanted, other=0.0).to(tl.float32)
            x = (tl.div_rn(x, divisor) + ROUND) - ROUND
            x = tl.minimum(tl.maximum(x, -LEVELS), LEVELS)
            code = (codes >> (BITS * j)) & (2**BITS - 1)
            dots = tl.dot(x.to(tl.float16), code.to(tl.float16), dots)
            sums += tl.sum(x, axis=1)
        scales = tl.load(halves + group * INDEX_TILE, mask=live, other=0.0).to(tl.float32)
        zeros = tl.load(halves + (GROUPS + group) * INDEX_TILE, mask=live,
                        other=0.0).to(tl.float32)
        total += step[:, None] * (dots * scales[None, :] + sums[:, None] * zeros[None, :])
    logit = total * scale
    if CAPPED:
        logit = soft_capped(logit, cap) * LOG2_E
    logit = tl.where(live[None, :], logit, float("-inf"))
    mine = pair.to(tl.int64) * HEADS + g
    tl.store(logits + mine[:, None] * n + token[None, :], logit,
             mask=(g < HEADS)[:, None] & live[None, :])
    most = tl.max(logit, axis=1)
    sums = tl.sum(tl.exp2(logit - most[:, None]), axis=1)
    stats += mine * tl.num_programs(1) + block
    tl.store(stats, most, mask=g < HEADS)
    everyone = tl.num_programs(0).to(tl.int64) * HEADS * tl.num_programs(1)
    tl.store(stats + everyone, sums, mask=g < HEADS)


@triton.jit
def _weigh(q, q_row, q_head, k, k_row, k_head, metadata, logits, stats, weights, log_weights,
           l_row, l_head, sink_logits, kv_heads, n, blocks, scale, cap, HEADS: tl.constexpr,
           TALL: tl.constexpr, CAPPED: tl.constexpr, LENGTH: tl.constexpr, BLOCKS: tl.constexpr,
           BLOCK: tl.constexpr):
    """Weights [pair, token] of BLOCK tokens, summed over a group's query heads, and the running
    means of their logarithms."""
    pair, block = tl.program_id(0), tl.program_id(1)
    sequence, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    cached = tl.load(metadata + sequence)
    if block * BLOCK >= cached:
        return
    g, lane = tl.arange(0, TALL), tl.arange(0, triton.next_power_of_2(LENGTH))
    there = g < HEADS
    queries = q + sequence * q_row + (head * HEADS + g)[:, None] * q_head + lane[None, :]
    key = tl.load(k + sequence * k_row + head * k_head + lane, mask=lane < LENGTH, other=0.0)
    query = tl.load(queries, mask=there[:, None] & (lane < LENGTH)[None, :], other=0.0)
    own = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
    if CAPPED:
        own = soft_capped(own, cap) * LOG2_E
    mine = pair.to(tl.int64) * HEADS + g
    part = tl.arange(0, BLOCKS)
    mask = there[:, None] & (part < tl.cdiv(cached, BLOCK))[None, :]
    place = stats + mine[:, None] * blocks + part[None, :]
    mosts = tl.load(place, mask=mask, other=float("-inf"))
    sums = tl.load(place + tl.num_programs(0).to(tl.int64) * HEADS * blocks, mask=mask, other=0.0)
    most = tl.maximum(tl.max(mosts, axis=1), own)
    if sink_logits is not None:
        sink = tl.load(sink_logits + head * HEADS + g, mask=there, other=0.0) * LOG2_E
        most = tl.maximum(most, sink)
    total = tl.sum(tl.exp2(mosts - most[:, None]) * sums, axis=1) + tl.exp2(own - most)
    if sink_logits is not None:
        total += tl.exp2(sink - most)
    lse = most + tl.log2(total)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + mine[:, None] * n + token[None, :],
                    mask=there[:, None] & (token < cached)[None, :], other=float("-inf"))
    weight = tl.sum(tl.exp2(logit - lse[:, None]), axis=0)
    tl.store(weights + pair.to(tl.int64) * n + token, weight, mask=token < cached)
    if log_weights is not None:  # `reference_recall.note_weights`
        log_weights += sequence * l_row + head * l_head + token
        bits = weight.to(tl.int32, bitcast=True)
        mean = tl.load(log_weights, mask=token < cached, other=0)
        mean = tl.where(mean != 0, mean + ((bits - mean) >> MEAN_SHIFT), bits)
        tl.store(log_weights, mean, mask=token < cached)


@triton.jit
def _choose(weights, metadata, chosen, kv_heads, n, most, WHOLE: tl.constexpr,
            BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The tokens of most weight of one sequence's KV head, ascending, and -1 behind the last."""
    pair = tl.program_id(0)
    sequence = pair // kv_heads
    cached = tl.load(metadata + sequence)
    count = tl.load(metadata + tl.num_programs(0) // kv_heads + sequence)
    weights += pair.to(tl.int64) * n
    chosen += pair.to(tl.int64) * most
    bound, above, equals = tl.full((), 2**31 - 1, tl.int32), 0, 0  # above all finite weights
    first = cached  # no choice: all tokens are before the first candidate
    if count < cached:
        first = 0
        if count > 0:
            bound, above, equals = threshold(weights, 1, 0, cached, cached, count, False, WHOLE,
                                             BLOCK)
    store_staying(weights, 1, first, cached, cached, bound, equals, count - above, chosen, None,
                  False, CHUNK)
    for start in range(0, most, CHUNK):
        place = start + tl.arange(0, CHUNK)
        tl.store(chosen + place, -1, mask=(place >= count) & (place < most))


@triton.jit
def _note_missing(chosen, slot_of, marks, missing, most, CHUNK: tl.constexpr):
    """Mark the slots of chosen tokens, and list those that have none, in their order; how many."""
    count = 0
    for start in range(0, most, CHUNK):
        number = start + tl.arange(0, CHUNK)
        token = tl.load(chosen + number, mask=number < most, other=-1)
        slot = tl.load(slot_of + token, mask=token >= 0, other=-1)
        tl.store(marks + slot, 1, mask=slot >= 0)
        away = (token >= 0) & (slot < 0)
        tl.store(missing + count + tl.cumsum(away.to(tl.int32), axis=0) - 1, token, mask=away)
        count += tl.sum(away.to(tl.int32), axis=0)
    return count


@triton.jit
def _at_most(keys, bound, slots, CHUNK: tl.constexpr):
    """Number of keys that are at most `bound`."""
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        key = tl.load(keys + slot, mask=slot < slots, other=2**31 - 1)
        found += ((key <= bound) & (slot < slots)).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def _lowest(keys, slots, count, CHUNK: tl.constexpr):
    """The least bound that `count` keys do not exceed, and how many are below it. Keys are not
    negative; bisection, as of `triton_select`."""
    low, high = tl.full((), -1, tl.int64), tl.full((), 2**31 - 1, tl.int64)
    while high - low > 1:  # fewer than `count` are at most `low`, and `count` at most `high`
        middle = (low + high) >> 1
        enough = _at_most(keys, middle.to(tl.int32), slots, CHUNK) >= count
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return high.to(tl.int32), _at_most(keys, low.to(tl.int32), slots, CHUNK)


@triton.jit
def _claim(chosen, slot_of, token_of, log_weights, keys, taken, missing, places, counts, tokens,
           slots, most, CHUNK: tl.constexpr):
    """Slots of what one KV head has chosen; what is missing gets those of the least weights."""
    pair = tl.program_id(0).to(tl.int64)
    chosen += pair * most
    taken += pair * most
    missing += pair * most
    places += pair * most
    slot_of += pair * tokens
    log_weights += pair * tokens
    token_of += pair * slots
    keys += pair * slots
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        tl.store(keys + slot, 0, mask=slot < slots)
    tl.debug_barrier()
    count = _note_missing(chosen, slot_of, keys, missing, most, CHUNK)
    tl.store(counts + pair, count)
    tl.debug_barrier()
    if count > 0:
        for start in range(0, slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            live = slot < slots
            token = tl.load(token_of + slot, mask=live, other=-1)
            key = tl.load(log_weights + token, mask=token >= 0, other=0)
            marked = tl.load(keys + slot, mask=live, other=1)
            tl.store(keys + slot, tl.where(marked != 0, 2**31 - 1, key), mask=live)
        tl.debug_barrier()
        bound, below = _lowest(keys, slots, count, CHUNK)
        given, seen = 0, 0
        for start in range(0, slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            key = tl.load(keys + slot, mask=slot < slots, other=2**31 - 1)
            equal = (key == bound) & (slot < slots)
            before = seen + tl.cumsum(equal.to(tl.int32), axis=0)
            gives = (key < bound) | (equal & (before <= count - below))
            number = given + tl.cumsum(gives.to(tl.int32), axis=0) - 1
            new = tl.load(missing + number, mask=gives, other=0)
            old = tl.load(token_of + slot, mask=gives, other=-1)
            tl.store(slot_of + old, -1, mask=gives & (old >= 0))
            tl.store(slot_of + new, slot, mask=gives)
            tl.store(token_of + slot, new, mask=gives)
            tl.store(places + number, slot, mask=gives)
            seen += tl.sum(equal.to(tl.int32), axis=0)
            given += tl.sum(gives.to(tl.int32), axis=0)
        tl.debug_barrier()
    for start in range(0, most, CHUNK):
        number = start + tl.arange(0, CHUNK)
        token = tl.load(chosen + number, mask=number < most, other=-1)
        slot = tl.load(slot_of + token, mask=token >= 0, other=-1)
        tl.store(taken + number, slot, mask=number < most)


@triton.jit
def _copy(source, s_kind, s_row, s_head, target, t_kind, t_row, t_head, origins, places, counts,
          kv_heads, most, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Copy ROWS of one KV head's keys and values to their places; strides in elements."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // kv_heads, pair % kv_heads
    number = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = number < tl.load(counts + pair)
    origin = tl.load(origins + pair * most + number, mask=live, other=0).to(tl.int64) * WIDTH
    place = tl.load(places + pair * most + number, mask=live, other=0).to(tl.int64) * WIDTH
    lane = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    mask = live[:, None] & (lane < WIDTH)
    source += sequence * s_row + head * s_head
    target += sequence * t_row + head * t_head
    keys = tl.load(source + origin[:, None] + lane, mask=mask)
    values = tl.load(source + s_kind + origin[:, None] + lane, mask=mask)
    tl.store(target + place[:, None] + lane, keys, mask=mask)
    tl.store(target + t_kind + place[:, None] + lane, values, mask=mask)


def index_keys(keys: Tensor, index: Tensor, spans: Tensor, *, layout: IndexLayout, bits: int
               ) -> None:
    """See `reference_recall.index_keys`; the same bytes. Keys may be in page-locked host memory."""
    keys = unit_stride(keys)
    _, kv_heads, _, _ = keys.shape
    counts = spans[2].tolist()
    if not max(counts, default=0):
        return
    length = layout.length
    rows = max(1, (256 if interpreted() else 4096) // triton.next_power_of_2(length))
    rows = min(rows, triton.next_power_of_2(max(counts)))
    unit, strides = in_units(keys)
    told = device_ints(tuple(map(tuple, spans.T.tolist())), index.device)
    _index[(triton.cdiv(max(counts), rows), len(counts), kv_heads)](
        keys, *strides, index, *index.stride()[:2], told, LENGTH=length,
        RECORD=length if bits == 16 else GroupLayout(length, bits).group, BITS=bits, UNIT=unit,
        GROUP=layout.group, INDEX_BITS=layout.bits, ROWS=rows)


def choose_keys(q: Tensor, k: Tensor, *, index: Tensor, metadata: Tensor, layout: IndexLayout,
                most: int, log_weights: Tensor | None, form: FormArguments) -> Tensor:
    """See `reference_recall.choose_keys`; it never waits for the device."""
    (sequences, heads, length), kv_heads = q.shape, k.shape[1]
    n, pairs, group = index.shape[2] * limits.INDEX_TILE, sequences * kv_heads, heads // kv_heads
    chosen = torch.empty((sequences, kv_heads, most), dtype=torch.int32, device=q.device)
    if not chosen.numel():
        return chosen
    q, k, metadata = unit_stride(q), unit_stride(k), metadata.contiguous()
    block, chunk = (32, 32) if interpreted() else (256, 2048)
    if not has_matrix_units(gpu_of(q.device), torch.float16):
        block = 32  # products keep more in registers
    blocks = triton.cdiv(n, block)
    logits, stats, weights = (q.new_empty(size, dtype=torch.float32) for size in (
        pairs * group * n, 2 * pairs * group * blocks, pairs * n))
    scale = (form.scale or length**-0.5) * (1 if form.softcap else math.log2(math.e))
    shape = {"HEADS": group, "CAPPED": form.softcap > 0, "LENGTH": length, "BLOCK": block}
    tall = triton.next_power_of_2(group)
    _logits[(pairs, blocks)](
        q, *q.stride()[:2], index, *index.stride()[:2], metadata, logits, stats, kv_heads, n,
        scale, form.softcap, **shape, TALL=max(FEWEST, tall), GROUP=layout.group, BITS=layout.bits)
    _weigh[(pairs, blocks)](
        q, *q.stride()[:2], k, *k.stride()[:2], metadata, logits, stats, weights, log_weights,
        *((0, 0) if log_weights is None else log_weights.stride()[:2]), form.sink_logits,
        kv_heads, n, blocks, scale, form.softcap, **shape, TALL=tall,
        BLOCKS=triton.next_power_of_2(blocks))
    whole = n <= (64 if interpreted() else MOST_IN_REGISTERS)
    chunk = max(32, min(chunk, triton.next_power_of_2(n)))
    wide = max(32, triton.next_power_of_2(n)) if whole else chunk
    _choose[(pairs,)](
        weights, metadata, chosen, kv_heads, n, most, WHOLE=whole, BLOCK=wide, CHUNK=chunk,
        num_warps=max(4, min(16, max(wide // 128 if whole else 0, chunk // 256))))
    return chosen


def attend_recalled(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, chosen: Tensor,
                    metadata: Tensor, bits: int, form: FormArguments) -> tuple[Tensor, Tensor]:
    """See `reference_recall.attend_recalled`; slots may be in page-locked host memory, of which
    those that are chosen are read."""
    places, counts = metadata.contiguous()
    return triton_decode.attend_slots(q, k, v, slots=slots, metadata=counts, bits=bits, form=form,
                                      chosen=chosen.contiguous(), places=places)


def claim_slots(chosen: Tensor, *, slot_of: Tensor, token_of: Tensor, log_weights: Tensor
                ) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference_recall.claim_slots`; it never waits for the device."""
    most, slots = chosen.shape[2], token_of.shape[1]
    chosen = chosen.contiguous()
    taken, missing = torch.empty_like(chosen), chosen.new_empty((2, *chosen.shape))
    counts, keys = chosen.new_empty(chosen.shape[:2]), torch.empty_like(token_of)
    chunk = 32 if interpreted() else 2048
    if chosen.numel():
        _claim[(len(token_of),)](
            chosen, slot_of, token_of, log_weights, keys, taken, *missing, counts,
            slot_of.shape[1], slots, most, CHUNK=chunk, num_warps=8)
    return taken, missing, counts


def copy_tokens(source: Tensor, target: Tensor, moves: Tensor, counts: Tensor) -> None:
    """See `reference_recall.copy_tokens`; either side may be in page-locked host memory."""
    nbytes = source.shape[-1] * source.element_size()
    dtype = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
                 if nbytes % dtype.itemsize == 0)
    source, target = source.view(dtype), target.view(dtype)
    most, width = moves.shape[3], source.shape[4]
    rows = max(1, (32 if interpreted() else 2048) // triton.next_power_of_2(width))
    rows = min(rows, triton.next_power_of_2(most))
    if moves.numel():
        _copy[(counts.numel(), triton.cdiv(most, rows))](
            source, *source.stride()[:3], target, *target.stride()[:3], *moves, counts,
            counts.shape[1], most, WIDTH=width, ROWS=rows)
