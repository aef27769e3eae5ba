"""dots.llm1 (arXiv 2506.05767): the attention of Qwen3, the experts of DeepSeek V3."""

from __future__ import annotations

from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import (
    MixtureDecoder,
    read_experts,
    read_grouped_router,
    read_leading_dense,
)
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope


class Dots1(MixtureDecoder):
    DEFAULTS = {
        "dots1": {
            "vocab_size": 152064, "hidden_size": 4608, "num_hidden_layers": 62,
            "intermediate_size": 10944, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "attention_bias": False, "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "norm_topk_prob": False, "tie_word_embeddings": False,
            "sliding_window": 4096, "max_window_layers": 62,
        },
    }
    correction = "gate.e_score_correction_bias"
    shared_expert = "mlp.shared_experts"
    gated_shared = False

    def read(self, f: Fields) -> ModelConfig:
        local = f.local_layers(lambda layer: f.window() is not None
                               and layer >= f.value(int, "max_window_layers"))
        bias = f.flag("attention_bias")
        return ModelConfig(
            **f.decoder("dots1", read_rope(f)),
            attention_bias=bias,
            out_bias=bias,
            qk_norm=True,
            attention=f.attention_variants(local),
            experts=read_experts(f, router=read_grouped_router(f),
                                 shared_experts="n_shared_experts"),
            dense_layers=read_leading_dense(f),
        )


FAMILY = Dots1()
