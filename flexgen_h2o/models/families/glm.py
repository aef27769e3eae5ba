"""GLM-4 (arXiv 2406.12793): half of each head rotates, in interleaved pairs.

GLM-4-0414 (glm4) also has norms after attention and MLP.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, attention_specs, linear_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import read_rope

_GLM = {
    "vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 40,
    "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-7, "attention_bias": True, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338],
}


class Glm(Decoder):
    DEFAULTS = {"glm": _GLM, "glm4": _GLM}

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **f.decoder("glm", read_rope(f, partial=True)),
            attention_bias=f.flag("attention_bias"),
            rope_interleaved=True,
            post_norms=f.values["model_type"] == "glm4",
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, ffn = cfg.hidden_size, cfg.ffn_size
        norms = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
        if cfg.post_norms:
            norms |= {"post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"}
        specs = {short: spec for norm, name in norms.items()
                 for short, spec in norm_specs(norm, f"{prefix}{name}", hidden).items()}
        return {**specs, **attention_specs(cfg, prefix),
                **linear_specs("gate_up", f"{prefix}mlp.gate_up_proj", (2 * ffn, hidden)),
                **linear_specs("down", f"{prefix}mlp.down_proj", (hidden, ffn))}


FAMILY = Glm()
