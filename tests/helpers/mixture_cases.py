"""Tiny mixtures of experts of odd shapes: the transformers config of each branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZES = {"vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 5,
         "num_key_value_heads": 1, "intermediate_size": 27, "max_position_embeddings": 256}


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
}


def limit_as_configured(model) -> None:
    """Let transformers' experts of gpt-oss go by the limit of their config: older releases have
    one of 7, whatever it says."""
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
