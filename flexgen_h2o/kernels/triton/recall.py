"""Recall on a GPU: the key index, the selection of tokens, and attention over them.

`select_keys` has four launches: quantize queries, compute logits of all tokens from the index, sum
the attention weights over a group's query heads, and select tokens by bisection as `select` does,
without a sort. Attention over the selected slots is that of `decode`. Slots may be in page-locked
host memory: then only selected ones are transferred, as they are read. Logits are to base 2, as
`tl.exp2` is one instruction.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config import limits
from flexgen_h2o.config.cache_layout import CacheLayout, GroupLayout, IndexLayout
from flexgen_h2o.h2o.recall import QUERY_LEVELS
from flexgen_h2o.kernels.arguments import VariantArguments
from flexgen_h2o.kernels.triton import decode as triton_decode
from flexgen_h2o.kernels.triton.common import (
    ceil_div,
    device_ints,
    in_units,
    interpreted,
    power_of_2,
    soft_capped,
    unit_stride,
)
from flexgen_h2o.kernels.triton.groups import load_elements
from flexgen_h2o.kernels.triton.select import launch_shape, store_staying, threshold

INDEX_TILE = tl.constexpr(limits.INDEX_TILE)
MEAN_SHIFT = tl.constexpr(limits.MEAN_SHIFT)
LEVELS = tl.constexpr(float(QUERY_LEVELS))
LOG2_E = tl.constexpr(1.4426950408889634)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23. Adding it to a small float32 and subtracting it rounds to an integer."""
MAX_HEADS = 4
"""Query heads per program of `_logits`; the accumulators of more do not fit into registers."""


@triton.jit
def _index(keys, k_row, k_head, k_slot, index, i_row, i_head, spans, LENGTH: tl.constexpr,
           KEY_GROUP: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
           INDEX_BITS: tl.constexpr, ROWS: tl.constexpr):
    """Index ROWS keys of one KV head, which have BITS bits in groups of KEY_GROUP elements."""
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
    valid = (group < GROUPS)[:, None] & (byte < GROUP // PER)[None, :]
    element = group[:, None] * GROUP + byte[None, :] * PER
    low = tl.full((ROWS, MANY), float("inf"), tl.float32)
    high = tl.full((ROWS, MANY), float("-inf"), tl.float32)
    values = ()
    for j in tl.static_range(PER):
        x = load_elements(rows, live, tl.reshape(element + j, (MANY * WIDE,)),
                          tl.reshape(valid, (MANY * WIDE,)), 0, LENGTH // KEY_GROUP - 1, LENGTH,
                          KEY_GROUP, BITS)
        x = tl.reshape(x.to(tl.float32), (ROWS, MANY, WIDE))
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        low = tl.minimum(low, tl.min(tl.where(valid[None], x, float("inf")), axis=2))
        high = tl.maximum(high, tl.max(tl.where(valid[None], x, float("-inf")), axis=2))
        values += (x,)
    zero = low.to(tl.float16)
    levels = tl.full(low.shape, 2**INDEX_BITS - 1, tl.float32)
    scale = tl.div_rn(high - zero.to(tl.float32), levels)
    scale = tl.minimum(tl.maximum(scale, 0.0), 65504.0).to(tl.float16)
    # All values of a constant group quantize to 0.
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
             mask=live[:, None, None] & valid[None])
    halves = (tile + CODES * INDEX_TILE).to(tl.pointer_type(tl.float16)) + lane
    mask = live[:, None] & (group < GROUPS)[None, :]
    tl.store(halves[:, None] + group[None, :] * INDEX_TILE, scale, mask=mask)
    tl.store(halves[:, None] + (GROUPS + group)[None, :] * INDEX_TILE, zero, mask=mask)


@triton.jit
def _round_queries(q, q_row, q_head, codes, steps, LENGTH: tl.constexpr, GROUP: tl.constexpr):
    """Quantize one head's query to codes [head, element] and steps [2, head, group].

    Steps are the scale and the sum of the quantized values, see `h2o.recall`.
    """
    GROUPS: tl.constexpr = LENGTH // GROUP
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query_row = sequence * tl.num_programs(1) + head
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    lane = tl.arange(0, triton.next_power_of_2(GROUP))
    element = group[:, None] * GROUP + lane[None, :]
    valid = (group < GROUPS)[:, None] & (lane < GROUP)[None, :]
    x = tl.load(q + sequence * q_row + head * q_head + element, mask=valid, other=0.0)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    step = tl.div_rn(largest, tl.full(largest.shape, LEVELS, tl.float32))
    divisor = tl.broadcast_to(tl.where(step > 0, step, 1.0)[:, None], x.shape)
    code = (tl.div_rn(x, divisor) + ROUND) - ROUND
    code = tl.minimum(tl.maximum(code, -LEVELS), LEVELS).to(tl.int32)
    tl.store(codes + query_row * LENGTH + element, code, mask=valid)
    steps += query_row * GROUPS + group
    tl.store(steps, step, mask=group < GROUPS)
    everyone = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * GROUPS
    tl.store(steps + everyone, tl.sum(code, axis=1).to(tl.float32), mask=group < GROUPS)


@triton.jit
def _two_halves(word):
    """Return the two float16 of a word, as float32; the one in the lower bits first."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _logits(codes, steps, index, i_row, i_head, metadata, logits, stats, kv_heads, n, scale, cap,
            HEADS: tl.constexpr, PART: tl.constexpr, CAPPED: tl.constexpr, LENGTH: tl.constexpr,
            GROUP: tl.constexpr, BITS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute logits [pair, head, token] of BLOCK tokens for PART query heads, from the index.

    The maximum and the sum of their softmax go to stats [2, pair, head, block]. A word has one byte
    of each of four adjacent tokens. Masked, it has two values 16 bits apart, and one multiplication
    by a value of the query computes both products. DEPTH such products fit into 16 signed bits;
    what the lower sum borrows from the upper one is added back.
    """
    PER: tl.constexpr = 8 // BITS
    GROUPS: tl.constexpr = LENGTH // GROUP
    ROWS: tl.constexpr = GROUP // PER
    TILE: tl.constexpr = INDEX_TILE * (LENGTH // PER + 4 * GROUPS) // 4
    MASK: tl.constexpr = (2**BITS - 1) * 0x10001
    pair, block = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * PART
    sequence, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    cached = tl.load(metadata + sequence)
    if block * BLOCK >= cached:
        return
    first_row = pair.to(tl.int64) * HEADS + first
    codes += first_row * LENGTH
    steps += first_row * GROUPS
    sums = steps + tl.num_programs(0).to(tl.int64) * HEADS * GROUPS
    token = block * BLOCK + 4 * tl.arange(0, BLOCK // 4)
    live = token < cached
    tile = (index + sequence * i_row + head * i_head).to(tl.pointer_type(tl.int32))
    tile += (token // INDEX_TILE).to(tl.int64) * TILE + token % INDEX_TILE // 4
    halves = tile - token % INDEX_TILE // 4 + token % INDEX_TILE // 2
    halves += INDEX_TILE * (LENGTH // PER) // 4
    totals = ()
    for _ in tl.static_range(4 * PART):
        totals += (tl.zeros((BLOCK // 4,), tl.float32),)
    for group in range(GROUPS):
        dots = ()
        for _ in tl.static_range(4 * PART):
            dots += (tl.zeros((BLOCK // 4,), tl.int32),)
        for row in range(0, ROWS, DEPTH):
            words = ()
            for i in tl.static_range(DEPTH):
                place = (group * ROWS + row + i) * (INDEX_TILE // 4)
                words += (tl.load(tile + place, mask=live, other=0),)
            for j in tl.static_range(PER):
                query = codes + group * GROUP + row * PER + j
                dots = _add_products(dots, words, query, first, HEADS, PART, LENGTH, PER,
                                     BITS * j, MASK, DEPTH)
        scales, zeros = (), ()
        for i in tl.static_range(2):
            place = halves + group * (INDEX_TILE // 2) + i
            scales += _two_halves(tl.load(place, mask=live, other=0))
            zeros += _two_halves(tl.load(place + GROUPS * (INDEX_TILE // 2), mask=live, other=0))
        added = ()
        for h in tl.static_range(PART):
            head_group = h * GROUPS + group
            step = tl.load(steps + head_group, mask=first + h < HEADS, other=0.0)
            total = tl.load(sums + head_group, mask=first + h < HEADS, other=0.0)
            for i in tl.static_range(4):
                product = dots[4 * h + i].to(tl.float32) * scales[i] + total * zeros[i]
                added += (totals[4 * h + i] + step * product,)
        totals = added
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < cached
    everyone = tl.num_programs(0).to(tl.int64) * HEADS * tl.num_programs(1)
    for h in tl.static_range(PART):
        if first + h < HEADS:
            logit = tl.interleave(tl.interleave(totals[4 * h], totals[4 * h + 2]),
                                  tl.interleave(totals[4 * h + 1], totals[4 * h + 3])) * scale
            if CAPPED:
                logit = soft_capped(logit, cap) * LOG2_E
            logit = tl.where(live, logit, float("-inf"))
            tl.store(logits + (first_row + h) * n + token, logit, mask=live)
            maximum = tl.max(logit, axis=0)
            place = stats + (first_row + h) * tl.num_programs(1) + block
            tl.store(place, maximum)
            tl.store(place + everyone, tl.sum(tl.exp2(logit - maximum), axis=0))


@triton.jit
def _add_products(dots, words, query, first, HEADS: tl.constexpr, PART: tl.constexpr,
                  LENGTH: tl.constexpr, PER: tl.constexpr, SHIFT: tl.constexpr,
                  MASK: tl.constexpr, DEPTH: tl.constexpr):
    """Add the products of the values at SHIFT of all words to the sums of four tokens per head.

    Every PER-th element of `query` belongs to these values.
    """
    even, odd = (), ()
    for _ in tl.static_range(PART):
        even += (tl.zeros(words[0].shape, tl.int32),)
        odd += (tl.zeros(words[0].shape, tl.int32),)
    for i in tl.static_range(DEPTH):
        low, high = (words[i] >> SHIFT) & MASK, (words[i] >> (SHIFT + 8)) & MASK
        new_even, new_odd = (), ()
        for h in tl.static_range(PART):
            x = tl.load(query + h * LENGTH + i * PER, mask=first + h < HEADS, other=0)
            new_even += (even[h] + low * x,)
            new_odd += (odd[h] + high * x,)
        even, odd = new_even, new_odd
    sums = ()
    for h in tl.static_range(PART):
        lower, upper = (even[h] << 16) >> 16, (odd[h] << 16) >> 16
        sums += (dots[4 * h] + lower, dots[4 * h + 1] + upper,
                 dots[4 * h + 2] + ((even[h] - lower) >> 16),
                 dots[4 * h + 3] + ((odd[h] - upper) >> 16))
    return sums


@triton.jit
def _weigh(q, q_row, q_head, k, k_row, k_head, metadata, logits, stats, weights, log_weights,
           l_row, l_head, sink_logits, kv_heads, n, blocks, scale, cap, HEADS: tl.constexpr,
           TALL: tl.constexpr, CAPPED: tl.constexpr, LENGTH: tl.constexpr, BLOCKS: tl.constexpr,
           BLOCK: tl.constexpr):
    """Compute weights [pair, token] of BLOCK tokens, summed over a group; update log_weights."""
    pair, block = tl.program_id(0), tl.program_id(1)
    sequence, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    cached = tl.load(metadata + sequence)
    if block * BLOCK >= cached:
        return
    g, lane = tl.arange(0, TALL), tl.arange(0, triton.next_power_of_2(LENGTH))
    valid = g < HEADS
    queries = q + sequence * q_row + (head * HEADS + g)[:, None] * q_head + lane[None, :]
    key = tl.load(k + sequence * k_row + head * k_head + lane, mask=lane < LENGTH, other=0.0)
    query = tl.load(queries, mask=valid[:, None] & (lane < LENGTH)[None, :], other=0.0)
    new_logit = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
    if CAPPED:
        new_logit = soft_capped(new_logit, cap) * LOG2_E
    rows = pair.to(tl.int64) * HEADS + g
    part = tl.arange(0, BLOCKS)
    mask = valid[:, None] & (part < tl.cdiv(cached, BLOCK))[None, :]
    place = stats + rows[:, None] * blocks + part[None, :]
    maxima = tl.load(place, mask=mask, other=float("-inf"))
    sums = tl.load(place + tl.num_programs(0).to(tl.int64) * HEADS * blocks, mask=mask, other=0.0)
    maximum = tl.maximum(tl.max(maxima, axis=1), new_logit)
    if sink_logits is not None:
        sink = tl.load(sink_logits + head * HEADS + g, mask=valid, other=0.0) * LOG2_E
        maximum = tl.maximum(maximum, sink)
    total = tl.sum(tl.exp2(maxima - maximum[:, None]) * sums, axis=1) + tl.exp2(new_logit - maximum)
    if sink_logits is not None:
        total += tl.exp2(sink - maximum)
    lse = maximum + tl.log2(total)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + rows[:, None] * n + token[None, :],
                    mask=valid[:, None] & (token < cached)[None, :], other=float("-inf"))
    weight = tl.sum(tl.exp2(logit - lse[:, None]), axis=0)
    tl.store(weights + pair.to(tl.int64) * n + token, weight, mask=token < cached)
    if log_weights is not None:  # see `reference.recall.update_log_weights`
        log_weights += sequence * l_row + head * l_head + token
        bits = weight.to(tl.int32, bitcast=True)
        mean = tl.load(log_weights, mask=token < cached, other=0)
        mean = tl.where(mean != 0, mean + ((bits - mean) >> MEAN_SHIFT), bits)
        tl.store(log_weights, mean, mask=token < cached)


@triton.jit
def _choose(weights, metadata, selected, kv_heads, n, top_k, WHOLE: tl.constexpr,
            BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Write the tokens with the largest weights of one KV head, ascending, padded with -1."""
    pair = tl.program_id(0)
    sequence = pair // kv_heads
    cached = tl.load(metadata + sequence)
    count = tl.load(metadata + tl.num_programs(0) // kv_heads + sequence)
    weights += pair.to(tl.int64) * n
    selected += pair.to(tl.int64) * top_k
    bound, num_above, equals = tl.full((), 2**31 - 1, tl.int32), 0, 0  # above all finite weights
    first = cached  # no choice: all tokens are before the first candidate
    if count < cached:
        first = 0
        if count > 0:
            bound, num_above, equals = threshold(weights, 1, 0, cached, cached, count, False, WHOLE,
                                                 BLOCK)
    store_staying(weights, 1, first, cached, cached, bound, equals, count - num_above, selected,
                  None, False, CHUNK)
    for start in range(0, top_k, CHUNK):
        place = start + tl.arange(0, CHUNK)
        tl.store(selected + place, -1, mask=(place >= count) & (place < top_k))


def index_keys(keys: Tensor, index: Tensor, spans: Tensor, *, layout: IndexLayout,
               key_layout: GroupLayout | None) -> None:
    """Run `reference.recall.index_keys`; keys may be in page-locked host memory."""
    keys = unit_stride(keys)
    _, kv_heads, _, _ = keys.shape
    counts = spans[2].tolist()
    if not max(counts, default=0):
        return
    length = layout.length
    rows = max(1, (256 if interpreted() else 4096) // power_of_2(length))
    rows = min(rows, power_of_2(max(counts)))
    unit, strides = in_units(keys)
    device_spans = device_ints(tuple(map(tuple, spans.T.tolist())), index.device)
    _index[(ceil_div(max(counts), rows), len(counts), kv_heads)](
        keys, *strides, index, *index.stride()[:2], device_spans, LENGTH=length,
        KEY_GROUP=length if key_layout is None else key_layout.group,
        BITS=16 if key_layout is None else key_layout.bits, UNIT=unit,
        GROUP=layout.group, INDEX_BITS=layout.bits, ROWS=rows)


def _depth(layout: IndexLayout) -> int:
    """Return the rows of a group, a divisor of them, whose products fit into 16 bits and registers.
    """
    rows = layout.group // layout.per_byte
    max_depth = min(2**15 // (QUERY_LEVELS * layout.levels), 32 // layout.per_byte)
    return next(depth for depth in range(min(rows, max_depth), 0, -1) if rows % depth == 0)


def select_keys(q: Tensor, k: Tensor, *, index: Tensor, metadata: Tensor, layout: IndexLayout,
                top_k: int, log_weights: Tensor | None, variant: VariantArguments) -> Tensor:
    """Run `reference.recall.select_keys`, without synchronization."""
    (sequences, heads, length), kv_heads = q.shape, k.shape[1]
    n, pairs, group = index.shape[2] * limits.INDEX_TILE, sequences * kv_heads, heads // kv_heads
    selected = torch.empty((sequences, kv_heads, top_k), dtype=torch.int32, device=q.device)
    if not selected.numel():
        return selected
    q, k, metadata = unit_stride(q), unit_stride(k), metadata.contiguous()
    block = 32 if interpreted() else 512
    blocks = ceil_div(n, block)
    logits, stats, weights = (q.new_empty(size, dtype=torch.float32) for size in (
        pairs * group * n, 2 * pairs * group * blocks, pairs * n))
    codes = q.new_empty(sequences * heads * length, dtype=torch.int32)
    steps = q.new_empty(2 * sequences * heads * layout.groups, dtype=torch.float32)
    _round_queries[(sequences, heads)](q, *q.stride()[:2], codes, steps, LENGTH=length,
                                       GROUP=layout.group, num_warps=1)
    scale = (variant.scale or length**-0.5) * (1 if variant.softcap else math.log2(math.e))
    shape = {"HEADS": group, "CAPPED": variant.softcap > 0, "LENGTH": length, "BLOCK": block}
    parts = ceil_div(group, MAX_HEADS)
    _logits[(pairs, blocks, parts)](
        codes, steps, index, *index.stride()[:2], metadata, logits, stats, kv_heads, n, scale,
        variant.softcap, **shape, PART=ceil_div(group, parts), GROUP=layout.group,
        BITS=layout.bits, DEPTH=_depth(layout))
    _weigh[(pairs, blocks)](
        q, *q.stride()[:2], k, *k.stride()[:2], metadata, logits, stats, weights, log_weights,
        *((0, 0) if log_weights is None else log_weights.stride()[:2]), variant.sink_logits,
        kv_heads, n, blocks, scale, variant.softcap, **shape, TALL=power_of_2(group),
        BLOCKS=power_of_2(blocks))
    _choose[(pairs,)](weights, metadata, selected, kv_heads, n, top_k, **launch_shape(n, n))
    return selected


def recall_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, selected: Tensor,
                     metadata: Tensor, layout: CacheLayout | None, variant: VariantArguments
                    ) -> tuple[Tensor, Tensor]:
    """Run `reference.recall.recall_attention`; slots may be in page-locked host memory."""
    places, counts = metadata.contiguous()
    return triton_decode.attend_slots(q, k, v, slots=slots, metadata=counts, layout=layout,
                                      variant=variant, selected=selected.contiguous(),
                                      places=places)
