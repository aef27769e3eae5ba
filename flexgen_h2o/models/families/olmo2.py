"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP, and of all queries and all keys."""

from __future__ import annotations

from flexgen_h2o.models.decoder import (
    aliases,
    attention_inputs,
    attention_output,
    attention_specs,
    embed,
    head,
    mlp,
    mlp_specs,
    model_specs,
    norm_specs,
)
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec
from flexgen_h2o.models.rope import read_rope

__all__ = ["DEFAULTS", "aliases", "attention_inputs", "attention_output", "embed", "head", "mlp",
           "read", "weights"]

DEFAULTS = {
    "olmo2": {
        "vocab_size": 50304, "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 11008, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "attention_bias": False, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "eos_token_id": 50279,
    },
}


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    bias = f.flag("attention_bias")
    common = f.decoder("olmo2", read_rope(f))
    return ModelConfig(
        **common,
        attention_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names, as a checkpoint calls them."""
    def layer(prefix: str) -> dict[str, TensorSpec]:
        attention = f"{prefix}self_attn."
        return {**norm_specs("post1", f"{prefix}post_attention_layernorm", cfg.hidden_size),
                **norm_specs("post2", f"{prefix}post_feedforward_layernorm", cfg.hidden_size),
                **norm_specs("q_norm", f"{attention}q_norm", cfg.q_size),
                **norm_specs("k_norm", f"{attention}k_norm", cfg.kv_size),
                **attention_specs(cfg, prefix), **mlp_specs(cfg, prefix)}

    return model_specs(cfg, layer)
