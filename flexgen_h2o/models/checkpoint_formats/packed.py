"""The interface of a quantized tensor: rows of values, and codes where values are such."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference_matrix import assembled
from flexgen_h2o.models.checkpoint_base import Checkpoint, TensorInfo

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_HALF_ERROR = 2.0**-11  # of rounding to float16, relative, but for the smallest numbers


@dataclass(frozen=True)
class Codes:
    """Rows whose elements are ``(code - zero point) * scale``.

    Attributes
    ----------
    codes : uint8 Tensor [rows, columns]
    scales, zeros : float32 Tensor [rows, groups]
        Zero points are in units of codes.
    group_of : int64 Tensor [columns]
        The group of each column.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    def every(self, step: int) -> Codes:
        """Every so many of the rows, from the first on."""
        return replace(self, codes=self.codes[::step], scales=self.scales[::step],
                       zeros=self.zeros[::step])

    def values(self) -> Tensor:
        """float32 Tensor [rows, columns]."""
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return zeros.neg_().add_(self.codes).mul_(scales)

    def stored(self, layout: MatrixLayout) -> Tensor | None:
        """The same codes in a layout of these rows, uint8 [layout.nbytes]; None where its groups
        are no parts of these, or float16 cannot hold the scales as well as others.

        Zero points become ``-zero * scale``, rounded to float16.
        """
        first = self.group_of[:: layout.group]
        groups = first.repeat_interleave(layout.group)[: len(self.group_of)]
        if not torch.equal(groups, self.group_of):
            return None
        halves = self.scales.half()
        zeros = (-self.zeros * halves.float()).half()
        near = (halves.float() - self.scales).abs() <= _HALF_ERROR * self.scales.abs()
        if not near.all() or not zeros.isfinite().all():
            return None
        rows, columns = self.codes.shape
        codes = torch.zeros(layout.tiles * MATRIX_TILE, layout.groups * layout.group,
                            dtype=torch.int32)
        codes[:rows, :columns] = self.codes
        parts = torch.zeros(2, len(codes), layout.groups, dtype=torch.float16)
        parts[0, :rows], parts[1, :rows] = halves[:, first], zeros[:, first]
        return assembled(codes, *parts, layout)


class Rows(ABC):
    """A quantized tensor that is being read. Rows are counted over all axes but the last."""

    @abstractmethod
    def values(self, first: int, stop: int) -> Tensor:
        """float32 Tensor [stop - first, columns]."""

    def codes(self, first: int, stop: int) -> Codes | None:
        """The same rows as codes; None where the format has none."""
        return None

    def stored(self, rows: range, layout: MatrixLayout) -> Tensor | None:
        """Some rows in a layout of theirs, uint8 [layout.nbytes], by their codes; None where it
        cannot hold these."""
        found = self.codes(rows[0], rows[-1] + 1)
        return None if found is None else found.every(rows.step).stored(layout)


class CodedRows(Rows):
    """Rows of a format whose values are codes."""

    @abstractmethod
    def codes(self, first: int, stop: int) -> Codes:
        """Some rows as codes."""

    def values(self, first: int, stop: int) -> Tensor:
        return self.codes(first, stop).values()


@dataclass(frozen=True)
class Packed(ABC):
    """A tensor that the checkpoint keeps as several, whose dtypes and shapes have been checked.

    Attributes
    ----------
    checkpoint : Checkpoint
    name : str
        What all its parts' names begin with.
    shape : tuple of int
        As the model knows it: [outputs, inputs], or with the experts before.
    parts : tuple of str
        The names of its parts.
    levels : int or None
        The highest code; None where values are no codes.
    """

    checkpoint: Checkpoint = field(repr=False)
    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    levels: int | None = None

    def fits(self, layout: MatrixLayout) -> bool:
        """True if a layout has room for all codes."""
        return not layout.mxfp4 and self.levels is not None and self.levels <= layout.levels

    @abstractmethod
    def opened(self) -> Rows:
        """The tensor, for reading. What lies across its rows is read here, and held."""


def part(checkpoint: Checkpoint, name: str, dtypes: tuple[torch.dtype, ...]) -> TensorInfo:
    """The info of a part that must be there, in one of these dtypes; UserError if it is not."""
    if name not in checkpoint.names():
        raise UserError(f"{checkpoint.source} has no tensor {name}, without which a quantized "
                        "weight cannot be read; is it complete?")
    info = checkpoint.info(name)
    if info.dtype not in dtypes:
        words = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise UserError(f"{checkpoint.source}: tensor {name} is stored as "
                        f"{str(info.dtype).removeprefix('torch.')}, not {words}; it is no part of "
                        "a checkpoint of its quant_method")
    return info


def check_shape(checkpoint: Checkpoint, name: str, expected: tuple[int, ...]) -> None:
    """Raise `UserError` unless a part is of this shape."""
    shape = checkpoint.info(name).shape
    if shape != tuple(expected):
        raise UserError(f"{checkpoint.source}: tensor {name} has shape {list(shape)}, not "
                        f"{list(expected)} as quantization_config and its weight call for; do they "
                        "belong together?")


def check_filled(checkpoint: Checkpoint, name: str, axes: int | None = None) -> None:
    """Raise `UserError` for a part without elements or with another number of axes (None: 2 or
    more)."""
    shape = checkpoint.info(name).shape
    if not all(shape) or (len(shape) < 2 if axes is None else len(shape) != axes):
        raise UserError(f"{checkpoint.source}: tensor {name} has shape {list(shape)}, which is no "
                        "quantized weight; it is damaged")


def raw(checkpoint: Checkpoint, name: str, first: int | None = None, stop: int | None = None
        ) -> Tensor:
    """Some rows of a tensor [rows, columns] as they are stored; all of a tensor of any shape."""
    info = checkpoint.info(name)
    if first is None or stop is None:
        out = torch.empty(info.shape, dtype=info.dtype)
        checkpoint.read_part(name, 0, out)
        return out
    columns = info.shape[-1]
    out = torch.empty(stop - first, columns, dtype=info.dtype)
    checkpoint.read_part(name, first * columns, out)
    return out


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes of int32 words, from the lowest bits on.

    Parameters
    ----------
    words : int32 Tensor [...]
    bits : int
        2, 4 or 8.

    Returns
    -------
    uint8 Tensor [..., 32 / bits]
    """
    octets = words.contiguous().unsqueeze(-1).view(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (octets.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def count(shape: tuple[int, ...]) -> int:
    """Rows of a tensor: the product of all axes but the last."""
    return math.prod(shape[:-1])
