"""GLM-4 (arXiv 2406.12793): half of each head rotates, in interleaved pairs.

GLM-4-0414 (glm4) also has norms after attention and MLP.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, fused_mlp_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import TensorSpec

_GLM = {
    "vocab_size": 151552, "num_hidden_layers": 40, "intermediate_size": 13696,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7, "attention_bias": True, "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}


class Glm(Decoder):
    DEFAULTS = {"glm": _GLM, "glm4": _GLM}

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f, read_rope(f, partial=True)) | {"out_bias": False},
            rope_interleaved=True,
            post_norms=f.values["model_type"] == "glm4",
        )

    def layer_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs, hidden = super().layer_norm_specs(cfg, prefix), cfg.hidden_size
        return specs if not cfg.post_norms else {
            **specs, **norm_specs("post1", f"{prefix}post_self_attn_layernorm", hidden),
            **norm_specs("post2", f"{prefix}post_mlp_layernorm", hidden)}

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return fused_mlp_specs(cfg, prefix)


FAMILY = Glm()
