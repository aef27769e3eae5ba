"""Weights in 8 bits beside a grid of scales: the part that FP8 and compressed-tensors share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.formats.packed import (
    FLOATS,
    CodedRows,
    Codes,
    Packed,
    Rows,
    check_filled,
    part,
    raw,
)
from flexgen_h2o.models.quantization import Quantization

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (*FLOATS, *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []))


@dataclass(frozen=True)
class ScaleGrid:
    """Numbers of which each belongs to a block of a tensor [..., rows, columns].

    Attributes
    ----------
    checkpoint : Checkpoint
    name : str
        A tensor [..., rows / block rows, columns / block columns], rounded up, or of one element.
    shape : tuple of int
        Of the larger tensor.
    block : tuple of int
        Rows and columns of a block.
    """

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]

    def rows(self, first: int, stop: int) -> Tensor:
        """The numbers of some rows, float32 [stop - first, columns / block columns]."""
        stored = self.checkpoint.info(self.name).shape
        if math.prod(stored) == 1:
            return raw(self.checkpoint, self.name).float().reshape(1, 1).expand(stop - first, 1)
        places = torch.arange(first, stop)
        entry, row = places // self.shape[-2], places % self.shape[-2]
        places = entry * stored[-2] + row // self.block[0]
        begin, end = int(places[0]), int(places[-1]) + 1
        return raw(self.checkpoint, self.name, begin, end).float()[places - begin]

    @property
    def group_of(self) -> Tensor:
        """The place in `rows` of each column, int64 [columns]."""
        return torch.arange(self.shape[-1]) // self.block[1]


def grid(checkpoint: Checkpoint, name: str, shape: tuple[int, ...],
         block: tuple[int, int] | None = None) -> ScaleGrid:
    """The grid `name` of a tensor of `shape`; without a block the grid's own shape tells it.

    Raises `UserError` where they do not fit.
    """
    stored = checkpoint.info(name).shape
    rows, columns = shape[-2:]
    if math.prod(stored) == 1:
        return ScaleGrid(checkpoint, name, shape, (rows, columns))
    if len(stored) == len(shape) and all(stored):
        high, wide = stored[-2:]
        size = block or (-(-rows // high), -(-columns // wide))
        fits = (high, wide) == (-(-rows // size[0]), -(-columns // size[1]))
        even = block or (rows % high, columns % wide) == (0, 0)
        if fits and even and stored[:-2] == shape[:-2]:
            return ScaleGrid(checkpoint, name, shape, size)
    blocks = f" in blocks of {list(block)}" if block else ""
    raise UserError(f"{checkpoint.source}: tensor {name} has shape {list(stored)}, which holds no "
                    f"scales of a weight {list(shape)}{blocks}; do they belong together?")


@dataclass(frozen=True, kw_only=True)
class ScaledFloats(Packed, Rows):
    """float8 times scales.

    Attributes
    ----------
    scales : ScaleGrid
    """

    scales: ScaleGrid

    def opened(self) -> Rows:
        return self

    def values(self, first: int, stop: int) -> Tensor:
        values = raw(self.checkpoint, self.name, first, stop).float()
        return values.mul_(self.scales.rows(first, stop)[:, self.scales.group_of])


@dataclass(frozen=True, kw_only=True)
class ScaledIntegers(Packed, CodedRows):
    """int8, less zero points if there are any, times scales.

    Attributes
    ----------
    scales : ScaleGrid
    zeros : ScaleGrid or None
    """

    scales: ScaleGrid
    zeros: ScaleGrid | None

    def opened(self) -> Rows:
        return self

    def codes(self, first: int, stop: int) -> Codes:
        codes = raw(self.checkpoint, self.name, first, stop).view(torch.uint8) ^ 0x80  # + 128
        scales = self.scales.rows(first, stop)
        zeros = torch.full_like(scales, 128.0)
        if self.zeros is not None:
            zeros += self.zeros.rows(first, stop)
        return Codes(codes, scales, zeros, self.scales.group_of)


def scaled_floats(checkpoint: Checkpoint, weight: str, scale: str,
                  block: tuple[int, int] | None) -> ScaledFloats:
    """A float8 weight and its scales, checked."""
    check_filled(checkpoint, weight)
    part(checkpoint, scale, SCALES)
    shape = checkpoint.info(weight).shape
    return ScaledFloats(checkpoint, weight, shape, (weight, scale),
                        scales=grid(checkpoint, scale, shape, block))


def scaled_integers(checkpoint: Checkpoint, weight: str, scale: str, zero: str) -> ScaledIntegers:
    """An int8 weight with its scales, and its zero points if there are any, checked."""
    check_filled(checkpoint, weight)
    part(checkpoint, scale, FLOATS)
    shape = checkpoint.info(weight).shape
    scales, zeros, parts = grid(checkpoint, scale, shape), None, (weight, scale)
    if zero in checkpoint.names():
        part(checkpoint, zero, (torch.int8,))
        zeros, parts = grid(checkpoint, zero, shape), (*parts, zero)
        if zeros.block != scales.block:
            raise UserError(f"{checkpoint.source}: tensors {scale} and {zero} differ in shape; "
                            "do they belong together?")
    return ScaledIntegers(checkpoint, weight, shape, parts, 255, scales=scales, zeros=zeros)


# FP8 as DeepSeek and Qwen3 ship it: float8 weights, with a scale for each block or tensor.
#
# ``weight`` [rows, columns] float8, ``weight_scale_inv`` [rows / 128, columns / 128], rounded up,
# or
# one number: an element is ``weight * weight_scale_inv`` of its block. Scales of activations are
# left
# out: products take activations as they are. Source: DeepSeek-V3's inference/kernel.py, and
# FineGrainedFP8 of transformers.


_SCALE, _ACTIVATIONS = "_scale_inv", ("activation_scale", "input_scale")


def find(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
    """The quantized tensors of a checkpoint by their names; UserError where a part is wrong."""
    return {name: scaled_floats(checkpoint, name, name + _SCALE, settings.block)
            for name in checkpoint.names()
            if checkpoint.info(name).dtype in FLOAT8 and not name.endswith(_ACTIVATIONS)}
