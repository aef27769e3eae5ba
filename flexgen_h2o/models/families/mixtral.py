"""Mixtral, and a model with its tensor names."""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope


class Mixtral(MixtureDecoder):
    """Mixtral (arXiv 2401.04088): LLaMA with a mixture of experts in each layer."""

    DEFAULTS = {
        "mixtral": {
            "intermediate_size": 14336, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "num_experts_per_tok": 2, "num_local_experts": 8, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }
    block = "block_sparse_moe"
    renames: tuple[tuple[str, str], ...] = ((".block_sparse_moe.", ".mlp."),)
    expert_names = {"gate": "w1", "up": "w3", "down": "w2"}

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f, bias=""),
            attention=f.attention_variants(True),
            experts=read_experts(f, width="intermediate_size", router=RouterConfig()),
        )


class MiniMaxM2(Mixtral):
    """MiniMax M2: experts with sigmoid scores, norms over all query and all key heads.

    A part of each head rotates.
    """

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
