"""StableLM 3B and StableLM 2 1.6B (arXiv 2402.17834): layer norms, and a part of each head rotates.

Norms of each query and key head, and a parallel residual (StableLM 2 12B), are refused.
"""

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
    "stablelm": {
        "vocab_size": 50304, "hidden_size": 2560, "num_hidden_layers": 32,
        "intermediate_size": 6912, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "hidden_act": "silu", "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    },
}


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    f.refuse("qk_layernorm")
    f.refuse("use_parallel_residual")
    common = f.decoder("stablelm", read_rope(f, partial=True), eps="layer_norm_eps")
    return ModelConfig(
        **common,
        attention_bias=f.flag("use_qkv_bias"),
    )


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names, as a checkpoint calls them."""
    hidden = cfg.hidden_size

    def layer(prefix: str) -> dict[str, TensorSpec]:
        return {**norm_specs("ln1", f"{prefix}input_layernorm", hidden, True),
                **norm_specs("ln2", f"{prefix}post_attention_layernorm", hidden, True),
                **attention_specs(cfg, prefix), **mlp_specs(cfg, prefix)}

    return model_specs(cfg, layer, norm_bias=True)
