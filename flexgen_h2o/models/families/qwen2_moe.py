"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): a shared expert in addition to routed experts."""

from __future__ import annotations

from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_dense_layers, read_experts
from flexgen_h2o.models.model_config import ModelConfig


class Qwen2Moe(MixtureDecoder):
    DEFAULTS = {
        "qwen2_moe": {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
            "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
            "max_position_embeddings": 32768, "qkv_bias": True, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
            "norm_topk_prob": False, "use_sliding_window": False, "sliding_window": 4096,
            "max_window_layers": 28,
        },
    }
    shared_expert = "mlp.shared_expert"
    gated_shared = True

    def read(self, f: Fields) -> ModelConfig:
        windows = f.flag("use_sliding_window")
        local = f.local_layers(lambda layer: windows and layer % 2 == 0
                               and layer < f.value(int, "max_window_layers"))
        return ModelConfig(
            **self.common(f, bias="qkv_bias") | {"out_bias": False},
            attention=f.attention_variants(local) if windows else (),
            experts=read_experts(f, shared_ffn_size=f.count("shared_expert_intermediate_size")),
            dense_layers=read_dense_layers(f),
        )


FAMILY = Qwen2Moe()
