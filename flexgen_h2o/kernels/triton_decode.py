"""Decode attention on a GPU: two launches, one that reads the cache and one that writes to it.

The first is split over the slots, so that a batch of one fills the device too; each program reads
its slots' keys and values once for all query heads of a KV head, and leaves logits and a partial
softmax. (Compressed caches whose heads are not multiplied together go by `triton_codes`.) The
second puts the parts together, adds the new token, scores, evicts and writes: not before every read
of the first is done, since launches on one stream follow each other.

All logits are to base 2 (`tl.exp2` is the device's own instruction).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.formats import GroupLayout
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.arguments import (
    DEFAULT_ARGUMENTS,
    EvictionArguments,
    FormArguments,
)
from flexgen_h2o.kernels.gpus import gpu_of
from flexgen_h2o.kernels.triton_codes import (
    EXACT,
    LOG2_E,
    LOWEST,
    read_codes,
    reads_codes,
)
from flexgen_h2o.kernels.triton_common import (
    EMPTY,
    FEWEST,
    configs,
    in_units,
    interpreted,
    load_halves,
    load_rotated,
    multiprocessors,
    one_layout,
    soft_capped,
    store_records,
    unit_stride,
)

MOST_SPLITS = 128
NO_EVICTION = EvictionArguments()
FINISH_ELEMENTS = 8192
"""Elements that a program of the second launch handles at a time."""


@triton.jit
def _logits(q_low, q_high, k_low, k_high, slot, live, kept, n, g, scale, cap, seen,
            HEADS: tl.constexpr, CAPPED: tl.constexpr):
    """Logits of a block of slots, [slots] of one query head or [heads, slots] of several; none of
    slots that are not `seen`.

    They are stored at `kept`, a row of n for each head, unless it is None.
    """
    if HEADS == 1:
        products = (k_low.to(tl.float32) * q_low.to(tl.float32)
                    + k_high.to(tl.float32) * q_high.to(tl.float32))
        logit = tl.sum(products, axis=1) * scale
        if CAPPED:
            logit = soft_capped(logit, cap) * LOG2_E
        logit = tl.where(seen, logit, float("-inf"))
        if kept is not None:
            tl.store(kept + slot, logit, mask=live)
    else:
        logit = tl.dot(q_low.to(k_low.dtype), tl.trans(k_low), input_precision="tf32")
        logit = tl.dot(q_high.to(k_high.dtype), tl.trans(k_high), logit, input_precision="tf32")
        logit = logit * scale
        if CAPPED:
            logit = soft_capped(logit, cap) * LOG2_E
        logit = tl.where(seen[None, :], logit, float("-inf"))
        if kept is not None:
            tl.store(kept + g.to(tl.int64)[:, None] * n + slot[None, :], logit,
                     mask=(g < HEADS)[:, None] & live[None, :])
    return logit


@triton.jit
def _attend(logit, v_low, v_high, most, total, low, high, HEADS: tl.constexpr):
    """One step of the online softmax: maximum, sum and the two halves of the output.

    Of one query head, every lane of slots has a softmax of its own, put together at the end. The
    loop then has no exchange between threads but each logit's sum, so loads stay in flight. A
    group of heads goes through the matrix units, with one softmax a head.
    """
    if HEADS == 1:
        new = tl.maximum(most, logit)
        shrink, p = tl.exp2(most - new), tl.exp2(logit - new)
        total = total * shrink + p
        low = low * shrink[:, None] + p[:, None] * v_low.to(tl.float32)
        high = high * shrink[:, None] + p[:, None] * v_high.to(tl.float32)
    else:
        new = tl.maximum(most, tl.max(logit, axis=1))
        shrink, p = tl.exp2(most - new), tl.exp2(logit - new[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        p = p.to(v_low.dtype)
        low = tl.dot(p, v_low, low * shrink[:, None], input_precision="tf32")
        high = tl.dot(p, v_high, high * shrink[:, None], input_precision="tf32")
    return new, total, low, high


def _fitting(tuned, named_args, **constants):
    """The configs that do not spill: what is rotated has sines and partners in registers, too, and
    what is chosen its places (benchmarks/results/gpu_static.csv holds the rest to it)."""
    if not constants["ROTARY"] and named_args["chosen"] is None:
        return tuned
    of_a_warp = 4 if constants["WIDTH"] > 64 or named_args["q"].dtype == torch.float32 else 8
    return [one for one in tuned
            if one.kwargs["BLOCK"] < 64 and one.kwargs["BLOCK"] <= of_a_warp * one.num_warps]


@triton.autotune(
    configs({"BLOCK": 16}, ({"BLOCK": 16}, 2, 2), ({"BLOCK": 16}, 4, 3), ({"BLOCK": 32}, 4, 2),
            ({"BLOCK": 32}, 4, 3), ({"BLOCK": 64}, 8, 2)),
    key=["HEADS", "LENGTH", "BITS", "ROTARY", "LONG"],
    prune_configs_by={"early_config_prune": _fitting}, cache_results=True)
@triton.jit
def _read(q, q_row, q_head, slots, s_kind, s_row, s_head, s_slot, metadata, ranks, b_row, b_head,
          cos, sin, logits, parts, stats, chosen, kv_heads, n, split, scale, cap, positions,
          window, HEADS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
          SHARERS: tl.constexpr, TALL: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr,
          BITS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, UNIT: tl.constexpr,
          LONG: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [sequence, head, slot], parts [.., head, split, LENGTH], stats [2, .., head, split].

    One program a split of the slots of one sequence's KV head, for HEADS query heads; SHARERS
    programs side by side have all of its group. Where there are `chosen` slots, [.., n] of each KV
    head, these are meant by the first ones. The strides of slots come in UNITs. LONG only tells the
    tuner. All that is written is scratch, so that the tuner may run it again.
    """
    pair, sharer = tl.program_id(0) // SHARERS, tl.program_id(0) % SHARERS
    sequence = (pair // kv_heads).to(tl.int64)
    head = (pair % kv_heads).to(tl.int64)
    cached = tl.load(metadata + sequence)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, cached)
    if first >= last:
        return
    lane = tl.arange(0, BLOCK)
    g = tl.arange(0, TALL)
    rows = q + sequence * q_row + ((head * SHARERS + sharer) * HEADS + g) * q_head
    q_low, q_high = load_rotated(rows, g < HEADS, tl.zeros_like(g) + cached, cos, sin, ROTARY,
                                 LENGTH, LENGTH, 16, WIDTH)
    mine = tl.program_id(0).to(tl.int64) * HEADS + g  # of parts and stats
    kept = None if logits is None else logits + tl.program_id(0).to(tl.int64) * HEADS * n
    slots += (sequence * s_row + head * s_head) * UNIT
    most = tl.full((BLOCK if HEADS == 1 else TALL,), LOWEST, tl.float32)
    total = tl.zeros_like(most)
    low = tl.zeros((BLOCK if HEADS == 1 else TALL, WIDTH), tl.float32)
    high = tl.zeros_like(low)
    for start in range(first, last, BLOCK):
        slot = start + lane
        live = slot < last
        at = slot
        if chosen is not None:
            at = tl.load(chosen + pair.to(tl.int64) * n + slot, mask=live, other=0)
        place = slots + at.to(tl.int64) * s_slot * UNIT
        places = slot
        if ROTARY > 0:
            places = tl.load(ranks + sequence * b_row + head * b_head + slot, mask=live, other=0)
        k_low, k_high = load_rotated(place, live, places, cos, sin, ROTARY, LENGTH, GROUP, BITS,
                                     WIDTH)
        v_low, v_high = load_halves(place + s_kind * UNIT, live, LENGTH, GROUP, BITS, WIDTH)
        seen = live
        if WINDOWED:
            tokens = tl.load(metadata + tl.num_programs(0) // (kv_heads * SHARERS) + sequence)
            position = tl.load(positions + sequence * b_row + head * b_head + slot, mask=live,
                               other=0)
            seen = live & (position > tokens - 1 - window)
        logit = _logits(q_low, q_high, k_low, k_high, slot, live, kept, n, g, scale, cap, seen,
                        HEADS, CAPPED)
        most, total, low, high = _attend(logit, v_low, v_high, most, total, low, high, HEADS)
    _keep_part(parts, stats, mine, g, most, total, low, high, LENGTH, WIDTH, HEADS)


@triton.jit
def _keep_part(parts, stats, mine, g, most, total, low, high, LENGTH: tl.constexpr,
               WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """Store a split's partial softmax of the query heads `mine`."""
    if HEADS == 1:
        weight = tl.exp2(most - tl.max(most, axis=0))
        most = tl.max(most, axis=0) + tl.zeros_like(g)
        total = tl.sum(total * weight, axis=0) + tl.zeros_like(g)
        low = tl.sum(low * weight[:, None], axis=0)[None, :]
        high = tl.sum(high * weight[:, None], axis=0)[None, :]
    live = g < HEADS
    lane = tl.arange(0, WIDTH)
    place = mine * tl.num_programs(1) + tl.program_id(1)
    everyone = tl.num_programs(0).to(tl.int64) * HEADS * tl.num_programs(1)
    tl.store(stats + place, most, mask=live)
    tl.store(stats + everyone + place, total, mask=live)
    mask = live[:, None] & (lane < LENGTH // 2)[None, :]
    place = parts + place[:, None] * LENGTH + lane[None, :]
    tl.store(place, low, mask=mask)
    tl.store(place + LENGTH // 2, high, mask=mask)


@triton.jit
def _combine(parts, stats, v, out, mine, live, own, sink, count, splits, everyone,
             LENGTH: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr):
    """Put the splits and the new token together: the output; maximum and sum of each head."""
    part = tl.arange(0, SPLITS)
    there = live[:, None] & (part < count)[None, :]
    place = stats + mine[:, None] * splits + part[None, :]
    mosts = tl.load(place, mask=there, other=LOWEST)
    totals = tl.load(place + everyone, mask=there, other=0.0)
    most = tl.maximum(tl.max(mosts, axis=1), own)
    if sink is not None:
        most = tl.maximum(most, sink)
    fresh = tl.exp2(own - most)
    total = tl.sum(tl.exp2(mosts - most[:, None]) * totals, axis=1) + fresh
    if sink is not None:
        total += tl.exp2(sink - most)
    lane = tl.arange(0, triton.next_power_of_2(LENGTH))
    value = tl.load(v + lane, mask=lane < LENGTH, other=0).to(tl.float32)
    result = fresh[:, None] * value[None, :]
    for start in range(0, count, CHUNK):
        some = start + tl.arange(0, CHUNK)
        mask = live[:, None] & (some < count)[None, :]
        index = mine[:, None] * splits + some[None, :]
        weight = tl.exp2(tl.load(stats + index, mask=mask, other=LOWEST) - most[:, None])
        chunk = tl.load(parts + index[:, :, None] * LENGTH + lane[None, None, :],
                        mask=mask[:, :, None] & (lane < LENGTH)[None, None, :], other=0.0)
        result += tl.sum(chunk * weight[:, :, None], axis=1)
    tl.store(out + mine[:, None] * LENGTH + lane[None, :],
             (result / total[:, None]).to(out.dtype.element_ty),
             mask=live[:, None] & (lane < LENGTH)[None, :])
    return most, total


@triton.jit
def _score(logits, scores, positions, mine, heads, lse, cached, tokens, recent, n, decay, sinks,
           window, MEAN: tl.constexpr, WINDOWED: tl.constexpr, BLOCK: tl.constexpr):
    """Add what each slot received to its attention score; the slot with the lowest score, or 0.

    Each lane remembers the best victim of its own slots: one comparison among threads at the end.
    """
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("inf"), tl.float32)
    oldest = tl.full((BLOCK,), EMPTY, tl.int32)
    victim = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, cached, BLOCK):
        slot = start + lane
        live = slot < cached
        logit = tl.load(logits + mine[:, None] * n + slot[None, :],
                        mask=heads[:, None] & live[None, :], other=float("-inf"))
        received = tl.sum(tl.exp2(logit - lse[:, None]), axis=0)
        score = tl.load(scores + slot, mask=live, other=0.0) * decay + received
        tl.store(scores + slot, score, mask=live)
        position = tl.load(positions + slot, mask=live, other=EMPTY)
        may = live & (position >= sinks) & (position < tokens - recent)
        if MEAN:
            score = tl.div_rn(score, tl.maximum(tokens - position, 1).to(tl.float32))
        if WINDOWED:  # what the next token does not see goes first
            score = tl.where(position > tokens - window, score, float("-inf"))
        may = may & ((score < best) | ((score == best) & (position < oldest)))
        best = tl.where(may, score, best)
        oldest = tl.where(may, position, oldest)
        victim = tl.where(may, slot, victim)
    lowest = best == tl.min(best, axis=0)
    first = tl.min(tl.where(lowest, oldest, EMPTY), axis=0)
    return tl.min(tl.where(lowest & (oldest == first), victim, EMPTY), axis=0)


@triton.jit
def _note(scores, positions, ranks, place, own, cached, tokens, full, BLOCK: tl.constexpr):
    """Write the new token into the eviction state of one head, in `place`; see
    `reference._note`."""
    # Other threads have just stored this attention score, and read this position.
    tl.debug_barrier()
    tl.store(scores + place, own)
    tl.store(positions + place, tokens - 1)
    if ranks is not None:
        gone = tl.load(ranks + place)
        tl.debug_barrier()  # every thread has read it: now it may change
        lane = tl.arange(0, BLOCK)
        for start in range(0, cached * full, BLOCK):
            slot = start + lane
            rank = tl.load(ranks + slot, mask=slot < cached, other=-1)
            tl.store(ranks + slot, rank - 1, mask=(slot < cached) & (rank > gone))
        tl.debug_barrier()
        tl.store(ranks + place, cached - full)


@triton.jit
def _finish(q, q_row, q_head, k, k_row, k_head, v, v_row, v_head, out, slots, s_kind, s_row,
            s_head, s_slot, metadata, scores, positions, ranks, b_row, b_head, cos, sin, logits,
            parts, stats, taken, given, kv_heads, n, split, splits, scale, cap, window,
            sink_logits, decay, sinks, HEADS: tl.constexpr, CAPPED: tl.constexpr,
            WINDOWED: tl.constexpr, TALL: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr,
            BITS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, UNIT: tl.constexpr,
            MEAN: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Output, eviction state and slot of one sequence's KV head: all that changes in place changes
    here. Without an eviction state the new token takes the slot that it is `given`, or the next."""
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    sequences = tl.num_programs(0) // kv_heads
    cached = tl.load(metadata + sequence)
    g = tl.arange(0, TALL)
    one = tl.arange(0, 1)
    k += sequence * k_row + head * k_head
    v += sequence * v_row + head * v_head
    q_low, q_high = load_rotated(q + sequence * q_row + (head * HEADS + g) * q_head, g < HEADS,
                                 tl.zeros_like(g) + cached, cos, sin, ROTARY, LENGTH, LENGTH, 16,
                                 WIDTH)
    k_low, k_high = load_rotated(k + one, one == 0, one + cached, cos, sin, ROTARY, LENGTH,
                               LENGTH, 16, WIDTH)
    own = scale * tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)
                         + q_high.to(tl.float32) * k_high.to(tl.float32), axis=1)
    if CAPPED:
        own = soft_capped(own, cap) * LOG2_E
    sink = None
    if sink_logits is not None:
        sink = tl.load(sink_logits + head * HEADS + g, mask=g < HEADS, other=0.0) * LOG2_E
    mine = tl.program_id(0).to(tl.int64) * HEADS + g
    everyone = tl.num_programs(0).to(tl.int64) * HEADS * splits
    most, total = _combine(parts, stats, v, out, mine, g < HEADS, own, sink,
                           tl.cdiv(cached, split), splits, everyone, LENGTH, SPLITS, CHUNK)
    place = cached
    if given is not None:
        place = tl.load(given + sequence)
    if scores is not None:
        tokens = tl.load(metadata + sequences + sequence)
        recent = tl.load(metadata + 2 * sequences + sequence)
        full = tl.load(metadata + 3 * sequences + sequence)
        state = sequence * b_row + head * b_head
        lse = most + tl.log2(total)
        victim = _score(logits, scores + state, positions + state, mine, g < HEADS, lse, cached,
                        tokens, recent, n, decay, sinks, window, MEAN, WINDOWED, BLOCK)
        place = tl.where(full == 1, victim, cached)
        received = tl.sum(tl.where(g < HEADS, tl.exp2(own - lse), 0.0), axis=0)
        _note(scores + state, positions + state, None if ranks is None else ranks + state, place,
              received, cached, tokens, full, BLOCK)
    tl.store(taken + tl.program_id(0), place.to(tl.int64))
    slots += (sequence * s_row + head * s_head + place.to(tl.int64) * s_slot) * UNIT
    values = slots + s_kind * UNIT
    if BITS == 16:
        lane = tl.arange(0, triton.next_power_of_2(LENGTH))
        tl.store(slots + lane, tl.load(k + lane, mask=lane < LENGTH), mask=lane < LENGTH)
        tl.store(values + lane, tl.load(v + lane, mask=lane < LENGTH), mask=lane < LENGTH)
    else:
        store_records(k + one, slots + one, one == 0, LENGTH, GROUP, BITS)
        store_records(v + one, values + one, one == 0, LENGTH, GROUP, BITS)


def _split(n: int, programs: int, device: torch.device) -> int:
    """Slots of one split: so many splits that the device is busy for several rounds."""
    least, wanted = (32, 4) if interpreted() else (128, 32 * multiprocessors(device))
    splits = min(max(1, wanted // programs), MOST_SPLITS)
    return max(least, triton.cdiv(triton.cdiv(n, splits), least) * least)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     bits: int, eviction: EvictionArguments,
                     form: FormArguments = DEFAULT_ARGUMENTS) -> tuple[Tensor, Tensor]:
    """See `reference.decode_attention`; it never waits for the device."""
    with one_layout(eviction) as eviction:
        return attend_slots(q, k, v, slots=slots, metadata=metadata, bits=bits, form=form,
                            eviction=eviction)


def attend_slots(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor, bits: int,
                 form: FormArguments, eviction: EvictionArguments = NO_EVICTION,
                 chosen: Tensor | None = None, places: Tensor | None = None
                 ) -> tuple[Tensor, Tensor]:
    """Attention over cached slots, or `chosen` ones alone.

    Of the arguments that `decode_attention` has not: `eviction` has scores, positions and ranks of
    one layout (`one_layout`). `chosen` are int32 [sequences, kv_heads, most], of which metadata's
    first row says how many count, and `places` int32 [sequences] the slots that new tokens take.
    """
    scores, positions, ranks, cos, sin, mean, decay, sinks, window = eviction
    (sequences, heads, length), kv_heads = q.shape, k.shape[1]
    n = slots.shape[3] if chosen is None else chosen.shape[2]
    out, taken = q.new_empty(q.shape), q.new_empty((sequences, kv_heads), dtype=torch.int64)
    pairs, group = sequences * kv_heads, heads // kv_heads
    if not pairs:
        return out, taken
    q, k, v, metadata = (unit_stride(x) for x in (q, k, v, metadata.contiguous()))
    split = _split(n, pairs, q.device)
    splits = max(1, triton.cdiv(n, split))
    logits, parts, stats = (q.new_empty(pairs * group * size, dtype=torch.float32)
                            for size in (0 if scores is None else n, splits * length, splits * 2))
    logits = None if scores is None else logits
    rotary = 0 if ranks is None else 2 * cos.shape[-1]
    tables = (None, None) if ranks is None else (cos.contiguous(), sin.contiguous())
    unit, strides = in_units(slots)
    layout = length if bits == 16 else GroupLayout(length, bits).group
    shape = {"UNIT": unit, "LENGTH": length, "BITS": bits, "GROUP": layout,
             "CAPPED": form.softcap > 0, "WINDOWED": window > 0}
    half, tall = triton.next_power_of_2(length // 2), triton.next_power_of_2(group)
    # A group goes to `tl.dot` together, or head by head: then the cache is read once for each, but
    # at the same time, and so mostly from the second-level cache.
    together = group > 1 and dispatch.gpu_choice(
        "decode_attention", group, q.dtype, gpu_of(q.device)) == "matrix units"
    heads, least = (group, FEWEST) if together else (1, 1)
    stride = (0, 0) if scores is None else scores.stride()[:2]
    scale = (form.scale or length**-0.5) * (1 if form.softcap else math.log2(math.e))
    apart = {"SHARERS": group // heads, "LONG": n >= 512}
    grid = (pairs * (group // heads), splits)
    if heads == 1 and reads_codes(slots, unit, length, layout, bits, rotary):
        read_codes[grid](
            q, *q.stride()[:2], slots, *strides, metadata, *stride, logits, parts, stats, chosen,
            kv_heads, n, split, scale, form.softcap, positions, window, EXACT, **shape, **apart,
            WORDS=triton.next_power_of_2(length // 8))
    else:
        _read[grid](
            q, *q.stride()[:2], slots, *strides, metadata, ranks, *stride, *tables, logits,
            parts, stats, chosen, kv_heads, n, split, scale, form.softcap, positions, window,
            **shape, **apart, ROTARY=rotary, HEADS=heads,
            TALL=max(least, triton.next_power_of_2(heads)), WIDTH=max(least, half))
    # As few warps as will do, and few logits a thread: 2048 programs of 1024 slots each take 0.011
    # ms on an H200 with 1 warp and 256 slots at a time; with all at once 0.015 ms with 2 warps, and
    # 0.058 and 0.102 ms with 4 and 8. Long caches of few heads, whose programs are few, have up to
    # 16; groups have more than single heads, since some spill otherwise.
    most = triton.next_power_of_2(n)
    warps = max(1, min(16, tall * most // (1024 if group == 1 else 512)))
    block = max(16, min(most, max(256, tall * most // 4) // tall, FINISH_ELEMENTS // tall))
    wide = triton.next_power_of_2(length)
    chunk = max(1, min(triton.next_power_of_2(splits), FINISH_ELEMENTS // (tall * wide)))
    _finish[(pairs,)](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], out, slots,
        *strides, metadata, scores, positions, ranks, *stride, *tables, logits, parts, stats,
        taken, places, kv_heads, n, split, splits, scale, form.softcap, window, form.sink_logits,
        decay, sinks, **shape, ROTARY=rotary, HEADS=group, TALL=tall, WIDTH=half, MEAN=mean,
        SPLITS=triton.next_power_of_2(splits), CHUNK=chunk, BLOCK=block, num_warps=warps)
    return out, taken
