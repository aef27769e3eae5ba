"""Tensors of a GGUF file by their Hugging Face names, dequantized or as quantized values.

The changes of llama.cpp's converter are undone: order of rows, shifted norms, stacked experts.
Sources: conversion/ of llama.cpp, and integrations/mxfp4.py of transformers.
"""

from __future__ import annotations

import errno
import math
import mmap
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.config.weight_layout import BLOCK_TYPES, GGMLType, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference.blocks import dequantize, interleave_nibbles
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo, fill_rows
from flexgen_h2o.models.gguf.architectures import (
    BARE,
    DELTA_NET,
    EXPERTS,
    HEAD_MAPS,
    Architecture,
    extra_layers,
    num_layers,
)
from flexgen_h2o.models.gguf.config import architecture_of, kv_heads
from flexgen_h2o.models.gguf.header import GgufHeader, Metadata, read_header
from flexgen_h2o.models.gguf.rope import ROPE_TENSORS

_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: 4 MB of float32
_MXFP4_BLOCK = 32
_F32 = BLOCK_TYPES[0]
_MAX_ELEMENTS = 1 << 28  # of an expert, which is converted at once; the largest have 8 million
_MAX_TENSORS = 1 << 17  # mostly experts: the largest models have some ten thousand
_LAYER_NUMBER = re.compile(r"blk\.([0-9]{1,9})\.")
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.([a-z0-9_]+)(?:\.(weight|bias))?")
_MADV_POPULATE_READ = 22  # madvise(2), Linux 5.14; not in the mmap module


class MappedFile(mmap.mmap):
    """A file mapped for reading."""

    path: Path

    def populate(self, offset: int, nbytes: int) -> None:
        """Read bytes into memory before they are used.

        Raises `UserError` if they cannot be read, where their use would end the process (SIGBUS).
        """
        try:
            self._advise(_MADV_POPULATE_READ, offset, nbytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older Linux
                raise UserError(f"cannot read {self.path}: it has been cut, or its disk fails: "
                                "get the file again") from error

    def release(self, offset: int, nbytes: int) -> None:
        """Unmap the pages of bytes, which otherwise count as memory of this process."""
        self._advise(mmap.MADV_DONTNEED, offset, nbytes)

    def _advise(self, advice: int, offset: int, nbytes: int) -> None:
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.madvise(advice, first, offset + nbytes - first)


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
        """Return the layout that keeps the quantized values; None if it is not such a matrix."""
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
        self.file.populate(offset, nbytes)
        return np.frombuffer(self.file, np.uint8, nbytes, offset).reshape(-1, self._row_bytes)


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
        """Return the dtype of the tensor in a converted model of dtype `target`."""
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

    Attributes
    ----------
    shape : tuple of int
        Shape on the hub.
    heads : tuple of tuple of (GgufTensor, slice, bool)
        What follows one another in each head: rows of a tensor, and whether these are columns on
        the hub.
    """

    shape: tuple[int, int]
    heads: tuple[tuple[tuple[GgufTensor, slice, bool], ...], ...]

    def dtype(self, target: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor in a converted model of dtype `target`."""
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


Tensors = dict[str, GgufTensor | FusedExperts | FusedRows]


def read_gguf(source: Path) -> tuple[GgufHeader, Tensors]:
    """Return the header of a GGUF file, and its tensors by Hugging Face name: see `mapped`."""
    header = read_header(source)
    return header, mapped(header)


def mapped(header: GgufHeader, *, fuse: bool = True) -> Tensors:
    """Return the tensors of a GGUF file by Hugging Face name, mapped and not yet read.

    Parameters
    ----------
    fuse : bool
        Whether experts are fused as on the hub: see `Architecture.fused_experts`. Otherwise each
        expert has its own tensors, with the names of its family. Likewise for `HEAD_MAPS` and
        `DELTA_NET`.

    Raises
    ------
    UserError
        If the file is damaged or its architecture is not supported.
    """
    meta, arch = architecture_of(header)
    fusions: list[tuple[str, ...]] = [names for names, fuses in (
        (HEAD_MAPS, "attn_kv_b" in arch.layer), (EXPERTS, arch.fused_experts),
        (DELTA_NET, arch.fused_delta_net)) if fuse and fuses]
    files = {path: _mapped(path) for path in header.files}
    tensors: Tensors = {}
    layers = num_layers(meta) if extra_layers(meta) else math.inf
    parts: dict[tuple[tuple[str, ...], str], dict[str, GgufTensor]] = {}
    for name, stored in meta.tensors.items():
        match, number = _LAYER.fullmatch(name), _LAYER_NUMBER.match(name)
        # Ropes are part of the configuration; layers for multi-token prediction come last.
        if name in ROPE_TENSORS or number and int(number[1]) >= layers:
            continue
        shifted = arch.shifted and name.endswith("norm.weight") and "ssm_norm" not in name
        tensor = GgufTensor(files[stored.source], stored.ggml_type, stored.shape, stored.offset,
                            shift=-1.0 if shifted else 0.0)
        names = next((names for names in fusions if match and match[2] in names), None)
        if names is not None:
            parts.setdefault((names, match[1]), {})[f"{match[2]}.{match[3]}"] = tensor
        else:
            tensors.update(_named(meta, arch, name, match, tensor))
        if len(tensors) > _MAX_TENSORS:
            raise UserError(f"{header.source} has more tensors than any model")
    for (names, layer), fused in parts.items():
        prefix = f"{arch.layers}.{layer}."
        if names == EXPERTS:
            tensors.update(fused_experts(header.source, prefix, arch, fused))
        else:
            name = arch.layer["attn_kv_b"] if names == HEAD_MAPS else arch.fused_delta_net
            tensors[f"{prefix}{name}.weight"] = fused_rows(meta, layer, names, fused)
    for key, name in arch.layer_values.items():
        numbers = meta.layer_numbers(key)
        memory = MappedFile(-1, 4 * len(numbers))
        memory.write(struct.pack(f"<{len(numbers)}f", *numbers))
        tensors.update({f"{arch.layers}.{layer}.{name}": GgufTensor(memory, _F32, (1,), 4 * layer)
                        for layer in range(len(numbers))})
    return tensors


def _mapped(path: Path) -> MappedFile:
    with open(path, "rb") as file:
        mapped_file = MappedFile(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped_file.path = path
    return mapped_file


def _named(meta: Metadata, arch: Architecture, name: str, match: re.Match | None,
           tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yield a tensor, or the entries of a stacked one, by Hugging Face name."""
    outer, _, suffix = name.rpartition(".")
    if match is None and outer in arch.outer and suffix in ("weight", "bias"):
        yield f"{arch.outer[outer]}.{suffix}", tensor
        return
    if match is None or match[2] not in arch.layer or not (match[3] or match[2] in BARE):
        raise UserError(f"{meta.source}: tensor {name} is no part of the {meta.architecture} "
                        "architecture")
    layer, inner, suffix = match.groups()
    hub_name = f"{arch.layers}.{layer}.{arch.layer[inner]}"
    hub_name = hub_name if inner in BARE else f"{hub_name}.{suffix}"
    if "{}" in hub_name:
        yield from _entries(meta, hub_name, tensor)
        return
    if len(tensor.shape) == 1 and inner in arch.single_rows:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    tensor = replace(tensor, float32=inner in arch.float32)
    if len(tensor.shape) > (3 if inner in HEAD_MAPS else 2):
        raise UserError(f"{meta.source}: tensor {name} has {len(tensor.shape)} dimensions; a "
                        "matrix is needed")
    if "ssm_out" in arch.layer and (inner in DELTA_NET or inner.startswith("ssm_")):
        yield hub_name, _delta_net_tensor(meta, arch, inner, tensor)
        return
    yield hub_name, replace(tensor, order=_order(meta, arch, name, inner, tensor.shape[0]))


def _delta_net_tensor(meta: Metadata, arch: Architecture, inner: str, tensor: GgufTensor
                      ) -> GgufTensor:
    """Return a tensor of a gated DeltaNet as it is on the hub.

    The value heads, which may be in another order, come last among the rows, or are the columns of
    the output projection. Source: `Qwen3NextModel` and `_LinearAttentionVReorderBase` in
    conversion/qwen.py of llama.cpp.
    """
    if inner == "ssm_conv1d":
        tensor = replace(tensor, shape=(tensor.shape[0], 1, *tensor.shape[1:]))
    tensor = replace(tensor, is_decay=inner == "ssm_a")
    if inner == "ssm_norm" or not arch.tiled_heads:
        return tensor
    keys, values, size = (meta.count(f"ssm.{key}")
                          for key in ("group_count", "time_step_rank", "inner_size"))
    of_heads = inner in ("ssm_a", "ssm_dt", "ssm_alpha", "ssm_beta")
    height, total = tensor.shape[-1 if inner == "ssm_out" else 0], values if of_heads else size
    if values % keys or size % values or total > height:
        raise UserError(f"{meta.source}: {inner} of shape {list(tensor.shape)} has no {values} "
                        f"value heads for {keys} key heads")
    heads = np.arange(total).reshape(values // keys, keys, -1).swapaxes(0, 1).reshape(-1)
    order = np.concatenate((np.arange(height - total), height - total + heads))
    if inner == "ssm_out":
        return replace(tensor, columns=order)
    return replace(tensor, order=order)


def _entries(meta: Metadata, hub_name: str, tensor: GgufTensor
             ) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the entries of the first axis of a stacked tensor."""
    entries, shape = tensor.shape[0], tensor.shape[1:]
    if not shape or len(shape) > 2 or entries > _MAX_TENSORS:
        raise UserError(f"{meta.source}: {hub_name.format('N')} of shape {list(tensor.shape)} is "
                        "not a tensor for each expert or head")
    size = math.prod(shape) // tensor.ggml_type.elements * tensor.ggml_type.nbytes
    for entry in range(entries):
        yield hub_name.format(entry), replace(tensor, shape=shape,
                                              offset=tensor.offset + entry * size)


def _order(meta: Metadata, arch: Architecture, name: str, inner: str, rows: int
           ) -> np.ndarray | None:
    """Return for each row of the Hugging Face projection the row in the file; None for the same.

    In some architectures llama.cpp rotates pairs (2i, 2i + 1) and transformers (i, i + d/2): the
    converter interleaves the halves of each head. The rows of GPT-NeoX's fused projection are
    query, key and value of each head; the converter sorts them into all queries, all keys and all
    values. Source: `permute` in conversion/llama.py, and conversion/gptneox.py, of llama.cpp.
    """
    if arch.fused_heads and inner == "attn_qkv":
        heads = meta.count("attention.head_count")
        if rows % (3 * heads):
            raise UserError(f"{meta.source}: {name} has {rows} rows for {heads} heads")
        return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    if not arch.interleaved or inner not in ("attn_q", "attn_k"):
        return None
    heads = meta.count("attention.head_count") if inner == "attn_q" else kv_heads(meta)
    if rows % (2 * heads):
        raise UserError(f"{meta.source}: {name} has {rows} rows for {heads} heads")
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


class GgufCheckpoint(Checkpoint):
    """Tensors of a GGUF file. `read` dequantizes them, `read_quantized` does not.

    Parameters
    ----------
    header : GgufHeader

    Raises
    ------
    UserError
        If the architecture is not supported, or the file has a tensor that is not part of it.
    """

    def __init__(self, header: GgufHeader):
        self.source = str(header.source)
        self._tensors = {name: tensor
                         for name, tensor in mapped(header, fuse=False).items()
                         if isinstance(tensor, GgufTensor)}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(torch.float32, self._tensors[name].shape, None)

    def stored_layout(self, name: str) -> MatrixLayout | None:
        return self._tensors[name].layout()

    def read_quantized(self, name: str, layout: MatrixLayout, out: torch.Tensor,
                       rows: range | None = None) -> bool:
        tensor = self._tensors[name]
        if tensor.layout() is None or not tensor.ggml_type.fits(layout):
            return False
        rows = range(tensor.shape[0]) if rows is None else rows
        if (len(rows), tensor.shape[1]) != (layout.outputs, layout.inputs):
            raise ValueError(f"{name} is of shape {tensor.shape}, and not as {layout}")
        return tensor.repack(rows, layout, out)

    def _fill_part(self, name: str, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        fill_rows(out, start, info.shape[-1],
                  lambda first, stop: tensor.values(slice(first, stop)))

    def close(self) -> None:
        """Unmap the files. The checkpoint must not be read afterwards."""
        self._tensors = {}
