"""Qwen3-MoE (arXiv 2505.09388): many small experts, and norms of query and key heads."""

from __future__ import annotations

from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_dense_layers, read_experts
from flexgen_h2o.models.model_config import ModelConfig


class Qwen3Moe(MixtureDecoder):
    DEFAULTS = {
        "qwen3_moe": {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
            "intermediate_size": 6144, "num_key_value_heads": 4,
            "max_position_embeddings": 32768, "moe_intermediate_size": 768,
            "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
            "use_sliding_window": False, "sliding_window": 4096,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f),
            qk_norm=True,
            attention=f.attention_variants(f.flag("use_sliding_window")),
            experts=read_experts(f),
            dense_layers=read_dense_layers(f),
        )


FAMILY = Qwen3Moe()
