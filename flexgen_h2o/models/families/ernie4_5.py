"""ERNIE 4.5, the dense models: LLaMA whose heads rotate in interleaved pairs."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig


class Ernie(Decoder):
    DEFAULTS = {
        "ernie4_5": {
            "vocab_size": 103424, "hidden_size": 1024, "num_hidden_layers": 18,
            "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "use_bias": False, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f, bias="use_bias"),
            mlp_bias=f.flag("use_bias"),
            rope_interleaved=True,
        )


FAMILY = Ernie()
