"""GPTQ as GPTQModel, AutoGPTQ and optimum ship it: codes packed along the inputs.

With 32 / bits codes in an int32, from the lowest bits on: ``qweight`` [inputs / n, outputs] packed
along the first axis, ``qzeros`` [groups, outputs / n] along the second, ``scales`` [groups,
outputs], and ``g_idx`` [inputs], the group of each input (without it they come in order). An
element is ``scales[g] * (code - zero)`` with g = g_idx[input]. The format "gptq" stores zero points
less one in each field of a word, "gptq_v2" as they are. Source: gptqmodel's BaseQuantLinear and
convert_gptq_v1_to_v2_format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint_base import Checkpoint
from flexgen_h2o.models.checkpoint_formats.packed import (
    FLOATS,
    CodedRows,
    Codes,
    Packed,
    Rows,
    check_filled,
    check_shape,
    part,
    raw,
    unpacked,
)
from flexgen_h2o.models.checkpoint_formats.settings import Quantization

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


def find(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
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
