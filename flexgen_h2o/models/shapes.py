"""The config.json of published models, with the keys of transformers 5.

`registry.from_transformers` reads them like any other config.json. They are enough for the memory
plan and for `--path _DUMMY_`. Values are from huggingface.co, OPT-175B's from the OPT paper
(arXiv 2205.01068, table 1).
"""

from __future__ import annotations

from typing import Any


def _float16(model_type: str, hidden: int, layers: int, heads: int, **other) -> dict[str, Any]:
    return {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "dtype": "float16", **other}


def _opt(*sizes: int, **other) -> dict[str, Any]:
    return _float16("opt", *sizes, ffn_dim=4 * sizes[0], **other)


def _llama(*sizes: int, ffn: int, **other) -> dict[str, Any]:
    return _float16("llama", *sizes, intermediate_size=ffn, **other)


def _pythia(*sizes: int, **other) -> dict[str, Any]:
    return _float16("gpt_neox", *sizes, **{
        "intermediate_size": 4 * sizes[0], "vocab_size": 50304, "eos_token_id": 0, **other})


def _sizes(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int,
           **other) -> dict[str, Any]:
    return {**_float16(model_type, hidden, layers, heads), "num_key_value_heads": kv_heads,
            "intermediate_size": ffn, "dtype": "bfloat16", **other}


def _llama3(*sizes: int, **other) -> dict[str, Any]:
    return _sizes("llama", *sizes, **{
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "bos_token_id": 128000,
        "eos_token_id": 128001, "max_position_embeddings": 131072,
        "rope_parameters": _llama3_rope(32.0), **other})


def _rope(theta: float, kind: str = "default", **other) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **other}


def _llama3_rope(factor: float, theta: float = 500000.0, high_freq_factor: float = 4.0
                 ) -> dict[str, Any]:
    return _rope(theta, "llama3", factor=factor, low_freq_factor=1.0,
                 high_freq_factor=high_freq_factor, original_max_position_embeddings=8192)


def _qwen35(model_type: str, **other) -> dict[str, Any]:
    return {"model_type": model_type, "max_position_embeddings": 262144, "dtype": "bfloat16",
            "rope_parameters": _rope(10000000.0, partial_rotary_factor=0.25), **other}


def _qwen2(*sizes: int, **other) -> dict[str, Any]:
    return _sizes("qwen2", *sizes, **{
        "max_position_embeddings": 131072, "rope_parameters": _rope(1000000.0),
        "bos_token_id": 151643, "eos_token_id": 151643, **other})


def _qwen3(*sizes: int, **other) -> dict[str, Any]:
    return _sizes("qwen3", *sizes, head_dim=128, max_position_embeddings=40960,
                  rope_parameters=_rope(1000000.0), bos_token_id=151643, eos_token_id=151645,
                  **other)


def _gemma3(*sizes: int, **other) -> dict[str, Any]:
    return _sizes("gemma3_text", *sizes, sliding_window=1024, rope_parameters={
        "sliding_attention": _rope(10000.0),
        "full_attention": _rope(1000000.0, "linear", factor=8.0)}, **other)


def _gemma4(model_type: str, *sizes: int, global_kv_heads: int, **other) -> dict[str, Any]:
    return _sizes(model_type, *sizes, sliding_window=1024, max_position_embeddings=262144,
                  attention_k_eq_v=True, num_global_key_value_heads=global_kv_heads,
                  final_logit_softcapping=30.0, **other)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _sizes("gpt_oss", 2880, layers, 64, 8, 2880, num_local_experts=experts,
                  quantization_config={"quant_method": "mxfp4"},
                  eos_token_id=[200002, 199999, 200012],
                  rope_parameters=_rope(150000.0, "yarn", factor=32.0, truncate=False,
                                        original_max_position_embeddings=4096))


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def _latent_rope(theta: float, factor: float, mscale: float, **other) -> dict[str, Any]:
    return _rope(theta, "yarn", factor=factor, mscale=mscale, mscale_all_dim=mscale,
                 original_max_position_embeddings=4096, **other)


def _glm4_moe(*sizes: int, experts: int, dense: int, width: int, **other) -> dict[str, Any]:
    return _sizes("glm4_moe", *sizes, head_dim=128, attention_bias=True, n_routed_experts=experts,
                  first_k_dense_replace=dense, moe_intermediate_size=width,
                  rope_parameters=_rope(1000000.0, partial_rotary_factor=0.5),
                  eos_token_id=[151329, 151336, 151338], **other)


_OLMO2 = {"vocab_size": 100352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
          "rope_parameters": _rope(500000.0), "eos_token_id": 100257}
_LLAMA2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}

PUBLISHED: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-2.7b": _opt(2560, 32, 32),
    "facebook/opt-6.7b": _opt(4096, 32, 32),
    "facebook/opt-13b": _opt(5120, 40, 40),
    "facebook/opt-30b": _opt(7168, 48, 56),
    "facebook/opt-66b": _opt(9216, 64, 72),
    "facebook/opt-175b": _opt(12288, 96, 96),
    "huggyllama/llama-7b": _llama(4096, 32, 32, ffn=11008),
    "huggyllama/llama-13b": _llama(5120, 40, 40, ffn=13824),
    "huggyllama/llama-30b": _llama(6656, 60, 52, ffn=17920),
    "huggyllama/llama-65b": _llama(8192, 80, 64, ffn=22016, rms_norm_eps=1e-5),
    "meta-llama/Llama-2-7b-hf": _llama(4096, 32, 32, ffn=11008, **_LLAMA2),
    "meta-llama/Llama-2-13b-hf": _llama(5120, 40, 40, ffn=13824, **_LLAMA2),
    "meta-llama/Llama-2-70b-hf": _llama(8192, 80, 64, ffn=28672, num_key_value_heads=8, **_LLAMA2),
    "meta-llama/Meta-Llama-3-8B": _llama3(4096, 32, 32, 8, 14336, max_position_embeddings=8192,
                                          rope_parameters=_rope(500000.0)),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 32, 32, 8, 14336, rope_parameters=_llama3_rope(8.0)),
    "meta-llama/Llama-3.1-70B": _llama3(8192, 80, 64, 8, 28672, rope_parameters=_llama3_rope(8.0)),
    "meta-llama/Llama-3.2-1B": _llama3(2048, 16, 32, 8, 8192, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _llama3(3072, 28, 24, 8, 8192, tie_word_embeddings=True),
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "sliding_window": 4096, "dtype": "bfloat16", "rope_parameters": _rope(10000.0)},
    "mistralai/Mistral-7B-v0.3": {
        "model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "sliding_window": None, "dtype": "bfloat16",
        "rope_parameters": _rope(1000000.0)},
    "EleutherAI/gpt-neox-20b": {
        "model_type": "gpt_neox", "hidden_act": "gelu_fast", "eos_token_id": 0,
        "dtype": "float16"},
    "EleutherAI/pythia-70m": _pythia(512, 6, 8),
    "EleutherAI/pythia-160m": _pythia(768, 12, 12),
    "EleutherAI/pythia-410m": _pythia(1024, 24, 16),
    "EleutherAI/pythia-1b": _pythia(2048, 16, 8),
    "EleutherAI/pythia-1.4b": _pythia(2048, 24, 16),
    "EleutherAI/pythia-2.8b": _pythia(2560, 32, 32),
    "EleutherAI/pythia-6.9b": _pythia(4096, 32, 32, vocab_size=50432),
    "EleutherAI/pythia-12b": _pythia(5120, 36, 40, vocab_size=50688),
    "mistralai/Mixtral-8x7B-v0.1": {
        "model_type": "mixtral", "max_position_embeddings": 32768, "dtype": "bfloat16",
        "rope_parameters": _rope(1000000.0)},
    "allenai/OLMoE-1B-7B-0924": {
        "model_type": "olmoe", "intermediate_size": 1024, "dtype": "bfloat16"},
    "Qwen/Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "max_position_embeddings": 8192, "bos_token_id": 151643,
        "eos_token_id": 151643, "dtype": "bfloat16",
        "rope_parameters": _rope(1000000.0)},
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128,
        "max_position_embeddings": 40960, "norm_topk_prob": True, "bos_token_id": 151643,
        "eos_token_id": 151645, "dtype": "bfloat16",
        "rope_parameters": _rope(1000000.0)},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next", "max_position_embeddings": 262144, "intermediate_size": 5120,
        "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16",
        "rope_parameters": _rope(10000000.0, partial_rotary_factor=0.25)},
    "Qwen/Qwen3.5-9B": _qwen35("qwen3_5_text"),
    "Qwen/Qwen3.5-27B": _qwen35("qwen3_5_text", hidden_size=5120, num_hidden_layers=64,
                                intermediate_size=17408, num_attention_heads=24,
                                linear_num_value_heads=48),
    "Qwen/Qwen3.5-35B-A3B": _qwen35("qwen3_5_moe_text"),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "zai-org/GLM-4.5-Air": _glm4_moe(4096, 46, 96, 8, 10944, experts=128, dense=1, width=1408),
    "zai-org/GLM-4.6": _glm4_moe(
        5120, 92, 96, 8, 12288, experts=160, dense=3, width=1536, use_qk_norm=True,
        routed_scaling_factor=2.5, max_position_embeddings=202752),
    "baidu/ERNIE-4.5-21B-A3B-PT": {
        "model_type": "ernie4_5_moe", "dtype": "bfloat16", "rope_parameters": _rope(500000.0)},
    "MiniMaxAI/MiniMax-M2": {
        "model_type": "minimax_m2", "dtype": "bfloat16",
        "rope_parameters": _rope(5000000.0, partial_rotary_factor=0.5),
        "quantization_config": _FP8},
    "deepseek-ai/DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
        "max_position_embeddings": 163840, "rope_parameters": _latent_rope(10000.0, 40.0, 0.707),
        "bos_token_id": 100000, "eos_token_id": 100001, "dtype": "bfloat16"},
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", "max_position_embeddings": 163840, "dtype": "bfloat16",
        "rope_parameters": _latent_rope(10000.0, 40.0, 1.0), "quantization_config": _FP8},
    "moonshotai/Kimi-K2-Instruct": {
        "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827, "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0, "dtype": "bfloat16", "bos_token_id": 163584,
        "eos_token_id": 163585, "quantization_config": _FP8,
        "rope_parameters": _latent_rope(50000.0, 32.0, 1.0, beta_fast=1.0, beta_slow=1.0)},
    "zai-org/GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite", "rope_parameters": _rope(1000000.0),
        "eos_token_id": [154820, 154827, 154829], "dtype": "bfloat16"},
    "meta-llama/Llama-4-Scout-17B-16E": {
        "model_type": "llama4_text", "max_position_embeddings": 262144, "bos_token_id": 200000,
        "eos_token_id": 200001, "dtype": "bfloat16",
        "rope_parameters": _llama3_rope(16.0, high_freq_factor=1.0)},
    "meta-llama/Llama-4-Maverick-17B-128E": {
        "model_type": "llama4_text", "max_position_embeddings": 262144, "bos_token_id": 200000,
        "eos_token_id": 200001, "dtype": "bfloat16", "rope_parameters": _rope(500000.0),
        "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    "ibm-granite/granite-3.0-3b-a800m-base": _sizes(
        "granitemoe", 1536, 32, 24, 8, 512, vocab_size=49155, num_local_experts=40,
        num_experts_per_tok=8, max_position_embeddings=4096, rope_parameters=_rope(10000.0),
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, embedding_multiplier=12.0,
        logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.015625),
    # Without the factors of its LongRoPE, which speed does not depend on.
    "microsoft/Phi-3.5-MoE-instruct": {
        "model_type": "phimoe", "attention_bias": True, "lm_head_bias": True,
        "sliding_window": 131072, "rope_parameters": _rope(10000.0), "eos_token_id": 32000,
        "dtype": "bfloat16"},
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, max_position_embeddings=32768,
                                tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, vocab_size=152064),
    "Qwen/Qwen2.5-72B": _qwen2(8192, 80, 64, 8, 29568, vocab_size=152064, rms_norm_eps=1e-5),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 8, 9728, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 8, 12288),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 8, 17408),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 8, 25600),
    "ByteDance-Seed/Seed-OSS-36B-Base": _sizes(
        "seed_oss", 5120, 64, 80, 8, 27648, head_dim=128, rope_parameters=_rope(10000000.0)),
    "microsoft/Phi-3-mini-4k-instruct": _sizes("phi3", 3072, 32, 32, 32, 8192,
                                               sliding_window=2047),
    "microsoft/phi-4": _sizes(
        "phi3", 5120, 40, 40, 10, 17920, vocab_size=100352, max_position_embeddings=16384,
        original_max_position_embeddings=16384, bos_token_id=100257, eos_token_id=100265,
        rope_parameters=_rope(250000.0)),
    "google/gemma-2-2b": _sizes("gemma2", 2304, 26, 8, 4, 9216),
    "google/gemma-2-9b": _sizes("gemma2", 3584, 42, 16, 8, 14336),
    "google/gemma-2-27b": _sizes("gemma2", 4608, 46, 32, 16, 36864, head_dim=128,
                                 query_pre_attn_scalar=144),
    "google/gemma-3-12b-pt": _gemma3(3840, 48, 16, 8, 15360),
    "google/gemma-3-27b-pt": _gemma3(5376, 62, 32, 16, 21504, head_dim=128,
                                     query_pre_attn_scalar=168),
    "google/gemma-4-12B": _gemma4("gemma4_unified_text", 3840, 48, 16, 8, 15360,
                                  global_kv_heads=1),
    "google/gemma-4-26B-A4B": _gemma4(
        "gemma4_text", 2816, 30, 16, 8, 2112, global_kv_heads=2, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704),
    "google/gemma-4-31B": _gemma4("gemma4_text", 5376, 60, 32, 16, 21504, global_kv_heads=4,
                                  hidden_size_per_layer_input=0),
    "ibm-granite/granite-3.0-8b-base": _sizes(
        "granite", 4096, 40, 32, 8, 12800, vocab_size=49155, max_position_embeddings=4096,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22,
        attention_multiplier=0.0078125),
    "allenai/OLMo-2-1124-7B": _sizes("olmo2", 4096, 32, 32, 32, 11008, **_OLMO2),
    "allenai/OLMo-2-1124-13B": _sizes("olmo2", 5120, 40, 40, 40, 13824, **_OLMO2),
    "allenai/Olmo-3-1025-7B": _sizes("olmo3", 4096, 32, 32, 32, 11008, **{
        **_OLMO2, "vocab_size": 100278, "max_position_embeddings": 65536, "rope_parameters": {
            "sliding_attention": _rope(500000.0),
            "full_attention": _rope(500000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0,
                                    original_max_position_embeddings=8192)}}),
    "HuggingFaceTB/SmolLM3-3B": _sizes(
        "smollm3", 2048, 36, 16, 4, 11008, max_position_embeddings=65536, eos_token_id=128012,
        rope_parameters=_rope(5000000.0)),
    "zai-org/GLM-4-9B-0414": _sizes(
        "glm4", 4096, 40, 32, 2, 13696, max_position_embeddings=32768, rms_norm_eps=1e-5,
        rope_parameters=_rope(10000.0, partial_rotary_factor=0.5)),
    "CohereLabs/c4ai-command-r7b-12-2024": _sizes(
        "cohere2", 4096, 32, 32, 8, 14336, max_position_embeddings=132096, logit_scale=0.25,
        rope_parameters=_rope(50000.0)),
    "swiss-ai/Apertus-8B-2509": _sizes(
        "apertus", 4096, 32, 32, 8, 21504, rope_parameters=_llama3_rope(8.0, 12000000.0)),
    "stabilityai/stablelm-3b-4e1t": _sizes("stablelm", 2560, 32, 32, 32, 6912),
    "HuggingFaceTB/SmolLM2-135M": _sizes(
        "llama", 576, 30, 9, 3, 1536, vocab_size=49152, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        rope_parameters=_rope(100000.0)),
}

SAME_AS = {"meta-llama/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
           "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
           "Qwen/Qwen3-Next-80B-A3B-Thinking": "Qwen/Qwen3-Next-80B-A3B-Instruct",
           "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
           "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B"}
