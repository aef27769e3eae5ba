"""Decode attention on a GPU: a launch that reads the cache, and launches that write to it.

The first launch splits the slots among programs, as Flash-Decoding does, so that a batch of one
fills the device. Each program reads the keys and values of its slots once for all query heads of a
KV head, and writes logits and a partial softmax. Quantized caches whose heads are not multiplied
together are read by `decode_quantized`; `finish` has the other launches. Logits are to base 2, as
`tl.exp2` is one instruction.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.arguments import (
    DEFAULT_ARGUMENTS,
    EvictionArguments,
    VariantArguments,
)
from flexgen_h2o.kernels.dispatch import gpu_of
from flexgen_h2o.kernels.triton.common import (
    MIN_DOT_SIZE,
    ceil_div,
    configs,
    interpreted,
    multiprocessors,
    one_layout,
    power_of_2,
    slots_in_units,
    soft_capped,
    unit_stride,
    vector_format,
)
from flexgen_h2o.kernels.triton.decode_quantized import (
    EXACT,
    LOG2_E,
    LOWEST,
    read_codes,
    reads_codes,
)
from flexgen_h2o.kernels.triton.finish import PartialAttention, finish
from flexgen_h2o.kernels.triton.groups import load_halves, load_rotated

MAX_SPLITS = 128
NO_EVICTION = EvictionArguments()


@triton.jit
def _logits(q_low, q_high, k_low, k_high, slot, live, stored, n, g, scale, cap, visible,
            HEADS: tl.constexpr, CAPPED: tl.constexpr):
    """Return the logits of a block of slots: [slots] for one query head, else [heads, slots].

    Slots that are not `visible` are masked. Logits are stored at `stored`, in rows of n for each
    head, unless it is None.
    """
    if HEADS == 1:
        products = (k_low.to(tl.float32) * q_low.to(tl.float32)
                    + k_high.to(tl.float32) * q_high.to(tl.float32))
        logit = tl.sum(products, axis=1) * scale
        if CAPPED:
            logit = soft_capped(logit, cap) * LOG2_E
        logit = tl.where(visible, logit, float("-inf"))
        if stored is not None:
            tl.store(stored + slot, logit, mask=live)
    else:
        logit = tl.dot(q_low.to(k_low.dtype), tl.trans(k_low), input_precision="tf32")
        logit = tl.dot(q_high.to(k_high.dtype), tl.trans(k_high), logit, input_precision="tf32")
        logit = logit * scale
        if CAPPED:
            logit = soft_capped(logit, cap) * LOG2_E
        logit = tl.where(visible[None, :], logit, float("-inf"))
        if stored is not None:
            tl.store(stored + g.to(tl.int64)[:, None] * n + slot[None, :], logit,
                     mask=(g < HEADS)[:, None] & live[None, :])
    return logit


@triton.jit
def _attend(logit, v_low, v_high, maximum, total, low, high, HEADS: tl.constexpr):
    """Return maximum, sum and both halves of the output after a step of the online softmax.

    With one query head, each lane of slots has its own softmax, and these are combined at the end.
    Then threads exchange nothing in the loop except for the sum of each logit, so loads stay in
    flight. A group of heads uses tensor cores, with one softmax per head.
    """
    if HEADS == 1:
        new = tl.maximum(maximum, logit)
        shrink, p = tl.exp2(maximum - new), tl.exp2(logit - new)
        total = total * shrink + p
        low = low * shrink[:, None] + p[:, None] * v_low.to(tl.float32)
        high = high * shrink[:, None] + p[:, None] * v_high.to(tl.float32)
    else:
        new = tl.maximum(maximum, tl.max(logit, axis=1))
        shrink, p = tl.exp2(maximum - new), tl.exp2(logit - new[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        p = p.to(v_low.dtype)
        low = tl.dot(p, v_low, low * shrink[:, None], input_precision="tf32")
        high = tl.dot(p, v_high, high * shrink[:, None], input_precision="tf32")
    return new, total, low, high


def _fitting(tuned, named_args, **constants):
    """Return the configs that do not spill, as benchmarks/results/gpu_static.csv checks.

    Rotation needs registers for sines and partner elements, and selected slots for their indices.
    """
    if not constants["ROTARY"] and named_args["selected"] is None:
        return tuned
    of_a_warp = 4 if constants["WIDTH"] > 64 or named_args["q"].dtype == torch.float32 else 8
    return [config for config in tuned
            if config.kwargs["BLOCK"] <= min(63, of_a_warp * config.num_warps)]


@triton.autotune(
    configs({"BLOCK": 16}, ({"BLOCK": 16}, 2, 2), ({"BLOCK": 16}, 4, 3), ({"BLOCK": 32}, 4, 2),
            ({"BLOCK": 32}, 4, 3), ({"BLOCK": 64}, 8, 2)),
    key=["HEADS", "LENGTH", "BITS", "VALUE_BITS", "ROTARY", "LONG"],
    prune_configs_by={"early_config_prune": _fitting}, cache_results=True)
@triton.jit
def _read(q, q_row, q_head, slots, s_kind, s_row, s_head, s_slot, metadata, ranks, b_row, b_head,
          cos, sin, logits, parts, stats, selected, kv_heads, n, split, scale, cap, positions,
          window, HEADS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
          SHARERS: tl.constexpr, TALL: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr,
          BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_BITS: tl.constexpr,
          WIDTH: tl.constexpr, ROTARY: tl.constexpr, UNIT: tl.constexpr, LONG: tl.constexpr,
          BLOCK: tl.constexpr):
    """Write logits [sequence, head, slot], parts [.., head, split, LENGTH], stats [2, .., split].

    One program per split of the slots of one KV head, for HEADS query heads; SHARERS adjacent
    programs cover its group. With `selected`, [..,
                                                n] per KV head, slot i is selected[i]. Strides of
    slots are in UNITs. LONG is a key for the autotuner, which may run the kernel repeatedly since
    only scratch memory is written.
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
    head_rows = tl.program_id(0).to(tl.int64) * HEADS + g  # row of parts and stats
    stored = None if logits is None else logits + tl.program_id(0).to(tl.int64) * HEADS * n
    slots += (sequence * s_row + head * s_head) * UNIT
    maximum = tl.full((BLOCK if HEADS == 1 else TALL,), LOWEST, tl.float32)
    total = tl.zeros_like(maximum)
    low = tl.zeros((BLOCK if HEADS == 1 else TALL, WIDTH), tl.float32)
    high = tl.zeros_like(low)
    for start in range(first, last, BLOCK):
        slot = start + lane
        live = slot < last
        at = slot
        if selected is not None:
            at = tl.load(selected + pair.to(tl.int64) * n + slot, mask=live, other=0)
        place = slots + at.to(tl.int64) * s_slot * UNIT
        places = slot
        if ROTARY > 0:
            places = tl.load(ranks + sequence * b_row + head * b_head + slot, mask=live, other=0)
        k_low, k_high = load_rotated(place, live, places, cos, sin, ROTARY, LENGTH, GROUP, BITS,
                                     WIDTH)
        v_low, v_high = load_halves(place + s_kind * UNIT, live, LENGTH, VALUE_GROUP, VALUE_BITS,
                                    WIDTH)
        visible = live
        if WINDOWED:
            tokens = tl.load(metadata + tl.num_programs(0) // (kv_heads * SHARERS) + sequence)
            position = tl.load(positions + sequence * b_row + head * b_head + slot, mask=live,
                               other=0)
            visible = live & (position > tokens - 1 - window)
        logit = _logits(q_low, q_high, k_low, k_high, slot, live, stored, n, g, scale, cap, visible,
                        HEADS, CAPPED)
        maximum, total, low, high = _attend(logit, v_low, v_high, maximum, total, low, high, HEADS)
    _keep_part(parts, stats, head_rows, g, maximum, total, low, high, LENGTH, WIDTH, HEADS)


@triton.jit
def _keep_part(parts, stats, rows, g, maximum, total, low, high, LENGTH: tl.constexpr,
               WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """Store a split's partial softmax of the query heads `rows`."""
    if HEADS == 1:
        weight = tl.exp2(maximum - tl.max(maximum, axis=0))
        maximum = tl.max(maximum, axis=0) + tl.zeros_like(g)
        total = tl.sum(total * weight, axis=0) + tl.zeros_like(g)
        low = tl.sum(low * weight[:, None], axis=0)[None, :]
        high = tl.sum(high * weight[:, None], axis=0)[None, :]
    live = g < HEADS
    lane = tl.arange(0, WIDTH)
    place = rows * tl.num_programs(1) + tl.program_id(1)
    everyone = tl.num_programs(0).to(tl.int64) * HEADS * tl.num_programs(1)
    tl.store(stats + place, maximum, mask=live)
    tl.store(stats + everyone + place, total, mask=live)
    mask = live[:, None] & (lane < LENGTH // 2)[None, :]
    place = parts + place[:, None] * LENGTH + lane[None, :]
    tl.store(place, low, mask=mask)
    tl.store(place + LENGTH // 2, high, mask=mask)


def _split(n: int, programs: int, device: torch.device) -> int:
    """Return the slots per split, for enough splits to fill the device several times."""
    min_part, target_programs = (32, 4) if interpreted() else (128, 32 * multiprocessors(device))
    splits = min(max(1, target_programs // programs), MAX_SPLITS)
    return max(min_part, ceil_div(ceil_div(n, splits), min_part) * min_part)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                     layout: CacheLayout | None, eviction: EvictionArguments,
                     variant: VariantArguments = DEFAULT_ARGUMENTS) -> tuple[Tensor, Tensor]:
    """Run `reference.attention.decode_attention`; it never waits for the device."""
    with one_layout(eviction) as eviction:
        return attend_slots(q, k, v, slots=slots, metadata=metadata, layout=layout, variant=variant,
                            eviction=eviction)


def attend_slots(q: Tensor, k: Tensor, v: Tensor, *, slots: Tensor, metadata: Tensor,
                 layout: CacheLayout | None, variant: VariantArguments,
                 eviction: EvictionArguments = NO_EVICTION, selected: Tensor | None = None,
                 places: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention over all cached slots or selected ones, and cache the new tokens.

    Arguments in addition to those of `decode_attention`:

    Parameters
    ----------
    eviction : EvictionArguments
        Scores, positions and ranks have equal strides (`one_layout`).
    selected : int32 Tensor [sequences, kv_heads, top_k], optional
        Slots to attend to; the first row of `metadata` is their number.
    places : int32 Tensor [sequences], optional
        The slots of the new tokens. None: as `decode_attention` assigns them.
    """
    (sequences, heads, length), kv_heads = q.shape, k.shape[1]
    n = slots.shape[3] if selected is None else selected.shape[2]
    pairs, group = sequences * kv_heads, heads // kv_heads
    if not pairs:
        return torch.empty_like(q), q.new_empty((sequences, kv_heads), dtype=torch.int64)
    q, k, v, metadata = (unit_stride(x) for x in (q, k, v, metadata.contiguous()))
    scores, positions, ranks, cos, sin = eviction[:5]
    tables = (None, None) if ranks is None else (cos.contiguous(), sin.contiguous())
    eviction = eviction._replace(cos=tables[0], sin=tables[1])
    split = _split(n, pairs, q.device)
    splits = max(1, ceil_div(n, split))
    logits, parts, stats = (q.new_empty(pairs * group * size, dtype=torch.float32)
                            for size in (0 if scores is None else n, splits * length, splits * 2))
    logits = None if scores is None else logits
    rotary = 0 if ranks is None else 2 * cos.shape[-1]
    unit, strides = slots_in_units(slots, layout)
    shape = {"UNIT": unit, "LENGTH": length, **vector_format(length, layout),
             "CAPPED": variant.softcap > 0, "WINDOWED": eviction.window > 0}
    # A group's heads run together in `tl.dot`, or one by one. Then every head reads the cache, but
    # at the same time, and mostly from L2.
    together = group > 1 and dispatch.select_gpu_implementation(
        "decode_attention", group, q.dtype, gpu_of(q.device)) == "matrix units"
    heads, min_rows = (group, MIN_DOT_SIZE) if together else (1, 1)
    stride = (0, 0) if scores is None else scores.stride()[:2]
    scale = (variant.scale or length**-0.5) * (1 if variant.softcap else math.log2(math.e))
    separate = {"SHARERS": group // heads, "LONG": n >= 512}
    grid = (pairs * (group // heads), splits)
    if heads == 1 and reads_codes(slots, unit, length, layout, rotary):
        read_codes[grid](
            q, *q.stride()[:2], slots, *strides, metadata, *stride, logits, parts, stats, selected,
            kv_heads, n, split, scale, variant.softcap, positions, eviction.window, EXACT, **shape,
            **separate, WORDS=power_of_2(length // 8))
    else:
        _read[grid](
            q, *q.stride()[:2], slots, *strides, metadata, ranks, *stride, *tables, logits,
            parts, stats, selected, kv_heads, n, split, scale, variant.softcap, positions,
            eviction.window, **shape, **separate, ROTARY=rotary, HEADS=heads,
            TALL=max(min_rows, power_of_2(heads)),
            WIDTH=max(min_rows, power_of_2(length // 2)))
    return finish(q, k, v, PartialAttention(logits, parts, stats, n, split, scale), slots=slots,
                  metadata=metadata, layout=layout, variant=variant, eviction=eviction,
                  places=places)
