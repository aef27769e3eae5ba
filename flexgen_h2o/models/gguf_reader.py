"""Tensors of a GGUF file by their Hugging Face names, what llama.cpp's converter did undone."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.gguf_architectures import FUSED_EXPERTS, Architecture
from flexgen_h2o.models.gguf_config import architecture_of, kv_heads
from flexgen_h2o.models.gguf_fused import FusedExperts, fused_experts
from flexgen_h2o.models.gguf_header import GgufHeader, read_header
from flexgen_h2o.models.gguf_metadata import Metadata
from flexgen_h2o.models.gguf_rope import ROPE_TENSORS
from flexgen_h2o.models.gguf_tensors import GgufTensor

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
