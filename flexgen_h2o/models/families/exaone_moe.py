"""K-EXAONE: the windows of EXAONE 4.0, the experts of DeepSeek V3."""

from __future__ import annotations

from flexgen_h2o.models.families.exaone4 import read_windows
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import (
    MixtureDecoder,
    read_experts,
    read_grouped_router,
    read_leading_dense,
)
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope


class ExaoneMoe(MixtureDecoder):
    DEFAULTS = {
        "exaone_moe": {
            "vocab_size": 102400, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 16384, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 53,
        },
    }
    correction = "e_score_correction_bias"
    renames = ((".mlp.e_score_", ".mlp.gate.e_score_"),)
    shared_expert = "mlp.shared_experts"
    gated_shared = False

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **f.decoder("exaone_moe", read_rope(f)),
            **read_windows(f),
            qk_norm=True,
            experts=read_experts(f, router=read_grouped_router(f),
                                 shared_experts="num_shared_experts"),
            dense_layers=read_leading_dense(f),
        )


FAMILY = ExaoneMoe()
