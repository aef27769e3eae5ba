"""GGUF architectures: llama.cpp's and Hugging Face's names of values and tensors. No torch.

To add an architecture, add an entry to `ARCHITECTURES`. It maps names, and says how llama.cpp's
converter changes the tensors. The tables of the gguf package are not used: it imports numpy, and
its name map has no inverse.

Sources: the folder conversion of llama.cpp; constants.py and tensor_mapping.py of its gguf package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from flexgen_h2o.models.gguf import values
from flexgen_h2o.models.gguf.header import Metadata

Table = Mapping[str, str]
Keys = Mapping[str, "str | tuple[str, float]"]
"""Keys of config.json to keys of a GGUF file, with the value for files without the key."""


def _table(*tables: Mapping[str, Any], **others: Any) -> Mapping[str, Any]:
    return MappingProxyType({name: value for table in (*tables, others)
                             for name, value in table.items()})


def _without(table: Table, *names: str) -> Table:
    return _table({name: value for name, value in table.items() if name not in names})


def _in_block(table: Table, block: str) -> Table:
    """Return a table whose tensors of the MLP have another name for it."""
    return _table({name: value.replace("mlp.", f"{block}.") for name, value in table.items()})


_OUTER = _table({"token_embd": "model.embed_tokens", "output_norm": "model.norm",
                 "output": "lm_head"})
_ATTENTION = _table(attn_norm="input_layernorm", attn_q="self_attn.q_proj",
                    attn_k="self_attn.k_proj", attn_v="self_attn.v_proj",
                    attn_output="self_attn.o_proj")
_FUSED_ATTENTION = _table(attn_norm="input_layernorm", attn_output="self_attn.o_proj",
                          attn_qkv="self_attn.qkv_proj")
_QK_NORMS = _table(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_FFN_NORM = _table(ffn_norm="post_attention_layernorm")
_POST_NORM = _table(post_attention_norm="post_attention_layernorm")
_UP_DOWN = _table(ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_FUSED_MLP = _table(ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj")
_MLP = _table(_UP_DOWN, ffn_gate="mlp.gate_proj")
# One tensor for all experts of a layer becomes one per expert.
_EXPERTS = _table(
    ffn_gate_inp="mlp.gate", ffn_gate_exps="mlp.experts.{}.gate_proj",
    ffn_up_exps="mlp.experts.{}.up_proj", ffn_down_exps="mlp.experts.{}.down_proj")
_SHARED_EXPERTS = _table(
    ffn_gate_shexp="mlp.shared_experts.gate_proj", ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj")
_SHARED_EXPERT = _table({name: value.replace("experts", "expert")
                         for name, value in _SHARED_EXPERTS.items()})
_GATED_EXPERT = _table(_SHARED_EXPERT, ffn_gate_inp_shexp="mlp.shared_expert_gate")
_DECODER = _table(_ATTENTION, _FFN_NORM, _MLP)
_MIXTURE = _table(_ATTENTION, _FFN_NORM, _EXPERTS)
_BLOCK_MIXTURE = _table(  # as in Mixtral
    _ATTENTION, _FFN_NORM, ffn_gate_inp="block_sparse_moe.gate",
    ffn_gate_exps="block_sparse_moe.experts.{}.w1", ffn_up_exps="block_sparse_moe.experts.{}.w3",
    ffn_down_exps="block_sparse_moe.experts.{}.w2")
_GROUPED_MIXTURE = _table(  # as in DeepSeek V3, whose first layers are dense
    _MIXTURE, _MLP, _SHARED_EXPERTS, exp_probs_b="mlp.gate.e_score_correction_bias")
_SANDWICH = _table(_ATTENTION, _POST_NORM, _MLP, ffn_norm="pre_feedforward_layernorm",
                   post_ffw_norm="post_feedforward_layernorm")
_HYBRID = _table(
    _ATTENTION, _QK_NORMS, _POST_NORM,
    attn_qkv="linear_attn.in_proj_qkv", attn_gate="linear_attn.in_proj_z",
    ssm_alpha="linear_attn.in_proj_a", ssm_beta="linear_attn.in_proj_b",
    ssm_conv1d="linear_attn.conv1d", ssm_a="linear_attn.A_log", ssm_dt="linear_attn.dt_bias",
    ssm_norm="linear_attn.norm", ssm_out="linear_attn.out_proj")
_NEXTN = _table({"nextn.enorm": "enorm", "nextn.hnorm": "hnorm", "nextn.eh_proj": "eh_proj",
                 "nextn.shared_head_norm": "shared_head.norm"})  # multi-token prediction
_LATENT = _table(
    _GROUPED_MIXTURE, attn_q_a="self_attn.q_a_proj", attn_q_a_norm="self_attn.q_a_layernorm",
    attn_q_b="self_attn.q_b_proj", attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
    attn_kv_a_norm="self_attn.kv_a_layernorm", attn_kv_b="self_attn.kv_b_proj",
    attn_k_b="self_attn.k_b_proj", attn_v_b="self_attn.v_b_proj")

HEAD_MAPS = ("attn_k_b", "attn_v_b")
"""Tensors with the maps of each head from latents to keys, and to values."""

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Tensors with all experts of a layer."""

DELTA_NET = ("attn_qkv", "attn_gate")
"""Tensors with the queries, keys and values of a gated DeltaNet, and with the gates of values."""

NEXTN_COPIES = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Ends of names of tensors that a layer for multi-token prediction shares with the model."""

BARE = frozenset({"attn_sinks", "exp_probs_b", "layer_output_scale", "ssm_a", "ssm_dt"})
"""Tensors that have no ".weight" or ".bias" on the hub."""

_SIZES = _table(max_position_embeddings="context_length", hidden_size="embedding_length",
                num_hidden_layers="block_count", num_attention_heads="attention.head_count",
                intermediate_size="feed_forward_length")
_PER_TOKEN = _table(_SIZES, num_experts_per_tok="expert_used_count")
_ROUTED = _table(_PER_TOKEN, num_experts="expert_count")
_NARROW_ROUTED = _table(_ROUTED, moe_intermediate_size="expert_feed_forward_length",
                        num_shared_experts="expert_shared_count")
_GROUPS = _table(  # as in DeepSeek V3
    first_k_dense_replace=("leading_dense_block_count", 0), n_group=("expert_group_count", 1),
    topk_group=("expert_group_used_count", 1),
    num_nextn_predict_layers=("nextn_predict_layers", 0))
_GROUPED = _table(_PER_TOKEN, _GROUPS, n_routed_experts="expert_count",
                  moe_intermediate_size="expert_feed_forward_length",
                  n_shared_experts="expert_shared_count")
_LOCAL = _table(_PER_TOKEN, num_local_experts="expert_count")
_NARROW = _table(_LOCAL, intermediate_size="expert_feed_forward_length")
_RMS = _table(rms_norm_eps="attention.layer_norm_rms_epsilon")
_NORM = _table(layer_norm_eps="attention.layer_norm_epsilon")
_GROUPED_NUMBERS = _table(_RMS, routed_scaling_factor=("expert_weights_scale", 1.0))
_GROUPED_FLAGS = _table(norm_topk_prob=("expert_weights_norm", False))
_GRANITE_NUMBERS = _table(
    _RMS, embedding_multiplier=("embedding_scale", 1.0), logits_scaling=("logit_scale", 1.0),
    residual_multiplier=("residual_scale", 1.0))

_QKV = ("attn_q", "attn_k", "attn_v")
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_ATTENTION_BIAS: Mapping[str, tuple[str, ...]] = {"attention_bias": (*_QKV, "attn_output")}
_BIASES: Mapping[str, tuple[str, ...]] = {**_ATTENTION_BIAS, "mlp_bias": _FFN}


@dataclass(frozen=True)
class Architecture:
    """Names and tensor layout of one GGUF architecture, relative to its Hugging Face model.

    Attributes
    ----------
    model_type, class_name : str
        Names of the model in config.json.
    layer : mapping
        Tensor names after "blk.0" to names after `layers`.0. With "{}" the tensor is stacked:
        each entry of its first axis becomes a tensor of that number.
    outer : mapping
        Names of the other tensors.
    layers : str
        Prefix of the layers' names.
    counts, numbers, flags : Keys
        Integers, floats and booleans of config.json.
    fixed : mapping
        Constant entries of config.json. hidden_act is "silu" unless it is among them.
    biases : mapping
        Keys of config.json to names of tensors, any of which may have a bias.
    extras : callable (Metadata, head_dim) -> dict
        Returns the other entries of config.json.
    rope : callable (Metadata, head_dim) -> dict
        Returns `rope_parameters` of config.json.
    interleaved : bool
        Whether rows of query and key projections rotate in pairs (2i, 2i + 1), instead of
        (i, i + head_dim / 2) as on the hub. False if both rotate in pairs (2i, 2i + 1).
    shifted : bool
        Whether 1 was added to the weights of norms, except for "ssm_norm".
    tiled_heads : bool
        Whether the value heads of gated DeltaNets are sorted by their number within the group of a
        key head, instead of by key head.
    fused_delta_net : str
        Name after `layers`.0 of the tensor that has "attn_qkv" and "attn_gate" on the hub, by key
        head; empty if they are two tensors there.
    fused_heads : bool
        Whether the rows of the fused projection are all queries, all keys, all values, instead of
        query, key and value of each head.
    single_rows : frozenset
        Vectors that are matrices of one row on the hub.
    fused_experts : tuple of str
        Names after `layers`.0 of the tensors that have gate and up, and down, of all experts of a
        layer on the hub; empty if each expert has its own tensors there.
    layer_values : mapping
        Keys of the file with a number for each layer to names, after `layers`.0, of the tensors of
        one element that these are on the hub.
    """

    model_type: str
    class_name: str
    layer: Table = field(default_factory=lambda: _DECODER)
    outer: Table = field(default_factory=lambda: _OUTER)
    layers: str = "model.layers"
    counts: Keys = field(default_factory=lambda: _SIZES)
    numbers: Keys = field(default_factory=lambda: _RMS)
    flags: Keys = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extras: Callable[[Metadata, int], dict[str, Any]] = lambda meta, head_dim: {}
    rope: Callable[[Metadata, int], dict[str, Any]] = values.rope
    interleaved: bool = False
    shifted: bool = False
    tiled_heads: bool = False
    fused_delta_net: str = ""
    fused_heads: bool = False
    single_rows: frozenset[str] = frozenset({"ffn_gate_inp_shexp"})
    fused_experts: tuple[str, ...] = ()
    layer_values: Table = field(default_factory=dict)

    @property
    def float32(self) -> frozenset[str]:
        """Names of tensors that stay in float32 in a converted model: routers with corrections."""
        return frozenset({"exp_probs_b", "ffn_gate_inp"} if "exp_probs_b" in self.layer else ())


_NO_WINDOW: Mapping[str, Any] = {"use_sliding_window": False}
_ALL_ROUTED: Mapping[str, Any] = {**_NO_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GEMMA: Mapping[str, Any] = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
_LINEAR = _table(linear_conv_kernel_dim="ssm.conv_kernel", linear_key_head_dim="ssm.state_size",
                 linear_num_key_heads="ssm.group_count",
                 linear_num_value_heads="ssm.time_step_rank")
_LLAMA = Architecture("llama", "LlamaForCausalLM", biases=_BIASES, interleaved=True)
_OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", biases=_ATTENTION_BIAS,
    layer=_without(_table(_SANDWICH, _QK_NORMS), "attn_norm", "ffn_norm"))
_QWEN35 = Architecture(
    "qwen3_5_text", "Qwen3_5ForCausalLM", counts=_table(_SIZES, _LINEAR), extras=values.qwen35,
    biases=_ATTENTION_BIAS, rope=values.partial_rope, shifted=True, tiled_heads=True,
    layer=_table(_HYBRID, _MLP))
_COHERE = Architecture("cohere", "CohereForCausalLM",
                       numbers=_table(_NORM, logit_scale="logit_scale"),
                       layer=_without(_DECODER, "ffn_norm"))

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", fixed=_NO_WINDOW),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", layer=_table(_DECODER, _QK_NORMS),
                          fixed=_NO_WINDOW, biases=_ATTENTION_BIAS),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", extras=values.phi3, rope=values.phi3_rope,
                         layer=_table(_FUSED_ATTENTION, _FFN_NORM, _FUSED_MLP)),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", layer=_SANDWICH, fixed=_GEMMA, extras=values.gemma2,
        shifted=True,
        numbers=_table(_RMS, attn_logit_softcapping=("attn_logit_softcapping", 50.0),
                       final_logit_softcapping=("final_logit_softcapping", 30.0))),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", layer=_table(_SANDWICH, _QK_NORMS),
                           fixed=_GEMMA, extras=values.gemma3,
                           rope=values.gemma3_rope, shifted=True),
    "gemma4": Architecture(
        "gemma4_text", "Gemma4ForCausalLM", fixed=_GEMMA, extras=values.gemma4,
        rope=values.gemma4_rope,
        layer=_table(_SANDWICH, _QK_NORMS, layer_output_scale="layer_scalar")),
    "olmo2": _OLMO2,
    "exaone4": replace(_OLMO2, model_type="exaone4", class_name="Exaone4ForCausalLM", biases={},
                       extras=values.exaone4),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", biases=_BIASES, interleaved=True,
                            fixed={"no_rope_layer_interval": 4}),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM", biases=_ATTENTION_BIAS, rope=values.partial_rope,
        layer=_table(_ATTENTION, _FFN_NORM, _FUSED_MLP, post_ffw_norm="post_mlp_layernorm",
                     post_attention_norm="post_self_attn_layernorm")),
    "apertus": Architecture(
        "apertus", "ApertusForCausalLM", fixed={"hidden_act": "xielu"}, biases=_ATTENTION_BIAS,
        layer_values={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n")},
        layer=_table(_ATTENTION, _QK_NORMS, _UP_DOWN, attn_norm="attention_layernorm",
                     ffn_norm="feedforward_layernorm")),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, model_type="cohere2", class_name="Cohere2ForCausalLM",
                       extras=values.alternating(4)),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM",
                             biases={"use_bias": (*_QKV, "attn_output", *_FFN)}),
    "granite": Architecture("granite", "GraniteForCausalLM", numbers=_GRANITE_NUMBERS,
                            biases=_BIASES, extras=values.granite, interleaved=True),
    "stablelm": Architecture(
        "stablelm", "StableLmForCausalLM", numbers=_NORM, biases={"use_qkv_bias": _QKV},
        extras=values.stablelm, rope=values.partial_rope,
        layer=_table(_DECODER, attn_q_norm="self_attn.q_layernorm.norms.{}",
                     attn_k_norm="self_attn.k_layernorm.norms.{}")),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", layer=_table(_ATTENTION, _POST_NORM, _MLP),
        biases={"attention_bias": _QKV, "attention_out_bias": ("attn_output",),
                "mlp_bias": _FFN}),
    "gptneox": Architecture(
        "gpt_neox", "GPTNeoXForCausalLM", numbers=_NORM, fixed={"hidden_act": "gelu"},
        flags={"use_parallel_residual": ("use_parallel_residual", True)}, extras=values.gpt_neox,
        biases={"attention_bias": ("attn_qkv",)}, rope=values.partial_rope, fused_heads=True,
        layers="gpt_neox.layers",
        outer=_table({"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
                      "output": "embed_out"}),
        layer=_table(_FFN_NORM, attn_norm="input_layernorm", attn_qkv="attention.query_key_value",
                     attn_output="attention.dense", ffn_up="mlp.dense_h_to_4h",
                     ffn_down="mlp.dense_4h_to_h")),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", counts=_ROUTED, extras=values.qwen2_moe,
        fixed={**_ALL_ROUTED, "norm_topk_prob": False}, layer=_table(_MIXTURE, _GATED_EXPERT)),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35, model_type="qwen3_5_moe_text", class_name="Qwen3_5MoeForCausalLM",
        counts=_table(_without(_ROUTED, "intermediate_size"), _LINEAR), extras=values.qwen35_moe,
        layer=_table(_HYBRID, _EXPERTS, _GATED_EXPERT)),
    "qwen3next": replace(
        _QWEN35, model_type="qwen3_next", class_name="Qwen3NextForCausalLM", tiled_heads=False,
        counts=_table(_ROUTED, _LINEAR), fixed={**_ALL_ROUTED, "norm_topk_prob": True},
        extras=values.qwen35_moe, fused_delta_net="linear_attn.in_proj_qkvz",
        layer=_table(_HYBRID, _EXPERTS, _GATED_EXPERT, ssm_ba="linear_attn.in_proj_ba",
                     ssm_in="linear_attn.in_proj_qkvz")),  # in older files
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", counts=_ROUTED, layer=_table(_MIXTURE, _QK_NORMS),
        fixed={**_ALL_ROUTED, "norm_topk_prob": True}, biases=_ATTENTION_BIAS,
        extras=values.expert_sizes),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", counts=_ROUTED,
                          layer=_table(_MIXTURE, _QK_NORMS), biases=_ATTENTION_BIAS,
                          fixed={"norm_topk_prob": False}),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", counts=_NARROW, extras=values.alternating(2),
        fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        fixed={"attention_bias": True, "swiglu_limit": 7.0},
        layer=_table(_ATTENTION, _POST_NORM, _EXPERTS, attn_sinks="self_attn.sinks",
                     ffn_gate_inp="mlp.router")),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", counts=_GROUPED, numbers=_GROUPED_NUMBERS,
        flags=_GROUPED_FLAGS, biases={"attention_bias": _QKV}, extras=values.glm4_moe,
        rope=values.partial_rope,
        layer=_without(_table(_GROUPED_MIXTURE, _QK_NORMS, _POST_NORM, _NEXTN), "ffn_norm")),
    "dots1": Architecture(
        "dots1", "Dots1ForCausalLM", counts=_GROUPED, numbers=_GROUPED_NUMBERS,
        flags=_GROUPED_FLAGS, biases={"attention_bias": _QKV},
        layer=_table(_GROUPED_MIXTURE, _QK_NORMS)),
    "deepseek2": Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", numbers=_GROUPED_NUMBERS, flags=_GROUPED_FLAGS,
        biases={"attention_bias": _QKV}, extras=values.deepseek2, rope=values.deepseek_rope,
        layer=_LATENT,
        counts=_table(_GROUPED, kv_lora_rank="attention.kv_lora_rank",
                      qk_rope_head_dim="rope.dimension_count")),
    "llama4": Architecture(
        "llama4_text", "Llama4ForCausalLM", extras=values.llama4,
        counts=_table(_NARROW, intermediate_size_mlp="feed_forward_length",
                      interleave_moe_layer_step="interleave_moe_layer_step"),
        fixed={"attention_bias": False, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
               "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        fused_experts=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        layer=_table(_in_block(_table(_MIXTURE, _MLP, _SHARED_EXPERT), "feed_forward"),
                     ffn_gate_inp="feed_forward.router")),
    "afmoe": Architecture(
        "afmoe", "AfmoeForCausalLM", biases=_ATTENTION_BIAS, extras=values.alternating(4),
        counts=_table(_NARROW_ROUTED, num_dense_layers=("leading_dense_block_count", 0)),
        numbers=_table(_RMS, route_scale=("expert_weights_scale", 1.0)),
        fixed={"mup_enabled": True, "global_attn_every_n_layers": 4},
        layer=_table(_GROUPED_MIXTURE, _QK_NORMS, _POST_NORM, attn_gate="self_attn.gate_proj",
                     ffn_norm="pre_mlp_layernorm", post_ffw_norm="post_mlp_layernorm",
                     ffn_gate_inp="mlp.router.gate", exp_probs_b="mlp.expert_bias")),
    "exaone-moe": Architecture(
        "exaone_moe", "ExaoneMoeForCausalLM", counts=_table(_NARROW_ROUTED, _GROUPS),
        numbers=_GROUPED_NUMBERS, flags=_GROUPED_FLAGS, biases={"attention_bias": _QKV},
        extras=values.exaone4,
        layer=_table(_GROUPED_MIXTURE, _QK_NORMS, exp_probs_b="mlp.e_score_correction_bias")),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", fixed={"use_bias": False},
        single_rows=frozenset({"exp_probs_b"}),
        counts=_table(_SIZES, moe_num_experts="expert_count", moe_k="expert_used_count",
                      moe_layer_interval="interleave_moe_layer_step",
                      moe_intermediate_size="expert_feed_forward_length",
                      moe_num_shared_experts=("expert_shared_count", 0),
                      moe_layer_start_index=("leading_dense_block_count", 0)),
        layer=_table(_GROUPED_MIXTURE, exp_probs_b="mlp.moe_statics.e_score_correction_bias")),
    "minimax-m2": Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", rope=values.partial_rope, counts=_NARROW,
        layer=_table(_BLOCK_MIXTURE, _QK_NORMS,
                     exp_probs_b="block_sparse_moe.e_score_correction_bias")),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", counts=_LOCAL, numbers=_GRANITE_NUMBERS,
        biases=_ATTENTION_BIAS, extras=values.granite, interleaved=True,
        fused_experts=("block_sparse_moe.input_linear.weight",
                       "block_sparse_moe.output_linear.weight"),
        layer=_table(_in_block(_MIXTURE, "block_sparse_moe"),
                     ffn_gate_inp="block_sparse_moe.router.layer")),
    "phimoe": Architecture("phimoe", "PhimoeForCausalLM", counts=_LOCAL, biases=_ATTENTION_BIAS,
                           extras=values.phimoe, rope=values.phimoe_rope, layer=_BLOCK_MIXTURE),
})
"""By `general.architecture`."""

_MIXTRAL = replace(
    _LLAMA, model_type="mixtral", class_name="MixtralForCausalLM", biases={}, counts=_LOCAL,
    layer=_BLOCK_MIXTURE)
_DEEPSEEK_V2 = replace(ARCHITECTURES["deepseek2"], model_type="deepseek_v2",
                       class_name="DeepseekV2ForCausalLM", extras=values.deepseek_v2)
_OLMO3 = replace(_OLMO2, model_type="olmo3", class_name="Olmo3ForCausalLM",
                 extras=values.alternating(4), rope=values.layered_rope)


def variant(meta: Metadata) -> Architecture | None:
    """Return the architecture of a file; None if it is not supported.

    Mixtral is stored as a "llama" with experts, OLMo 3 as an "olmo2" with windows, DeepSeek V2 as
    a "deepseek2" whose routers have no correction. GLM-4.7-Flash computes as DeepSeek V3.
    """
    if meta.architecture == "deepseek2" and not any("exp_probs_b" in name for name in meta.tensors):
        return _DEEPSEEK_V2
    if meta.architecture == "llama" and meta.count("expert_count", 0):
        return _MIXTRAL
    if meta.architecture == "olmo2" and meta.has("attention.sliding_window"):
        return _OLMO3
    return ARCHITECTURES.get(meta.architecture)
