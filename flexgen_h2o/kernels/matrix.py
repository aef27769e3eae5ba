"""A quantized matrix in memory: bytes, and the layout that says what they mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexgen_h2o.config.formats import MatrixLayout


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized weight [outputs, inputs].

    Attributes
    ----------
    data : uint8 Tensor [layout.nbytes]
        Contiguous, at a multiple of 4 bytes; on any device.
    layout : MatrixLayout
    """

    data: Tensor
    layout: MatrixLayout

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.layout.outputs, self.layout.inputs

    def __len__(self) -> int:
        return self.layout.outputs
