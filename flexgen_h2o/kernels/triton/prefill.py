"""Causal attention of packed prompts on a GPU, with the attention score of each key.

The forward pass of FlashAttention (arXiv 2307.08691, section 3.1) saves each row's maximum logit
and the inverse of its softmax sum; their logarithm would lose the sum beside a large maximum. A
second pass runs by blocks of keys: it recomputes the probabilities of all queries that see them,
and sums the columns in registers. It costs half of the forward's work, needs two floats per row
and head, and no atomics, so the sums are deterministic. Logits are to base 2, as `tl.exp2` is one
instruction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.kernels import dispatch, torch_ops
from flexgen_h2o.kernels.arguments import DEFAULT_ARGUMENTS, VariantArguments
from flexgen_h2o.kernels.dispatch import gpu_of
from flexgen_h2o.kernels.triton.common import (
    MIN_DOT_SIZE,
    ceil_div,
    configs,
    device_ints,
    interpreted,
    power_of_2,
    soft_capped,
    starts,
    unit_stride,
)

LOWEST = tl.constexpr(-3.0e38)
"""A finite number below every logit, so that differences are never NaN."""

LONG = 512
"""Tokens from which on prompts are autotuned separately."""

MAX_SUMS = {4: 4 * 32 * 80, 8: 8 * 32 * 96}
"""Accumulators of a program by its warps, in float32: 80 or 96 of the 255 registers of a thread.
Larger blocks spill; benchmarks/results/gpu_static.csv checks that none does."""
MAX_SUMS_HOPPER = 8 * 32 * 160
"""The same for 8 warps on sm_90, whose tensor cores read their operands from shared memory."""


def _fitting(tuned, named_args, **constants):
    """Return the configs whose accumulators, logits and output, fit into registers.

    Heads of more than 128 elements have their own configs: for 16 heads of 256 and 2,048 tokens
    an H200 takes 0.13 ms with blocks of 128 rows and 64 keys, and 0.32 with the others.
    """
    wide, gpu = constants["WIDTH"] > 128, gpu_of(named_args["q"].device)
    hopper = wide and constants["DIM"] == constants["WIDTH"] and (
        gpu is not None and gpu.architecture >= 90)
    limits = MAX_SUMS | ({8: MAX_SUMS_HOPPER} if hopper else {})
    # Three stages of keys and values of wide heads do not fit into shared memory.
    return [config for config in tuned if (config.num_stages == 2 if wide else config not in _WIDE)
            and config.kwargs["BLOCK_M"] * (config.kwargs["BLOCK_N"] + constants["WIDTH"])
            <= limits[config.num_warps]]


def _fitting_columns(tuned, named_args, **constants):
    """Return the configs that do not spill.

    Heads that fill their tiles need no masks in registers, so small ones may have wider blocks or
    more stages.
    """
    limit = 2 * 32 if constants["WIDTH"] > 128 else {64: 2 * 128, 128: 3 * 64}.get(
        constants["DIM"], 2 * 64)
    return [config for config in tuned if config.num_stages * config.kwargs["BLOCK_N"] <= limit]


_TUNED = configs(
    {"BLOCK_M": 16, "BLOCK_N": 16},
    ({"BLOCK_M": 64, "BLOCK_N": 32}, 4, 2), ({"BLOCK_M": 64, "BLOCK_N": 32}, 8, 2),
    ({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3), ({"BLOCK_M": 128, "BLOCK_N": 64}, 8, 3),
    ({"BLOCK_M": 128, "BLOCK_N": 128}, 8, 2))
_WIDE = [] if interpreted() else configs(
    {}, ({"BLOCK_M": 64, "BLOCK_N": 64}, 8, 2), ({"BLOCK_M": 128, "BLOCK_N": 64}, 8, 2))
_COLUMNS = configs(
    {"BLOCK_M": 16, "BLOCK_N": 16},
    ({"BLOCK_M": 64, "BLOCK_N": 32}, 4, 2), ({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 2),
    ({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3), ({"BLOCK_M": 64, "BLOCK_N": 128}, 4, 2))


@triton.jit
def _tile(x, row, stride, last, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Load rows [rows, WIDTH] of x, 0 from row `last` on. WHOLE: all rows are before it."""
    lane = tl.arange(0, WIDTH)[None, :]
    place = x + row.to(tl.int64)[:, None] * stride + lane
    if WHOLE and DIM == WIDTH:
        tile = tl.load(place)
    elif DIM == WIDTH:
        tile = tl.load(place, mask=(row < last)[:, None], other=0)
    else:
        tile = tl.load(place, mask=(row < last)[:, None] & (lane < DIM), other=0)
    return tile


@triton.jit
def _attend(q, k, k_stride, v, v_stride, maximum, total, result, position, first, last, scale,
            inner, cap, window, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
            CAPPED: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Update the online softmax with keys first to last.

    MASKED applies the causal mask, WINDOWED the window, CAPPED the soft cap on logits that are
    scaled by `inner`.
    """
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        keys = _tile(k, key, k_stride, last, DIM, WIDTH, not MASKED)
        logits = tl.dot(q, tl.trans(keys))
        if CAPPED:
            logits = soft_capped(logits * inner, cap)
        if MASKED:
            logits = tl.where(key[None, :] <= position[:, None], logits, float("-inf"))
        if WINDOWED:
            logits = tl.where(key[None, :] > position[:, None] - window, logits, float("-inf"))
        # Scaling after the maximum makes scaling and subtraction one instruction.
        new = tl.maximum(maximum, tl.max(logits, axis=1) * scale)
        shrink = tl.exp2(maximum - new)
        p = tl.exp2(logits * scale - new[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        values = _tile(v, key, v_stride, last, DIM, WIDTH, not MASKED)
        result = tl.dot(p.to(values.dtype), values, result * shrink[:, None])
        maximum = new
    return maximum, total, result


@triton.autotune([*_TUNED, *_WIDE], key=["DIM", "LONG"],
                 prune_configs_by={"early_config_prune": _fitting}, cache_results=True)
@triton.jit
def _forward(q, q_row, q_head, k, k_row, k_head, v, v_row, v_head, out, stats, sequences, rows,
             scale, inner, cap, window, sinks, GROUP: tl.constexpr, DIM: tl.constexpr,
             WIDTH: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
             LONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the output of BLOCK_M rows of one head, and stats [2, heads, rows] unless None.

    Stats are the maximum and the inverse of the sum of each row's softmax. Row r of n has position
    tokens - n + r. The last rows, which see the most keys, are launched first.
    """
    sequence, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    q_start, n = tl.load(sequences + 4 * sequence), tl.load(sequences + 4 * sequence + 1)
    k_start, tokens = tl.load(sequences + 4 * sequence + 2), tl.load(sequences + 4 * sequence + 3)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_row >= n:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    position = tokens - n + row
    k += k_start.to(tl.int64) * k_row + head // GROUP * k_head
    v += k_start.to(tl.int64) * v_row + head // GROUP * v_head
    tile = _tile(q + q_start.to(tl.int64) * q_row + head * q_head, row, q_row, n, DIM, WIDTH,
                 False)
    maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if sinks is not None:  # a first key with this logit, and a value of zeros
        maximum = tl.maximum(maximum, tl.load(sinks + head) * 1.4426950408889634)
        total += 1.0
    result = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    last = tl.minimum(tokens - n + first_row + BLOCK_M, tokens)
    if WINDOWED:
        unmasked_end = tl.maximum(tokens - n + first_row + 1 - window, 0) // BLOCK_N * BLOCK_N
    else:
        # Every row sees the keys up to `seen`. Later blocks need a mask.
        unmasked_end = (tokens - n + first_row + 1) // BLOCK_N * BLOCK_N
        maximum, total, result = _attend(tile, k, k_row, v, v_row, maximum, total, result, position,
                                         0,
                                         unmasked_end, scale, inner, cap, window, DIM, WIDTH, False,
                                         CAPPED, False, BLOCK_N)
    maximum, total, result = _attend(tile, k, k_row, v, v_row, maximum, total, result, position,
                                     unmasked_end,
                                     last, scale, inner, cap, window, DIM, WIDTH, True, CAPPED,
                                     WINDOWED, BLOCK_N)
    row = q_start.to(tl.int64) + row
    live = row < q_start + n
    if stats is not None:
        tl.store(stats + head * rows + row, maximum, mask=live)
        tl.store(stats + (tl.num_programs(1) + head) * rows + row, 1.0 / total, mask=live)
    lane = tl.arange(0, WIDTH)[None, :]
    place = out + (row[:, None] * tl.num_programs(1) + head) * DIM + lane
    tl.store(place, (result / total[:, None]).to(out.dtype.element_ty),
             mask=live[:, None] & (lane < DIM))


@triton.jit
def _columns(keys, q, q_stride, maximum, inverse, weights, position, before, n, first, last, scale,
             inner, cap, window, received, DIM: tl.constexpr, WIDTH: tl.constexpr,
             MASKED: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
             BLOCK_M: tl.constexpr):
    """Add the probabilities that rows first to last give to the keys at `position`: [rows, keys].

    Blocks of rows are accumulated in one tile, so sums over threads come only at the end. A block's
    loads are before its matmul and without masks, so that they are in flight together.
    """
    for start in range(first, last, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        clamped_row = tl.minimum(row,
                                 n - 1)  # rows past the end repeat the last one, with a factor of 0
        tile = _tile(q, clamped_row, q_stride, n, DIM, WIDTH, True)
        highest = tl.load(maximum + clamped_row)
        # The inverse of a row's sum and its decay are one factor.
        factor = tl.load(inverse + clamped_row)
        logits = tl.dot(tile, tl.trans(keys))
        if weights is not None:
            factor *= tl.load(weights + (n - 1 - clamped_row))
        factor = tl.where(row < n, factor, 0.0)
        if CAPPED:
            logits = soft_capped(logits * inner, cap)
        if MASKED:
            logits = tl.where(position[None, :] <= (before + row)[:, None], logits, float("-inf"))
        if WINDOWED:
            logits = tl.where(position[None, :] > (before + row - window)[:, None], logits,
                              float("-inf"))
        received += tl.exp2(logits * scale - highest[:, None]) * factor[:, None]
    return received


@triton.autotune(_COLUMNS, key=["DIM", "LONG"], restore_value=["scores"],
                 prune_configs_by={"early_config_prune": _fitting_columns}, cache_results=True)
@triton.jit
def _sum_columns(q, q_row, q_head, k, k_row, k_head, stats, scores, m_head, m_row, weights,
                 sequences,
                 rows, scale, inner, cap, window, GROUP: tl.constexpr, DIM: tl.constexpr,
                 WIDTH: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
                 LONG: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the attention score of BLOCK_N keys of one KV head, over all heads of its group.

    The first keys, which the most rows see, are launched first.
    """
    sequence, head = tl.program_id(2), tl.program_id(1).to(tl.int64)
    q_start, n = tl.load(sequences + 4 * sequence), tl.load(sequences + 4 * sequence + 1)
    k_start, tokens = tl.load(sequences + 4 * sequence + 2), tl.load(sequences + 4 * sequence + 3)
    first_key = tl.program_id(0) * BLOCK_N
    if first_key >= tokens:
        return
    position = first_key + tl.arange(0, BLOCK_N)
    keys = _tile(k + k_start.to(tl.int64) * k_row + head * k_head, position, k_row, tokens, DIM,
                 WIDTH, False)
    before = tokens - n
    # The first row that sees any of the keys, and the first row that sees all of them.
    first = tl.maximum(first_key - before, 0)
    masked_end = tl.maximum(first_key + BLOCK_N - 1 - before, 0)
    masked_end = tl.minimum(first + tl.cdiv(masked_end - first, BLOCK_M) * BLOCK_M, n)
    if WINDOWED:  # up to the last row whose window has the last key
        masked_end = tl.minimum(tl.maximum(first_key + BLOCK_N - 1 + window - before, 0), n)
    received = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for g in range(GROUP):
        query = head * GROUP + g
        query_rows = q + q_start.to(tl.int64) * q_row + query * q_head
        maximum = stats + query * rows + q_start
        inverse = maximum + tl.num_programs(1).to(tl.int64) * GROUP * rows
        received = _columns(keys, query_rows, q_row, maximum, inverse, weights, position, before, n,
                            first,
                            masked_end, scale, inner, cap, window, received, DIM, WIDTH, True,
                            CAPPED, WINDOWED, BLOCK_M)
        if not WINDOWED:
            received = _columns(keys, query_rows, q_row, maximum, inverse, weights, position,
                                before, n,
                                masked_end, n, scale, inner, cap, window, received, DIM, WIDTH,
                                False, CAPPED, False, BLOCK_M)
    place = scores + head * m_head + (k_start + position.to(tl.int64)) * m_row
    old = tl.load(place, mask=position < tokens, other=0.0)
    if weights is not None:
        old *= tl.load(weights + n)
    tl.store(place, old + tl.sum(received, axis=0), mask=position < tokens)


@functools.lru_cache(maxsize=4)
def _powers(decay: float, count: int, device: torch.device) -> Tensor | None:
    """Return decay ** 0 to decay ** count in float32; None for a decay of 1."""
    if decay == 1:
        return None
    return (decay ** torch.arange(count + 1, dtype=torch.float64, device=device)).float()


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                      key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                      variant: VariantArguments = DEFAULT_ARGUMENTS) -> Tensor:
    """Run `reference.attention.prefill_attention`, in memory linear in the tokens."""
    if dispatch.select_gpu_implementation(
            "scored_prefill", 1, q.dtype, gpu_of(q.device)) == "matmul":
        return torch_ops.blockwise_prefill_attention(q, k, v, lengths, key_lengths, scores, decay,
                                                     variant)
    out = q.new_empty(q.shape)
    rows, heads, dim = q.shape
    kv_heads, longest = k.shape[1], max(lengths, default=0)
    if not out.numel():
        return out
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    sequences = device_ints(
        tuple(zip(starts(lengths), lengths, starts(key_lengths), key_lengths, strict=True)),
        q.device)
    stats = None if scores is None else q.new_empty((2, heads, rows), dtype=torch.float32)
    inner = variant.scale or dim**-0.5
    scale = math.log2(math.e) * (1 if variant.softcap else inner)
    options = (scale, inner, variant.softcap, variant.window)
    shape = {"CAPPED": variant.softcap > 0, "WINDOWED": variant.window > 0,
             "GROUP": heads // kv_heads, "DIM": dim,
             "WIDTH": max(MIN_DOT_SIZE, power_of_2(dim)), "LONG": longest >= LONG}
    _forward[lambda size: (ceil_div(longest, size["BLOCK_M"]), heads, len(lengths))](
        q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], out, stats, sequences, rows,
        *options, variant.sink_logits, **shape)
    if scores is not None:
        _sum_columns[lambda size: (ceil_div(max(key_lengths), size["BLOCK_N"]), kv_heads,
                                   len(lengths))](
            q, *q.stride()[:2], k, *k.stride()[:2], stats, scores, *scores.stride(),
            _powers(decay, longest, q.device), sequences, rows, *options, **shape)
    return out
