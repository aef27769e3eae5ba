"""Weights that are not plain tensors: quantized ones, and ones that arrive in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from flexgen_h2o.config.weight_layout import MatrixLayout


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight [outputs, inputs].

    Attributes
    ----------
    data : uint8 Tensor [layout.nbytes]
        Contiguous, aligned to 4 bytes; on any device.
    layout : MatrixLayout
    activation_bits : int
        Bit width of the activations in matmuls: 16 to leave them as they are, 8 to quantize them
        (`reference.matrix.quantize_activations`).
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


@dataclass(frozen=True)
class ShardedMatrix:
    """A weight [outputs, inputs] of which only one row shard is in memory at a time.

    Attributes
    ----------
    shape : (int, int)
        (outputs, inputs).
    shards : callable (x) -> iterator of (slice, Tensor or QuantizedMatrix)
        Yields every row shard in order: its range of outputs, and its weight [outputs, inputs]. x
        [rows, inputs] is multiplied with the shards. A shard is valid until the next one
        is requested; its matmul has to be finished by then.
    """

    shape: tuple[int, int]
    shards: Callable[[Tensor], Iterator[tuple[slice, Tensor | QuantizedMatrix]]]

    def __len__(self) -> int:
        return self.shape[0]


Matrix = Tensor | QuantizedMatrix | ShardedMatrix
"""A weight [outputs, inputs] of any kind."""
