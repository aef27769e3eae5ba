"""Qwen2 to Qwen3 with full attention, and models that share their attention."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import (
    MixtureDecoder,
    read_dense_layers,
    read_experts,
    read_grouped_experts,
)
from flexgen_h2o.models.model_config import ModelConfig

_QWEN = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}


class Qwen(Decoder):
    """Qwen2 and Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388) and Seed-OSS.

    LLaMA with biases of queries, keys and values, or with norms of queries and keys.
    """

    DEFAULTS = {
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128},
        "seed_oss": {
            "vocab_size": 155136, "num_hidden_layers": 64, "intermediate_size": 27648,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 524288, "attention_bias": True,
            "attention_out_bias": False, "use_sliding_window": False, "bos_token_id": 0,
            "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        kind, windows = f.values["model_type"], f.flag("use_sliding_window")
        local = f.local_layers(lambda layer: windows and layer >= f.value(int, "max_window_layers"))
        common = self.common(f, bias="" if kind == "qwen2" else "attention_bias")
        if kind == "qwen2":  # has no key for its biases
            common |= {"attention_bias": True}
        elif kind == "seed_oss":
            common |= {"out_bias": f.flag("attention_out_bias"), "mlp_bias": f.flag("mlp_bias")}
        return ModelConfig(
            **common,
            qk_norm=kind == "qwen3",
            attention=f.attention_variants(local) if windows else (),
        )


class Qwen2Moe(MixtureDecoder):
    """Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671): a shared expert beside the routed ones."""

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


class Qwen3Moe(MixtureDecoder):
    """Qwen3-MoE (arXiv 2505.09388): many small experts, and norms of query and key heads."""

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


class Dots1(MixtureDecoder):
    """dots.llm1 (arXiv 2506.05767): the attention of Qwen3, the experts of DeepSeek V3."""

    DEFAULTS = {
        "dots1": {
            "vocab_size": 152064, "hidden_size": 4608, "num_hidden_layers": 62,
            "intermediate_size": 10944, "num_key_value_heads": 32, "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "norm_topk_prob": False, "sliding_window": 4096,
            "max_window_layers": 62,
        },
    }
    correction = "gate.e_score_correction_bias"

    def read(self, f: Fields) -> ModelConfig:
        local = f.local_layers(lambda layer: f.window() is not None
                               and layer >= f.value(int, "max_window_layers"))
        return ModelConfig(
            **self.common(f),
            **read_grouped_experts(f),
            qk_norm=True,
            attention=f.attention_variants(local),
        )
