"""MiniMax M2: many experts with sigmoid scores, norms over all query and all key heads, a partial
rotation."""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.families.mixtral import Mixtral
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope


class MiniMaxM2(Mixtral):
    DEFAULTS = {
        "minimax_m2": {
            "vocab_size": 200064, "hidden_size": 3072, "num_hidden_layers": 62,
            "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5000000.0,
            "num_experts_per_tok": 8, "num_local_experts": 256, "bos_token_id": 200034,
            "eos_token_id": 200020,
        },
    }
    correction = "e_score_correction_bias"
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        parameters = f.mapping("rope_scaling") or f.mapping("rope_parameters")
        if f.raw("rotary_dim") is not None:  # in place of partial_rotary_factor
            share = f.count("rotary_dim") / f.head_dim()
            parameters = {"partial_rotary_factor": share, **parameters}
        return ModelConfig(
            **self.common(f, read_rope(f, parameters=parameters, partial=True), bias=""),
            qk_norm=True,
            experts=read_experts(f, width="intermediate_size", router=RouterConfig("sigmoid")),
        )


FAMILY = MiniMaxM2()
