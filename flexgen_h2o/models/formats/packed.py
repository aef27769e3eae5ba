"""The interface of a quantized tensor: rows of values, and codes where values are such."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference.matrix import assembled
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo
from flexgen_h2o.models.quantization import Quantization

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


# GPTQ as GPTQModel, AutoGPTQ and optimum ship it: codes packed along the inputs.
#
# With 32 / bits codes in an int32, from the lowest bits on: ``qweight`` [inputs / n, outputs]
# packed
# along the first axis, ``qzeros`` [groups, outputs / n] along the second, ``scales`` [groups,
# outputs], and ``g_idx`` [inputs], the group of each input (without it they come in order). An
# element is ``scales[g] * (code - zero)`` with g = g_idx[input]. The format "gptq" stores zero
# points
# less one in each field of a word, "gptq_v2" as they are. Source: gptqmodel's BaseQuantLinear and
# convert_gptq_v1_to_v2_format.


_WEIGHT = ".qweight"


@dataclass(frozen=True)
class Transposed(CodedRows):
    """Codes, zero points and scales that are stored by input, read by output.

    Attributes
    ----------
    words : int32 Tensor [words of inputs or inputs, outputs or words of outputs]
    zeros : uint8 Tensor [groups, outputs]
    scales : float32 Tensor [groups, outputs]
    group_of : int64 Tensor [inputs]
    bits : int
    """

    words: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: Tensor
    bits: int

    def codes(self, first: int, stop: int) -> Codes:
        zeros, scales = (each[:, first:stop].T.float() for each in (self.zeros, self.scales))
        return Codes(self.by_output(first, stop), scales, zeros, self.group_of)

    def by_output(self, first: int, stop: int) -> Tensor:
        """Codes of some outputs, uint8 [stop - first, inputs]."""
        return unpacked(self.words[:, first:stop].T, self.bits).flatten(1)


@dataclass(frozen=True, kw_only=True)
class _Gptq(Packed):
    bits: int
    group: int
    zeros_below: bool

    def opened(self) -> Rows:
        qweight, qzeros, scales = (raw(self.checkpoint, name) for name in self.parts[:3])
        if self.zeros_below:
            # One to each field of a word, carries and all, as they were subtracted.
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            qzeros = (qzeros.long() + ones).to(torch.int32)  # wraps
        return Transposed(qweight, unpacked(qzeros, self.bits).flatten(1), scales,
                          self._group_of(len(scales)), self.bits)

    def _group_of(self, groups: int) -> Tensor:
        inputs = self.shape[-1]
        if len(self.parts) == 3:
            return torch.arange(inputs) // self.group
        return group_indices(self.checkpoint, self.parts[3], groups)


def group_indices(checkpoint: Checkpoint, name: str, groups: int) -> Tensor:
    """The group of each input, int64; UserError where there is no such group."""
    found = raw(checkpoint, name).long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise UserError(f"{checkpoint.source}: tensor {name} names group "
                        f"{int(found.max() if found.min() >= 0 else found.min())}, but there are "
                        f"{groups}; it is damaged: get it again")
    return found


def find_gptq(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
    """The quantized tensors of a checkpoint by the names of the weights that they stand for;
    UserError where a part is wrong."""
    (bits,) = settings.bits
    found: dict[str, Packed] = {}
    for weight in checkpoint.names():
        if not weight.endswith(_WEIGHT):
            continue
        name = weight.removesuffix(_WEIGHT)
        parts = tuple(name + suffix for suffix in (_WEIGHT, ".qzeros", ".scales", ".g_idx"))
        for each, dtypes in zip(parts, ((torch.int32,), (torch.int32,), FLOATS), strict=False):
            part(checkpoint, each, dtypes)
            check_filled(checkpoint, each, axes=2)
        words, outputs = checkpoint.info(weight).shape
        inputs, groups = words * 32 // bits, checkpoint.info(parts[2]).shape[0]
        group = settings.group_size or inputs
        check_shape(checkpoint, parts[2], (-(-inputs // group), outputs))
        check_shape(checkpoint, parts[1], (groups, -(-outputs * bits // 32)))
        if parts[3] in checkpoint.names():
            part(checkpoint, parts[3], (torch.int32, torch.int64))
            check_shape(checkpoint, parts[3], (inputs,))
        else:
            parts = parts[:3]
        found[f"{name}.weight"] = _Gptq(checkpoint, name, (outputs, inputs), parts,
                                        (1 << bits) - 1, bits=bits, group=group,
                                        zeros_below=settings.zeros_below)
    return found


# AWQ as AutoAWQ ships it ("gemm"): codes packed along the outputs, in turn.
#
# Eight codes of 4 bits in an int32: ``qweight`` [inputs, outputs / 8], ``qzeros`` [groups,
# outputs / 8], ``scales`` [groups, outputs]. From its lowest bits on a word holds outputs 0, 2, 4,
# 6,
# 1, 3, 5, 7 of its eight. An element is ``(code - zero) * scale``. Source: AutoAWQ, packing_utils.


_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of outputs 0 to 7


class _Interleaved(Transposed):
    def by_output(self, first: int, stop: int) -> Tensor:
        begin, end = first // _PER_WORD, -(-stop // _PER_WORD)
        codes = _in_order(self.words[:, begin:end])
        return codes[:, first - begin * _PER_WORD : stop - begin * _PER_WORD].T


@dataclass(frozen=True, kw_only=True)
class _Awq(Packed):
    group: int

    def opened(self) -> Rows:
        qweight, qzeros, scales = (raw(self.checkpoint, name) for name in self.parts)
        group_of = torch.arange(self.shape[-1]) // self.group
        return _Interleaved(qweight, _in_order(qzeros), scales, group_of, _BITS)


def _in_order(words: Tensor) -> Tensor:
    """Codes of words [rows, words], uint8 [rows, 8 * words]."""
    return unpacked(words, _BITS)[..., _PLACES].flatten(1)


def find_awq(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
    """The quantized tensors of a checkpoint by the names of the weights that they stand for;
    UserError where a part is wrong."""
    found: dict[str, Packed] = {}
    for weight in checkpoint.names():
        if not weight.endswith(_WEIGHT):
            continue
        name = weight.removesuffix(_WEIGHT)
        parts = tuple(name + suffix for suffix in (_WEIGHT, ".qzeros", ".scales"))
        for each, dtypes in zip(parts, ((torch.int32,), (torch.int32,), FLOATS), strict=True):
            part(checkpoint, each, dtypes)
            check_filled(checkpoint, each, axes=2)
        inputs, words = checkpoint.info(weight).shape
        group, outputs = settings.group_size or inputs, words * _PER_WORD
        groups = -(-inputs // group)
        check_shape(checkpoint, parts[1], (groups, words))
        check_shape(checkpoint, parts[2], (groups, outputs))
        found[f"{name}.weight"] = _Awq(checkpoint, name, (outputs, inputs), parts, 15,
                                       group=group)
    return found
