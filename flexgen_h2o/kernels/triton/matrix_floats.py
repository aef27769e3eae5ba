"""Matmuls with MXFP4 and 12-bit float weights on a GPU; see `MatrixLayout`.

In both formats, a unit of one word (MXFP4) or three words (12 bits) has eight inputs of an output,
and each group has an exponent. Values are built from their bits. The group's power of two is
multiplied in afterwards: per element when dequantizing rows, once per sum of a unit in matmuls. The
structure is that of `matrix`, which has the integer formats.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels.triton.common import ceil_div, configs, interpreted, power_of_2

LANES = tl.constexpr(MATRIX_TILE)
PER = tl.constexpr(8)
"""Inputs of a unit."""


@triton.jit
def _places(unit, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Return the offsets of units' first words and of their groups' heads, in units of 4 bytes.

    Units of a tile are counted over all its groups.
    """
    UNIT: tl.constexpr = 3 if BITS == 12 else 1
    head = unit // (WORDS // UNIT) * (LANES // 4 + LANES * WORDS)
    return head + LANES // 4 + unit % (WORDS // UNIT) * (UNIT * LANES), head


@triton.jit
def _load(words, mask, BITS: tl.constexpr):
    """Load the four pairs of inputs of units, given their first words; MXFP4 has one word."""
    first = tl.load(words, mask=mask, other=0)
    if BITS == 12:
        second = tl.load(words + LANES, mask=mask, other=0)
        third = tl.load(words + 2 * LANES, mask=mask, other=0)
        last = (first >> 4) & 0x07800780 | (second >> 7) & 0x00700070
        last |= (third >> 11) & 0x000F000F | (second << 1) & -0x7FFF8000
        pairs = first, second, third, last
    else:
        pairs = first, first, first, first
    return pairs


@triton.jit
def _number(pairs, j: tl.constexpr, BITS: tl.constexpr):
    """Return the j-th input of units as float32, without the power of two of their group.

    MXFP4 is too small by 2 ** 14: its bits are those of a float16, in which 1 is subnormal.
    """
    word = pairs[j // 2]
    if BITS == 12:
        half = word << 16 if j % 2 == 0 else word  # the value is in the upper half
        number = (half & -0x78010000 | 0x38000000).to(tl.float32, bitcast=True)
        number = tl.where((half & 0x07FF0000) != 0, number, 0.0)
    else:
        codes = word >> (4 * (j // 2))
        both = (codes << 12) & -0x7FFF8000 | (codes << 9) & 0x0E000E00
        half = (both >> (16 * (j % 2))).to(tl.int16)
        number = half.to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _scaled(numbers, power, BITS: tl.constexpr):
    """Multiply numbers, or sums of them, by the powers of two of their groups."""
    TOO_SMALL: tl.constexpr = 1.0 if BITS == 12 else 16384.0
    return numbers * TOO_SMALL * power


@triton.jit
def _powers(heads, mask, BITS: tl.constexpr):
    """Load the powers of two of groups; MXFP4's lowest is subnormal."""
    exponent = tl.load(heads, mask=mask, other=0).to(tl.int32)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    if BITS != 12:
        power = tl.where(exponent == 0, 1.1754943508222875e-38 * 0.5, power)
    return power


def _fitting(tuned, named_args, **constants):
    """Return the configs whose accumulators and products of all rows fit into registers."""
    return [config for config in tuned
            if constants["ROWS"] * config.kwargs["BLOCK"] * MATRIX_TILE <= 1024 * config.num_warps]


_CONFIGS = configs({"BLOCK": 8}, ({"BLOCK": 8}, 2, 1), ({"BLOCK": 16}, 4, 1), ({"BLOCK": 32}, 4, 1),
                   ({"BLOCK": 64}, 4, 1))
for _config in _CONFIGS[:2]:
    _config.maxnreg = 128  # per thread; by default ptxas uses fewer with 8 rows, and spills


@triton.autotune(_CONFIGS, key=["WORDS", "BITS", "ROWS"],
                 prune_configs_by={"early_config_prune": _fitting}, cache_results=True)
@triton.jit
def _multiply_floats(x, x_row, data, parts, rows, outputs, inputs, groups, units, split,
                     WORDS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
                     BLOCK: tl.constexpr):
    """Write parts [splits, rows, outputs] of a matmul; one program per tile and split of units."""
    tile = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * split
    last = tl.minimum(first + split, units)
    lane = tl.arange(0, LANES)
    words = data.to(tl.pointer_type(tl.int32)) + tile * groups * (LANES // 4 + LANES * WORDS)
    heads = words.to(tl.pointer_type(tl.uint8))
    totals = (tl.zeros((BLOCK, LANES), tl.float32),) * ROWS
    for start in range(first, last, BLOCK):
        unit = start + tl.arange(0, BLOCK)
        live = unit < last
        place, head = _places(unit, WORDS, BITS)
        pairs = _load(words + place[:, None] + lane[None, :], live[:, None], BITS)
        power = _powers(heads + 4 * head[:, None] + lane[None, :], live[:, None], BITS)
        dots = (tl.zeros((BLOCK, LANES), tl.float32),) * ROWS
        for j in tl.static_range(PER):
            number = _number(pairs, j, BITS)
            k = unit * PER + j
            new = ()
            for row in tl.static_range(ROWS):
                value = tl.load(x + row * x_row + k, mask=live & (k < inputs * (row < rows)),
                                other=0)
                new += (dots[row] + value.to(tl.float32)[:, None] * number,)
            dots = new
        new = ()
        for row in tl.static_range(ROWS):
            new += (totals[row] + _scaled(dots[row], power, BITS),)
        totals = new
    n = tile * LANES + lane
    parts += tl.program_id(1).to(tl.int64) * rows * outputs
    for row in tl.static_range(ROWS):
        tl.store(parts + n, tl.sum(totals[row], axis=0), mask=n < outputs * (row < rows))
        parts += outputs


def multiply(x: Tensor, data: Tensor, layout: MatrixLayout, parts: Tensor, split: int) -> None:
    """Write parts of a matmul with x [rows, inputs]: float32 [splits, rows, outputs].

    Each split has `split` units.
    """
    _multiply_floats[(layout.tiles, len(parts))](
        x, x.stride(0), data, parts, len(x), layout.outputs, layout.inputs, layout.groups,
        units_of(layout), split, WORDS=layout.words, BITS=layout.bits,
        ROWS=power_of_2(len(x)))


@triton.jit
def _unpack_floats(data, output_ids, first, out, out_row, count, inputs, groups, units,
                   WORDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize outputs to rows of out; one program per tile of rows and BLOCK units of each.

    Outputs are `output_ids`, or those from `first` on, which is a multiple of the tile.
    """
    lane = tl.arange(0, LANES)
    row = tl.program_id(0).to(tl.int64) * LANES + lane
    valid = row < count
    output = first + row
    if output_ids is not None:
        output = tl.load(output_ids + row, mask=valid, other=0)
    base = output // LANES * groups * (LANES // 4 + LANES * WORDS)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (unit < units)[:, None] & valid[None, :]
    place, head = _places(unit, WORDS, BITS)
    words = data.to(tl.pointer_type(tl.int32))
    pairs = _load(words + (base + output % LANES)[None, :] + place[:, None], mask, BITS)
    power = _powers(data + (4 * base + output % LANES)[None, :] + 4 * head[:, None], mask, BITS)
    quarters = ()
    for j in tl.static_range(4):  # two inputs each, j and j + 4
        low = _scaled(_number(pairs, j, BITS), power, BITS)
        high = _scaled(_number(pairs, j + 4, BITS), power, BITS)
        quarters += (tl.join(low, high).to(out.dtype.element_ty),)
    elements = tl.join(tl.join(quarters[0], quarters[2]), tl.join(quarters[1], quarters[3]))
    k = unit[:, None] * PER + tl.arange(0, PER)[None, :]
    tl.store(out + (row * out_row)[None, :, None] + k[:, None, :],
             tl.reshape(elements, (BLOCK, LANES, PER)),
             mask=(k < inputs)[:, None, :] & valid[None, :, None])


def unpack(out: Tensor, data: Tensor, layout: MatrixLayout, *, first: int,
           output_ids: Tensor | None) -> None:
    """Dequantize the outputs `output_ids`, or those from `first` on, to the rows of out."""
    block = 8 if interpreted() else 64
    units = units_of(layout)
    grid = ceil_div(len(out), MATRIX_TILE), ceil_div(units, block)
    _unpack_floats[grid](data, output_ids, first, out, out.stride(0), len(out), layout.inputs,
                         layout.groups, units, WORDS=layout.words, BITS=layout.bits, BLOCK=block)


def units_of(layout: MatrixLayout) -> int:
    """Return the number of units of one output."""
    return layout.groups * layout.group // PER.value
