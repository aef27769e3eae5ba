"""Records of quantized vectors on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen_h2o.config.cache_layout import GroupLayout
from flexgen_h2o.kernels.triton.common import (
    ceil_div,
    in_units,
    load_halves,
    power_of_2,
    store_records,
    unit_stride,
)

GROUP_ELEMENTS = 4096
"""Elements that one program handles."""


@triton.jit
def _quantize(x, records, rows, x_stride, LENGTH: tl.constexpr, GROUP: tl.constexpr,
              BITS: tl.constexpr, NBYTES: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    store_records(x + row * x_stride, records + row * NBYTES, row < rows, LENGTH, GROUP, BITS)


@triton.jit
def _dequantize(records, out, rows, stride, LENGTH: tl.constexpr, GROUP: tl.constexpr,
                BITS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
                ROWS: tl.constexpr):
    HALF: tl.constexpr = LENGTH // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    low, high = load_halves(records + row * stride * UNIT, live, LENGTH, GROUP, BITS, WIDTH)
    lane = tl.arange(0, WIDTH)
    mask = live[:, None] & (lane < HALF)[None, :]
    place = out + row[:, None] * LENGTH + lane[None, :]
    tl.store(place, low, mask=mask)
    tl.store(place + HALF, high, mask=mask)


def quantize_groups(x: Tensor, layout: GroupLayout) -> Tensor:
    """Run `reference.attention.quantize_groups`, with identical bytes."""
    records = x.new_empty((*x.shape[:-1], layout.nbytes), dtype=torch.uint8)
    vectors = unit_stride(x.reshape(-1, layout.length))
    tile = max(1, GROUP_ELEMENTS // power_of_2(layout.length))
    if len(vectors):
        _quantize[(ceil_div(len(vectors), tile),)](
            vectors, records, len(vectors), vectors.stride(0), layout.length, layout.group,
            layout.bits, layout.nbytes, tile)
    return records


def dequantize_groups(records: Tensor, layout: GroupLayout) -> Tensor:
    """Run `reference.attention.dequantize_groups`."""
    length = layout.length
    out = records.new_empty((*records.shape[:-1], length), dtype=torch.float32)
    flat = records.reshape(-1, layout.nbytes)
    if flat.stride(1) != 1 or flat.stride(0) % 2 or flat.data_ptr() % 2:
        flat = flat.clone(memory_format=torch.contiguous_format)  # float16 is read at even bytes
    tile = max(1, GROUP_ELEMENTS // power_of_2(length))
    unit, (stride,) = in_units(flat)
    if len(flat):
        _dequantize[(ceil_div(len(flat), tile),)](
            flat, out, len(flat), stride, length, layout.group, layout.bits,
            power_of_2(length // 2), unit, tile)
    return out
