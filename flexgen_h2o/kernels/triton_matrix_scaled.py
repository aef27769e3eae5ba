"""Products of some 65 to 256 rows with quantized matrices, on the warp groups of sm_90.

Each weight becomes a number of the inputs' dtype in registers, scaled and rounded as
`reference_matrix.unpack_rows` rounds it, and is the left operand of the matrix units from there:
sums stay in the units, and nothing of the weights is written to memory. Codes lie in the words in
the order of `triton_matrix_units`. The inputs come in the order in which a thread's words have
them (`_in_order`), so that they reach shared memory by plain copies, some groups ahead.

Each block of `ROWS` rows scales the weights again: with many rows unpacking them once is cheaper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.kernels import triton_matrix_units
from flexgen_h2o.kernels.gpus import gpu_of
from flexgen_h2o.kernels.triton_common import multiprocessors
from flexgen_h2o.kernels.triton_matrix_units import (
    MAGIC,
    RUN,
    WARPS,
    _codes,
    _header,
    _load,
    _numbers,
    _store,
)

ROWS = 128
"""Rows of a block: with 4 warps their sums fill half of the registers, and two programs fit."""
STAGES = 4
"""Groups whose words and inputs are on their way at a time."""
ADJACENT = 2
"""Codes that a thread holds next to each other in an operand of a warp group."""


@triton.jit
def _factors(pairs, dtype: tl.constexpr):
    """Scales or zero points of a program's outputs, [outputs, 1, 1, 4, 1]: of float16, which
    float16 inputs meet as it is, or else of float32."""
    low = pairs.to(tl.int16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    both = tl.reshape(tl.join(low, high), (1, WARPS, 8, 4, RUN // 2, 2))
    if dtype != tl.float16:
        both = both.to(tl.float32)
    return tl.reshape(tl.permute(both, (4, 1, 5, 2, 0, 3)), (8 * RUN * WARPS, 1, 1, 4, 1))


@triton.jit
def _weights(words, scale, zero, shift, magic, dtype: tl.constexpr, BITS: tl.constexpr,
             WORDS: tl.constexpr):
    """Weights of a group, [outputs, inputs], for words [threads, RUN]."""
    M: tl.constexpr = 8 * RUN * WARPS
    words = tl.reshape(words, (WORDS // 4, WARPS, 8, 4, RUN // 2, 2))
    words = tl.reshape(tl.permute(words, (4, 1, 5, 2, 0, 3)), (M, WORDS // 4, 1, 4, 1))
    low, high = _numbers(words, shift, magic, dtype, BITS)
    scale, _ = tl.broadcast(_factors(scale, dtype), low)
    zero, _ = tl.broadcast(_factors(zero, dtype), low)
    if dtype == tl.float16:  # codes and products are exact: one rounding
        low = tl.fma(low - 1024.0, scale, zero)
        high = tl.fma(high - 1024.0, scale, zero)
    else:
        OFFSET: tl.constexpr = 128.0 if BITS == 4 else 0.0
        low = tl.fma(low.to(tl.float32) - OFFSET, scale, zero).to(dtype)
        high = tl.fma(high.to(tl.float32) - OFFSET, scale, zero).to(dtype)
    return tl.reshape(tl.join(low, high), (M, WORDS * (32 // BITS)))


@triton.jit(do_not_specialize=["rows", "split", "magic"])
def _scaled(x, x_row, data, bias, out, out_row, rows, outputs, groups, split, magic,
            WORDS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
            ADJACENT: tl.constexpr):
    """A product; one program 8 runs of outputs a warp, a split of the groups, and ROWS rows.

    Of x a group's inputs are in the order of `_in_order`. out is [rows, outputs], or parts of it
    [splits, rows, outputs].
    """
    M: tl.constexpr = 8 * RUN * WARPS
    CORE: tl.constexpr = 16 * WARPS
    K: tl.constexpr = WORDS * (32 // BITS)
    EACH: tl.constexpr = 32 // BITS // ADJACENT
    thread = tl.arange(0, 32 * WARPS * (WORDS // 4))  # [WORDS / 4, WARPS, 8, 4]
    first_run = tl.program_id(0) * (8 * WARPS)
    codes = _codes(data, first_run + thread // 4 % (8 * WARPS),
                   thread // (32 * WARPS) * 4 + thread % 4, outputs, groups, WORDS)
    header = _header(data, first_run + tl.arange(0, 32 * WARPS) // 4, outputs, groups, WORDS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    x += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_row + tl.arange(0, K)[None, :]
    half = tl.arange(0, ADJACENT // 2)[None, None, None, None, :]
    shift = BITS * (EACH * half + tl.arange(0, EACH)[None, None, :, None, None])
    first = tl.program_id(1) * split
    total = tl.zeros((M, ROWS), tl.float32)
    for group in tl.range(first, tl.minimum(first + split, groups), num_stages=STAGES):
        words, scale, zero = _load(codes, header, group, group, WORDS)
        weight = _weights(words, scale, zero, shift, magic, x.dtype.element_ty, BITS, WORDS)
        total = tl.dot(weight, tl.trans(tl.load(x + group * K)), total)
    m = tl.arange(0, M)  # as in `triton_matrix_units._wide`
    output = (m % CORE // 16 * 8 + m % 8) * RUN + m // CORE * 2 + m // 8 % 2
    _store(total, bias, out, out_row, rows, outputs, tl.program_id(0) * M + output, row)


def _in_order(x: Tensor, layout: MatrixLayout) -> Tensor:
    """x, each group's inputs in the order of `_weights`: [fours of words, codes of a half word, 4
    words, halves, ADJACENT codes]."""
    x = triton_matrix_units.whole(x, layout)
    words, per = layout.words, 32 // layout.bits
    order = (layout.groups, words // 4, 4, ADJACENT // 2, per // ADJACENT, 2)
    return x.unflatten(1, order).permute(0, 1, 2, 5, 3, 4, 6).reshape(x.shape)


def takes(layout: MatrixLayout, device: torch.device) -> bool:
    """True if `product` multiplies with such a matrix on a device: one with warp groups."""
    gpu = gpu_of(device)
    return triton_matrix_units.takes(layout) and (gpu is None or 90 <= gpu.architecture < 100)


def product(x: Tensor, data: Tensor, layout: MatrixLayout, bias: Tensor | None,
            out: Tensor | None) -> Tensor | None:
    """See `triton_matrix_units.product`; of any number of rows."""
    rows, outputs = len(x), layout.outputs
    x = _in_order(x, layout)
    tiles, blocks = triton.cdiv(outputs, 8 * RUN.value * WARPS.value), triton.cdiv(rows, ROWS)
    split = _split(layout.groups, tiles * blocks, multiprocessors(x.device))
    splits = triton.cdiv(layout.groups, split)
    parts = None
    if splits > 1 or out is None:
        parts, bias = x.new_empty((splits, rows, outputs), dtype=torch.float32), None
    target = out if parts is None else parts[0]
    _scaled[(tiles, splits, blocks)](
        x, x.stride(0), data, bias, target, target.stride(0), rows, outputs, layout.groups, split,
        MAGIC[x.dtype], WORDS=layout.words, BITS=layout.bits, ROWS=ROWS, STAGES=STAGES,
        ADJACENT=ADJACENT, num_warps=WARPS.value)
    return parts


def _split(groups: int, programs: int, processors: int) -> int:
    """Groups of one split: one for all, or so many that two programs run on each processor."""
    splits = 1 if programs >= 0.9 * processors else max(1, 2 * processors // programs)
    return triton.cdiv(groups, splits)
