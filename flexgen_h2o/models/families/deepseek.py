"""DeepSeek V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437), Kimi K2 and GLM-4.7-Flash.

Multi-head latent attention. Queries absorb the heads' maps from latents to keys ("k_b"), and
attention's output goes through their maps from latents to values ("v_b"), so that attention itself
sees one KV head: see `config.layers.LatentConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import LatentConfig, RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import (
    add_linear_,
    linear_specs,
    norm_specs,
    normed,
    product,
    row_blocks,
)
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import (
    MixtureDecoder,
    read_experts,
    read_grouped_router,
    read_leading_dense,
)
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeConfig, read_rope
from flexgen_h2o.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, independent of the other norms."""

_V3 = {
    "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_attention_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "max_position_embeddings": 4096, "rope_interleave": True,
    "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1,
}


class DeepSeek(MixtureDecoder):
    DEFAULTS = {
        "deepseek_v2": {
            "vocab_size": 102400, "moe_intermediate_size": 1407, "n_shared_experts": 2,
            "n_routed_experts": 64, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "topk_method": "greedy", "first_k_dense_replace": 0,
            "rope_interleave": True, "bos_token_id": 1, "eos_token_id": 2,
        },
        "deepseek_v3": _V3,
        "kimi_k2": _V3,
        "glm4_moe_lite": _V3 | {
            "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
            "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
            "n_routed_experts": 64, "routed_scaling_factor": 1.8, "q_lora_rank": 768,
            "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 4, "first_k_dense_replace": 1,
            "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
        },
    }
    correction = "gate.e_score_correction_bias"
    mtp_norm = "shared_head.norm"

    def read(self, f: Fields) -> ModelConfig:
        latent = _read_latent(f)
        # The rotary dimensions are a head of their own; head_dim in config.json is its size.
        f = Fields(f.name, {**f.values, "head_dim": latent.rope_dim}, f.defaults, f.family)
        rope = read_rope(f)
        scale = latent.query_dim ** -0.5 * _yarn_scale(f, rope)
        f.refuse("mlp_bias")
        return ModelConfig(
            **self.common(f, rope) | {"num_kv_heads": 1, "head_dim": latent.key_dim},
            latent=latent,
            attention=f.attention_variants(False, scale=scale),
            experts=read_experts(f, router=_read_router(f), shared_experts="n_shared_experts"),
            dense_layers=read_leading_dense(f),
        )

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return _attention_specs(cfg, f"{prefix}self_attn.")

    def router_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().router_specs(cfg, prefix)
        if cfg.experts.router.scoring == "softmax":  # V2 has no corrections
            del specs["router_correction"]
        return specs

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        """Return the views of experts, and of the two maps of each head in "kv_b_proj"."""
        views = super().views(cfg)
        nope, height = cfg.latent.nope_dim, cfg.latent.nope_dim + cfg.latent.value_dim
        for layer, specs in enumerate(cfg.weights.layers, cfg.first_layer):
            for short, rows in (("k_b", range(nope)), ("v_b", range(nope, height))):
                views[specs[short].name] = self.views_of(
                    f"model.layers.{layer}.self_attn.kv_b_proj.weight", rows=rows,
                    blocks=cfg.num_heads, transposed=short == "k_b")
        return views

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [rows, heads or 1, rope_dim + rank] and latents [rows, 1, rank].

        Latents are a view of the keys. The rotated elements come first.
        """
        latent, rows = cfg.latent, len(x)
        rope_dim, nope_dim = latent.rope_dim, latent.nope_dim
        q = ops.get("q", (rows, cfg.num_heads, latent.key_dim), x.dtype)
        k = ops.get("k", (rows, 1, latent.key_dim), x.dtype)
        for block in row_blocks(rows):
            source = normed(cfg, w, "ln1", x[block], ops)
            keys, queries = k[block], q[block]
            kv = product(w, "kv_a", source, ops)
            ops.rms_norm(kv[:, : latent.rank], w["kv_norm"], eps=LATENT_EPS,
                         out=keys[:, 0, rope_dim:])
            _copy_rotated(latent, kv[:, None, latent.rank :], keys[..., :rope_dim], ops)
            if latent.query_rank:
                low = product(w, "q_a", source, ops)
                source = ops.rms_norm(low, w["q_a_norm"], eps=LATENT_EPS, out=low)
            heads = product(w, "q_b", source, ops).view(-1, cfg.num_heads, latent.query_dim)
            ops.linear_heads(heads[..., :nope_dim], w["k_b"], out=queries[..., rope_dim:])
            _copy_rotated(latent, heads[..., nope_dim:], queries[..., :rope_dim], ops)
        return q, k, k[..., rope_dim:]

    def attention_output(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         attended: Tensor, ops: Operations) -> Tensor:
        """Add attention's output to x [rows, hidden]; attended is [rows, heads, rank]."""
        for block in row_blocks(len(x)):
            part = attended[block]
            values = ops.get("values", (len(part), cfg.num_heads, cfg.latent.value_dim), x.dtype)
            ops.linear_heads(part, w["v_b"], out=values)
            add_linear_(cfg, w, x[block], values.view(len(part), -1), ops, matrix="out",
                        post_norm="post1")
        return x


def _attention_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    latent, hidden, heads, bias = cfg.latent, cfg.hidden_size, cfg.num_heads, cfg.attention_bias
    specs = {**linear_specs("kv_a", f"{prefix}kv_a_proj_with_mqa", (latent.key_dim, hidden), bias),
             **norm_specs("kv_norm", f"{prefix}kv_a_layernorm", latent.rank)}
    queries = "q_proj"
    if latent.query_rank:
        queries, inputs = "q_b_proj", latent.query_rank
        specs |= {**linear_specs("q_a", f"{prefix}q_a_proj", (inputs, hidden), bias),
                  **norm_specs("q_a_norm", f"{prefix}q_a_layernorm", inputs)}
    width = heads * latent.query_dim, latent.query_rank or hidden
    return {**specs, **linear_specs("q_b", f"{prefix}{queries}", width),
            "k_b": TensorSpec(f"{prefix}k_b_proj.weight", (heads, latent.rank, latent.nope_dim)),
            "v_b": TensorSpec(f"{prefix}v_b_proj.weight", (heads, latent.value_dim, latent.rank)),
            **linear_specs("out", f"{prefix}o_proj", (hidden, heads * latent.value_dim), bias)}


def _copy_rotated(latent: LatentConfig, x: Tensor, out: Tensor, ops: Operations) -> None:
    """Copy the rotated elements [rows, heads, rope_dim]: first even, then odd ones."""
    if not latent.interleaved:
        ops.copy_(out, x)
        return
    half = latent.rope_dim // 2
    ops.copy_(out[..., :half], x[..., 0::2])
    ops.copy_(out[..., half:], x[..., 1::2])


def _read_latent(f: Fields) -> LatentConfig:
    query_rank = f.values.get("q_lora_rank", f.defaults["q_lora_rank"])  # null: there is none
    return LatentConfig(
        f.count("kv_lora_rank"), f.count("qk_rope_head_dim"), f.count("qk_nope_head_dim"),
        f.count("v_head_dim"), 0 if query_rank is None else f.size("q_lora_rank", query_rank),
        f.flag("rope_interleave"))


def _yarn_scale(f: Fields, rope: RopeConfig) -> float:
    """Return the factor of the softmax's scale that a scaled rope brings with mscale_all_dim."""
    parameters = f.mapping("rope_scaling") or f.mapping("rope_parameters")
    mscale = f.fit(float, parameters.get("mscale_all_dim") or 0.0, "rope mscale_all_dim")
    if rope.rope_type == "default" or not mscale or rope.factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(rope.factor) + 1.0) ** 2


def _read_router(f: Fields) -> RouterConfig:
    if f.values["model_type"] != "deepseek_v2":
        return read_grouped_router(f)
    f.refuse("norm_topk_prob")
    method = f.value(str, "topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"{f.name}: topk_method = {method} is not supported in a deepseek_v2 model "
                        "(greedy and group_limited_greedy are)")
    grouped = method == "group_limited_greedy"
    return RouterConfig(normalize=False, scale=f.number("routed_scaling_factor"), group_experts=1,
                        groups=f.count("n_group") if grouped else 1,
                        groups_per_token=f.count("topk_group") if grouped else 1)
