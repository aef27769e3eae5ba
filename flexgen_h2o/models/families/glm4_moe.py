"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): routers as in DeepSeek V3, leading dense layers, a
partial rotation. And Solar Open, without the last two."""

from __future__ import annotations

from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_grouped_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope

_GLM = {
    "vocab_size": 151552, "num_hidden_layers": 46, "intermediate_size": 10944,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "use_qk_norm": False, "num_nextn_predict_layers": 1,
}


class Glm4Moe(MixtureDecoder):
    DEFAULTS = {
        "glm4_moe": _GLM,
        "solar_open": {
            **_GLM, "vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64,
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


FAMILY = Glm4Moe()
