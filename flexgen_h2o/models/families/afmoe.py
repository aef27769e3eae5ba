"""Arcee's AFMoE (Trinity): gated attention, norms before and after attention and MLP.

Layers with windows rotate, the others do not.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.decoder import linear_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import nope, read_rope


class AfMoe(MixtureDecoder):
    DEFAULTS = {
        "afmoe": {
            "vocab_size": 200192, "hidden_size": 2048, "num_hidden_layers": 32,
            "intermediate_size": 6144, "moe_intermediate_size": 1408, "num_dense_layers": 1,
            "num_attention_heads": 16, "head_dim": 128, "hidden_act": "silu",
            "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
            "route_scale": 1.0, "global_attn_every_n_layers": 4, "sliding_window": 1024,
            "mup_enabled": False, "attention_bias": False, "tie_word_embeddings": False,
        },
    }
    router = "router.gate"
    correction = "expert_bias"
    shared_expert = "mlp.shared_experts"
    gated_shared = False

    def read(self, f: Fields) -> ModelConfig:
        every, bias = f.count("global_attn_every_n_layers"), f.flag("attention_bias")
        local = f.local_layers(lambda layer: bool((layer + 1) % every))
        common = f.decoder("afmoe", read_rope(f))
        dense = f.value(Annotated[int, Meta(ge=0)], "num_dense_layers")
        return ModelConfig(
            **common,
            **nope([not is_local for is_local in local]),
            attention_bias=bias,
            out_bias=bias,
            attention_gate=True,
            qk_norm=True,
            embed_scale=common["hidden_size"] ** 0.5 if f.flag("mup_enabled") else 1.0,
            attention=f.attention_variants(local),
            experts=read_experts(
                f, router=RouterConfig("sigmoid", scale=f.number("route_scale")),
                shared_experts="num_shared_experts"),
            dense_layers=tuple(layer < dense for layer in range(len(local))) if dense else (),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        names = {"ln1": "input_layernorm", "post1": "post_attention_layernorm",
                 "post2": "post_mlp_layernorm"}
        specs = super().layer_specs(cfg, prefix)
        names["router_norm" if "router" in specs else "ln2"] = "pre_mlp_layernorm"
        for short, name in names.items():
            specs |= norm_specs(short, f"{prefix}{name}", cfg.hidden_size)
        return specs

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().attention_specs(cfg, prefix)
        last = {short: specs.pop(short) for short in tuple(specs) if short.startswith("out")}
        return {**specs, **linear_specs("out_gate", f"{prefix}self_attn.gate_proj",
                                        (cfg.q_size, cfg.hidden_size)), **last}


FAMILY = AfMoe()
