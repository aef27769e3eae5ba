"""Matmuls of up to 64 rows with quantized weights, on a GPU's tensor cores.

The weight is the left operand of `tl.dot`, and does not pass through shared memory. The order of a
block's outputs and inputs is free, and chosen so that the 16 bytes that a thread loads at once (a
word of each of `RUN` outputs) are those that the tensor cores need in its registers. Loads have the
shape [threads, elements per thread], so that every compiler assigns rows to threads in order.

A value becomes a float without a shift, by ORing in the exponent of a power of two. This offset
makes numbers too large, which the zero point corrects: in float32, ``x @ weight.T`` of a group is
``scale * (x @ numbers.T) + (zero - offset * scale) * sum(x)``. The sums of x are matmuls with ones.

`tl.dot` has a group's inputs in the order [word // 4, value of a half word, word % 4, adjacent
values of a thread].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels.dispatch import gpu_of
from flexgen_h2o.kernels.triton.common import (
    ceil_div,
    configs,
    interpreted,
    multiprocessors,
    power_of_2,
)

LANES = tl.constexpr(MATRIX_TILE)
RUN = tl.constexpr(4)
"""Adjacent outputs whose words a thread loads at once."""
NARROW = tl.constexpr(8)
"""Maximum rows of `_narrow`, which is the smallest N of the tensor cores."""
WARPS = tl.constexpr(4)
"""Warps per program of `_wide`: a warp group of sm_90."""

ADJACENT = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 2
"""Adjacent values of a thread in an operand, in this compiler's layout (its kWidth). With another
number results are the same, but threads exchange values."""

MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}
"""1024 in float16, 128 in bfloat16, in both halves of a word, to whose low bits integers are ORed.

It is an argument of kernels because mask and OR are one instruction only if not both operands are
constants.
"""


@triton.jit
def _numbers(words, shift, magic, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return the values in the lower and the upper halves of shifted words, as floats of dtype."""
    if dtype == tl.bfloat16 and BITS == 8:  # too few bits for an offset: convert from float32
        low = (((words >> shift) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((words >> (shift + 16)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        return (low - 8388608.0).to(dtype), (high - 8388608.0).to(dtype)
    else:
        both = ((words >> shift) & (2**BITS - 1) * 0x10001) | magic
        low = both.to(tl.int16).to(dtype, bitcast=True)
        return low, (both >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _floats(pairs):
    """Convert words [threads, RUN / 2] of two float16 to float32 [threads, RUN]."""
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], RUN))


@triton.jit
def _factors(scale, zero, dtype: tl.constexpr, BITS: tl.constexpr):
    """Return the factors of matmuls and of the sums of inputs; see the module's docstring.
    """
    OFFSET: tl.constexpr = 1024.0 if dtype == tl.float16 else (128.0 if BITS == 4 else 0.0)
    scale = _floats(scale)
    return scale, _floats(zero) - OFFSET * scale


@triton.jit
def _blocks(data, run, outputs, groups, WORDS: tl.constexpr):
    """Return addresses of the first blocks of runs of outputs; past the end, of the last tile."""
    tile = tl.minimum(run // (LANES // RUN), (outputs + LANES - 1) // LANES - 1).to(tl.int64)
    return data.to(tl.pointer_type(tl.int32)) + tile * groups * (LANES + LANES * WORDS)


@triton.jit
def _codes(data, run, word, outputs, groups, WORDS: tl.constexpr):
    """Return addresses [threads, RUN] of a word of each output of runs, in their first blocks."""
    lane = (run % (LANES // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    return (_blocks(data, run, outputs, groups, WORDS)[:, None]
            + (LANES + (word * LANES)[:, None] + lane))


@triton.jit
def _header(data, run, outputs, groups, WORDS: tl.constexpr):
    """Return addresses [threads, RUN / 2] of pairs of scales of runs, in their first blocks."""
    pair = (run % (LANES // RUN) * (RUN // 2))[:, None] + tl.arange(0, RUN // 2)[None, :]
    return _blocks(data, run, outputs, groups, WORDS)[:, None] + pair


@triton.jit
def _load(codes, header, group, of_header, WORDS: tl.constexpr):
    """Load words, scales and zero points of groups; each is read only once."""
    BLOCK: tl.constexpr = LANES + LANES * WORDS
    words = tl.load(codes + group * BLOCK, eviction_policy="evict_first")
    scale = tl.load(header + of_header * BLOCK, eviction_policy="evict_first")
    zero = tl.load(header + of_header * BLOCK + LANES // 2, eviction_policy="evict_first")
    return words, scale, zero


@triton.jit
def _load_side(codes, header, start, last, side, of_header, WORDS: tl.constexpr,
               EVEN: tl.constexpr):
    """Load the groups from start on, one per side; past the end, the last one."""
    group, of_header = start + side, start + of_header
    if not EVEN:
        group, of_header = tl.minimum(group, last - 1), tl.minimum(of_header, last - 1)
    return _load(codes, header, group[:, None], of_header[:, None], WORDS)


@triton.jit
def _store(result, bias, out, out_row, rows, outputs, n, column):
    """Store result [outputs n, rows of x], plus bias, to out or to this split's part."""
    if bias is not None:
        result += tl.load(bias + n, mask=n < outputs, other=0).to(tl.float32)[:, None]
    out += tl.program_id(1).to(tl.int64) * rows * outputs
    live = (n < outputs)[:, None] & (column < rows)[None, :]
    tl.store(out + column.to(tl.int64)[None, :] * out_row + n[:, None],
             result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _ones(A: tl.constexpr, B: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr):
    """Return ones [A, B, K], joined of two halves so that their layout is that of the values."""
    half = tl.full((A, B, K // 2), 1.0, tl.float32).to(dtype)
    return tl.reshape(tl.join(half, half), (A, B, K))


_SHAPES = ({"SIDE": 8, "AHEAD": False}, 8, 1), ({"SIDE": 4, "AHEAD": True}, 4, 1)
_REGISTERS = {4: (64, 64), 8: (80, 72)}
"""Registers per thread, by bits of the weights and config. By default ptxas uses fewer, and spills.
With 64 registers, a multiprocessor holds 4 programs of 8 warps, or 8 of 4."""
_NARROW_CONFIGS = configs({"SIDE": 2, "AHEAD": True}, *_SHAPES, *_SHAPES)
for _config, _most in zip(_NARROW_CONFIGS, sum(_REGISTERS.values(), ()), strict=False):
    _config.maxnreg = _most


def _with_registers(tuned, named_args, **constants):
    """Return the configs with the registers of the weights' bits."""
    return [config for config in tuned if config.maxnreg in _REGISTERS[constants["BITS"]]]


@triton.autotune(_NARROW_CONFIGS, key=["WORDS", "BITS"],
                 prune_configs_by={"early_config_prune": _with_registers}, cache_results=True)
@triton.jit(do_not_specialize=["rows", "split", "magic"])
def _narrow(x, x_row, data, bias, out, out_row, rows, outputs, groups, split, magic,
            WORDS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
            ADJACENT: tl.constexpr, SIDE: tl.constexpr, AHEAD: tl.constexpr):
    """Multiply up to `NARROW` rows; one program per 8 runs of outputs and split of the groups.

    A step has SIDE groups, one per warp. EVEN: groups are a multiple of the split. AHEAD: words are
    loaded one step ahead. out is [rows, outputs], or parts [splits, rows, outputs].
    """
    M: tl.constexpr = 8 * RUN
    HIGH: tl.constexpr = WORDS // 4
    PER: tl.constexpr = 32 // BITS
    K: tl.constexpr = WORDS * PER
    HALVES: tl.constexpr = ADJACENT // 2
    EACH: tl.constexpr = PER // ADJACENT
    dtype: tl.constexpr = x.dtype.element_ty
    thread = tl.arange(0, 32 * SIDE * HIGH)  # [HIGH, SIDE, 8, 4]
    side, word = thread // 32 % SIDE, thread // (32 * SIDE) * 4 + thread % 4
    codes = _codes(data, tl.program_id(0) * 8 + thread // 4 % 8, word, outputs, groups, WORDS)
    unit = tl.arange(0, 32 * SIDE)  # [SIDE, 8, 4]: four threads share one
    of_header = unit // 32
    header = _header(data, tl.program_id(0) * 8 + unit // 4 % 8, outputs, groups, WORDS)
    row = tl.minimum(thread // 4 % 8, rows - 1)  # past the end, the last one
    x += row.to(tl.int64)[:, None] * x_row
    k = (side * WORDS + word)[:, None] * PER + tl.arange(0, PER)[None, :]
    half = tl.arange(0, HALVES)[None, None, None, None, None, :]
    shift = BITS * (EACH * half + tl.arange(0, EACH)[None, None, None, :, None, None])
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, groups)
    total = tl.zeros((SIDE, M, 8), tl.float32)
    ones = _ones(SIDE, 16, K, dtype)
    if AHEAD:
        words, scale, zero = _load_side(codes, header, first, last, side, of_header, WORDS,
                                        EVEN)
    for start in range(first, last, SIDE):
        if EVEN:
            value = tl.load(x + (start * K + k))
        else:
            value = tl.load(x + (start * K + k), mask=(start + side < last)[:, None], other=0)
        if AHEAD:
            after = tl.minimum(start + SIDE, last - SIDE) if EVEN else start + SIDE
            next_words, next_scale, next_zero = _load_side(
                codes, header, after, last, side, of_header, WORDS, EVEN)
        else:
            words, scale, zero = _load_side(codes, header, start, last, side, of_header, WORDS,
                                            EVEN)
        value = tl.reshape(value, (HIGH, SIDE, 8, 4, HALVES, EACH, 2))
        value = tl.reshape(tl.permute(value, (1, 0, 5, 3, 4, 6, 2)), (SIDE, K, 8))
        weight = tl.permute(tl.reshape(words, (HIGH, SIDE, 8, 4, RUN)), (1, 4, 2, 0, 3))
        weight = tl.reshape(weight, (SIDE, M, HIGH, 1, 4, 1))
        low, high = _numbers(weight, shift, magic, dtype, BITS)
        dots = tl.dot(tl.reshape(tl.join(low, high), (SIDE, M, K)), value)
        sums = tl.reshape(tl.dot(ones, value), (SIDE, 1, 16, 8))
        scale, zero = _factors(scale, zero, dtype, BITS)
        scale = _spread_side(scale, SIDE)
        zero = tl.reshape(_spread_side(zero, SIDE), (SIDE, M // 16, 16, 8))
        total = tl.fma(zero, tl.broadcast_to(sums, (SIDE, M // 16, 16, 8)),
                       tl.reshape(total, (SIDE, M // 16, 16, 8)))
        total = tl.fma(dots, scale, tl.reshape(total, (SIDE, M, 8)))
        if AHEAD:
            words, scale, zero = next_words, next_scale, next_zero
    m = tl.arange(0, M)  # output j of run r is m = 8 * j + r
    _store(tl.sum(total, axis=0), bias, out, out_row, rows, outputs,
           tl.program_id(0) * M + m % 8 * RUN + m // 8, tl.arange(0, 8))


@triton.jit
def _spread_side(factor, SIDE: tl.constexpr):
    """Broadcast headers [SIDE * 8 * 4, RUN] over rows of x: [SIDE, 8 * RUN, 8]."""
    factor = tl.permute(tl.reshape(factor, (SIDE, 8, 4, RUN)), (0, 3, 1, 2))
    factor = tl.reshape(factor, (SIDE, RUN, 8, 4, 1))
    return tl.reshape(tl.broadcast_to(factor, (SIDE, RUN, 8, 4, 2)), (SIDE, 8 * RUN, 8))


def _holding(tuned, named_args, **constants):
    """Return the configs that fit into registers: with 64 rows, those without AHEAD."""
    return [config for config in tuned if constants["ROWS"] < 64 or not config.kwargs["AHEAD"]]


@triton.autotune(
    configs({"AHEAD": True}, ({"AHEAD": False}, 4, 1), ({"AHEAD": True}, 4, 1)),
    key=["WORDS", "BITS", "ROWS"], prune_configs_by={"early_config_prune": _holding},
    cache_results=True)
@triton.jit(do_not_specialize=["rows", "split", "magic"])
def _wide(x, x_row, data, bias, out, out_row, rows, outputs, groups, split, magic,
          WORDS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ADJACENT: tl.constexpr,
          AHEAD: tl.constexpr):
    """Do what `_narrow` does for up to ROWS rows: warps share the inputs, in shared memory.

    A step has one group, with 8 runs of outputs per warp. ADJACENT values of a thread are adjacent:
    2 for warp groups of sm_90, else 4.
    """
    M: tl.constexpr = 8 * RUN * WARPS
    CORE: tl.constexpr = 16 * WARPS
    HIGH: tl.constexpr = WORDS // 4
    PER: tl.constexpr = 32 // BITS
    K: tl.constexpr = WORDS * PER
    HALVES: tl.constexpr = ADJACENT // 2
    EACH: tl.constexpr = PER // ADJACENT
    dtype: tl.constexpr = x.dtype.element_ty
    thread = tl.arange(0, 32 * WARPS * HIGH)  # [HIGH, WARPS, 8, 4]
    first_run = tl.program_id(0) * (8 * WARPS)
    codes = _codes(data, first_run + thread // 4 % (8 * WARPS),
                   thread // (32 * WARPS) * 4 + thread % 4, outputs, groups, WORDS)
    header = _header(data, first_run + tl.arange(0, 32 * WARPS) // 4, outputs, groups, WORDS)
    row = tl.minimum(tl.arange(0, ROWS)[:, None], rows - 1)  # past the end, the last one
    k = tl.arange(0, K)[None, :]
    x += row.to(tl.int64) * x_row
    half = tl.arange(0, HALVES)[None, None, None, None, :]
    shift = BITS * (EACH * half + tl.arange(0, EACH)[None, None, :, None, None])
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, groups)
    total = tl.zeros((M, ROWS), tl.float32)
    ones = tl.reshape(_ones(1, CORE, K, dtype), (CORE, K))
    if AHEAD:
        words, scale, zero = _load(codes, header, first, first, WORDS)
    for group in range(first, last):
        value = tl.load(x + (group * K + k))
        if AHEAD:
            after = tl.minimum(group + 1, last - 1)
            next_words, next_scale, next_zero = _load(codes, header, after, after, WORDS)
        else:
            words, scale, zero = _load(codes, header, group, group, WORDS)
        value = tl.reshape(value, (ROWS, HIGH, 4, HALVES, EACH, 2))
        value = tl.trans(tl.reshape(tl.permute(value, (0, 1, 4, 2, 3, 5)), (ROWS, K)))
        weight = tl.reshape(words, (HIGH, WARPS, 8, 4, RUN // 2, 2))
        weight = tl.reshape(tl.permute(weight, (4, 1, 5, 2, 0, 3)), (M, HIGH, 1, 4, 1))
        low, high = _numbers(weight, shift, magic, dtype, BITS)
        dots = tl.dot(tl.reshape(tl.join(low, high), (M, K)), value)
        sums = tl.reshape(tl.dot(ones, value), (1, CORE, ROWS))
        scale, zero = _factors(scale, zero, dtype, BITS)
        scale = _spread_warps(scale, ROWS)
        zero = tl.reshape(_spread_warps(zero, ROWS), (M // CORE, CORE, ROWS))
        total = tl.fma(zero, tl.broadcast_to(sums, (M // CORE, CORE, ROWS)),
                       tl.reshape(total, (M // CORE, CORE, ROWS)))
        total = tl.fma(dots, scale, tl.reshape(total, (M, ROWS)))
        if AHEAD:
            words, scale, zero = next_words, next_scale, next_zero
    m = tl.arange(0, M)  # CORE * i + 16 * warp + 8 * j + r, of output 2 * i + j of a warp's run r
    output = (m % CORE // 16 * 8 + m % 8) * RUN + m // CORE * 2 + m // 8 % 2
    _store(total, bias, out, out_row, rows, outputs, tl.program_id(0) * M + output,
           tl.arange(0, ROWS))


@triton.jit
def _spread_warps(factor, ROWS: tl.constexpr):
    """Broadcast headers [WARPS * 8 * 4, RUN] over rows of x: [8 * RUN * WARPS, ROWS]."""
    factor = tl.permute(tl.reshape(factor, (WARPS, 8, 4, RUN // 2, 2)), (3, 0, 4, 1, 2))
    factor = tl.reshape(factor, (RUN // 2, WARPS, 2, 8, 1, 4, 1))
    factor = tl.broadcast_to(factor, (RUN // 2, WARPS, 2, 8, ROWS // 8, 4, 2))
    return tl.reshape(factor, (8 * RUN * WARPS, ROWS))


def takes(layout: MatrixLayout) -> bool:
    """Return True if `product` supports a layout: groups of 4, 8 or 16 words."""
    return layout.words in (4, 8, 16)


def product(x: Tensor, data: Tensor, layout: MatrixLayout, bias: Tensor | None,
            out: Tensor | None) -> Tensor | None:
    """Compute x @ weight.T + bias for 1 to 64 rows of 16-bit floats.

    Parameters
    ----------
    x : Tensor [rows, inputs]
        Contiguous in the last dimension.
    data : uint8 Tensor [layout.nbytes]
    bias : Tensor [outputs] or None
    out : Tensor [rows, outputs] or None

    Returns
    -------
    float32 Tensor [splits, rows, outputs] or None
        Parts to be summed, without the bias; None if the result is in out. There are parts without
        `out`, and for small weights, which fill the device only if their inputs are split.
    """
    rows, outputs, narrow = len(x), layout.outputs, len(x) <= NARROW.value
    x = _pad_groups(x, layout)
    tile = 8 * RUN.value * (1 if narrow else WARPS.value)
    split = _split(layout.groups, ceil_div(outputs, tile), rows, multiprocessors(x.device))
    splits = ceil_div(layout.groups, split)
    parts = None
    if splits > 1 or out is None:
        parts, bias = x.new_empty((splits, rows, outputs), dtype=torch.float32), None
    target = out if parts is None else parts[0]
    args = (x, x.stride(0), data, bias, target, target.stride(0), rows, outputs, layout.groups,
            split, MAGIC[x.dtype])
    grid = ceil_div(outputs, tile), splits
    if narrow:
        _narrow[grid](*args, WORDS=layout.words, BITS=layout.bits,
                      EVEN=layout.groups % split == 0, ADJACENT=ADJACENT)
    else:
        gpu = gpu_of(x.device)
        warp_groups = gpu is not None and 90 <= gpu.architecture < 100
        _wide[grid](*args, WORDS=layout.words, BITS=layout.bits,
                    ROWS=max(16, power_of_2(rows)),
                    ADJACENT=2 if warp_groups else ADJACENT)
    return parts


def _pad_groups(x: Tensor, layout: MatrixLayout) -> Tensor:
    """Return x padded with zeros to whole groups, with rows aligned to 16 bytes.

    Usually that is x itself. A copy of few rows costs less than masks in the kernel, for which
    there are no registers.
    """
    padded_inputs = layout.groups * layout.group
    if layout.inputs == padded_inputs and not (x.stride(0) % 16 or x.data_ptr() % 16):
        return x
    padded = x.new_zeros((len(x), padded_inputs))
    padded[:, : layout.inputs] = x
    return padded


def _split(groups: int, tiles: int, rows: int, processors: int) -> int:
    """Return the groups per split, for as many programs as the device runs at once.

    A multiprocessor holds 8 programs of 4 warps or 4 of 8 warps of `_narrow`; of `_wide` 4, or 2
    with more than 32 rows, whose accumulators take more registers.
    """
    narrow = rows <= NARROW.value
    least = 1 if not narrow else 2 if interpreted() else 8  # a multiple of any SIDE
    target_programs = processors * (8 if narrow else 4 if rows <= 32 else 2)
    splits = 1 if narrow and tiles >= 2.5 * processors else max(1, target_programs // tiles)
    return ceil_div(ceil_div(groups, splits), least) * least
