"""The hot set of recalled tokens in GPU memory: assigning its slots, and copying tokens to them.

The other tokens are in page-locked host memory, which the copy reads directly. Which tokens are
missing is known on the device only, and there is no synchronization with the host. Missing tokens
replace those of the lowest weight that are not selected; the highest weight to replace is found by
bisection, as in `select`, without a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.kernels.triton.common import ceil_div, interpreted, power_of_2


@triton.jit
def _note_missing(selected, slot_of, marks, missing, top_k, CHUNK: tl.constexpr):
    """Mark the slots of selected tokens, list tokens without a slot, and return their number."""
    count = 0
    for start in range(0, top_k, CHUNK):
        number = start + tl.arange(0, CHUNK)
        token = tl.load(selected + number, mask=number < top_k, other=-1)
        slot = tl.load(slot_of + token, mask=token >= 0, other=-1)
        tl.store(marks + slot, 1, mask=slot >= 0)
        is_missing = (token >= 0) & (slot < 0)
        place = count + tl.cumsum(is_missing.to(tl.int32), axis=0) - 1
        tl.store(missing + place, token, mask=is_missing)
        count += tl.sum(is_missing.to(tl.int32), axis=0)
    return count


@triton.jit
def _at_most(keys, bound, slots, CHUNK: tl.constexpr):
    """Return the number of keys that are at most `bound`."""
    counts = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        key = tl.load(keys + slot, mask=slot < slots, other=2**31 - 1)
        counts += ((key <= bound) & (slot < slots)).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _lowest(keys, slots, count, CHUNK: tl.constexpr):
    """Return the lowest bound that `count` keys do not exceed, and the number of keys below it.

    Keys are not negative. Found by bisection.
    """
    low, high = tl.full((), -1, tl.int64), tl.full((), 2**31 - 1, tl.int64)
    while high - low > 1:  # fewer than `count` are at most `low`, and `count` at most `high`
        middle = (low + high) >> 1
        enough = _at_most(keys, middle.to(tl.int32), slots, CHUNK) >= count
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    return high.to(tl.int32), _at_most(keys, low.to(tl.int32), slots, CHUNK)


@triton.jit
def _claim(selected, slot_of, token_of, log_weights, keys, token_slots, missing, places, counts,
           tokens, slots, top_k, CHUNK: tl.constexpr):
    """Compute `reference.recall.claim_slots` of one KV head."""
    pair = tl.program_id(0).to(tl.int64)
    selected += pair * top_k
    token_slots += pair * top_k
    missing += pair * top_k
    places += pair * top_k
    slot_of += pair * tokens
    log_weights += pair * tokens
    token_of += pair * slots
    keys += pair * slots
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        tl.store(keys + slot, 0, mask=slot < slots)
    tl.debug_barrier()
    count = _note_missing(selected, slot_of, keys, missing, top_k, CHUNK)
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
        num_given, num_equal = 0, 0
        for start in range(0, slots, CHUNK):
            slot = start + tl.arange(0, CHUNK)
            key = tl.load(keys + slot, mask=slot < slots, other=2**31 - 1)
            equal = (key == bound) & (slot < slots)
            before = num_equal + tl.cumsum(equal.to(tl.int32), axis=0)
            gives = (key < bound) | (equal & (before <= count - below))
            number = num_given + tl.cumsum(gives.to(tl.int32), axis=0) - 1
            new = tl.load(missing + number, mask=gives, other=0)
            old = tl.load(token_of + slot, mask=gives, other=-1)
            tl.store(slot_of + old, -1, mask=gives & (old >= 0))
            tl.store(slot_of + new, slot, mask=gives)
            tl.store(token_of + slot, new, mask=gives)
            tl.store(places + number, slot, mask=gives)
            num_equal += tl.sum(equal.to(tl.int32), axis=0)
            num_given += tl.sum(gives.to(tl.int32), axis=0)
        tl.debug_barrier()
    for start in range(0, top_k, CHUNK):
        number = start + tl.arange(0, CHUNK)
        token = tl.load(selected + number, mask=number < top_k, other=-1)
        slot = tl.load(slot_of + token, mask=token >= 0, other=-1)
        tl.store(token_slots + number, slot, mask=number < top_k)


@triton.jit
def _copy(source, s_kind, s_row, s_head, target, t_kind, t_row, t_head, origins, places, counts,
          kv_heads, top_k, KINDS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Copy ROWS keys and values of one KV head. With one kind, a row holds both."""
    pair = tl.program_id(0).to(tl.int64)
    sequence, head = pair // kv_heads, pair % kv_heads
    number = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = number < tl.load(counts + pair)
    origin = tl.load(origins + pair * top_k + number, mask=live, other=0).to(tl.int64) * WIDTH
    place = tl.load(places + pair * top_k + number, mask=live, other=0).to(tl.int64) * WIDTH
    lane = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    mask = live[:, None] & (lane < WIDTH)
    source += sequence * s_row + head * s_head
    target += sequence * t_row + head * t_head
    keys = tl.load(source + origin[:, None] + lane, mask=mask)
    if KINDS == 2:
        values = tl.load(source + s_kind + origin[:, None] + lane, mask=mask)
        tl.store(target + t_kind + place[:, None] + lane, values, mask=mask)
    tl.store(target + place[:, None] + lane, keys, mask=mask)


def claim_slots(selected: Tensor, *, slot_of: Tensor, token_of: Tensor, log_weights: Tensor
                ) -> tuple[Tensor, Tensor, Tensor]:
    """Run `reference.recall.claim_slots`, without synchronization."""
    top_k, slots = selected.shape[2], token_of.shape[1]
    selected = selected.contiguous()
    token_slots, missing = torch.empty_like(selected), selected.new_empty((2, *selected.shape))
    counts, keys = selected.new_empty(selected.shape[:2]), torch.empty_like(token_of)
    chunk = 32 if interpreted() else 2048
    if selected.numel():
        _claim[(len(token_of),)](
            selected, slot_of, token_of, log_weights, keys, token_slots, *missing, counts,
            slot_of.shape[1], slots, top_k, CHUNK=chunk, num_warps=8)
    return token_slots, missing, counts


def copy_tokens(source: Tensor, target: Tensor, moves: Tensor, counts: Tensor) -> None:
    """Run `reference.recall.copy_tokens`; either side may be in page-locked host memory."""
    nbytes = source.shape[-1] * source.element_size()
    dtype = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
                 if nbytes % dtype.itemsize == 0)
    source, target = source.view(dtype), target.view(dtype)
    top_k, width = moves.shape[3], source.shape[4]
    rows = max(1, (32 if interpreted() else 2048) // power_of_2(width))
    rows = min(rows, power_of_2(top_k))
    if moves.numel():
        _copy[(counts.numel(), ceil_div(top_k, rows))](
            source, *source.stride()[:3], target, *target.stride()[:3], *moves, counts,
            counts.shape[1], top_k, KINDS=len(source), WIDTH=width, ROWS=rows)
