"""AWQ as AutoAWQ ships it ("gemm"): codes packed along the outputs, in turn.

Eight codes of 4 bits in an int32: ``qweight`` [inputs, outputs / 8], ``qzeros`` [groups,
outputs / 8], ``scales`` [groups, outputs]. From its lowest bits on a word holds outputs 0, 2, 4, 6,
1, 3, 5, 7 of its eight. An element is ``(code - zero) * scale``. Source: AutoAWQ, packing_utils.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.models.checkpoint_base import Checkpoint
from flexgen_h2o.models.checkpoint_formats.gptq import Transposed
from flexgen_h2o.models.checkpoint_formats.packed import (
    FLOATS,
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


def find(checkpoint: Checkpoint, settings: Quantization) -> dict[str, Packed]:
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
