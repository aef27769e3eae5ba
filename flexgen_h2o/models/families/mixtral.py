"""Mixtral (arXiv 2401.04088): LLaMA with a mixture of experts in each layer."""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig


class Mixtral(MixtureDecoder):
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


FAMILY = Mixtral()
