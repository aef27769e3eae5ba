"""Matmuls with quantized weights on a GPU, and dequantization of rows; see `MatrixLayout`.

Few rows of x: each byte of the weight is read once, and dequantized values exist in registers only.
Inputs are split among programs (split-K), so that a small weight fills the device; a second launch
sums the parts in a fixed order. `tensor_cores` multiplies where Triton uses them; otherwise fused
multiply-adds do, for a few rows only. Scales and zero points are applied to sums over quantized
values, which are exact integers: in float32, ``x @ weight.T`` of a group is ``scale * (x @ q.T) +
zero * sum(x)``.

Many rows: slices of the weight are dequantized and multiplied by cuBLAS. `dispatch.GPU_TABLE` has
the limits. `matrix_floats` has both kernels for MXFP4 and 12-bit weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE, UNPACKED_BYTES
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.dispatch import gpu_of
from flexgen_h2o.kernels.triton import matrix_floats, tensor_cores
from flexgen_h2o.kernels.triton.common import (
    ceil_div,
    configs,
    interpreted,
    multiprocessors,
    power_of_2,
    unit_stride,
)

LANES = tl.constexpr(MATRIX_TILE)

_MAX_VECTORS = 8  # rows of `_skinny`, as in `dispatch.GPU_TABLE` without tensor cores

MAGIC = 0x4B000000
"""2 ** 23 in float32, to whose low bits integers are ORed."""


@triton.jit
def _place(word, WORDS: tl.constexpr):
    """Return the offsets of a tile's words, counted over all its groups, in units of 4 bytes."""
    return word // WORDS * (LANES + LANES * WORDS) + LANES + word % WORDS * LANES


@triton.jit
def _words(codes, word, mask, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Load words of quantized values; with 6 bits, `word` counts words expanded to 8 bits."""
    if BITS == 6:
        unit, part = word // 4 * 3, word % 4
        first = tl.load(codes + _place(unit, WORDS)[:, None], mask=mask, other=0)
        second = tl.load(codes + _place(unit + 1, WORDS)[:, None], mask=mask, other=0)
        third = tl.load(codes + _place(unit + 2, WORDS)[:, None], mask=mask, other=0)
        selected = tl.where((part == 0)[:, None], first,
                            tl.where((part == 1)[:, None], second, third))
        last = (first >> 6) & 0x03030303 | (second >> 4) & 0x0C0C0C0C | (third >> 2) & 0x30303030
        return tl.where((part < 3)[:, None], selected & 0x3F3F3F3F, last)
    else:
        return tl.load(codes + _place(word, WORDS)[:, None], mask=mask, other=0)


@triton.jit
def _header(group, WORDS: tl.constexpr):
    """Return the offsets of groups' scales, in units of 2 bytes. Zero points follow the scales."""
    return group * (2 * LANES + 2 * LANES * WORDS)


@triton.jit
def _exact(words, mask, magic):
    """Convert masked bits, integers below 2 ** 23, to float32, faster than by a conversion.

    `magic` is `MAGIC` as an argument of the kernel: mask and OR are one instruction only if not
    both operands are constants.
    """
    return ((words & mask) | magic).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _step(dots, sums, words, x, x_row, word, live, rows, inputs, magic, j: tl.constexpr,
          BITS: tl.constexpr):
    """Add the products of the j-th value of each word to dots, and its inputs to sums.

    Values are not shifted within their half of the word; the input is divided instead.
    """
    FROM: tl.constexpr = BITS * (j // 2)
    code = _exact(words >> (16 * (j % 2)), (2**BITS - 1) << FROM, magic)
    k = word * (32 // BITS) + j
    new_dots, new_sums = (), ()
    for row in tl.static_range(len(dots)):
        value = tl.load(x + row * x_row + k, mask=live & (k < inputs * (row < rows)), other=0)
        value = value.to(tl.float32)
        new_dots += (dots[row] + (value * 0.5**FROM)[:, None] * code,)
        new_sums += (sums[row] + value,)
    return new_dots, new_sums


def _fitting(tuned, named_args, **constants):
    """Return the configs whose accumulators and products of all rows fit into registers."""
    return [config for config in tuned
            if constants["ROWS"] * config.kwargs["BLOCK"] * MATRIX_TILE <= 2048 * config.num_warps]


@triton.autotune(
    configs({"BLOCK": 8}, ({"BLOCK": 32}, 2, 1), ({"BLOCK": 32}, 4, 1), ({"BLOCK": 64}, 2, 1),
            ({"BLOCK": 64}, 4, 1), ({"BLOCK": 128}, 4, 1)),
    key=["WORDS", "BITS", "ROWS"], prune_configs_by={"early_config_prune": _fitting},
    cache_results=True)
@triton.jit
def _skinny(x, x_row, data, parts, rows, outputs, inputs, groups, split, magic,
            WORDS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write parts [splits, rows, outputs] of a matmul; one program per tile and split of its words.

    Threads accumulate what they read, and exchange nothing before the end, so that loads stay in
    flight.
    """
    tile = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = 8 if BITS == 6 else BITS  # bits of a value in a word
    FULL: tl.constexpr = WORDS * WIDTH // BITS  # words of a group of one output
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, groups * FULL)
    lane = tl.arange(0, LANES)
    codes = data.to(tl.pointer_type(tl.int32)) + tile * groups * (LANES + LANES * WORDS)
    halves = codes.to(tl.pointer_type(tl.float16))
    totals = (tl.zeros((BLOCK, LANES), tl.float32),) * ROWS
    for start in range(first, last, BLOCK):
        word = start + tl.arange(0, BLOCK)
        live = word < last
        words = _words(codes + lane[None, :], word, live[:, None], WORDS, BITS)
        header = halves + _header(word // FULL, WORDS)[:, None] + lane[None, :]
        scale = tl.load(header, mask=live[:, None], other=0).to(tl.float32)
        zero = tl.load(header + LANES, mask=live[:, None], other=0).to(tl.float32)
        dots = (tl.zeros((BLOCK, LANES), tl.float32),) * ROWS
        sums = (tl.zeros((BLOCK,), tl.float32),) * ROWS
        for j in tl.static_range(32 // WIDTH):
            dots, sums = _step(dots, sums, words, x, x_row, word, live, rows, inputs, magic, j,
                               WIDTH)
        new = ()
        for row in tl.static_range(ROWS):
            new += (totals[row] + dots[row] * scale + sums[row][:, None] * zero,)
        totals = new
    n = tile * LANES + lane
    parts += tl.program_id(1).to(tl.int64) * rows * outputs
    for row in tl.static_range(ROWS):
        tl.store(parts + n, tl.sum(totals[row], axis=0), mask=n < outputs * (row < rows))
        parts += outputs


@triton.jit
def _add_parts(parts, bias, out, out_row, outputs, splits, ADD: tl.constexpr,
               BLOCK: tl.constexpr):
    """Sum parts, bias and, with ADD, out itself; one program per BLOCK outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = n < outputs
    out += row * out_row + n
    parts += row * outputs + n
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, splits):
        total += tl.load(parts, mask=live, other=0.0)
        parts += tl.num_programs(0).to(tl.int64) * outputs
    if bias is not None:
        total += tl.load(bias + n, mask=live, other=0).to(tl.float32)
    if ADD:
        total += tl.load(out, mask=live, other=0).to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _unpack(data, output_ids, first, out, out_row, count, inputs, groups, magic,
            WORDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize outputs to rows of out; one program per tile of rows and BLOCK words of each.

    Outputs are `output_ids`, or those from `first` on, which is a multiple of the tile.
    """
    WIDTH: tl.constexpr = 8 if BITS == 6 else BITS  # bits of a value in a word
    FULL: tl.constexpr = WORDS * WIDTH // BITS  # words of a group of one output
    PER: tl.constexpr = 32 // WIDTH
    lane = tl.arange(0, LANES)
    row = tl.program_id(0).to(tl.int64) * LANES + lane
    valid = row < count
    place = lane
    if output_ids is None:
        base = (first // LANES + tl.program_id(0)).to(tl.int64) + lane * 0
    else:
        output = tl.load(output_ids + row, mask=valid, other=0)
        base, place = output // LANES, output % LANES
    base *= groups * (LANES + LANES * WORDS)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (word < groups * FULL)[:, None] & valid[None, :]
    words = _words(data.to(tl.pointer_type(tl.int32)) + (base + place)[None, :], word, mask,
                   WORDS, BITS)
    header = (data.to(tl.pointer_type(tl.float16)) + (2 * base + place)[None, :]
              + _header(word // FULL, WORDS)[:, None])
    scale = tl.load(header, mask=mask, other=0).to(tl.float32)
    zero = tl.load(header + LANES, mask=mask, other=0).to(tl.float32)
    j = tl.arange(0, PER)
    shift = WIDTH * (j // 2) + 16 * (j % 2)
    code = _exact(words[:, None, :] >> shift[None, :, None], 2**WIDTH - 1, magic)
    weight = zero[:, None, :] + scale[:, None, :] * code  # the product is exact: one rounding
    k = word[:, None] * PER + j[None, :]
    tl.store(out + (row * out_row)[None, None, :] + k[:, :, None],
             weight.to(out.dtype.element_ty),
             mask=(k < inputs)[:, :, None] & valid[None, None, :])


def unpack_rows(matrix: QuantizedMatrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Run `reference.matrix.unpack_rows`, with identical bits in float32."""
    out = matrix.data.new_empty((len(rows), matrix.layout.inputs), dtype=dtype)
    _unpack_to(out, matrix.data, matrix.layout, output_ids=rows.contiguous())
    return out


def _unpack_to(out: Tensor, data: Tensor, layout: MatrixLayout, *, first: int = 0,
               output_ids: Tensor | None = None) -> None:
    if len(out) and not layout.has_zeros:
        matrix_floats.unpack(out, data, layout, first=first, output_ids=output_ids)
    elif len(out):
        block = 8 if interpreted() else 64
        grid = ceil_div(len(out), MATRIX_TILE), ceil_div(_words_of(layout), block)
        _unpack[grid](data, output_ids, first, out, out.stride(0), len(out), layout.inputs,
                      layout.groups, MAGIC, layout.words, layout.bits, block)


def linear_quantized(x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None, out: Tensor,
                     add: bool = False) -> None:
    """Run `reference.matrix.linear_quantized`; results are deterministic.

    Weights are rounded to x's dtype first where `dispatch.select_gpu_implementation` returns
    "unpacked", and on tensor cores with groups that these do not support (6 bits with more than 8
    rows). A result with bias and residual is then rounded twice.
    """
    if matrix.activation_bits != 16:
        raise ValueError("linear_quantized: a GPU rounds no activations")
    data, layout = matrix.data, matrix.layout
    if not len(x):
        return
    x = unit_stride(x)
    target = None if add else out
    operation = "linear_quantized" if layout.has_zeros else "linear_short_floats"
    kernel = dispatch.select_gpu_implementation(operation, len(x), x.dtype, gpu_of(x.device))
    if kernel == "vectors" or layout.bits == 6 and len(x) <= _MAX_VECTORS:
        parts = _parts(x, data, layout)
    elif kernel == "matrix units" and tensor_cores.takes(layout):
        parts = tensor_cores.product(x, data, layout, bias, target)
    else:
        _multiply_unpacked(x, data, layout, bias, out, add=add)
        return
    if parts is not None:
        block = 64 if interpreted() else 512
        _add_parts[(len(x), ceil_div(layout.outputs, block))](
            parts, bias, out, out.stride(0), layout.outputs, len(parts), add, block)


def _parts(x: Tensor, data: Tensor, layout: MatrixLayout) -> Tensor:
    """Return parts of a matmul with few rows: float32 [splits, rows, outputs]."""
    rows, outputs = len(x), layout.outputs
    total = _words_of(layout) if layout.has_zeros else matrix_floats.units_of(layout)
    split = _split(total, layout.tiles, 32 * multiprocessors(x.device))
    parts = x.new_empty((ceil_div(total, split), rows, outputs), dtype=torch.float32)
    if not layout.has_zeros:
        matrix_floats.multiply(x, data, layout, parts, split)
        return parts
    _skinny[(layout.tiles, len(parts))](
        x, x.stride(0), data, parts, rows, outputs, layout.inputs, layout.groups, split, MAGIC,
        WORDS=layout.words, BITS=layout.bits, ROWS=power_of_2(rows))
    return parts


def _words_of(layout: MatrixLayout) -> int:
    """Return the words of one output, as `_words` counts them."""
    return layout.groups * layout.words * (8 if layout.bits == 6 else layout.bits) // layout.bits


def _split(units: int, programs: int, target_programs: int) -> int:
    """Return the words, or units of words, per split for about `target_programs` programs."""
    least = 16 if interpreted() else 64
    splits = max(1, target_programs // programs)
    return ceil_div(ceil_div(units, splits), least) * least


def _multiply_unpacked(x: Tensor, data: Tensor, layout: MatrixLayout, bias: Tensor | None,
                       out: Tensor, *, add: bool) -> None:
    """Multiply many rows, through a buffer of `UNPACKED_BYTES` or at least one tile."""
    stride = ceil_div(layout.inputs, 8) * 8  # aligned rows suit cuBLAS
    max_tiles = max(1, UNPACKED_BYTES // (MATRIX_TILE * stride * x.element_size()))
    slices = ceil_div(layout.tiles, max_tiles)
    num_outputs = min(ceil_div(layout.tiles, slices) * MATRIX_TILE, layout.outputs)
    buffer = x.new_empty((num_outputs, stride))
    for first in range(0, layout.outputs, num_outputs):
        part = out[:, first : first + num_outputs]
        weight = buffer[: part.shape[1], : layout.inputs]
        _unpack_to(weight, data, layout, first=first)
        outputs_bias = None if bias is None else bias[first : first + num_outputs]
        if add:
            part.addmm_(x, weight.T)
            if bias is not None:
                part += outputs_bias
        elif bias is not None:
            torch.addmm(outputs_bias, x, weight.T, out=part)
        else:
            torch.mm(x, weight.T, out=part)
