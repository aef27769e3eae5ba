"""StableLM 3B and StableLM 2 (arXiv 2402.17834): layer norms, and a part of each head rotates.

StableLM 2 12B norms each query and key head by weights of its own, and its MLP reads what attention
reads.
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
        "qk_layernorm": False, "use_parallel_residual": False,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    },
}


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    common = f.decoder("stablelm", read_rope(f, partial=True), eps="layer_norm_eps")
    return ModelConfig(
        **common,
        attention_bias=f.flag("use_qkv_bias"),
        qk_norm=f.flag("qk_layernorm"),
        parallel_residual=f.flag("use_parallel_residual"),
    )


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names, as a checkpoint calls them."""
    hidden, parallel = cfg.hidden_size, cfg.parallel_residual

    def layer(prefix: str) -> dict[str, TensorSpec]:
        specs = norm_specs("ln1", f"{prefix}input_layernorm", hidden, True)
        if not parallel:
            specs |= norm_specs("ln2", f"{prefix}post_attention_layernorm", hidden, True)
        attention = attention_specs(cfg, prefix)
        for name, heads in (("q", cfg.num_heads), ("k", cfg.num_kv_heads)) if cfg.qk_norm else ():
            for number in range(heads):
                specs |= norm_specs(f"{name}_norm{number}",
                                    f"{prefix}self_attn.{name}_layernorm.norms.{number}",
                                    cfg.head_dim)
        last = {"out": attention.pop("out")} if parallel else {}  # as `attention_output` does
        return {**specs, **attention, **mlp_specs(cfg, prefix), **last}

    return model_specs(cfg, layer, norm_bias=True)
