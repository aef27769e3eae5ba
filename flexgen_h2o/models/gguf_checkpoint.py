"""A GGUF file as a checkpoint: tensors by Hugging Face name, read from the file's own bytes."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.models.checkpoint_base import Checkpoint, TensorInfo
from flexgen_h2o.models.gguf_header import GgufHeader
from flexgen_h2o.models.gguf_reader import mapped
from flexgen_h2o.models.gguf_tensors import GgufTensor

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32


class GgufCheckpoint(Checkpoint):
    """Tensors of a GGUF file, dequantized when they are read, or kept as codes (`keep`).

    Parameters
    ----------
    header : GgufHeader

    Raises
    ------
    UserError
        If the file is of another architecture, or has a tensor that its architecture has not.
    """

    def __init__(self, header: GgufHeader):
        self.source = str(header.source)
        self._tensors = {name: tensor
                         for name, tensor in mapped(header, fuse_experts=False).items()
                         if isinstance(tensor, GgufTensor)}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(torch.float32, self._tensors[name].shape, None)

    def kept_layout(self, name: str) -> MatrixLayout | None:
        return self._tensors[name].layout()

    def keep(self, name: str, layout: MatrixLayout, out: torch.Tensor,
             rows: range | None = None) -> bool:
        tensor = self._tensors[name]
        if tensor.layout() is None or not tensor.kind.fits(layout):
            return False
        rows = range(tensor.shape[0]) if rows is None else rows
        if (len(rows), tensor.shape[1]) != (layout.outputs, layout.inputs):
            raise ValueError(f"{name} is of shape {tensor.shape}, and not as {layout}")
        return tensor.repack(rows, layout, out)

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        self._fill_part(name, info, 0, out)

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        tensor, flat = self._tensors[name], out.view(-1)
        if len(info.shape) == 1:
            flat.copy_(tensor.values(slice(None))[start : start + len(flat)])
            return
        columns, end = info.shape[-1], start + len(flat)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for first in range(start // columns, math.ceil(end / columns), step):
            stop = min(first + step, math.ceil(end / columns))
            values = tensor.values(slice(first, stop)).view(-1)
            begin, finish = max(start, first * columns), min(end, stop * columns)
            flat[begin - start : finish - start].copy_(
                values[begin - first * columns : finish - first * columns])

    def close(self) -> None:
        """Unmap the files. The checkpoint must not be read afterwards."""
        self._tensors = {}
