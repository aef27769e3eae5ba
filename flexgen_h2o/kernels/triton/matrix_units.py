"""Products of up to 64 rows with quantized matrices, on a GPU's matrix units.

The weights are the units' left operand, and nothing of them goes through shared memory: outputs and
inputs of a block may be taken in any order, and are in one in which what a thread loads at once (16
bytes: a word each of `RUN` outputs) is what the units want of it in registers. For that, loads are
[threads, what each reads]: so every compiler gives them to threads in the order of the rows.

A code becomes a number where it lies in its word, by OR-ing in the exponent of a power of two. By
this offset numbers are too large, and the zero point takes it off: ``x @ weight.T`` of a group is
``scale * (x @ numbers.T) + (zero - offset * scale) * sum(x)``, in float32. The sums of x are
products with ones.

`tl.dot` sees a group's inputs in the order [fours of words, codes of a half word, 4 words, codes
that a thread holds next to each other].
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
"""Neighbouring outputs whose words a thread loads at once."""
NARROW = tl.constexpr(8)
"""The most rows of `_narrow`: so many results of an output the units compute at least."""
WARPS = tl.constexpr(4)
"""Warps of a program of `_wide`: together they feed the units of sm_90."""

ADJACENT = 4 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 2
"""Codes that a thread holds next to each other in an operand, as this compiler lays it out for one
warp's units (its kWidth). With another number results are the same, but threads exchange codes."""

MAGIC = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}
"""1024 in float16, 128 in bfloat16, in both halves of a word: the lowest bits count ones.

Kernels get it as an argument: the GPU masks and ORs in one instruction if only one of the two is a
literal, and the compiler does not see to it.
"""


@triton.jit
def _numbers(words, shift, magic, dtype: tl.constexpr, BITS: tl.constexpr):
    """Numbers of dtype for the codes in the lower and in the upper halves of shifted words."""
    if dtype == tl.bfloat16 and BITS == 8:  # too short for an offset: by way of float32
        low = (((words >> shift) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        high = (((words >> (shift + 16)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        return (low - 8388608.0).to(dtype), (high - 8388608.0).to(dtype)
    else:
        both = ((words >> shift) & (2**BITS - 1) * 0x10001) | magic
        low = both.to(tl.int16).to(dtype, bitcast=True)
        return low, (both >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _floats(pairs):
    """float32 [threads, RUN] of words [threads, RUN / 2] that are pairs of float16."""
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), (pairs.shape[0], RUN))


@triton.jit
def _factors(scale, zero, dtype: tl.constexpr, BITS: tl.constexpr):
    """Those of products with numbers and those of the sums of inputs; see the module's docstring.
    """
    OFFSET: tl.constexpr = 1024.0 if dtype == tl.float16 else (128.0 if BITS == 4 else 0.0)
    scale = _floats(scale)
    return scale, _floats(zero) - OFFSET * scale


@triton.jit
def _blocks(data, run, outputs, groups, WORDS: tl.constexpr):
    """Addresses of the first blocks of runs of outputs; past the end those of the last tile."""
    tile = tl.minimum(run // (LANES // RUN), (outputs + LANES - 1) // LANES - 1).to(tl.int64)
    return data.to(tl.pointer_type(tl.int32)) + tile * groups * (LANES + LANES * WORDS)


@triton.jit
def _codes(data, run, word, outputs, groups, WORDS: tl.constexpr):
    """Addresses [threads, RUN] of a word of each output of runs, in their first blocks."""
    lane = (run % (LANES // RUN) * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    return (_blocks(data, run, outputs, groups, WORDS)[:, None]
            + (LANES + (word * LANES)[:, None] + lane))


@triton.jit
def _header(data, run, outputs, groups, WORDS: tl.constexpr):
    """Addresses [threads, RUN / 2] of the pairs of scales of runs, in their first blocks."""
    pair = (run % (LANES // RUN) * (RUN // 2))[:, None] + tl.arange(0, RUN // 2)[None, :]
    return _blocks(data, run, outputs, groups, WORDS)[:, None] + pair


@triton.jit
def _load(codes, header, group, of_header, WORDS: tl.constexpr):
    """Words, scales and zero points of groups, of each thread or of all; none reads them again."""
    BLOCK: tl.constexpr = LANES + LANES * WORDS
    words = tl.load(codes + group * BLOCK, eviction_policy="evict_first")
    scale = tl.load(header + of_header * BLOCK, eviction_policy="evict_first")
    zero = tl.load(header + of_header * BLOCK + LANES // 2, eviction_policy="evict_first")
    return words, scale, zero


@triton.jit
def _load_side(codes, header, start, last, side, of_header, WORDS: tl.constexpr,
               EVEN: tl.constexpr):
    """`_load` of the groups from start on, side by side; past the end the last one."""
    group, of_header = start + side, start + of_header
    if not EVEN:
        group, of_header = tl.minimum(group, last - 1), tl.minimum(of_header, last - 1)
    return _load(codes, header, group[:, None], of_header[:, None], WORDS)


@triton.jit
def _store(result, bias, out, out_row, rows, outputs, n, column):
    """result [outputs n, rows of x] to out, or to this split's part; with a bias, if there is any.
    """
    if bias is not None:
        result += tl.load(bias + n, mask=n < outputs, other=0).to(tl.float32)[:, None]
    out += tl.program_id(1).to(tl.int64) * rows * outputs
    live = (n < outputs)[:, None] & (column < rows)[None, :]
    tl.store(out + column.to(tl.int64)[None, :] * out_row + n[:, None],
             result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _ones(A: tl.constexpr, B: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr):
    """[A, B, K], joined of two as the numbers are: so the compiler lays them out alike."""
    half = tl.full((A, B, K // 2), 1.0, tl.float32).to(dtype)
    return tl.reshape(tl.join(half, half), (A, B, K))


_SHAPES = ({"SIDE": 8, "AHEAD": False}, 8, 1), ({"SIDE": 4, "AHEAD": True}, 4, 1)
_REGISTERS = {4: (64, 64), 8: (80, 72)}
"""The most of a thread, by the bits of the weights, of each shape. Left to itself, ptxas takes
fewer, and spills. With 64, 4 programs of 8 warps fit on a multiprocessor, or 8 of 4."""
_NARROW_CONFIGS = configs({"SIDE": 2, "AHEAD": True}, *_SHAPES, *_SHAPES)
for _config, _most in zip(_NARROW_CONFIGS, sum(_REGISTERS.values(), ()), strict=False):
    _config.maxnreg = _most


def _with_registers(tuned, named_args, **constants):
    """The configs with the registers that the bits need."""
    return [one for one in tuned if one.maxnreg in _REGISTERS[constants["BITS"]]]


@triton.autotune(_NARROW_CONFIGS, key=["WORDS", "BITS"],
                 prune_configs_by={"early_config_prune": _with_registers}, cache_results=True)
@triton.jit(do_not_specialize=["rows", "split", "magic"])
def _narrow(x, x_row, data, bias, out, out_row, rows, outputs, groups, split, magic,
            WORDS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr,
            ADJACENT: tl.constexpr, SIDE: tl.constexpr, AHEAD: tl.constexpr):
    """A product of up to `NARROW` rows; one program 8 runs of outputs and a split of the groups.

    SIDE groups side by side, one a warp. EVEN: no group or split is cut off. AHEAD: codes are
    loaded a step before they are needed. out is [rows, outputs], or parts of it [splits, rows,
    outputs].
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
    one = tl.arange(0, 32 * SIDE)  # [SIDE, 8, 4]: four threads need the same
    of_header = one // 32
    header = _header(data, tl.program_id(0) * 8 + one // 4 % 8, outputs, groups, WORDS)
    row = tl.minimum(thread // 4 % 8, rows - 1)  # past the end the last one
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
    """[SIDE, 8 * RUN, 8] of headers [SIDE * 8 * 4, RUN], for all rows of x."""
    factor = tl.permute(tl.reshape(factor, (SIDE, 8, 4, RUN)), (0, 3, 1, 2))
    factor = tl.reshape(factor, (SIDE, RUN, 8, 4, 1))
    return tl.reshape(tl.broadcast_to(factor, (SIDE, RUN, 8, 4, 2)), (SIDE, 8 * RUN, 8))


def _holding(tuned, named_args, **constants):
    """The configs with registers left: of the most rows not those that load ahead."""
    return [one for one in tuned if constants["ROWS"] < 64 or not one.kwargs["AHEAD"]]


@triton.autotune(
    configs({"AHEAD": True}, ({"AHEAD": False}, 4, 1), ({"AHEAD": True}, 4, 1)),
    key=["WORDS", "BITS", "ROWS"], prune_configs_by={"early_config_prune": _holding},
    cache_results=True)
@triton.jit(do_not_specialize=["rows", "split", "magic"])
def _wide(x, x_row, data, bias, out, out_row, rows, outputs, groups, split, magic,
          WORDS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, ADJACENT: tl.constexpr,
          AHEAD: tl.constexpr):
    """`_narrow` for up to ROWS rows: warps share the inputs, in shared memory.

    One group at a time, 8 runs of outputs a warp. ADJACENT codes are held by a thread next to each
    other: 2, as the units of sm_90 want it of a warp group, or 4.
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
    row = tl.minimum(tl.arange(0, ROWS)[:, None], rows - 1)  # past the end the last one
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
    """[8 * RUN * WARPS, ROWS] of headers [WARPS * 8 * 4, RUN], for all rows of x."""
    factor = tl.permute(tl.reshape(factor, (WARPS, 8, 4, RUN // 2, 2)), (3, 0, 4, 1, 2))
    factor = tl.reshape(factor, (RUN // 2, WARPS, 2, 8, 1, 4, 1))
    factor = tl.broadcast_to(factor, (RUN // 2, WARPS, 2, 8, ROWS // 8, 4, 2))
    return tl.reshape(factor, (8 * RUN * WARPS, ROWS))


def takes(layout: MatrixLayout) -> bool:
    """True if `product` has an order for a layout's groups: 4, 8 or 16 words."""
    return layout.words in (4, 8, 16)


def product(x: Tensor, data: Tensor, layout: MatrixLayout, bias: Tensor | None,
            out: Tensor | None) -> Tensor | None:
    """x @ weight.T + bias to out, for 1 to 64 rows of 16 bits, whose last dimension is contiguous.

    Returns
    -------
    float32 Tensor [splits, rows, outputs] or None
        Parts that are still to be added up, with the bias; None, if the result is in out. A small
        matrix has parts, as it fills the device only if its inputs are split, and so does every one
        without an `out`.
    """
    rows, outputs, narrow = len(x), layout.outputs, len(x) <= NARROW.value
    x = _whole(x, layout)
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


def _whole(x: Tensor, layout: MatrixLayout) -> Tensor:
    """x with zeros up to whole groups, and in rows that are read 16 bytes at a time.

    Nearly always that is x. Else a copy of few rows costs less than masks, for which there are no
    registers.
    """
    whole = layout.groups * layout.group
    if layout.inputs == whole and not (x.stride(0) % 16 or x.data_ptr() % 16):
        return x
    padded = x.new_zeros((len(x), whole))
    padded[:, : layout.inputs] = x
    return padded


def _split(groups: int, tiles: int, rows: int, processors: int) -> int:
    """Groups of one split: so many splits that the device has as many programs as it runs at once.

    Of few rows these are 8 of 4 warps on a multiprocessor or 4 of 8, which tiles alone may nearly
    be; of more rows 4, and of the most 2, as their sums take the more registers.
    """
    narrow = rows <= NARROW.value
    least = 1 if not narrow else 2 if interpreted() else 8  # a multiple of any SIDE
    wanted = processors * (8 if narrow else 4 if rows <= 32 else 2)
    splits = 1 if narrow and tiles >= 2.5 * processors else max(1, wanted // tiles)
    return ceil_div(ceil_div(groups, splits), least) * least
