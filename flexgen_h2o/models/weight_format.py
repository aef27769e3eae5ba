"""Storage formats of a model's tensors: vectors in the run's dtype, matrices too, or quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.config.formats import MatrixLayout, WeightOptions
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.storage.tiers import typed


@dataclass(frozen=True)
class WeightFormat:
    """The form of every tensor of a model, at rest and in memory.

    Attributes
    ----------
    dtype : torch.dtype
        Of everything that is not quantized.
    options : WeightOptions
        Of the matrices.
    exact : frozenset of (outputs, inputs)
        Shapes of the matrices that are never quantized: routers of experts, which are small, and
        by which a rounded number picks another expert.
    """

    dtype: torch.dtype
    options: WeightOptions = WeightOptions()
    exact: frozenset[tuple[int, ...]] = frozenset()

    @property
    def bits(self) -> int:
        """Bits of an element of a matrix: 16 (dtype as it is), 12, 8 or 4."""
        return self.options.bits

    def layout(self, shape: tuple[int, ...]) -> MatrixLayout | None:
        """The layout of a tensor that is quantized; None for one that is not."""
        if len(shape) != 2 or tuple(shape) in self.exact:
            return None
        return self.options.layout((shape[0], shape[1]))

    def stored(self, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape by which a checkpoint in this format knows a tensor of `shape`."""
        layout = self.layout(shape)
        return (self.dtype, tuple(shape)) if layout is None else (torch.uint8, (layout.nbytes,))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape`."""
        dtype, stored = self.stored(shape)
        return math.prod(stored) * dtype.itemsize

    def view(self, buffer: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor | QuantizedMatrix:
        """The tensor of `shape` that starts `offset` bytes into the uint8 tensor `buffer`."""
        dtype, stored = self.stored(shape)
        data, layout = typed(buffer, offset, stored, dtype), self.layout(shape)
        return data if layout is None else QuantizedMatrix(
            data, layout, self.options.activation_bits)
