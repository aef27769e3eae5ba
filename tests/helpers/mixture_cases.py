"""Tiny mixtures of experts of odd shapes: the transformers config of each branch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

SIZES = {"vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5,
         "num_key_value_heads": 1, "intermediate_size": 27, "max_position_embeddings": 256}

HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5,
          "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
          "layer_types": ["linear_attention", "full_attention", "linear_attention",
                          "linear_attention", "full_attention"]}
"""Sizes of recurrent layers, in a model of five layers."""


def config_of(sizes: dict[str, Any], name: str, *overrides: dict[str, Any], **options: Any
              ) -> Callable[..., Any]:
    """Return a function that makes the transformers config of a model type with these options."""
    def make(**changes: Any) -> Any:
        import transformers

        merged: dict[str, Any] = {}
        for part in (sizes, *overrides, options, changes):
            merged |= copy.deepcopy(part)  # transformers changes the dicts that it is given
        return getattr(transformers, f"{name}Config")(**merged)

    return make


_of = partial(config_of, SIZES)
_TWO_OF_SEVEN = {"num_local_experts": 7, "num_experts_per_tok": 2}
_THREE_OF_SEVEN = {"num_local_experts": 7, "num_experts_per_tok": 3}
_OLMOE = {"num_key_value_heads": 5, "num_experts": 9, "num_experts_per_tok": 3}
_QWEN2 = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 13,
          "shared_expert_intermediate_size": 21}
_QWEN3 = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 13, "head_dim": 6,
          "norm_topk_prob": True}
_GPT_OSS = {
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "sliding_window": 6,
    "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 0.7,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                        "truncate": False, "original_max_position_embeddings": 64}}
_HALF_ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_GROUPED = {"num_hidden_layers": 4, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4,
            "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1, "moe_intermediate_size": 13, "n_shared_experts": 2}
_GLM4 = {**_GROUPED, "rope_parameters": _HALF_ROTATED}
_ERNIE = {"num_hidden_layers": 4, "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 13,
          "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "pad_token_id": None}
_PHI = {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.3}
_GRANITE = {**_THREE_OF_SEVEN, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
            "embedding_multiplier": 3.0, "logits_scaling": 0.5}
_EXAONE = {**_GROUPED, "num_experts": 12, "num_shared_experts": 2, "sliding_window": 7,
           "head_dim": 6}
_AFMOE = {"num_hidden_layers": 5, "head_dim": 6, "num_experts": 7, "num_experts_per_tok": 3,
          "moe_intermediate_size": 13, "num_dense_layers": 2, "sliding_window": 7,
          "route_scale": 1.7, "mup_enabled": True}
_LLAMA4 = {
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "num_local_experts": 5, "intermediate_size": 13, "intermediate_size_mlp": 27,
    "interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 1.0, "original_max_position_embeddings": 64}}
_GEMMA4 = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 2,
    "head_dim": 6, "global_head_dim": 10, "attention_k_eq_v": True, "sliding_window": 7,
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 7,
    "top_k_experts": 3, "moe_intermediate_size": 13, "layer_types": [
        "sliding_attention", "full_attention", "full_attention"]}
_LONG_ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
              "long_factor": [2.0, 3.0, 4.0, 5.0], "short_mscale": 1.2, "long_mscale": 1.2,
              "original_max_position_embeddings": 128}
_LATENT = {
    "num_key_value_heads": 5, "kv_lora_rank": 14, "q_lora_rank": 11, "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 7, "v_head_dim": 9, "moe_intermediate_size": 13, "n_routed_experts": 6,
    "n_shared_experts": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 1.7}
_LATENT_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 0.7,
                "mscale_all_dim": 0.9, "original_max_position_embeddings": 64}
_QWEN3_NEXT = {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2,
               "head_dim": 16, "num_experts": 13, "num_experts_per_tok": 3,
               "moe_intermediate_size": 13, "shared_expert_intermediate_size": 21, **HYBRID}

LATENT: dict[str, Callable[..., Any]] = {
    "deepseek_v2": _of("DeepseekV2", _LATENT, q_lora_rank=None, first_k_dense_replace=1,
                       qk_nope_head_dim=8),  # transformers needs an even stride
    "deepseek_v2_groups": _of(
        "DeepseekV2", _LATENT, qk_nope_head_dim=8, topk_method="group_limited_greedy", n_group=3,
        topk_group=2, rope_parameters=_LATENT_YARN),
    "deepseek_v3": _of("DeepseekV3", _LATENT, n_routed_experts=12, n_group=4, topk_group=2,
                       first_k_dense_replace=2, rope_parameters=_LATENT_YARN, attention_bias=True),
    "deepseek_v3_dense": _of("DeepseekV3", _LATENT, first_k_dense_replace=3, q_lora_rank=None,
                             rope_interleave=False, n_group=1, topk_group=1),
    "glm4_moe_lite": _of("Glm4MoeLite", _LATENT, norm_topk_prob=False)}
"""Models with multi-head latent attention."""

MIXTURES: dict[str, Callable[..., Any]] = {
    "mixtral": _of("Mixtral", _TWO_OF_SEVEN),
    "olmoe": _of("Olmoe", _OLMOE),
    "olmoe_normalised": _of("Olmoe", _OLMOE, norm_topk_prob=True, tie_word_embeddings=True),
    "olmoe_clipped": _of("Olmoe", _OLMOE, clip_qkv=0.7),
    "qwen2_moe": _of("Qwen2Moe", _QWEN2),
    "qwen2_moe_windows": _of("Qwen2Moe", _QWEN2, use_sliding_window=True, sliding_window=6,
                             max_window_layers=2),
    "qwen3_moe": _of("Qwen3Moe", _QWEN3),
    "qwen3_moe_windows": _of("Qwen3Moe", _QWEN3, use_sliding_window=True, sliding_window=5),
    "qwen2_moe_dense": _of("Qwen2Moe", _QWEN2, num_hidden_layers=4, mlp_only_layers=[1],
                           decoder_sparse_step=1),
    "qwen3_moe_dense": _of("Qwen3Moe", _QWEN3, num_hidden_layers=5, mlp_only_layers=[3],
                           decoder_sparse_step=2),
    "gpt_oss": _of("GptOss", _GPT_OSS),
    "glm4_moe": _of("Glm4Moe", _GLM4),
    "glm4_moe_normed": _of("Glm4Moe", _GLM4, use_qk_norm=True, attention_bias=True, head_dim=12,
                           n_group=1, topk_group=1, norm_topk_prob=False, first_k_dense_replace=2),
    "minimax_m2": _of("MiniMaxM2", _THREE_OF_SEVEN, num_attention_heads=6, num_key_value_heads=3,
                      head_dim=12, rope_parameters=_HALF_ROTATED),
    "ernie4_5_moe": _of("Ernie4_5_Moe", _ERNIE),
    "ernie4_5_moe_ends": _of("Ernie4_5_Moe", _ERNIE, moe_layer_end_index=2, moe_layer_interval=2,
                             moe_num_shared_experts=0, tie_word_embeddings=False),
    "phimoe": _of("Phimoe", _PHI),
    "phimoe_longrope": _of("Phimoe", _PHI, rope_parameters=_LONG_ROPE, sliding_window=6),
    "granitemoe": _of("GraniteMoe", _GRANITE, tie_word_embeddings=True),
    "granitemoeshared": _of("GraniteMoeShared", _GRANITE, shared_intermediate_size=21,
                            attention_bias=True),
    "dots1": _of("Dots1", _GROUPED, attention_bias=True, sliding_window=6, max_window_layers=2),
    "exaone_moe": _of("ExaoneMoe", _EXAONE),
    "exaone_moe_types": _of(
        "ExaoneMoe", _EXAONE, mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        sliding_window_pattern=2),
    "flex_olmo": _of("FlexOlmo", _OLMOE, num_experts=7, pad_token_id=None),
    "afmoe": _of("Afmoe", _AFMOE),
    "afmoe_experts": _of("Afmoe", _AFMOE, num_dense_layers=0, mup_enabled=False,
                         attention_bias=True, global_attn_every_n_layers=2),
    "gemma4_moe": _of("Gemma4Text", _GEMMA4),
    "llama4": _of("Llama4Text", _LLAMA4),
    "llama4_plain": _of(
        "Llama4Text", _LLAMA4, use_qk_norm=False, attention_bias=True, moe_layers=[0, 1, 2, 3],
        no_rope_layers=[1, 0, 1, 1], attention_chunk_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "solar_open": _of("SolarOpen", _GROUPED, head_dim=6),
    **{key: config for key, config in LATENT.items() if key != "deepseek_v3_dense"},
    "qwen3_next": _of("Qwen3Next", _QWEN3_NEXT),
    "qwen3_next_dense": _of("Qwen3Next", _QWEN3_NEXT, mlp_only_layers=[2], attention_bias=True),
    "qwen3_5_moe": _of("Qwen3_5MoeText", _QWEN2, num_hidden_layers=4, num_attention_heads=3,
                       head_dim=16, shared_expert_intermediate_size=9,
                       **HYBRID | {"layer_types": None})}


def limit_as_configured(model) -> None:
    """Let transformers' experts of gpt-oss go by the limit of their config: older releases have
    one of 7, whatever it says."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
