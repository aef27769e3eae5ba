"""K-EXAONE: the windows of EXAONE 4.0, the experts of DeepSeek V3."""

from __future__ import annotations

from flexgen_h2o.models.families.exaone4 import EXAONE, read_windows
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_grouped_experts
from flexgen_h2o.models.model_config import ModelConfig


class ExaoneMoe(MixtureDecoder):
    DEFAULTS = {
        "exaone_moe": {
            **EXAONE, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
            "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
            "bos_token_id": 1, "eos_token_id": 53,
        },
    }
    correction = "e_score_correction_bias"
    renames = ((".mlp.e_score_", ".mlp.gate.e_score_"),)

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f, bias=""),
            **read_windows(f),
            **read_grouped_experts(f, "num_shared_experts"),
            qk_norm=True,
        )


FAMILY = ExaoneMoe()
