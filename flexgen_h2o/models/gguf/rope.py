"""Rotary position embedding of GGUF files: `rope_parameters` of config.json. No torch."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
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
