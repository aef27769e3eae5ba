"""A tensor of a GGUF file, as the Hugging Face checkpoint has it."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.config.weight_layout import BlockType, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference.blocks import dequantize, in_pairs
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo
from flexgen_h2o.models.gguf.architectures import FUSED_EXPERTS, ROPE_TENSORS, Architecture
from flexgen_h2o.models.gguf.config import architecture_of, kv_heads
from flexgen_h2o.models.gguf.header import GgufHeader, Metadata, read_header

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


# The experts of gpt-oss in a GGUF file, as the hub's checkpoints have them.
#
# There gates and ups of all experts are one tensor, row by row in turn. In MXFP4 that is a tensor
# of
# codes and one of scales, which a GGUF holds block by block; its codes are kept.
# Sources: conversion/gpt_oss.py of llama.cpp, and integrations/mxfp4.py of transformers.


_BLOCK = 32
_MOST_ELEMENTS = 1 << 28  # of an expert, which is made at a time; the largest known have 8 million


@dataclass(frozen=True)
class FusedExperts:
    """One tensor for all experts of a layer, made of one tensor of the file, or of two in turn.

    Attributes
    ----------
    parts : tuple of GgufTensor
        Stacked: [experts, outputs, inputs], or [experts, outputs] for biases.
    form : str
        "values", "blocks" (codes of MXFP4) or "scales" (their powers of two).
    """

    parts: tuple[GgufTensor, ...]
    form: str = "values"

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the hub's tensor: matrices are stored as [experts, inputs, outputs] unless they
        are codes."""
        experts, outputs, *inputs = self.parts[0].shape
        outputs *= len(self.parts)
        if not inputs:
            return experts, outputs
        if self.form == "values":
            return experts, inputs[0], outputs
        groups = inputs[0] // _BLOCK
        return (experts, outputs, groups, 16) if self.form == "blocks" else (experts, outputs,
                                                                             groups)

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """The dtype it is written in, where the model is to be of the dtype `target`."""
        return target if self.form == "values" else torch.uint8

    def chunks(self, target: torch.dtype) -> Iterator[torch.Tensor]:
        """Its values or bytes, one expert at a time."""
        for expert in range(self.shape[0]):
            found = torch.stack([self._made(part, expert) for part in self.parts], dim=1)
            whole = found.flatten(0, 1)  # their rows in turn
            if self.form == "values" and whole.dim() == 2:
                whole = whole.T.contiguous()
            yield whole.to(self.dtype(target))[None]

    def _made(self, part: GgufTensor, expert: int) -> torch.Tensor:
        """One expert of a part, by rows."""
        _, outputs, *inputs = part.shape
        if not inputs:
            rows = torch.from_numpy(np.array(part.packed(slice(expert, expert + 1))))
            return dequantize(rows, part.kind)[0]
        rows = torch.from_numpy(np.array(
            part.packed(slice(expert * outputs, (expert + 1) * outputs))))
        if self.form == "values":
            return dequantize(rows, part.kind)
        blocks = rows.view(outputs, inputs[0] // _BLOCK, 17)
        return blocks[..., 0] if self.form == "scales" else in_pairs(blocks[..., 1:])


def fused_experts(source: Path, prefix: str, parts: Mapping[str, GgufTensor]
                  ) -> Iterator[tuple[str, FusedExperts]]:
    """The tensors of a layer's experts by Hugging Face name, which begins with `prefix`.

    Raises `UserError` where one is missing or they do not fit together.
    """
    for suffix, end in (("weight", ""), ("bias", "_bias")):
        for name, needed in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            missing = [f"ffn_{each}_exps.{suffix}" for each in needed
                       if f"ffn_{each}_exps.{suffix}" not in parts]
            if missing:
                raise UserError(f"{source}: a layer has experts, but no tensor {missing[0]}")
            found = tuple(parts[f"ffn_{each}_exps.{suffix}"] for each in needed)
            dims = 3 if suffix == "weight" else 2
            alike = len({(part.kind.name, part.shape) for part in found}) == 1
            fits = alike and len(found[0].shape) == dims
            if not fits or math.prod(found[0].shape[1:]) > _MOST_ELEMENTS:
                raise UserError(f"{source}: the tensors of {prefix}{name}{end} do not fit together")
            if suffix == "weight" and found[0].kind.name == "MXFP4":
                for form in ("blocks", "scales"):
                    yield f"{prefix}{name}_{form}", FusedExperts(found, form)
            else:
                yield f"{prefix}{name}{end}", FusedExperts(found)


# Tensors of a GGUF file by their Hugging Face names, what llama.cpp's converter did undone.


_MOST_TENSORS = 1 << 17  # of experts, mostly: the largest models have some ten thousand
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.([a-z_]+)\.(weight|bias)")

Tensors = dict[str, GgufTensor | FusedExperts]


def read_gguf(source: Path) -> tuple[GgufHeader, Tensors]:
    """Return the header of a GGUF file, and its tensors by Hugging Face name: see `mapped`."""
    header = read_header(source)
    return header, mapped(header)


def mapped(header: GgufHeader, *, fuse_experts: bool = True) -> Tensors:
    """Return the tensors of a GGUF file by Hugging Face name, mapped and not yet read.

    Parameters
    ----------
    header : GgufHeader
    fuse_experts : bool
        Give one tensor for all experts of a layer where the hub has such (gpt-oss); otherwise each
        expert has its own, named as `families.gpt_oss` does.

    Raises
    ------
    UserError
        If the file is damaged or of another architecture.
    """
    meta, kind = architecture_of(header)
    fuses = fuse_experts and kind.model_type == "gpt_oss"
    files = {path: _mapped(path) for path in header.files}
    found: Tensors = {}
    parts: dict[str, dict[str, GgufTensor]] = {}
    for name, stored in meta.tensors.items():
        match = _LAYER.fullmatch(name)
        if name in ROPE_TENSORS:  # part of the configuration
            continue
        file = files[stored.source]
        if fuses and match and match[2] in FUSED_EXPERTS:
            part = GgufTensor(file, stored.kind, stored.shape, stored.offset)
            parts.setdefault(f"{kind.layers}.{match[1]}.mlp.experts.", {})[
                f"{match[2]}.{match[3]}"] = part
            continue
        shift = -1.0 if kind.shifted and name.endswith("norm.weight") else 0.0
        tensor = GgufTensor(file, stored.kind, stored.shape, stored.offset, shift=shift)
        found.update(_named(meta, kind, name, match, tensor))
        if len(found) > _MOST_TENSORS:
            raise UserError(f"{header.source} has more tensors than any model")
    for prefix, several in parts.items():
        found.update(fused_experts(header.source, prefix, several))
    return found


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _named(meta: Metadata, kind: Architecture, name: str, match: re.Match | None,
           tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor by its Hugging Face name, or the entries of a stacked one by theirs."""
    outer, _, suffix = name.rpartition(".")
    if match is None and outer in kind.outer and suffix in ("weight", "bias"):
        yield f"{kind.outer[outer]}.{suffix}", tensor
        return
    if match is None or match[2] not in kind.layer:
        raise UserError(f"{meta.source}: tensor {name} is no part of the {meta.architecture} "
                        "architecture")
    layer, inner, suffix = match.groups()
    called = f"{kind.layers}.{layer}.{kind.layer[inner]}"
    called = called if inner in kind.bare else f"{called}.{suffix}"
    if "{}" in called:
        yield from _entries(meta, called, tensor)
        return
    if len(tensor.shape) == 1 and inner in kind.single_rows:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    if len(tensor.shape) > 2:
        raise UserError(f"{meta.source}: tensor {name} has {len(tensor.shape)} dimensions; a "
                        "matrix is needed")
    yield called, replace(tensor, order=_order(meta, kind, name, inner, tensor.shape[0]))


def _entries(meta: Metadata, called: str, tensor: GgufTensor
             ) -> Iterator[tuple[str, GgufTensor]]:
    """Tensors that are stacked along the first axis."""
    entries, shape = tensor.shape[0], tensor.shape[1:]
    if not shape or len(shape) > 2 or entries > _MOST_TENSORS:
        raise UserError(f"{meta.source}: {called.format('N')} of shape {list(tensor.shape)} is not "
                        "a tensor for each expert or head")
    size = math.prod(shape) // tensor.kind.elements * tensor.kind.nbytes
    for entry in range(entries):
        yield called.format(entry), replace(tensor, shape=shape,
                                            offset=tensor.offset + entry * size)


def _order(meta: Metadata, kind: Architecture, name: str, inner: str, rows: int
           ) -> np.ndarray | None:
    """The row of a GGUF projection that is row i of the Hugging Face one; None for the same.

    llama.cpp rotates neighbours (2i, 2i + 1) in some architectures, transformers halves
    (i, i + d/2), so llama.cpp's converter interleaves the halves of each head; this takes them
    apart again. It also sorts the rows of GPT-NeoX's fused projection, which are queries, keys and
    values of one head after the other, into all queries, all keys and all values.
    Source: `permute` in conversion/llama.py, and conversion/gptneox.py, of llama.cpp.
    """
    if kind.fused_heads and inner == "attn_qkv":
        heads = meta.count("attention.head_count")
        if rows % (3 * heads):
            raise UserError(f"{meta.source}: {name} has {rows} rows for {heads} heads")
        return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    if not kind.interleaved or inner not in ("attn_q", "attn_k"):
        return None
    heads = meta.count("attention.head_count") if inner == "attn_q" else kv_heads(meta)
    if rows % (2 * heads):
        raise UserError(f"{meta.source}: {name} has {rows} rows for {heads} heads")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


# A GGUF file as a checkpoint: tensors by Hugging Face name, read from the file's own bytes.


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
