"""Arcee's AFMoE (Trinity): gated attention, norms before and after attention and MLP.

Layers with windows rotate, the others do not.
"""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.decoder import linear_specs, move_last
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, leading_dense, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope
from flexgen_h2o.models.tensors import TensorSpec


class AfMoe(MixtureDecoder):
    DEFAULTS = {
        "afmoe": {
            "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_attention_heads": 16,
            "head_dim": 128, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
            "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
            "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024,
            "mup_enabled": False,
        },
    }
    norms = {"ln1": "input_layernorm", "post1": "post_attention_layernorm",
             "ln2": "pre_mlp_layernorm", "post2": "post_mlp_layernorm"}
    router = "router.gate"
    correction = "expert_bias"

    def read(self, f: Fields) -> ModelConfig:
        every = f.count("global_attn_every_n_layers")
        local = f.local_layers(lambda layer: bool((layer + 1) % every))
        return ModelConfig(
            **self.common(f),
            **nope([not is_local for is_local in local]),
            attention_gate=True,
            qk_norm=True,
            embed_scale=f.count("hidden_size") ** 0.5 if f.flag("mup_enabled") else 1.0,
            attention=f.attention_variants(local),
            experts=read_experts(
                f, router=RouterConfig("sigmoid", scale=f.number("route_scale")),
                shared_experts="num_shared_experts"),
            dense_layers=leading_dense(f, "num_dense_layers"),
        )

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        gate = linear_specs("out_gate", f"{prefix}self_attn.gate_proj",
                            (cfg.q_size, cfg.hidden_size))
        return move_last({**super().attention_specs(cfg, prefix), **gate}, "out")
