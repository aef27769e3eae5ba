"""A tensor of a GGUF file, as the Hugging Face checkpoint has it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from flexgen_h2o.config.block_types import BlockType
from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference_blocks import dequantize

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the Hugging Face checkpoint: where its blocks lie in the file.

    Attributes
    ----------
    file : mmap
        The whole file.
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

    file: mmap.mmap
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
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        for start in range(0, len(self._rows()), step):
            yield self.values(slice(start, start + step)).to(target)

    def values(self, rows: slice) -> torch.Tensor:
        """The values of some rows of a matrix, or of a vector, float32."""
        # A copy, as the mapped file is read-only and its rows lie anywhere.
        values = dequantize(torch.from_numpy(np.array(self.packed(rows))), self.kind)
        if len(self.shape) == 1:
            values = values[0] if self.order is None else values[0][self.order]
        return values + self.shift if self.shift else values

    def layout(self) -> MatrixLayout | None:
        """The layout that keeps its codes; None if it is no matrix of codes."""
        if len(self.shape) != 2 or self.shift:
            return None
        return self.kind.layout(self.shape[0], self.shape[1])

    def repack(self, rows: range, layout: MatrixLayout, out: torch.Tensor) -> bool:
        """Write some rows into `out` by their codes: see `ops.repack`."""
        whole = self._rows()
        order = None if self.order is None else torch.from_numpy(self.order)[
            rows.start : rows.stop : rows.step]
        if order is None and rows.step != 1:
            order = torch.arange(rows.start, rows.stop, rows.step)
        blocks = whole[rows.start : rows.stop] if order is None else whole
        try:
            return ops.repack(blocks, self.kind, layout, out, order)
        finally:
            self._release(whole.nbytes)

    def _rows(self) -> np.ndarray:
        size = self.shape[-1] // self.kind.elements * self.kind.nbytes
        count = math.prod(self.shape[:-1])
        return np.frombuffer(self.file, np.uint8, count * size, self.offset).reshape(count, size)

    def _release(self, nbytes: int) -> None:
        """Let the tensor's pages go: they would count as this process's memory until it ends."""
        first = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.file.madvise(mmap.MADV_DONTNEED, first, self.offset + nbytes - first)
