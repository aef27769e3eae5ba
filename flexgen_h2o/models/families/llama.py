"""LLaMA 1, 2, 3 (arXiv 2302.13971), and Mistral and SmolLM2, which share the architecture."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig


class Llama(Decoder):
    DEFAULTS = {
        "llama": {"bos_token_id": 1, "eos_token_id": 2},
        "mistral": {
            "intermediate_size": 14336, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "sliding_window": 4096, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        mistral = f.values["model_type"] == "mistral"  # has a window, and never a bias
        return ModelConfig(
            **self.common(f, bias="" if mistral else "attention_bias"),
            mlp_bias=not mistral and f.flag("mlp_bias"),
            # A Mistral with layer_types is a Ministral in transformers.
            attention=f.attention_variants(f.local_layers(lambda layer: True)) if mistral else (),
        )


FAMILY = Llama()
