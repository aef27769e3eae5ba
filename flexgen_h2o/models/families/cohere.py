"""Command R and Command R7B: layer norms without bias, a parallel residual, interleaved rotation.

In Command R7B (cohere2) three of four layers have windows, and the others do not rotate.
"""

from __future__ import annotations

from typing import Any

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope

_COHERE = {
    "vocab_size": 256000, "hidden_size": 8192, "num_hidden_layers": 40,
    "intermediate_size": 22528, "num_attention_heads": 64, "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True,
    "bos_token_id": 5, "eos_token_id": 255001,
}


class Cohere(Decoder):
    DEFAULTS = {
        "cohere": {**_COHERE, "rope_theta": 500000.0},
        "cohere2": {**_COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
    }
    norms = {"ln1": "input_layernorm"}

    def read(self, f: Fields) -> ModelConfig:
        f.refuse("use_qk_norm")  # Command R+
        return ModelConfig(
            **self.common(f, eps="layer_norm_eps"),
            **(self._windows(f) if f.values["model_type"] == "cohere2" else {}),
            layer_norm=True,
            logit_divisor=1.0 / f.number("logit_scale"),
            parallel_residual=True,
            rope_interleaved=True,
        )

    def _windows(self, f: Fields) -> dict[str, Any]:
        """Return the fields of layers with windows, which alone rotate."""
        pattern = f.count("sliding_window_pattern")
        local = f.local_layers(lambda layer: bool((layer + 1) % pattern))
        rotates = f.window() is not None
        return {"attention": f.attention_variants(local),
                **nope([not (is_local and rotates) for is_local in local])}
