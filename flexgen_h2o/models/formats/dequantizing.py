"""Quantized checkpoints as tensors in floating point, dequantized when they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import CODED_BITS, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo
from flexgen_h2o.models.formats import compressed_tensors, mxfp4, scaled
from flexgen_h2o.models.formats import packed as awq
from flexgen_h2o.models.formats import packed as gptq
from flexgen_h2o.models.formats.packed import Packed, count
from flexgen_h2o.models.quantization import Quantization

FORMATS: Mapping[str, Callable[[Checkpoint, Quantization], dict[str, Packed]]] = MappingProxyType({
    "fp8": scaled.find, "mxfp4": mxfp4.find, "awq": awq.find_awq, "gptq": gptq.find_gptq,
    "compressed-tensors": compressed_tensors.find,
})
"""The quantized tensors of a checkpoint, by quant_method."""

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: some tens of MB with all that is on the way


class DequantizingCheckpoint(Checkpoint):
    """A quantized checkpoint, presented as the tensors that it stands for.

    They count as float32, in which they are computed, and are rounded to what they are read into
    once. The parts that they are made of are not among the names.

    Parameters
    ----------
    inner : Checkpoint
        Closed with this one.
    settings : Quantization
        What its config.json says.

    Raises
    ------
    UserError
        If parts are missing, or their dtypes or shapes do not fit together.
    """

    def __init__(self, inner: Checkpoint, settings: Quantization):
        self.source, self.absent, self._inner = inner.source, inner.absent, inner
        self._packed = FORMATS[settings.method](inner, settings)
        parts = {name for packed in self._packed.values() for name in packed.parts}
        plain = [name for name in inner.names() if name not in parts]
        twice = next((name for name in plain if name in self._packed), None)
        if twice is not None:
            raise UserError(f"{self.source} has a tensor {twice} and its quantized parts, too; "
                            "get the model again")
        self._names = dict.fromkeys([*plain, *self._packed])

    def names(self) -> Collection[str]:
        return self._names.keys()

    def info(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._packed:
            return self._inner.info(name)
        return TensorInfo(torch.float32, self._packed[name].shape, None)

    def _fill(self, name: str, info: TensorInfo, out: Tensor) -> None:
        self._fill_part(name, info, 0, out)

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: Tensor) -> None:
        if name not in self._packed:
            self._inner.read_part(name, start, out)
            return
        flat, columns = out.view(-1), info.shape[-1]
        rows, step = self._packed[name].opened(), max(1, _CHUNK_ELEMENTS // columns)
        end = start + len(flat)
        for first in range(start // columns, -(-end // columns), step):
            stop = min(first + step, -(-end // columns))
            values = rows.values(first, stop)
            if not bool(values.isfinite().all()):
                raise UserError(f"{self.source}: tensor {name} has scales or elements that are not "
                                "finite; it is damaged: get it again")
            begin, finish = max(start, first * columns), min(end, stop * columns)
            flat[begin - start : finish - start].copy_(
                values.view(-1)[begin - first * columns : finish - first * columns])

    def keep(self, name: str, layout: MatrixLayout, out: Tensor,
             rows: range | None = None) -> bool:
        packed = self._packed.get(name)
        if packed is None or layout.bits not in CODED_BITS or not packed.fits(layout):
            return False
        rows = range(count(packed.shape)) if rows is None else rows
        if (len(rows), packed.shape[-1]) != (layout.outputs, layout.inputs):
            raise ValueError(f"{name} is of shape {packed.shape}, and not as {layout}")
        opened, end = packed.opened(), 0
        step = max(1, _CHUNK_ELEMENTS // layout.inputs // MATRIX_TILE) * MATRIX_TILE
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            part = replace(layout, outputs=len(some))
            stored = opened.stored(some, part)
            if stored is None:
                return False
            begin, end = end, end + part.nbytes
            out[begin:end] = stored
        return True

    def close(self) -> None:
        self._inner.close()
