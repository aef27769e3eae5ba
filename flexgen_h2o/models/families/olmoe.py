"""OLMoE (arXiv 2409.02060): many small experts, and norms over all query and all key heads."""

from __future__ import annotations

from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig


class Olmoe(MixtureDecoder):
    DEFAULTS = {
        "olmoe": {
            "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
            "intermediate_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64,
            "norm_topk_prob": False, "eos_token_id": 50279,
        },
    }
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f),
            qk_norm=True,
            clip_qkv=f.number_or("clip_qkv", 0.0),
            experts=read_experts(f, width="intermediate_size"),
        )


FAMILY = Olmoe()
