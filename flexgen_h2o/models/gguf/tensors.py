"""Tensors of a GGUF file: one of the file as one of the hub, or several fused into one.

Sources: conversion/ of llama.cpp, and integrations/mxfp4.py of transformers.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.config.weight_layout import GGMLType, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import populate_mapped
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference.blocks import dequantize, interleave_nibbles
from flexgen_h2o.models.gguf.architectures import HEAD_MAPS, Architecture
from flexgen_h2o.models.gguf.header import Metadata

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32
_MXFP4_BLOCK = 32
_MAX_ELEMENTS = 1 << 28  # of an expert, which is converted at once; the largest have 8 million


class MappedFile(mmap.mmap):
    """A file mapped for reading."""

    path: Path

    def release(self, offset: int, nbytes: int) -> None:
        """Unmap the pages of bytes, which otherwise count as memory of this process."""
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.madvise(mmap.MADV_DONTNEED, first, offset + nbytes - first)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the Hugging Face checkpoint, mapped from the file.

    Attributes
    ----------
    file : MappedFile
        The whole file.
    ggml_type : GGMLType
    shape : tuple of int
        Shape of the matrix or vector in the checkpoint.
    offset : int
        Offset of the first row in the file.
    order : int array [rows], optional
        order[i] is the file's row of row i.
    columns : int array [inputs], optional
        columns[i] is the file's column of column i.
    shift : float
        Added to every value.
    is_decay : bool
        Whether the file has -exp(x) of each value x.
    float32 : bool
        Stays in float32 in a converted model.
    """

    file: MappedFile
    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    order: np.ndarray | None = None
    columns: np.ndarray | None = None
    shift: float = 0.0
    is_decay: bool = False
    float32: bool = False

    def packed(self, rows: slice) -> np.ndarray:
        """Return rows of a matrix as stored, uint8 [rows, bytes]; a vector is one row."""
        if self.order is None:
            return self._rows(rows)
        stored = self._rows()
        return stored if len(stored) == 1 else stored[self.order[rows]]

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor in a converted model of dtype `target`."""
        return torch.float32 if self.float32 else target

    def chunks(self, target: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the values in chunks of rows, so that memory is bounded."""
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        for start in range(0, math.prod(self.shape[:-1]), step):
            yield self.values(slice(start, start + step)).to(self.dtype(target))

    def values(self, rows: slice) -> torch.Tensor:
        """Return the values of rows of a matrix, or of a vector, float32."""
        # Copied, because the mapped file is read-only and its rows are not aligned.
        values = dequantize(torch.from_numpy(np.array(self.packed(rows))), self.ggml_type)
        if len(self.shape) == 1:
            values = values[0] if self.order is None else values[0][self.order]
        if self.columns is not None:
            values = values[:, self.columns]
        if self.is_decay:
            values = (-values).log()
        return values + self.shift if self.shift else values

    def layout(self) -> MatrixLayout | None:
        """Return the layout that keeps the quantized values; None if there is none."""
        if len(self.shape) != 2 or self.shift or self.columns is not None:
            return None
        return self.ggml_type.layout(self.shape[0], self.shape[1])

    def repack(self, rows: range, layout: MatrixLayout, out: torch.Tensor) -> bool:
        """Write the quantized values of rows into `out`: see `ops.repack`."""
        order = None if self.order is None else torch.from_numpy(self.order)[
            rows.start : rows.stop : rows.step]
        if order is None and rows.step != 1:
            order = torch.arange(rows.start, rows.stop, rows.step)
        blocks = self._rows(slice(rows.start, rows.stop) if order is None else slice(None))
        try:
            return ops.repack(blocks, self.ggml_type, layout, out, order)
        finally:
            self.file.release(self.offset, self._row_bytes * self.shape[0])

    @property
    def _row_bytes(self) -> int:
        return self.shape[-1] // self.ggml_type.elements * self.ggml_type.nbytes

    def _rows(self, rows: slice = slice(None)) -> np.ndarray:
        """Return rows in the file's order, uint8 [rows, bytes]."""
        first, stop, _ = rows.indices(math.prod(self.shape[:-1]))
        offset, nbytes = self.offset + first * self._row_bytes, (stop - first) * self._row_bytes
        mapped = np.frombuffer(self.file, np.uint8, nbytes, offset)
        populate_mapped(self.file.path, mapped.ctypes.data, nbytes)
        return mapped.reshape(-1, self._row_bytes)


@dataclass(frozen=True)
class FusedExperts:
    """One tensor for all experts of a layer, as the hub's checkpoints have it.

    In Granite and Llama 4, gate rows come before up rows. In gpt-oss, they alternate. In the last
    two, values are transposed. In MXFP4 the hub has a tensor of codes and one of scales.

    Attributes
    ----------
    parts : tuple of GgufTensor
        One tensor of the file, or gate and up: [experts, outputs, inputs], or [experts, outputs]
        for biases.
    arrangement : str
        "rows" (Granite), "columns" (Llama 4), or for gpt-oss "values", "blocks" (codes of MXFP4)
        or "scales" (exponents of MXFP4).
    """

    parts: tuple[GgufTensor, ...]
    arrangement: str = "values"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on the hub: [experts, inputs, outputs] for values of matrices."""
        experts, outputs, *inputs = self.parts[0].shape
        outputs *= len(self.parts)
        if not inputs:
            return experts, outputs
        if self.arrangement == "rows":
            return experts, outputs, inputs[0]
        if self.arrangement in ("columns", "values"):
            return experts, inputs[0], outputs
        groups = inputs[0] // _MXFP4_BLOCK
        scales = experts, outputs, groups
        return (*scales, 16) if self.arrangement == "blocks" else scales

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """See `GgufTensor.dtype`."""
        return target if self.arrangement in ("rows", "columns", "values") else torch.uint8

    def chunks(self, target: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the values or bytes of one expert at a time."""
        for expert in range(self.shape[0]):
            parts = [self._expert(part, expert) for part in self.parts]
            rows = (torch.cat(parts) if self.arrangement in ("rows", "columns")
                    else torch.stack(parts, dim=1).flatten(0, 1))
            if self.arrangement in ("columns", "values") and rows.dim() == 2:
                rows = rows.T.contiguous()
            yield rows.to(self.dtype(target))[None]

    def _expert(self, part: GgufTensor, expert: int) -> torch.Tensor:
        """Return one expert of a part, by rows."""
        _, outputs, *inputs = part.shape
        if not inputs:
            rows = torch.from_numpy(np.array(part.packed(slice(expert, expert + 1))))
            return dequantize(rows, part.ggml_type)[0]
        rows = torch.from_numpy(np.array(
            part.packed(slice(expert * outputs, (expert + 1) * outputs))))
        if self.arrangement in ("rows", "columns", "values"):
            return dequantize(rows, part.ggml_type)
        blocks = rows.view(outputs, inputs[0] // _MXFP4_BLOCK, 17)
        if self.arrangement == "scales":
            return blocks[..., 0]
        return interleave_nibbles(blocks[..., 1:])


def fused_experts(source: Path, prefix: str, arch: Architecture, parts: Mapping[str, GgufTensor]
                  ) -> Iterator[tuple[str, FusedExperts]]:
    """Yield the tensors of a layer's experts by Hugging Face name, which begins with `prefix`.

    Raises `UserError` if one is missing or their shapes do not fit together.
    """
    gpt_oss = arch.model_type == "gpt_oss"
    arrangement = {"gpt_oss": "values", "llama4_text": "columns"}.get(arch.model_type, "rows")
    for suffix, end in (("weight", ""), ("bias", "_bias")) if gpt_oss else (("weight", ""),):
        for name, projections in zip(arch.fused_experts, (("gate", "up"), ("down",)), strict=True):
            stored = [f"ffn_{projection}_exps.{suffix}" for projection in projections]
            missing = next((tensor for tensor in stored if tensor not in parts), None)
            if missing is not None:
                raise UserError(f"{source}: a layer has experts, but no tensor {missing}")
            stacked = tuple(parts[tensor] for tensor in stored)
            blocks, shape = stacked[0].ggml_type, stacked[0].shape
            fits = (len({(part.ggml_type.name, part.shape) for part in stacked}) == 1
                    and len(shape) == (3 if suffix == "weight" else 2))
            if not fits or math.prod(shape[1:]) > _MAX_ELEMENTS:
                raise UserError(f"{source}: the tensors of {prefix}{name}{end} do not fit together")
            if suffix == "weight" and blocks.name == "MXFP4" and gpt_oss:
                for part in ("blocks", "scales"):
                    yield f"{prefix}{name}_{part}", FusedExperts(stacked, part)
            else:
                yield f"{prefix}{name}{end}", FusedExperts(stacked, arrangement)


@dataclass(frozen=True)
class FusedRows:
    """Rows of two tensors of the file, by head, as one matrix of the hub.

    `heads` are the parts of each head, in order: rows of a tensor, and whether these are columns on
    the hub.
    """

    shape: tuple[int, int]
    heads: tuple[tuple[tuple[GgufTensor, slice, bool], ...], ...]

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """See `GgufTensor.dtype`."""
        return target

    def chunks(self, target: torch.dtype) -> Iterator[torch.Tensor]:
        """Yield the rows of one head at a time."""
        for pieces in self.heads:
            values = ((tensor.values(rows), transposed) for tensor, rows, transposed in pieces)
            yield torch.cat([x.T if transposed else x for x, transposed in values]).to(target)


def fused_rows(meta: Metadata, layer: str, names: tuple[str, ...],
               tensors: Mapping[str, GgufTensor]) -> FusedRows:
    """Fuse the two tensors `names` of a layer: `HEAD_MAPS` or `DELTA_NET`.

    Raises `UserError` if one is missing or they do not fit together.
    """
    first, second = (tensors.get(f"{name}.weight") for name in names)
    fused = None
    if first is not None and second is not None:
        fuse = _fused_maps if names == HEAD_MAPS else _fused_delta_net
        fused = fuse(first, second, meta)
    if fused is None:
        raise UserError(f"{meta.source}: the tensors {' and '.join(names)} of layer {layer} do not "
                        "fit together")
    return fused


def _fused_maps(keys: GgufTensor, values: GgufTensor, meta: Metadata) -> FusedRows | None:
    """Fuse each head's maps from latents to its key and to its value.

    They are [heads, rank, elements of a key] and [heads, elements of a value, rank].
    """
    if len(keys.shape) != 3 or len(values.shape) != 3 or (
            keys.shape[:2] != (values.shape[0], values.shape[2])):
        return None
    heads, rank, key = keys.shape
    value = values.shape[1]
    return FusedRows((heads * (key + value), rank), tuple(
        ((keys, _rows_of(head, rank), True), (values, _rows_of(head, value), False))
        for head in range(heads)))


def _fused_delta_net(qkv: GgufTensor, gate: GgufTensor, meta: Metadata) -> FusedRows | None:
    """Fuse all queries, keys and values with the gates: a key head has some of each on the hub."""
    heads, rows = meta.count("ssm.group_count"), qkv.shape[0]
    total = gate.shape[0]  # rows of all values
    if len(qkv.shape) != 2 or len(gate.shape) != 2 or qkv.shape[1] != gate.shape[1] or (
            total % heads or rows <= total or (rows - total) % (2 * heads)):
        return None
    keys, key, value = (rows - total) // 2, (rows - total) // (2 * heads), total // heads
    return FusedRows((rows + total, qkv.shape[1]), tuple(
        ((qkv, _rows_of(head, key), False), (qkv, _rows_of(head, key, keys), False),
         (qkv, _rows_of(head, value, 2 * keys), False), (gate, _rows_of(head, value), False))
        for head in range(heads)))


def _rows_of(head: int, size: int, first: int = 0) -> slice:
    return slice(first + head * size, first + (head + 1) * size)
