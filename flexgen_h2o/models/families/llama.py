"""LLaMA 1, 2, 3 (arXiv 2302.13971), and Mistral and SmolLM2, which share the architecture."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope


class Llama(Decoder):
    DEFAULTS = {
        "llama": {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 11008, "num_attention_heads": 32,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        },
        "mistral": {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        mistral = f.values["model_type"] == "mistral"  # has a window, and never a bias
        bias = not mistral and f.flag("attention_bias")
        common = f.decoder("llama", read_rope(f))
        return ModelConfig(
            **common,
            attention_bias=bias,
            out_bias=bias,
            mlp_bias=not mistral and f.flag("mlp_bias"),
            # A Mistral with layer_types is a Ministral in transformers.
            attention=f.attention_variants(f.local_layers(lambda layer: True)) if mistral else (),
        )


FAMILY = Llama()
