"""Values of config.json that need more than a key of a GGUF file: rope, and others. No torch."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from flexgen_h2o.errors import UserError, short_repr
from flexgen_h2o.models.gguf.header import Metadata, decimal

ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight",
                          "rope_factors_short.weight"})
"""Tensors whose numbers are in config.json on the hub."""

_THETA = 10000.0
# Every LLaMA 3.x was published with these three; only the factor differs (8 or 32). In Llama 4,
# high_freq_factor is 1.
LLAMA3_ROPE: Mapping[str, float] = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})


def rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of most models, in which whole heads rotate."""
    rotated = meta.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UserError(f"{meta.source}: {rotated} of a head's {head_dim} dimensions rotate; that "
                        f"is not supported of a {meta.architecture} model")
    return _scaled(meta)


def _scaled(meta: Metadata) -> dict[str, Any]:
    """Return base and scaling, from the metadata or from the tensor of frequency divisors."""
    theta = meta.number("rope.freq_base", _THETA)
    divisors = _vector(meta, "rope_freqs.weight")
    if divisors:
        scaling = _llama3(divisors, theta)
        if scaling is None:
            raise UserError(f"{meta.source}: its rope factors differ from LLaMA 3's; not "
                            "supported")
        return scaling
    kind = meta.text("rope.scaling.type", "linear" if meta.has("rope.scale_linear") else "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        return {"rope_theta": theta, **_yarn(meta)}
    raise UserError(f"{meta.source}: rope scaling {short_repr(kind)} of a {meta.architecture} "
                    "model is not supported")


def _yarn(meta: Metadata) -> dict[str, Any]:
    factor = meta.number("rope.scaling.factor")
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        scale = meta.number(key, 1.0)  # relative to the usual factor, or that factor itself
        if min(abs(scale - 1), abs(scale - usual)) > 1e-3:
            raise UserError(f"{meta.source}: YaRN with an attention factor of {scale} is not "
                            "supported")
    return {"rope_type": "yarn", "factor": factor,
            "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
            "original_max_position_embeddings":
                meta.count("rope.scaling.original_context_length"),
            **({"truncate": False} if meta.architecture == "gpt-oss" else {})}


def partial_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of models that rotate a part of each head."""
    return {**_scaled(meta),
            "partial_rotary_factor": meta.count("rope.dimension_count", head_dim) / head_dim}


def deepseek_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of heads that rotate apart, with the scale of attention of YaRN.

    The file has a tenth of mscale_all_dim, which equals mscale in all published models.
    """
    parameters, key = rope(meta, head_dim), "rope.scaling.yarn_log_multiplier"
    if parameters["rope_type"] != "yarn" or not meta.has(key):
        return parameters
    mscale = round(10 * meta.number(key), 6)
    return {**parameters, "mscale": mscale, "mscale_all_dim": mscale}


def phi3_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of LongRoPE, whose short and long factors are tensors."""
    short, long = (_vector(meta, f"rope_factors_{name}.weight") for name in ("short", "long"))
    if not (short and long):
        return partial_rope(meta, head_dim)
    return {"rope_type": "longrope", "rope_theta": meta.number("rope.freq_base", _THETA),
            "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": meta.count("rope.scaling.original_context_length"),
            "partial_rotary_factor": meta.count("rope.dimension_count", head_dim) / head_dim}


def layered_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` by layer type; only full attention is scaled."""
    full = rope(meta, head_dim)
    return {"full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": full["rope_theta"]}}


def gemma3_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` by layer type, each with its own base."""
    full = {**rope(meta, head_dim), "rope_theta": meta.number("rope.freq_base", 1e6)}
    local = meta.number("rope.freq_base_swa", _THETA)
    return {"full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def gemma4_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` by layer type.

    Pairs of dimensions that do not rotate have huge divisors of the frequency in the file.
    """
    width, divisors = meta.count("attention.key_length"), _vector(meta, "rope_freqs.weight")
    rotated = divisors.count(1.0)
    still = divisors[rotated:]
    local = meta.count("rope.dimension_count_swa", head_dim)
    if len(divisors) != width // 2 or (still and min(still) < 1e29) or local != head_dim:
        raise UserError(f"{meta.source}: its rope factors differ from Gemma 4's; not supported")
    return {"full_attention": {"rope_type": "proportional",
                               "rope_theta": meta.number("rope.freq_base", 1e6),
                               "partial_rotary_factor": 2 * rotated / width},
            "sliding_attention": {"rope_type": "default",
                                  "rope_theta": meta.number("rope.freq_base_swa", _THETA)}}


def _vector(meta: Metadata, name: str) -> list[float]:
    """Return the numbers of a small float32 tensor; an empty list if the file has none."""
    if name not in meta.tensors:
        return []
    tensor = meta.tensors[name]
    if tensor.ggml_type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 16:
        raise UserError(f"{meta.source}: its rope factors {name} are not a short float32 vector")
    try:
        with open(meta.source, "rb") as file:
            file.seek(tensor.offset)
            numbers = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.nbytes))
    except (OSError, struct.error) as error:
        raise UserError(f"cannot read {meta.source}: {error}") from error
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise UserError(f"{meta.source}: its rope factors {name} make no sense")
    return [decimal(number) for number in numbers]


def _llama3(divisors: list[float], theta: float) -> dict[str, Any] | None:
    """Return the parameters of LLaMA 3's rope scaling that has these divisors; None if none has.

    The slowest frequency is divided by the whole factor. The formula is from
    `_compute_llama3_parameters` in transformers' modeling_rope_utils.py.
    """
    factor = max(divisors)
    low, high, trained = LLAMA3_ROPE.values()
    near = functools.partial(math.isclose, rel_tol=1e-4)
    if all(near(divisor, 1.0) or near(divisor, factor) for divisor in divisors):
        high = low  # nothing is between scaled and unscaled
    for pair, divisor in enumerate(divisors):
        cycles = trained / (2 * math.pi * theta ** (pair / len(divisors)))
        smooth = (float(cycles > low) if high == low
                  else min(1.0, max(0.0, (cycles - low) / (high - low))))
        if not near(divisor, 1 / ((1 - smooth) / factor + smooth)):
            return None
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3_ROPE,
            "high_freq_factor": high}


def extra_layers(meta: Metadata) -> int:
    """Return the layers for multi-token prediction, which are the last in a file."""
    return meta.count("nextn_predict_layers", 0)


def num_layers(meta: Metadata) -> int:
    """Return the decoder layers without those for multi-token prediction."""
    return meta.count("block_count", least=0) - extra_layers(meta)


def biased(meta: Metadata, *names: str) -> bool:
    """Return True if any layer has a bias of one of these names."""
    return any(name.startswith("blk.") and name.endswith(".bias") and name.split(".")[2] in names
               for name in meta.tensors)


def granite(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"attention_multiplier": meta.number("attention.scale", head_dim**-0.5)}


def stablelm(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"qk_layernorm": "blk.0.attn_q_norm.weight" in meta.tensors,
            "use_parallel_residual": meta.flag("use_parallel_residual",
                                               "blk.0.ffn_norm.weight" not in meta.tensors),
            "partial_rotary_factor": meta.count("rope.dimension_count", head_dim) / head_dim}


def gpt_neox(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"rotary_pct": meta.count("rope.dimension_count", head_dim) / head_dim}


def phi3(meta: Metadata, head_dim: int) -> dict[str, Any]:
    context = meta.count("context_length")
    return {"sliding_window": meta.count("attention.sliding_window", 0) or None,
            "original_max_position_embeddings": meta.count("rope.scaling.original_context_length",
                                                           context),
            "partial_rotary_factor": meta.count("rope.dimension_count", head_dim) / head_dim}


def alternating(period: int) -> Callable[[Metadata, int], dict[str, Any]]:
    """Return a reader of the window and of the layer types.

    Unless the file says otherwise, every `period`-th layer has full attention.
    """
    def read(meta: Metadata, head_dim: int) -> dict[str, Any]:
        key, layers = "attention.sliding_window_pattern", num_layers(meta)
        windows = meta.flags(key, layers)
        if windows is None:
            every = meta.count(key, period)
            windows = tuple(layer % every < every - 1 for layer in range(layers))
        return {"sliding_window": meta.count("attention.sliding_window"),
                "layer_types": ["sliding_attention" if windowed else "full_attention"
                                for windowed in windows]}

    return read


def _query_scale(meta: Metadata, head_dim: int, largest: int) -> int:
    """Return the divisor of queries; the largest Gemma of a family has another than head_dim."""
    if num_layers(meta) == largest:
        return meta.count("embedding_length") // meta.count("attention.head_count")
    return head_dim


def gemma2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**alternating(2)(meta, head_dim),
            "query_pre_attn_scalar": _query_scale(meta, head_dim, 46)}


def gemma3(meta: Metadata, head_dim: int) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    return {**alternating(6)(meta, head_dim),
            "query_pre_attn_scalar": _query_scale(meta, head_dim, 62),
            cap: meta.number(cap) if meta.has(cap) else None}


def gemma4(meta: Metadata, head_dim: int) -> dict[str, Any]:
    if meta.count("expert_count", 0):
        raise UserError(f"{meta.source}: GGUF files of Gemma 4's mixture are not supported; give "
                        "the model's Hugging Face folder instead")
    values, cap = alternating(6)(meta, head_dim), "final_logit_softcapping"
    types, key = values["layer_types"], "attention.head_count_kv"
    local, full = (types.index(kind) if kind in types else 0
                   for kind in ("sliding_attention", "full_attention"))
    return {**values, cap: meta.number(cap) if meta.has(cap) else None,
            "num_key_value_heads": meta.count(key, layer=local),
            "num_global_key_value_heads": meta.count(key, layer=full),
            "global_head_dim": meta.count("attention.key_length"),
            "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in meta.tensors,
            "hidden_size_per_layer_input": meta.count("embedding_length_per_layer_input", 0),
            "num_kv_shared_layers": meta.count("attention.shared_kv_layers", 0)}


def exaone4(meta: Metadata, head_dim: int) -> dict[str, Any]:
    if meta.has("attention.sliding_window"):
        return alternating(4)(meta, head_dim)
    return {"sliding_window": None,
            "layer_types": ["full_attention"] * num_layers(meta)}


def expert_sizes(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the experts' width, which older files have in their tensors only."""
    shape = meta.tensor("blk.0.ffn_up_exps.weight").shape
    return {"moe_intermediate_size": meta.count("expert_feed_forward_length", shape[-2])}


def qwen2_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    shared = meta.tensor("blk.0.ffn_up_shexp.weight").shape
    return {**expert_sizes(meta, head_dim), "shared_expert_intermediate_size":
            meta.count("expert_shared_feed_forward_length", shared[0])}


def qwen35(meta: Metadata, head_dim: int) -> dict[str, Any]:
    interval = meta.count("full_attention_interval", 4)
    return {"linear_value_head_dim":
            meta.count("ssm.inner_size") // meta.count("ssm.time_step_rank"),
            "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention"
                            for layer in range(num_layers(meta))]}


def qwen35_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**qwen35(meta, head_dim), **qwen2_moe(meta, head_dim)}


def glm4_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors}


def llama4(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"use_qk_norm": meta.count("expert_count") != 128}  # as llama.cpp has it


def deepseek2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    if meta.has("attention.temperature_scale"):
        raise UserError(f"{meta.source}: a scale of attention that depends on positions is not "
                        f"supported of a {meta.architecture} model")
    rank, groups, kept = "attention.q_lora_rank", {}, {160: 3, 256: 4}
    experts = meta.count("expert_count")
    if experts in kept and not meta.has("expert_group_count"):  # the large models in older files
        groups = {"n_group": 8, "topk_group": kept[experts]}
    # In older files the sizes are of the keys and values of attention, not of its cache.
    key, value = (meta.count(f"attention.{name}_length_mla", meta.count(f"attention.{name}_length"))
                  for name in ("key", "value"))
    return {**groups, "qk_nope_head_dim": key - head_dim, "v_head_dim": value,
            "q_lora_rank": meta.count(rank) if meta.has(rank) else None,
            "num_key_value_heads": meta.count("attention.head_count")}


def deepseek_v2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    values = deepseek2(meta, head_dim)
    grouped = values.get("n_group", meta.count("expert_group_count", 1)) > 1
    return {**values, "topk_method": "group_limited_greedy" if grouped else "greedy"}


def phimoe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"lm_head_bias": "output.bias" in meta.tensors,
            "sliding_window": meta.count("attention.sliding_window", 0) or None}


def phimoe_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of LongRoPE, whose attention factor has two names on the hub."""
    parameters = phi3_rope(meta, head_dim)
    if parameters["rope_type"] == "longrope":
        del parameters["partial_rotary_factor"]
        scale = meta.number("rope.scaling.attn_factor", 1.0)
        parameters |= {"short_mscale": scale, "long_mscale": scale}
    return parameters
