"""Matrices that are not plain tensors: quantized ones, and those that come in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from flexgen_h2o.config.limits import MXFP4_GROUP
from flexgen_h2o.config.weight_layout import MatrixLayout


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight [outputs, inputs].

    Attributes
    ----------
    data : uint8 Tensor [layout.nbytes]
        Contiguous, at a multiple of 4 bytes; on any device.
    layout : MatrixLayout
    activation_bits : int
        16: products take what they multiply it with as it is. 8: they round it (`reference_matrix.
        rounded_activations`).
    """

    data: Tensor
    layout: MatrixLayout
    activation_bits: int = 16

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.layout.outputs, self.layout.inputs

    def __len__(self) -> int:
        return self.layout.outputs


def layout_of(outputs: int, inputs: int, bits: int, group: int) -> MatrixLayout:
    """Return the layout that operators get as numbers (see `signed_group`)."""
    return MatrixLayout(outputs, inputs, bits, abs(group) or MXFP4_GROUP, mxfp4=not group,
                        compact=group < 0)


def signed_group(layout: MatrixLayout) -> int:
    """Return a layout's group as operators get it: 0 for MXFP4, negative for compact scales."""
    if layout.mxfp4:
        return 0
    return -layout.group if layout.compact else layout.group


@dataclass(frozen=True)
class ShardedMatrix:
    """A weight [outputs, inputs] of which only parts are in memory at a time.

    Attributes
    ----------
    shape : (outputs, inputs)
    parts : callable (x) -> iterator of (slice, Tensor or QuantizedMatrix)
        Every output once, some at a time and in order: which ones, and the weight [those, inputs].
        x [rows, inputs] is what the parts are multiplied with. A part is good until the next one
        is asked for, and its product has to be done by then.
    """

    shape: tuple[int, int]
    parts: Callable[[Tensor], Iterator[tuple[slice, Tensor | QuantizedMatrix]]]

    def __len__(self) -> int:
        return self.shape[0]


Matrix = Tensor | QuantizedMatrix | ShardedMatrix
"""A weight [outputs, inputs] of any kind."""
