"""OLMoE (arXiv 2409.02060): many small experts; norms over all queries, and over all keys."""

from __future__ import annotations

from flexgen_h2o.models.decoder import aliases, attention_inputs, attention_output, embed, head
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import expert, mixture_specs, read_experts, route, shared, views
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights
from flexgen_h2o.models.rope import read_rope

__all__ = ["DEFAULTS", "aliases", "attention_inputs", "attention_output", "embed", "expert", "head",
           "read", "route", "shared", "views", "weights"]

DEFAULTS = {
    "olmoe": {
        "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
        "intermediate_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 4096,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "attention_bias": False, "num_experts_per_tok": 8, "num_experts": 64,
        "norm_topk_prob": False, "tie_word_embeddings": False, "eos_token_id": 50279,
    },
}


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    common = f.decoder("olmoe", read_rope(f))
    return ModelConfig(
        **common,
        attention_bias=f.flag("attention_bias"),
        out_bias=f.flag("attention_bias"),
        qk_norm=True,
        clip_qkv=f.number_or("clip_qkv", 0.0),
        experts=read_experts(f, width="intermediate_size"),
    )


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names, as a checkpoint calls them."""
    return mixture_specs(cfg, head_norms=(cfg.q_size, cfg.kv_size))
