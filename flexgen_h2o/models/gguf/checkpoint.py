"""Tensors of a GGUF file by their Hugging Face names, dequantized or as quantized values.

The changes of llama.cpp's converter are undone: order of rows, shifted norms, stacked experts.
Source: conversion/ of llama.cpp.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.config.weight_layout import BLOCK_TYPES, MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo, fill_rows
from flexgen_h2o.models.gguf.architectures import (
    BARE,
    DELTA_NET,
    EXPERTS,
    HEAD_MAPS,
    NEXTN_COPIES,
    Architecture,
)
from flexgen_h2o.models.gguf.config import architecture_of, kv_heads
from flexgen_h2o.models.gguf.header import GgufHeader, Metadata, read_header
from flexgen_h2o.models.gguf.tensors import (
    FusedExperts,
    FusedRows,
    GgufTensor,
    MappedFile,
    fused_experts,
    fused_rows,
)
from flexgen_h2o.models.gguf.values import ROPE_TENSORS, extra_layers, num_layers

_F32 = BLOCK_TYPES[0]
_MAX_TENSORS = 1 << 17  # mostly experts: the largest models have some ten thousand
_LAYER_NUMBER = re.compile(r"blk\.([0-9]{1,9})\.")
_LAYER = re.compile(r"blk\.([0-9]{1,9})\.((?:nextn\.)?[a-z0-9_]+)(?:\.(weight|bias))?")

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
    layers = num_layers(meta) + ("nextn.eh_proj" in arch.layer) if extra_layers(meta) else math.inf
    parts: dict[tuple[tuple[str, ...], str], dict[str, GgufTensor]] = {}
    for name, stored in meta.tensors.items():
        match, number = _LAYER.fullmatch(name), _LAYER_NUMBER.match(name)
        # Ropes are part of the configuration; layers for multi-token prediction come last, and only
        # the first of them is ever used.
        if (name in ROPE_TENSORS or name.endswith(NEXTN_COPIES)
                or number and int(number[1]) >= layers):
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
        memory.path = header.source
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
    """Return a tensor of a gated DeltaNet in the layout of the hub.

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
