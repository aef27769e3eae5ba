"""Tiny mixtures of experts of odd shapes: the transformers config of each branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZES = {"vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5,
         "num_key_value_heads": 1, "intermediate_size": 27, "max_position_embeddings": 256}

HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5,
          "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
          "layer_types": ["linear_attention", "full_attention", "linear_attention",
                          "linear_attention", "full_attention"]}
"""Sizes of recurrent layers, in a model of five layers."""


def _mixtral(**options):
    from transformers import MixtralConfig

    return MixtralConfig(**SIZES | {"num_local_experts": 7, "num_experts_per_tok": 2} | options)


def _olmoe(**options):
    from transformers import OlmoeConfig

    return OlmoeConfig(**SIZES | {"num_key_value_heads": 5, "num_experts": 9,
                                  "num_experts_per_tok": 3} | options)


def _qwen2(**options):
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(**SIZES | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 13,
        "shared_expert_intermediate_size": 21} | options)


def _qwen3(**options):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SIZES | {
        "num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 13,
        "head_dim": 6, "norm_topk_prob": True} | options)


def _gpt_oss(**options):
    from transformers import GptOssConfig

    return GptOssConfig(**SIZES | {
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 6,
        "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.7,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                            "truncate": False, "original_max_position_embeddings": 64}} | options)


_HALF_ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_GROUPED = SIZES | {
    "num_hidden_layers": 4, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1, "moe_intermediate_size": 13, "n_shared_experts": 2}


def _glm4(**options):
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(**_GROUPED | {"rope_parameters": dict(_HALF_ROTATED)} | options)


def _solar_open():
    from transformers import SolarOpenConfig

    return SolarOpenConfig(**_GROUPED | {"head_dim": 6})


def _dots1():
    from transformers import Dots1Config

    return Dots1Config(**_GROUPED | {
        "attention_bias": True, "sliding_window": 6, "max_window_layers": 2})


def _minimax_m2(**options):
    from transformers import MiniMaxM2Config

    return MiniMaxM2Config(**SIZES | {
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12,
        "num_local_experts": 7, "num_experts_per_tok": 3,
        "rope_parameters": dict(_HALF_ROTATED)} | options)


def _ernie4_5(**options):
    from transformers import Ernie4_5_MoeConfig

    return Ernie4_5_MoeConfig(**SIZES | {
        "num_hidden_layers": 4, "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 13,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "pad_token_id": None} | options)


def _phimoe(**options):
    from transformers import PhimoeConfig

    return PhimoeConfig(**SIZES | {
        "num_local_experts": 5, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.3} | options)


def _granite(name, **options):
    import transformers

    return getattr(transformers, f"{name}Config")(**SIZES | {
        "num_local_experts": 7, "num_experts_per_tok": 3, "attention_multiplier": 0.2,
        "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 0.5} | options)


def _exaone(**options):
    from transformers import ExaoneMoeConfig

    return ExaoneMoeConfig(**_GROUPED | {
        "num_experts": 12, "num_shared_experts": 2, "sliding_window": 7, "head_dim": 6} | options)


def _afmoe(**options):
    from transformers import AfmoeConfig

    return AfmoeConfig(**SIZES | {
        "num_hidden_layers": 5, "head_dim": 6, "num_experts": 7, "num_experts_per_tok": 3,
        "moe_intermediate_size": 13, "num_dense_layers": 2, "sliding_window": 7,
        "route_scale": 1.7, "mup_enabled": True} | options)


def _flex_olmo():
    from transformers import FlexOlmoConfig

    return FlexOlmoConfig(**SIZES | {"num_key_value_heads": 5, "num_experts": 7,
                                     "num_experts_per_tok": 3, "pad_token_id": None})


def _llama4(**options):
    from transformers import Llama4TextConfig

    return Llama4TextConfig(**SIZES | {
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
        "num_local_experts": 5, "intermediate_size": 13, "intermediate_size_mlp": 27,
        "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 64}} | options)


_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
              "long_factor": [2.0, 3.0, 4.0, 5.0], "short_mscale": 1.2, "long_mscale": 1.2,
              "original_max_position_embeddings": 128}


def _latent(name: str, **options):
    import transformers

    return getattr(transformers, f"{name}Config")(**SIZES | {
        "num_key_value_heads": 5, "kv_lora_rank": 14, "q_lora_rank": 11, "qk_rope_head_dim": 6,
        "qk_nope_head_dim": 7, "v_head_dim": 9, "moe_intermediate_size": 13,
        "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.7} | options)


LATENT_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.7,
               "mscale_all_dim": 0.9, "original_max_position_embeddings": 64}

LATENT: dict[str, Callable[[], Any]] = {
    "deepseek_v2": lambda: _latent("DeepseekV2", q_lora_rank=None, first_k_dense_replace=1,
                                   qk_nope_head_dim=8),  # transformers needs an even stride
    "deepseek_v2_groups": lambda: _latent(
        "DeepseekV2", qk_nope_head_dim=8, topk_method="group_limited_greedy", n_group=3,
        topk_group=2, rope_parameters=LATENT_YARN),
    "deepseek_v3": lambda: _latent(
        "DeepseekV3", n_routed_experts=12, n_group=4, topk_group=2, first_k_dense_replace=2,
        rope_parameters=LATENT_YARN, attention_bias=True),
    "deepseek_v3_dense": lambda: _latent(
        "DeepseekV3", first_k_dense_replace=3, q_lora_rank=None, rope_interleave=False,
        n_group=1, topk_group=1),
    "glm4_moe_lite": lambda: _latent("Glm4MoeLite", norm_topk_prob=False),
}
"""Models with multi-head latent attention."""

def _qwen3_next(**options):
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**SIZES | {
        "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 13, "num_experts_per_tok": 3, "moe_intermediate_size": 13,
        "shared_expert_intermediate_size": 21} | HYBRID | options)


def _qwen3_5_moe(**options):
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(**SIZES | {
        "num_hidden_layers": 4, "num_attention_heads": 3, "head_dim": 16, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 13,
        "shared_expert_intermediate_size": 9} | HYBRID | {"layer_types": None} | options)


MIXTURES: dict[str, Callable[[], Any]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "olmoe_normalised": lambda: _olmoe(norm_topk_prob=True, tie_word_embeddings=True),
    "olmoe_clipped": lambda: _olmoe(clip_qkv=0.7),
    "qwen2_moe": _qwen2,
    "qwen2_moe_windows": lambda: _qwen2(use_sliding_window=True, sliding_window=6,
                                        max_window_layers=2),
    "qwen3_moe": _qwen3,
    "qwen3_moe_windows": lambda: _qwen3(use_sliding_window=True, sliding_window=5),
    "qwen2_moe_dense": lambda: _qwen2(num_hidden_layers=4, mlp_only_layers=[1],
                                      decoder_sparse_step=1),
    "qwen3_moe_dense": lambda: _qwen3(num_hidden_layers=5, mlp_only_layers=[3],
                                      decoder_sparse_step=2),
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4,
    "glm4_moe_normed": lambda: _glm4(
        use_qk_norm=True, attention_bias=True, head_dim=12, n_group=1, topk_group=1,
        norm_topk_prob=False, first_k_dense_replace=2),
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5,
    "ernie4_5_moe_ends": lambda: _ernie4_5(moe_layer_end_index=2, moe_layer_interval=2,
                                           moe_num_shared_experts=0, tie_word_embeddings=False),
    "phimoe": _phimoe,
    "phimoe_longrope": lambda: _phimoe(rope_parameters=dict(_LONG_ROPE), sliding_window=6),
    "granitemoe": lambda: _granite("GraniteMoe", tie_word_embeddings=True),
    "granitemoeshared": lambda: _granite("GraniteMoeShared", shared_intermediate_size=21,
                                         attention_bias=True),
    "dots1": _dots1,
    "exaone_moe": _exaone,
    "exaone_moe_types": lambda: _exaone(
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"], sliding_window_pattern=2),
    "flex_olmo": _flex_olmo,
    "afmoe": _afmoe,
    "afmoe_experts": lambda: _afmoe(num_dense_layers=0, mup_enabled=False, attention_bias=True,
                                    global_attn_every_n_layers=2),
    "llama4": _llama4,
    "llama4_plain": lambda: _llama4(use_qk_norm=False, attention_bias=True, moe_layers=[0, 1, 2, 3],
                                    no_rope_layers=[1, 0, 1, 1], attention_chunk_size=64,
                                    rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "solar_open": _solar_open,
    **{key: config for key, config in LATENT.items() if key != "deepseek_v3_dense"},
    "qwen3_next": _qwen3_next,
    "qwen3_next_dense": lambda: _qwen3_next(mlp_only_layers=[2], attention_bias=True),
    "qwen3_5_moe": _qwen3_5_moe,
}


def limit_as_configured(model) -> None:
    """Let transformers' experts of gpt-oss go by the limit of their config: older releases have
    one of 7, whatever it says."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
