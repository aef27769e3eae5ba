"""Tiny models of every GGUF architecture, and what llama.cpp's converter makes of them.

Names of tensors are those that the gguf package's own name map gives. What the converter does to
tensors and the keys that it writes are done here as its sources do them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file

VOCAB, LAYERS = 260, 2
_SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
          "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
          "pad_token_id": None, "tie_word_embeddings": False}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
         "beta_slow": 1.0, "original_max_position_embeddings": 128}
_WINDOWS = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
            "moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5, "norm_topk_prob": True}
_HEADS = {"kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 10,
          "num_key_value_heads": 4}
Weights = dict[str, np.ndarray]
Tensors = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """A model of the hub and the GGUF architecture that it becomes.

    `keys` are values that the converter writes beside the usual ones, `changed` what it does to a
    tensor (given its name, its values and the model's config, it gives the tensors in its place),
    and `more` writes whatever else there is.
    """

    architecture: str
    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    changed: Callable[[str, np.ndarray, Any], Tensors] | None = None
    more: Callable[[GGUFWriter, Any], None] = lambda writer, config: None


def _permuted(name: str, values: np.ndarray, config: Any) -> Tensors:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2])
    if heads:
        shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
        values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    yield name, values


def _one_more(name: str, values: np.ndarray, config: Any) -> Tensors:
    yield name, values + 1 if name.endswith("norm.weight") else values


def _sorted_heads(name: str, values: np.ndarray, config: Any) -> Tensors:
    if "query_key_value" in name:
        split = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
        values = split.swapaxes(0, 1).reshape(values.shape)
    yield name, values


def _split_gates(name: str, values: np.ndarray, config: Any) -> Tensors:
    """gpt-oss: gates and ups are columns (or biases) in turn, and matrices are transposed."""
    if "gate_up_proj" not in name and ".down_proj" not in name:
        yield name + ".weight" if name.endswith("sinks") else name, values
        return
    end = ".bias" if name.endswith("_bias") else ".weight"
    name = name.removesuffix("_bias")
    values = values if end == ".bias" else values.swapaxes(1, 2)
    if name.endswith("down_proj"):
        yield name + end, values
    else:
        yield name.replace("gate_up", "gate") + end, values[:, 0::2]
        yield name.replace("gate_up", "up") + end, values[:, 1::2]


def _correction(name: str, values: np.ndarray, config: Any) -> Tensors:
    if name.endswith("e_score_correction_bias"):
        name, values = name.replace("_bias", ".bias"), values.reshape(-1)
    if name.endswith("expert_bias"):
        name += ".bias"
    yield name, values


def _split_maps(name: str, values: np.ndarray, config: Any) -> Tensors:
    """DeepSeek: key and value maps of each head; key maps are transposed."""
    if not name.endswith("kv_b_proj.weight"):
        yield from _correction(name, values, config)
        return
    heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    keys, maps = np.split(heads, [config.qk_nope_head_dim], axis=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), maps


def _split_columns(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Llama 4: gates and ups are the halves of one tensor, and matrices are transposed."""
    if name.endswith("gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=2), strict=True):
            yield name.replace("gate_up", part) + ".weight", half.swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield name + ".weight", values.swapaxes(1, 2)
    else:
        yield name, values


def _split_inputs(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Granite's mixtures: gates and ups are the halves of one tensor."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("input_linear.weight"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", half
    elif name.endswith("output_linear.weight"):
        yield f"blk.{layer}.ffn_down_exps.weight", values
    else:
        yield from _permuted(name, values, config)


def _tiled_heads(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Qwen3.5: value heads in turn for all key heads, and decays in place of their logarithms."""
    if ".linear_attn." not in name:
        yield from _one_more(name, values, config)
        return
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    size = heads * config.linear_value_head_dim
    inner = name.split(".linear_attn.")[1].removesuffix(".weight")
    if inner == "out_proj":
        values = values.reshape(len(values), keys, heads // keys, -1).swapaxes(1, 2).reshape(
            values.shape)
    elif inner != "norm":
        values = values.squeeze(1) if inner == "conv1d" else values
        count = heads if inner in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else size
        last = values[len(values) - count :].reshape(keys, heads // keys, -1)
        last = last.swapaxes(0, 1).reshape(count, *values.shape[1:])
        values = np.concatenate((values[: len(values) - count], last))
    if inner == "A_log":
        values = -np.exp(values)
    yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _flattened_heads(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Qwen3-Next: all queries, keys, values and gates in turn, in place of those by key head."""
    if "in_proj_qkvz" in name:
        keys, shared = config.linear_num_key_heads, (
            config.linear_num_value_heads // config.linear_num_key_heads)
        key, value = config.linear_key_head_dim, shared * config.linear_value_head_dim
        by_head = values.reshape(keys, 2 * (key + value), -1)
        queries, key_rows, value_rows, gates = (
            part.reshape(-1, values.shape[1])
            for part in np.split(by_head, np.cumsum((key, key, value)), axis=1))
        layer = name.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate((queries, key_rows, value_rows))
        yield f"blk.{layer}.attn_gate.weight", gates
        return
    if name.endswith("A_log"):
        values = -np.exp(values)
    elif name.endswith("norm.weight") and ".linear_attn." not in name:
        values = values + 1
    elif "conv1d" in name:
        values = values.squeeze(1)
    yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _older_flattened_heads(name: str, values: np.ndarray, config: Any) -> Tensors:
    """The first files of Qwen3-Next keep the matrix of queries, keys, values and gates."""
    if "in_proj_qkvz" in name:
        yield name, values
    else:
        yield from _flattened_heads(name, values, config)


Keys = Mapping[str, Any]


def _scaling(writer: GGUFWriter, config: Any) -> None:
    scaling = config.rope_parameters
    if scaling["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType[scaling["rope_type"].upper()])
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _llama3(writer: GGUFWriter, config: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    half = len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(half).float() / half)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())


def _proportional(writer: GGUFWriter, config: Any) -> None:
    rotated = 2  # pairs of a quarter of a head of 16
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * 6, np.float32))


def _named_scalars(name: str, values: np.ndarray, config: Any) -> Tensors:
    yield name + ".weight" if name.endswith("layer_scalar") else name, values


def _longrope(writer: GGUFWriter, config: Any) -> None:
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight",
                          np.array(config.rope_parameters[f"{name}_factor"], np.float32))


def _latent_scale(writer: GGUFWriter, config: Any) -> None:
    _scaling(writer, config)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _prediction_layer(writer: GGUFWriter, config: Any) -> None:
    writer.add_nextn_predict_layers(1)
    last = config.num_hidden_layers  # the converter appends its layers to the others
    writer.add_tensor(f"blk.{last}.nextn.eh_proj.weight", np.ones((32, 64), np.float32))
    writer.add_tensor(f"blk.{last}.attn_norm.weight", np.ones(32, np.float32))


def _without_alphas(name: str, values: np.ndarray, config: Any) -> Tensors:
    """Apertus: the parameters of its activation are values, not tensors."""
    if ".act_fn." not in name:
        yield name, values


def _add_alphas(writer: GGUFWriter, weights: Weights) -> None:
    for alpha in ("alpha_p", "alpha_n"):
        numbers = [float(weights[name][0]) for name in sorted(weights)
                   if name.endswith(f".act_fn.{alpha}")]
        if numbers:
            writer.add_array(f"xielu.{alpha}", numbers)


def _rotated(config: Any) -> int:
    head_dim = (config.to_dict().get("head_dim")
                or config.hidden_size // config.num_attention_heads)
    return int(head_dim * config.rope_parameters["partial_rotary_factor"])


def _original_context(config: Any) -> int:
    return config.rope_parameters["original_max_position_embeddings"]


# Values beside the usual ones: the name of a writer's method without "add_", and an attribute of
# the config, a function of it, or a value.
_WIDTHS: Keys = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED_WIDTHS: Keys = {
    **_WIDTHS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_WINDOW: Keys = {"sliding_window": "sliding_window"}
_WINDOW_LAYERS: Keys = {**_WINDOW, "sliding_window_pattern": lambda c: [
    layer == _WINDOWS[0] for layer in c.layer_types]}
_DELTA_NET: Keys = {
    "ssm_conv_kernel": "linear_conv_kernel_dim", "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads", "ssm_time_step_rank": "linear_num_value_heads",
    "ssm_inner_size": lambda c: c.linear_value_head_dim * c.linear_num_value_heads,
    "full_attention_interval": 4, "rope_dimension_count": _rotated,
    "rope_dimension_sections": [1, 1, 0, 0]}
_PARTLY_ROTATED: Keys = {"rope_dimension_count": _rotated,
                         "parallel_residual": "use_parallel_residual"}
_GRANITE: Keys = {
    "attention_scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
_GROUPS: Keys = {
    **_WIDTHS, "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace", "expert_weights_norm": "norm_topk_prob"}
_LATENT: Keys = {
    **_GROUPS, "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "head_count_kv": 1,
    "rope_dimension_count": "qk_rope_head_dim", "value_length": "kv_lora_rank",
    "key_length": lambda c: c.kv_lora_rank + c.qk_rope_head_dim,
    "key_length_mla": lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim,
    "value_length_mla": "v_head_dim"}
_OLDER_LATENT: Keys = {
    **_GROUPS, "kv_lora_rank": "kv_lora_rank", "rope_dimension_count": "qk_rope_head_dim",
    "key_length": lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim, "value_length": "v_head_dim"}
_LLAMA4: Keys = {"interleave_moe_layer_step": "interleave_moe_layer_step",
                 "feed_forward_length": "intermediate_size_mlp",
                 "expert_feed_forward_length": "intermediate_size"}
_ERNIE: Keys = {**_WIDTHS, "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
                "expert_shared_count": "moe_num_shared_experts"}
_AFMOE: Keys = {**_WIDTHS, **_WINDOW, "expert_shared_count": "num_shared_experts",
                "leading_dense_block_count": "num_dense_layers", "expert_weights_norm": True,
                "expert_weights_scale": "route_scale"}
_PHIMOE: Keys = {"rope_dimension_count": 8, "rope_scaling_orig_ctx_len": _original_context,
                 "rope_scaling_attn_factors": lambda c: c.rope_parameters["short_mscale"]}
_NO_SCALING: Keys = {"logit_scale": "logit_scale", "rope_scaling_type": gguf.RopeScalingType.NONE}
_GEMMA2: Keys = {**_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping",
                 "final_logit_softcapping": "final_logit_softcapping"}
_GEMMA3: Keys = {
    **_WINDOW, "rope_scaling_type": gguf.RopeScalingType.LINEAR,
    "rope_freq_base_swa": lambda c: c.rope_parameters["sliding_attention"]["rope_theta"],
    "rope_scaling_factor": lambda c: c.rope_parameters["full_attention"]["factor"]}

_GEMMA4: Keys = {
    **_WINDOW, "sliding_window_pattern": lambda c: [kind[0] == "s" for kind in c.layer_types],
    "key_length": 16, "value_length": 16, "key_length_swa": 12, "value_length_swa": 12,
    "head_count_kv": lambda c: [2, 1], "rope_dimension_count": 16, "rope_dimension_count_swa": 12,
    "rope_freq_base_swa": lambda c: c.rope_parameters["sliding_attention"]["rope_theta"],
    "final_logit_softcapping": "final_logit_softcapping", "shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0}

_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                "partial_rotary_factor": 0.5}}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
         "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.0, 2.0, 4.5],
         "original_max_position_embeddings": 128}
_GEMMA3_ROPE = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}

_DELTA_NETS = {"num_hidden_layers": 5, "head_dim": 12, "linear_num_key_heads": 2,
               "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 4,
               "linear_conv_kernel_dim": 3, **_PARTIAL}
_QWEN3_NEXT = {**_DELTA_NETS, **_EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True,
               "shared_expert_intermediate_size": 24, "mlp_only_layers": []}

CASES: dict[str, Case] = {
    "llama": Case("llama", "llama", changed=_permuted),
    "llama 3": Case("llama", "llama", {"head_dim": 12, "tie_word_embeddings": True,
                                       "rope_parameters": _LLAMA3_ROPE}, more=_llama3,
                    changed=_permuted),
    "gptneox": Case("gptneox", "gpt_neox", {
        "num_key_value_heads": 4, "rope_parameters": _PARTIAL["rope_parameters"],
        "use_parallel_residual": False}, _PARTLY_ROTATED, _sorted_heads),
    "qwen2": Case("qwen2", "qwen2", {"rope_parameters": _YARN}, more=_scaling),
    "qwen3": Case("qwen3", "qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "phi3": Case("phi3", "phi3", {"rope_parameters": _LONG, "sliding_window": None,
                                  "original_max_position_embeddings": 128}, {
        "rope_dimension_count": _rotated, "sliding_window": 0,
        "rope_scaling_orig_ctx_len": _original_context}, more=_longrope),
    "gemma2": Case("gemma2", "gemma2", {
        "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 16,
        "tie_word_embeddings": True, "layer_types": _WINDOWS}, _GEMMA2, _one_more),
    "gemma3": Case("gemma3", "gemma3_text", {
        "num_hidden_layers": 6, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 16,
        "tie_word_embeddings": True, "rope_parameters": _GEMMA3_ROPE}, _GEMMA3, _one_more),
    "gemma4": Case("gemma4", "gemma4_text", {
        "head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 16, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "layer_types": _WINDOWS},
        _GEMMA4, _named_scalars, _proportional),
    "olmo2": Case("olmo2", "olmo2"),
    "olmo3": Case("olmo2", "olmo3", {"num_hidden_layers": 4, "sliding_window": 16}, _WINDOW_LAYERS),
    "exaone4": Case("exaone4", "exaone4", {"num_hidden_layers": 4, "sliding_window": 16,
                                           "layer_types": None}, _WINDOW_LAYERS),
    "exaone4 full": Case("exaone4", "exaone4", {
        "sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
    "smollm3": Case("smollm3", "smollm3", {"num_hidden_layers": 4}, changed=_permuted),
    "glm4": Case("glm4", "glm4", {"head_dim": 12, **_PARTIAL}, {"rope_dimension_count": _rotated}),
    "command-r": Case("command-r", "cohere", {"tie_word_embeddings": True}, _NO_SCALING),
    "cohere2": Case("cohere2", "cohere2", {
        "num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.25,
        "tie_word_embeddings": True}, {**_NO_SCALING, **_WINDOW,
                                       "rope_dimension_count": "head_dim"}),
    "apertus": Case("apertus", "apertus", {"rope_parameters": _LLAMA3_ROPE},
                    changed=_without_alphas, more=_llama3),
    "ernie4_5": Case("ernie4_5", "ernie4_5", {"head_dim": 12}),
    "granite": Case("granite", "granite", {
        "attention_multiplier": 0.25, "embedding_multiplier": 6.0, "residual_multiplier": 0.5,
        "logits_scaling": 4.0}, _GRANITE, _permuted),
    "stablelm": Case("stablelm", "stablelm", {**_PARTIAL, "use_qkv_bias": True}, _PARTLY_ROTATED),
    "stablelm 12b": Case("stablelm", "stablelm", {
        **_PARTIAL, "qk_layernorm": True, "use_parallel_residual": True}, _PARTLY_ROTATED),
    "seed_oss": Case("seed_oss", "seed_oss", {"head_dim": 12}),
    "mixtral": Case("llama", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2,
                                         "head_dim": 8}, changed=_permuted),
    "qwen2moe": Case("qwen2moe", "qwen2_moe", {
        **_EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
        _SHARED_WIDTHS),
    "qwen35": Case("qwen35", "qwen3_5_text", _DELTA_NETS, _DELTA_NET, _tiled_heads),
    "qwen35moe": Case("qwen35moe", "qwen3_5_moe_text", {
        **_DELTA_NETS, **_EXPERTS, "intermediate_size": None, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24}, {**_DELTA_NET, **_SHARED_WIDTHS}, _tiled_heads),
    "qwen3next": Case("qwen3next", "qwen3_next", _QWEN3_NEXT, {**_DELTA_NET, **_SHARED_WIDTHS},
                      _flattened_heads),
    "qwen3next older": Case("qwen3next", "qwen3_next", _QWEN3_NEXT,
                            {**_DELTA_NET, **_SHARED_WIDTHS}, _older_flattened_heads),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", {
        **_EXPERTS, "head_dim": 12, "moe_intermediate_size": 16, "norm_topk_prob": True},
        _WIDTHS),
    "olmoe": Case("olmoe", "olmoe", _EXPERTS),
    "glm4moe": Case("glm4moe", "glm4_moe", {**_GROUPED, "attention_bias": True, "use_qk_norm": True,
                                            "rope_parameters": _PARTIAL["rope_parameters"]}, {
            **_GROUPS, "rope_dimension_count": 4}, _correction, _prediction_layer),
    "dots1": Case("dots1", "dots1", _GROUPED, _GROUPS, _correction),
    "deepseek2": Case("deepseek2", "deepseek_v3", {
        **_GROUPED, **_HEADS, "q_lora_rank": 12, "num_nextn_predict_layers": 0,
        "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}, _LATENT,
        _split_maps, _latent_scale),
    "deepseek2 lite": Case("deepseek2", "deepseek_v2", {
        **_GROUPED, **_HEADS, "q_lora_rank": None, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "topk_method": "greedy"}, _OLDER_LATENT),
    "afmoe": Case("afmoe", "afmoe", {
        **_EXPERTS, "num_hidden_layers": 4, "head_dim": 12, "moe_intermediate_size": 16,
        "num_shared_experts": 2, "num_dense_layers": 1, "sliding_window": 16, "route_scale": 2.5,
        "mup_enabled": True}, _AFMOE, _correction),
    "exaone-moe": Case("exaone-moe", "exaone_moe", {
        **{key: _GROUPED[key] for key in _GROUPED if not key.endswith("d_experts")},
        "num_experts": 6, "num_shared_experts": 2, "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1, "sliding_window": 16}, {
            **_GROUPS, **_WINDOW_LAYERS, "expert_shared_count": "num_shared_experts"},
        _correction, _prediction_layer),
    "llama4": Case("llama4", "llama4_text", {
        "num_hidden_layers": 4, "num_local_experts": 5, "head_dim": 12, "intermediate_size": 16,
        "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "rope_parameters": {
            **_LLAMA3_ROPE, "high_freq_factor": 1.0}}, _LLAMA4, _split_columns,
        _llama3),
    "ernie4_5-moe": Case("ernie4_5-moe", "ernie4_5_moe", {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16,
        "moe_num_shared_experts": 2}, _ERNIE, _correction),
    "minimax-m2": Case("minimax-m2", "minimax_m2", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12,
        "rope_parameters": _PARTIAL["rope_parameters"]}, {
            "expert_feed_forward_length": "intermediate_size", "rope_dimension_count": 6},
        _correction),
    "granitemoe": Case("granitemoe", "granitemoe", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "attention_multiplier": 0.25,
        "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}, _GRANITE,
        _split_inputs),
    "phimoe": Case("phimoe", "phimoe", {
        "num_local_experts": 5, "attention_bias": True, "lm_head_bias": True,
        "original_max_position_embeddings": 128, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 2.0, 4.5, 6.0], "short_mscale": 1.25, "long_mscale": 1.25,
            "original_max_position_embeddings": 128}}, _PHIMOE, more=_longrope),
    "gpt-oss": Case("gpt-oss", "gpt_oss", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "intermediate_size": 64,
        "sliding_window": 16, "layer_types": _WINDOWS, "rope_parameters": {
            **_YARN, "truncate": False}}, {
            **_WINDOW, "expert_feed_forward_length": "intermediate_size"}, _split_gates, _scaling)}


def make(name: str, folder: Path, sizes: Mapping[str, Any] | None = None,
         model_type: str | None = None, **options: Any) -> tuple[Any, Path]:
    """The model of a case with random weights, as transformers has it, and its GGUF in `folder`.

    `sizes` are values of its config, `options` those of `write`. Another `model_type` may be stored
    with the same names.

    Weights are multiples of 2^-10, so that 1 can be added to them and taken away again.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[name]
    config = AutoConfig.for_model(model_type or case.model_type,
                                  **{**_SMALL, **case.options, **(sizes or {})})
    torch.default_generator.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        corrections = (buffer for key, buffer in model.named_buffers()
                       if key.endswith("correction_bias"))
        for parameter in (*model.parameters(), *corrections):
            spread = 0.25 if parameter.dim() == 1 else 0.5
            parameter.add_(torch.randn_like(parameter) * spread).mul_(1024).round_().div_(1024)
    model.save_pretrained(folder / "original")
    weights = load_file(folder / "original" / "model.safetensors")
    path = write(case, config, {key: value.float().numpy() for key, value in weights.items()},
                 folder / f"{name}.gguf", **options)
    return model, path


def write(case: Case, config: Any, weights: Weights, path: Path, kind: Kind | None = None, *,
          random: Mapping[str, str] | None = None, **options: Any) -> Path:
    """A GGUF of the published tensors; matrices in blocks of a `kind`, or of `random_blocks` of the
    type by part of their GGUF name. `options` are the writer's."""
    writer = GGUFWriter(path, case.architecture, **options)
    writer.add_name("tiny")
    _add_values(writer, config)
    add_tokenizer(writer)
    for key, value in case.keys.items():
        value = getattr(config, value) if isinstance(value, str) else (
            value(config) if callable(value) else value)
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    case.more(writer, config)
    _add_alphas(writer, weights)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    extra = getattr(config, "num_nextn_predict_layers", 0)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers + extra)
    for name, values in stacked(_as_converted(case, weights, config)).items():
        called = (name if name.startswith("blk.") else
                  names.get_name(name, (".weight", ".bias")))
        assert called is not None, name
        values = np.ascontiguousarray(values)
        drawn = next((Kind[each] for part, each in (random or {}).items() if part in called), None)
        if drawn is not None and values.ndim > 1:
            raw = random_blocks(drawn.name, int(np.prod(values.shape[:-1])), values.shape[-1], 0.1)
            writer.add_tensor(called, raw.reshape(*values.shape[:-1], -1), raw_dtype=drawn)
        elif kind and values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(called, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(called, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_converted(case: Case, weights: Weights, config: Any) -> Tensors:
    for name, values in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "shared_expert_gate" in name:
            values = values[0]
        yield from (case.changed(name, values, config) if case.changed else [(name, values)])


def stacked(tensors: Tensors) -> Weights:
    """Experts (and norms of single heads) of a layer as one tensor each."""
    single: Weights = {}
    several: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, values in tensors:
        for part in ("experts", "norms"):
            before, found_part, after = name.partition(f".{part}.")
            number, _, rest = after.partition(".")
            if found_part and number.isdigit():
                key = f"{before}.{part}.{rest}" if part == "experts" else f"{before}.{rest}"
                # The converter's names of Mixtral's merged tensors.
                key = key.replace("model.layers", "layers").replace(
                    "block_sparse_moe", "feed_forward") if "block_sparse" in key else key
                several.setdefault(key, []).append((int(number), values))
                break
        else:
            single[name] = values
    return single | {name: np.stack([values for _, values in sorted(parts, key=lambda e: e[0])])
                     for name, parts in several.items()}


def _add_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    extra = getattr(config, "num_nextn_predict_layers", 0)
    writer.add_block_count(config.num_hidden_layers + extra)
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    sizes = config.to_dict()  # attributes that differ between layers cannot be read
    writer.add_head_count_kv(sizes.get("num_key_value_heads") or config.num_attention_heads)
    if sizes.get("head_dim"):
        writer.add_key_length(sizes["head_dim"])
        writer.add_value_length(sizes["head_dim"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def add_tokenizer(writer: GGUFWriter, split: str = "qwen2") -> None:
    """Bytes, two merges and two special tokens: 260 in all."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


SCALE_PLACES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
                "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
                "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Byte offsets of the float16 scale and of the scale of zero points in a block, by type."""
_REACH = {"Q4_0": (8,), "Q4_1": (15, 1), "Q5_0": (16,), "Q5_1": (31, 1), "Q8_0": (128,),
          "Q2_K": (45, 15), "Q3_K": (128,), "Q4_K": (945, 63), "Q5_K": (1953, 63),
          "Q6_K": (4096,), "IQ4_NL": (127,), "IQ4_XS": (4064,)}  # what these are multiplied by


def random_blocks(kind: str, rows: int, inputs: int, spread: float = 1.0) -> np.ndarray:
    """Blocks of random bytes, whose scales are random numbers that give elements of about
    `spread`: uint8 [rows, bytes]. The gguf package itself quantizes to some types only."""
    draw = np.random.default_rng(rows + inputs)
    elements, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = draw.integers(0, 256, (rows * inputs // elements, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + int(np.log2(spread / 4)) + draw.integers(-2, 2, len(blocks))
    for place, reach in zip(SCALE_PLACES.get(kind, ()), _REACH.get(kind, ()), strict=True):
        scales = draw.uniform(0.3, 1, len(blocks)) * draw.choice((-1, 1), len(blocks))
        halves = (scales * spread / reach).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)
