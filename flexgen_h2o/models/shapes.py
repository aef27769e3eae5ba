"""Published model shapes, in the words of config.json.

Plain data in today's spelling (`rope_parameters`), read by `spec.from_transformers` like any other
config.json. A shape is enough for the memory plan and for `--path _DUMMY_`; a real checkpoint
brings its own config. Values are those of the configs published on huggingface.co; the 175B shape
is that of the OPT paper (arXiv 2205.01068, table 1), whose weights are not published there.
"""

from __future__ import annotations

from typing import Any


def _opt(hidden: int, layers: int, heads: int, **other) -> dict[str, Any]:
    return {"model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "ffn_dim": 4 * hidden, "dtype": "float16", **other}


def _llama(hidden: int, layers: int, heads: int, ffn: int, **other) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "intermediate_size": ffn, "dtype": "float16", **other}


def _llama3(**other) -> dict[str, Any]:
    return _llama(4096, 32, 32, 14336, vocab_size=128256, num_key_value_heads=8,
                  rms_norm_eps=1e-5, bos_token_id=128000, eos_token_id=128001,
                  **{"dtype": "bfloat16", **other})


def _pythia(hidden: int, layers: int, heads: int, **other) -> dict[str, Any]:
    return {"model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": 50304,
            "eos_token_id": 0, "dtype": "float16", **other}


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
    "huggyllama/llama-7b": _llama(4096, 32, 32, 11008),
    "huggyllama/llama-13b": _llama(5120, 40, 40, 13824),
    "huggyllama/llama-30b": _llama(6656, 60, 52, 17920),
    "huggyllama/llama-65b": _llama(8192, 80, 64, 22016, rms_norm_eps=1e-5),
    "meta-llama/Llama-2-7b-hf": _llama(4096, 32, 32, 11008, **_LLAMA2),
    "meta-llama/Llama-2-13b-hf": _llama(5120, 40, 40, 13824, **_LLAMA2),
    "meta-llama/Llama-2-70b-hf": _llama(8192, 80, 64, 28672, num_key_value_heads=8, **_LLAMA2),
    "meta-llama/Meta-Llama-3-8B": _llama3(
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "meta-llama/Llama-3.1-8B": _llama3(
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192}),
    "mistralai/Mistral-7B-v0.3": {
        "model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "sliding_window": None, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
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
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "allenai/OLMoE-1B-7B-0924": {
        "model_type": "olmoe", "intermediate_size": 1024, "dtype": "bfloat16"},
    "Qwen/Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe", "max_position_embeddings": 8192, "bos_token_id": 151643,
        "eos_token_id": 151643, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128,
        "max_position_embeddings": 40960, "norm_topk_prob": True, "bos_token_id": 151643,
        "eos_token_id": 151645, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "HuggingFaceTB/SmolLM2-135M": _llama(
        576, 30, 9, 1536, vocab_size=49152, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
}

# Repositories known under a second name.
SAME_AS = {"meta-llama/Meta-Llama-3.1-8B": "meta-llama/Llama-3.1-8B"}
