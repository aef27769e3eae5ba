"""Tiny random transformers models that cover every branch of the families.

Nothing is downloaded, and no tokenizer is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from helpers.mixture_cases import HYBRID, LATENT, MIXTURES, config_of, limit_as_configured


@dataclass(frozen=True)
class TinyModel:
    """A saved model: its folder (config.json, safetensors), the float32 model and its config."""

    folder: Path
    model: Any
    config: Any


_SIZES = {"vocab_size": 120, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
          "intermediate_size": 80, "max_position_embeddings": 256}
_of = partial(config_of, _SIZES, num_key_value_heads=2, pad_token_id=None)
_opt = partial(config_of, {
    "vocab_size": 112, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 48}, "OPT")
_llama = partial(config_of, {**_SIZES, "num_key_value_heads": 2}, "Llama")
_mistral = partial(config_of, {**_SIZES, "num_key_value_heads": 3}, "Mistral")


def _neox(*, rotary: float = 0.25, **options: Any) -> Callable[..., Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary}
    return config_of(_SIZES, "GPTNeoX", {"hidden_size": 64, "num_attention_heads": 4,
                                         "rope_parameters": rope}, **options)


LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
             "original_max_position_embeddings": 64}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
             "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
             "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}

_GEMMA4 = {"num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 20, "sliding_window": 6,
           "final_logit_softcapping": 4.0, "layer_types": [
               "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
           "rope_parameters": {
               "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
               "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0,
                                  "partial_rotary_factor": 0.3}}}

# Each makes the transformers config of one branch. The folder of a model has the name of its key.
TINY: dict[str, Callable[[], Any]] = {
    "opt": _opt(),
    "opt_350m_style": _opt(word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt_no_bias": _opt(enable_bias=False, layer_norm_elementwise_affine=False,
                        activation_function="gelu"),
    "opt_untied": _opt(tie_word_embeddings=False, _remove_final_layer_norm=True),
    "llama": _llama(tie_word_embeddings=True),
    "llama_untied_bias": _llama(attention_bias=True, mlp_bias=True, num_key_value_heads=6),
    "llama3_rope": _llama(rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": _llama(rope_parameters=LINEAR_ROPE),
    "llama_head_dim": _llama(head_dim=12, hidden_act="gelu_pytorch_tanh"),
    "mistral": _mistral(sliding_window=None),
    "mistral_window": _mistral(sliding_window=7),
    "llama_yarn": _llama(rope_parameters=YARN_ROPE),
    "llama_dynamic": _llama(rope_parameters=LINEAR_ROPE | {"rope_type": "dynamic"}),
    "qwen2": _of("Qwen2", num_key_value_heads=3),
    "qwen2_windows": _of("Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": _of("Qwen3", head_dim=12, tie_word_embeddings=True),
    "seed_oss": _of("SeedOss", head_dim=12, attention_out_bias=False),
    "phi3": _of("Phi3", sliding_window=20),
    "phi3_longrope": _of("Phi3", hidden_size=96, original_max_position_embeddings=128,
                         tie_word_embeddings=True, rope_parameters=LONG_ROPE),
    "gemma2": _of("Gemma2", head_dim=12, sliding_window=8, query_pre_attn_scalar=20,
                  attn_logit_softcapping=5.0, final_logit_softcapping=4.0),
    "gemma3": _of("Gemma3Text", head_dim=12, sliding_window=6, query_pre_attn_scalar=20,
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "gemma4": _of("Gemma4Text", _GEMMA4, hidden_size_per_layer_input=0, attention_k_eq_v=True,
                  num_global_key_value_heads=1),
    "gemma4_12b": _of("Gemma4UnifiedText", _GEMMA4, attention_bias=True, num_hidden_layers=3,
                      layer_types=["full_attention", "sliding_attention", "full_attention"]),
    "qwen3_5": _of("Qwen3_5Text", num_hidden_layers=5, head_dim=24,
                   tie_word_embeddings=True, **HYBRID),
    "granite": _of("Granite", attention_multiplier=0.2, residual_multiplier=0.4,
                   embedding_multiplier=3.0, logits_scaling=0.5),
    "olmo2": _of("Olmo2"),
    "olmo3": _of("Olmo3", num_hidden_layers=5, sliding_window=7, rope_parameters={
        "full_attention": YARN_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}),
    "exaone4": _of("Exaone4", num_hidden_layers=5, sliding_window=7, head_dim=12),
    "exaone4_full": _of("Exaone4", sliding_window=None, rope_parameters=LLAMA3_ROPE,
                        layer_types=["full_attention"] * 3),
    "smollm3": _of("SmolLM3", no_rope_layer_interval=2),
    "smollm3_windows": _of("SmolLM3", no_rope_layers=[0, 1, 0], use_sliding_window=True,
                           sliding_window=9, attention_bias=True, tie_word_embeddings=False),
    "glm": _of("Glm", head_dim=12, tie_word_embeddings=True),
    "glm4": _of("Glm4", head_dim=16, attention_bias=False),
    "cohere": _of("Cohere", logit_scale=0.6, attention_bias=True),
    "cohere2": _of("Cohere2", num_hidden_layers=5, sliding_window=7, logit_scale=0.5,
                   tie_word_embeddings=False),
    "apertus": _of("Apertus", num_key_value_heads=3),
    "ernie4_5": _of("Ernie4_5", head_dim=12, use_bias=True),
    "stablelm": _of("StableLm", hidden_size=96, use_qkv_bias=True),
    "stablelm_12b": _of("StableLm", hidden_size=96, qk_layernorm=True, use_parallel_residual=True),
    "neox": _neox(),
    "neox_sequential": _neox(rotary=1.0, use_parallel_residual=False, hidden_act="gelu_fast"),
    "neox_partial": _neox(hidden_act="gelu_new", attention_bias=False, tie_word_embeddings=True),
    "neox_linear_rope": _neox(rope_parameters=LINEAR_ROPE | {
        "partial_rotary_factor": 0.5})}

_TOWER = {"intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
          "num_heads": 2, "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0]}


def _multimodal(model_type: str, text: Any, **tower: Any):
    from transformers import AutoConfig

    text = text if isinstance(text, dict) else text().to_dict()
    widths = dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), text["hidden_size"])
    return AutoConfig.for_model(model_type, text_config=text, vision_config={
        **_TOWER, **widths, **tower})


def _mrope(sections: list[int], **options) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": sections}
    return {**_SIZES, "num_key_value_heads": 2, "pad_token_id": None, **options,
            "rope_parameters": rope | options.get("rope_parameters", {})}


MULTIMODAL: dict[str, Callable[[], Any]] = {
    "gemma3_vision": lambda: _multimodal("gemma3", TINY["gemma3"]),
    "gemma4_vision": lambda: _multimodal("gemma4", TINY["gemma4"](pad_token_id=0).to_dict(),
                                         num_key_value_heads=2, head_dim=24),
    "gemma4_unified": lambda: _multimodal(
        "gemma4_unified", TINY["gemma4_12b"](pad_token_id=0).to_dict(), mm_embed_dim=8,
        mm_posemb_size=4),
    "mistral3": lambda: _multimodal("mistral3", _mistral(sliding_window=None)),
    "llava": lambda: _multimodal("llava", _llama()),
    "aya_vision": lambda: _multimodal("aya_vision", TINY["cohere2"]),
    "llama4_vision": lambda: _multimodal("llama4", MIXTURES["llama4"](vocab_size=120).to_dict()),
    "internvl": lambda: _multimodal("internvl", TINY["qwen2"]),
    "qwen2_vl": lambda: _multimodal("qwen2_vl", _mrope([2, 1, 1])),
    "qwen2_5_vl": lambda: _multimodal("qwen2_5_vl", _mrope([2, 1, 1])),
    "qwen3_vl": lambda: _multimodal("qwen3_vl", _mrope([2, 2, 2], head_dim=12)),
    "qwen3_5_vision": lambda: _multimodal("qwen3_5", _mrope(
        [1, 1, 1], num_hidden_layers=5, head_dim=24, rope_parameters={
            "partial_rotary_factor": 0.25}, **HYBRID)),
    "glm4v": lambda: _multimodal("glm4v", _mrope([2, 1, 1], hidden_size=96, rope_parameters={
        "partial_rotary_factor": 0.5}))}
"""Models with a vision tower, around text models of `TINY`."""


def make_tiny(key: str, folder: Path, **changes: Any) -> TinyModel:
    """Build the model of a key with seeded random weights, and save it.

    `changes` are values of its config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = (TINY | MIXTURES | LATENT | MULTIMODAL)[key](**changes)
    config.eos_token_id = None  # a random model must not happen to stop
    kind = AutoModelForImageTextToText if key in MULTIMODAL else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    if hasattr(model, "set_experts_implementation"):  # grouped products want even shapes
        model.set_experts_implementation("eager")
    limit_as_configured(model)
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    with torch.no_grad():
        buffers = [(name, buffer) for name, buffer in model.named_buffers()
                   if name.endswith(("correction_bias", "layer_scalar"))]
        for name, parameter in (*model.named_parameters(), *buffers):
            # transformers starts biases at 0 and norms at 1: a forgotten one would go unnoticed.
            norm = parameter.dim() == 1 and name.endswith(("weight", "layer_scalar"))
            parameter.normal_(1.0 if norm else 0.0, 0.2, generator=generator)
            parameter.requires_grad_(False)
    model.save_pretrained(folder)
    return TinyModel(folder, model, model.config)
