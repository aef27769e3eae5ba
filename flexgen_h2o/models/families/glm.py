"""GLM-4, its mixtures, and Solar Open."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, fused_mlp_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_grouped_experts
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
    """GLM-4 (arXiv 2406.12793): half of each head rotates, in interleaved pairs.

    GLM-4-0414 (glm4) also has norms after attention and MLP.
    """

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


_GLM_MOE = {
    "vocab_size": 151552, "num_hidden_layers": 46, "intermediate_size": 10944,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "use_qk_norm": False, "num_nextn_predict_layers": 1,
}


class Glm4Moe(MixtureDecoder):
    """GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471), and Solar Open.

    Routers are as in DeepSeek V3. GLM has leading dense layers and a partial rotation.
    """

    DEFAULTS = {
        "glm4_moe": _GLM_MOE,
        "solar_open": {
            **_GLM_MOE, "vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64,
            "head_dim": 128, "rope_theta": 1000000.0, "partial_rotary_factor": 1.0,
            "moe_intermediate_size": 1280, "num_nextn_predict_layers": 0,
        },
    }
    correction = "gate.e_score_correction_bias"
    mtp_norm = "shared_head.norm"

    def read(self, f: Fields) -> ModelConfig:
        glm = f.values["model_type"] == "glm4_moe"
        return ModelConfig(
            **self.common(f, read_rope(f, partial=glm)) | {"out_bias": False},
            **read_grouped_experts(f) | ({} if glm else {"dense_layers": ()}),
            qk_norm=glm and f.flag("use_qk_norm"),
        )
