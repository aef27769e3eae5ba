"""Recall on a GPU: the index, the choice by it, and attention over what was chosen.

A choice is three launches: logits of all tokens by the index, the weights that a group of query
heads gives to each, and a selection by bisection as of prompts (`triton_select`), without a sort.
Attention is that of `triton_decode` over the chosen slots alone. These may lie in page-locked host
memory: then only what is chosen crosses to the device, as it is read.

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
