"""Mixtral (arXiv 2401.04088): LLaMA with a mixture of experts in each layer."""

from __future__ import annotations

from flexgen_h2o.models import decoder
from flexgen_h2o.models.decoder import attention_inputs, attention_output, embed, head
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import expert, mixture_specs, read_experts, route, shared, views
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights
from flexgen_h2o.models.rope import read_rope

__all__ = ["DEFAULTS", "aliases", "attention_inputs", "attention_output", "embed", "expert", "head",
           "read", "route", "shared", "views", "weights"]

DEFAULTS = {
    "mixtral": {
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "num_experts_per_tok": 2, "num_local_experts": 8,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    },
}


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    common = f.decoder("mixtral", read_rope(f))
    return ModelConfig(
        **common,
        attention=f.forms((True,) * common["num_layers"]),
        experts=read_experts(f, width="intermediate_size", normalise=True),
    )


def aliases(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may use for a tensor: transformers 5 says mlp in memory."""
    other = name.replace(".block_sparse_moe.", ".mlp.")
    return tuple(dict.fromkeys((*decoder.aliases(name), *decoder.aliases(other))))


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names, as a checkpoint calls them."""
    return mixture_specs(cfg, block="block_sparse_moe",
                         names={"gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"})
