"""The config.json of a GGUF file: its sizes are known from the header alone. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flexgen_h2o.config.formats import WeightOptions
from flexgen_h2o.errors import UserError, did_you_mean, shown
from flexgen_h2o.models.checkpoint_formats.settings import quantization
from flexgen_h2o.models.gguf_architectures import ARCHITECTURES, Architecture, variant
from flexgen_h2o.models.gguf_header import GgufHeader
from flexgen_h2o.config.block_types import KEPT, KEPT_GROUP
from flexgen_h2o.models.gguf_metadata import Metadata
from flexgen_h2o.models.model_config import ModelConfig

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
"""`quantization_config` of a folder whose experts are in MXFP4."""


def architecture_of(header: GgufHeader) -> tuple[Metadata, Architecture]:
    """The metadata of a file, and how its architecture is read.

    Raises `UserError` for an architecture that is not supported, and where the file calls for more
    layers than it has tensors.
    """
    meta = Metadata(header)
    kind, files = meta.text("general.type", "model"), meta.count("split.count", 1, least=0)
    if kind != "model" or files > 1:
        what = f"one of {files} files" if files > 1 else f"of the kind {shown(kind)}"
        raise UserError(f"{meta.source} is {what}: a whole model in one file is needed "
                        "(llama-gguf-split --merge makes it of several)")
    found = variant(meta)
    if found is None:
        near = did_you_mean(meta.architecture, ARCHITECTURES,
                            "give the Hugging Face folder of this model instead")
        raise UserError(f"{meta.source} is a GGUF of architecture {meta.architecture!r}, which is "
                        f"none of {', '.join(sorted(ARCHITECTURES))}{near}")
    if meta.has("block_count"):
        layers = meta.count("block_count", least=0)
        if layers > len(meta.tensors):
            raise UserError(f"{meta.source} has {len(meta.tensors)} tensors, but calls for "
                            f"{layers} layers; it is damaged")
    return meta, found


def config_of(header: GgufHeader, dtype: str | None = None) -> dict[str, Any]:
    """The config.json on the hub of the model in a GGUF file.

    Parameters
    ----------
    header : GgufHeader
    dtype : str, optional
        Of the weights, by PyTorch's name.

    Raises
    ------
    UserError
        If the architecture or a rope scaling is not supported, or a value makes no sense.
    """
    meta, kind = architecture_of(header)
    head_dim = head_size(meta)
    end, turn = meta.token("eos"), meta.token("eot")
    config = {
        "architectures": [kind.class_name], "model_type": kind.model_type,
        "vocab_size": meta.tensor("token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        **{name: meta.count(key) for name, key in kind.counts.items()},
        **{name: meta.number(key) for name, key in kind.numbers.items()},
        "num_key_value_heads": kv_heads(meta), "head_dim": head_dim,
        "rope_parameters": kind.rope(meta, head_dim),
        **kind.fixed, **kind.more(meta, head_dim),
        "bos_token_id": meta.token("bos"), "pad_token_id": meta.token("padding"),
        "eos_token_id": end if turn is None or turn == end or end is None else [end, turn]}
    return {**config, "dtype": dtype} if dtype else config


def head_size(meta: Metadata) -> int:
    """Dimensions of a head."""
    width, heads = meta.count("embedding_length"), meta.count("attention.head_count")
    whole = meta.architecture == "llama" and meta.has("rope.dimension_count")
    usual = meta.count("rope.dimension_count") if whole else max(1, width // heads)
    size = meta.count("attention.key_length", usual)
    if meta.count("attention.value_length", size) != size:
        raise UserError(f"{meta.source}: keys and values of different sizes are not supported")
    return size


def kv_heads(meta: Metadata) -> int:
    """Key and value heads of a layer."""
    return meta.count("attention.head_count_kv", meta.count("attention.head_count"))


def kept_weights(header: GgufHeader, model: ModelConfig, bits: int) -> WeightOptions:
    """The form of the weights in so many bits: in the groups of the file's blocks, if any are kept.

    Experts of gpt-oss stay codes of MXFP4 in the folder that is made, and 8 and 4 bits keep these.
    """
    kinds = {tensor.kind.name for tensor in header.tensors.values()}
    options = WeightOptions(bits)
    if "MXFP4" in kinds and architecture_of(header)[1].model_type == "gpt_oss":
        options = quantization({"quantization_config": MXFP4}, model.name).weights(bits, model)
    kept = not kinds.isdisjoint(KEPT.get(bits, frozenset()))
    return replace(options, group=KEPT_GROUP) if kept else options
