"""A tensor of a GGUF file, as the Hugging Face checkpoint has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from flexgen_h2o.models.gguf_dequantize import dequantize
from flexgen_h2o.models.gguf_kinds import BlockType

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the Hugging Face checkpoint: where its blocks lie in the file.

    Attributes
    ----------
    file : uint8 array
        The whole file, mapped.
    kind : BlockType
    shape : tuple of int
        Of the checkpoint's tensor: a matrix or a vector.
    offset : int
        Of the first row in the file.
    order : int array [rows], optional
        The row of the file that is row i here.
    shift : float
        Added to every value.
    """

    file: np.ndarray
    kind: BlockType
    shape: tuple[int, ...]
    offset: int
    order: np.ndarray | None = None
    shift: float = 0.0

    def packed(self, rows: slice) -> np.ndarray:
        """Some rows of a matrix as they lie in the file, uint8 [rows, bytes]; a vector is one."""
        whole = self._rows()
        return whole[rows if self.order is None or len(whole) == 1 else self.order[rows]]

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """The dtype it is written in, where the model is to be of the dtype `target`."""
        return target

    def chunks(self, target: torch.dtype) -> Iterator[torch.Tensor]:
        """Its values, some rows at a time, so that memory stays small whatever its size."""
        rows = len(self._rows())
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        for start in range(0, rows, step):
            # A copy, as the mapped file is read-only and its rows lie anywhere.
            packed = torch.from_numpy(np.array(self.packed(slice(start, start + step))))
            values = dequantize(packed, self.kind.name)
            if len(self.shape) == 1:
                values = values[0] if self.order is None else values[0][self.order]
            yield (values + self.shift if self.shift else values).to(target)

    def _rows(self) -> np.ndarray:
        size = self.shape[-1] // self.kind.elements * self.kind.nbytes
        count = math.prod(self.shape[:-1])
        return self.file[self.offset : self.offset + count * size].reshape(count, size)
