"""Storage formats of a model's tensors: vectors in the run's dtype, matrices too, or quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.models.model_config import TensorSpec
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

    def layout(self, spec: TensorSpec) -> MatrixLayout | None:
        """Return the layout of a tensor, or of some outputs of it; None if it is not quantized."""
        shape = spec.shape
        if len(shape) != 2 or tuple(shape) in self.exact:
            return None
        return self.options.layout((shape[0], shape[1]), spec.name)

    def stored(self, spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape by which a checkpoint in this format knows a tensor."""
        layout = self.layout(spec)
        if layout is None:
            return self.dtype, tuple(spec.shape)
        return torch.uint8, (layout.nbytes,)

    def nbytes(self, spec: TensorSpec) -> int:
        """Return the bytes of a tensor."""
        dtype, stored = self.stored(spec)
        return math.prod(stored) * dtype.itemsize

    def view(self, buffer: Tensor, offset: int, spec: TensorSpec) -> Tensor | QuantizedMatrix:
        """Return the tensor that starts `offset` bytes into the uint8 tensor `buffer`."""
        dtype, stored = self.stored(spec)
        data, layout = typed(buffer, offset, stored, dtype), self.layout(spec)
        return data if layout is None else QuantizedMatrix(
            data, layout, self.options.activation_bits)
