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

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.gguf.header import Metadata
from flexgen_h2o.models.gguf.rope import (
    deepseek_rope,
    gemma3_rope,
    layered_rope,
    partial_rope,
    phi3_rope,
    rope,
)

Table = Mapping[str, str]


def _table(*tables: Table, **more: str) -> Table:
    return MappingProxyType({name: value for table in (*tables, more)
                             for name, value in table.items()})


_OUTER = _table({"token_embd": "model.embed_tokens", "output_norm": "model.norm",
                 "output": "lm_head"})
_ATTENTION = _table(attn_norm="input_layernorm", attn_q="self_attn.q_proj",
                    attn_k="self_attn.k_proj", attn_v="self_attn.v_proj",
                    attn_output="self_attn.o_proj")
_QK_NORMS = _table(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_MLP = _table(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_DECODER = _table(_ATTENTION, _MLP, ffn_norm="post_attention_layernorm")
_SANDWICH = _table(_ATTENTION, _MLP, post_attention_norm="post_attention_layernorm",
                   ffn_norm="pre_feedforward_layernorm", post_ffw_norm="post_feedforward_layernorm")
# One tensor for all experts of a layer becomes one per expert.
_EXPERTS = _table(_ATTENTION, ffn_norm="post_attention_layernorm", ffn_gate_inp="mlp.gate",
                  ffn_gate_exps="mlp.experts.{}.gate_proj", ffn_up_exps="mlp.experts.{}.up_proj",
                  ffn_down_exps="mlp.experts.{}.down_proj")

_BLOCK_EXPERTS = _table(  # as in Mixtral
    _ATTENTION, ffn_norm="post_attention_layernorm", ffn_gate_inp="block_sparse_moe.gate",
    ffn_gate_exps="block_sparse_moe.experts.{}.w1", ffn_up_exps="block_sparse_moe.experts.{}.w3",
    ffn_down_exps="block_sparse_moe.experts.{}.w2")
_SHARED_EXPERTS = _table(  # with dense layers
    _EXPERTS, _MLP, ffn_gate_shexp="mlp.shared_experts.gate_proj",
    ffn_up_shexp="mlp.shared_experts.up_proj", ffn_down_shexp="mlp.shared_experts.down_proj",
    exp_probs_b="mlp.gate.e_score_correction_bias")

_DELTA_NET = _table(
    attn_qkv="linear_attn.in_proj_qkv", attn_gate="linear_attn.in_proj_z",
    ssm_alpha="linear_attn.in_proj_a", ssm_beta="linear_attn.in_proj_b",
    ssm_conv1d="linear_attn.conv1d", ssm_a="linear_attn.A_log", ssm_dt="linear_attn.dt_bias",
    ssm_norm="linear_attn.norm", ssm_out="linear_attn.out_proj")
_HYBRID = _table(_ATTENTION, _QK_NORMS, _DELTA_NET, post_attention_norm="post_attention_layernorm")
_SHARED_EXPERT = _table(
    ffn_gate_inp_shexp="mlp.shared_expert_gate", ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj", ffn_down_shexp="mlp.shared_expert.down_proj")
_LATENT = _table(
    _SHARED_EXPERTS, attn_q_a="self_attn.q_a_proj", attn_q_a_norm="self_attn.q_a_layernorm",
    attn_q_b="self_attn.q_b_proj", attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
    attn_kv_a_norm="self_attn.kv_a_layernorm", attn_kv_b="self_attn.kv_b_proj",
    attn_k_b="self_attn.k_b_proj", attn_v_b="self_attn.v_b_proj")

HEAD_MAPS = ("attn_k_b", "attn_v_b")
"""Tensors with the maps of each head from latents to keys, and to values."""

EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})
"""Tensors with all experts of a layer."""

_SIZES = _table(max_position_embeddings="context_length", hidden_size="embedding_length",
                num_hidden_layers="block_count", num_attention_heads="attention.head_count",
                intermediate_size="feed_forward_length")
_ROUTED = _table(_SIZES, num_experts="expert_count", num_experts_per_tok="expert_used_count")
_GROUPED = _table(_SIZES, n_routed_experts="expert_count", num_experts_per_tok="expert_used_count")
_LOCAL = _table(_SIZES, num_local_experts="expert_count", num_experts_per_tok="expert_used_count")
_RMS = _table(rms_norm_eps="attention.layer_norm_rms_epsilon")
_NORM = _table(layer_norm_eps="attention.layer_norm_epsilon")


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
    counts, numbers : mapping
        Keys of config.json to keys of the GGUF file, for integers and for floats.
    fixed : mapping
        Constant entries of config.json.
    more : callable (Metadata, head_dim) -> dict
        Returns the other entries of config.json.
    rope : callable (Metadata, head_dim) -> dict
        Returns `rope_parameters` of config.json.
    interleaved : bool
        Whether rows of query and key projections rotate in pairs (2i, 2i + 1), instead of
        (i, i + head_dim / 2) as on the hub. False if both rotate in such pairs.
    shifted : bool
        Whether 1 was added to the weights of norms, except for "ssm_norm".
    delta_nets : bool
        Whether the value heads of gated DeltaNets are sorted by their number within the group of a
        key head, instead of by key head, and "ssm_a" is -exp(A_log).
    fused_heads : bool
        Whether the rows of the fused projection are all queries, all keys, all values, instead of
        query, key and value of each head.
    bare : frozenset
        Names that have no ".weight" or ".bias" on the hub.
    single_rows : frozenset
        Vectors that are matrices of one row on the hub.
    float32 : frozenset
        Names of tensors that stay in float32 in a converted model.
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
    counts: Table = field(default_factory=lambda: _SIZES)
    numbers: Table = field(default_factory=lambda: _RMS)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Metadata, int], dict[str, Any]] = lambda meta, head_dim: {}
    rope: Callable[[Metadata, int], dict[str, Any]] = rope
    interleaved: bool = False
    shifted: bool = False
    delta_nets: bool = False
    fused_heads: bool = False
    bare: frozenset[str] = frozenset()
    single_rows: frozenset[str] = frozenset()
    float32: frozenset[str] = frozenset()
    fused_experts: tuple[str, ...] = ()
    layer_values: Table = field(default_factory=dict)


def extra_layers(meta: Metadata) -> int:
    """Return the layers for multi-token prediction, which are the last in a file."""
    return meta.count("nextn_predict_layers", 0, least=0)


def biased(meta: Metadata, *names: str) -> bool:
    """Return True if any layer has a bias of one of these names."""
    return any(name.startswith("blk.") and name.endswith(".bias") and name.split(".")[2] in names
               for name in meta.tensors)


def _llama(meta: Metadata, head_dim: int) -> dict[str, Any]:
    attention = biased(meta, "attn_q", "attn_k", "attn_v", "attn_output")
    return {"attention_bias": attention,
            "mlp_bias": biased(meta, "ffn_gate", "ffn_up", "ffn_down")}


def _qwen3(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"attention_bias": biased(meta, "attn_q", "attn_k", "attn_v", "attn_output")}


def _seed_oss(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"attention_bias": biased(meta, "attn_q", "attn_k", "attn_v"),
            "attention_out_bias": biased(meta, "attn_output"),
            "mlp_bias": biased(meta, "ffn_gate", "ffn_up", "ffn_down")}


def _granite(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_llama(meta, head_dim),
            "attention_multiplier": meta.number("attention.scale", head_dim**-0.5),
            "embedding_multiplier": meta.number("embedding_scale", 1.0),
            "residual_multiplier": meta.number("residual_scale", 1.0),
            "logits_scaling": meta.number("logit_scale", 1.0)}


def _granite_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    values = _granite(meta, head_dim)
    return {key: value for key, value in values.items() if key != "mlp_bias"}


def _stablelm(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"use_qkv_bias": biased(meta, "attn_q", "attn_k", "attn_v"),
            "qk_layernorm": "blk.0.attn_q_norm.weight" in meta.tensors,
            "use_parallel_residual": meta.flag("use_parallel_residual",
                                               "blk.0.ffn_norm.weight" not in meta.tensors),
            "partial_rotary_factor": meta.count("rope.dimension_count", head_dim) / head_dim}


def _gpt_neox(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"use_parallel_residual": meta.flag("use_parallel_residual", True),
            "attention_bias": biased(meta, "attn_qkv"),
            "rotary_pct": meta.count("rope.dimension_count", head_dim) / head_dim}


def _phi3(meta: Metadata, head_dim: int) -> dict[str, Any]:
    context = meta.count("context_length")
    return {"sliding_window": meta.count("attention.sliding_window", 0, least=0) or None,
            "original_max_position_embeddings": meta.count("rope.scaling.original_context_length",
                                                           context),
            "partial_rotary_factor": meta.count("rope.dimension_count", head_dim) / head_dim}


def _alternating(meta: Metadata, period: int) -> dict[str, Any]:
    """Return the window and the layer types: every `period`-th layer has full attention."""
    layers = meta.count("block_count", least=0)
    period = meta.count("attention.sliding_window_pattern", period) if not (
        flags := meta.flags("attention.sliding_window_pattern", layers)) else period
    window = flags or [place % period < period - 1 for place in range(layers)]
    return {"sliding_window": meta.count("attention.sliding_window"),
            "layer_types": ["sliding_attention" if windowed else "full_attention"
                            for windowed in window]}


def _query_scale(meta: Metadata, head_dim: int, largest: int) -> int:
    """Return the divisor of queries; the largest Gemma of a family has another than head_dim."""
    if meta.count("block_count", least=0) == largest:
        return meta.count("embedding_length") // meta.count("attention.head_count")
    return head_dim


def _gemma2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_alternating(meta, 2), "query_pre_attn_scalar": _query_scale(meta, head_dim, 46),
            "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0)}


def _gemma3(meta: Metadata, head_dim: int) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    return {**_alternating(meta, 6), "query_pre_attn_scalar": _query_scale(meta, head_dim, 62),
            cap: meta.number(cap) if meta.has(cap) else None}


def _olmo3(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_qwen3(meta, head_dim), **_alternating(meta, 4)}


def _exaone4(meta: Metadata, head_dim: int) -> dict[str, Any]:
    if meta.has("attention.sliding_window"):
        return _alternating(meta, 4)
    return {"sliding_window": None,
            "layer_types": ["full_attention"] * meta.count("block_count", least=0)}


def _cohere(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"logit_scale": meta.number("logit_scale")}


def _cohere2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_cohere(meta, head_dim), **_alternating(meta, 4)}


def _ernie4_5(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"use_bias": any(_llama(meta, head_dim).values())}


def _expert_sizes(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the experts' width, which older files have in their tensors only."""
    shape = meta.tensor("blk.0.ffn_up_exps.weight").shape
    return {"moe_intermediate_size": meta.count("expert_feed_forward_length", shape[-2])}


def _qwen2_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    shared = meta.tensor("blk.0.ffn_up_shexp.weight").shape
    return {**_expert_sizes(meta, head_dim), "shared_expert_intermediate_size":
            meta.count("expert_shared_feed_forward_length", shared[0])}


def _qwen35(meta: Metadata, head_dim: int) -> dict[str, Any]:
    interval = meta.count("full_attention_interval", 4)
    layers = meta.count("block_count", least=0) - extra_layers(meta)
    return {**_qwen3(meta, head_dim), "linear_value_head_dim":
            meta.count("ssm.inner_size") // meta.count("ssm.time_step_rank"),
            "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention"
                            for layer in range(layers)]}


def _qwen35_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_qwen35(meta, head_dim), **_qwen2_moe(meta, head_dim)}


def _qwen3_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_expert_sizes(meta, head_dim), **_qwen3(meta, head_dim)}


def _grouped_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the entries of routers as in DeepSeek V3, and of leading dense layers."""
    return {"moe_intermediate_size": meta.count("expert_feed_forward_length"),
            "n_shared_experts": meta.count("expert_shared_count"),
            "first_k_dense_replace": meta.count("leading_dense_block_count", 0, least=0),
            "n_group": meta.count("expert_group_count", 1),
            "topk_group": meta.count("expert_group_used_count", 1),
            "routed_scaling_factor": meta.number("expert_weights_scale", 1.0),
            "norm_topk_prob": meta.flag("expert_weights_norm", False),
            "attention_bias": biased(meta, "attn_q", "attn_k", "attn_v")}


def _glm4_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {**_grouped_moe(meta, head_dim), "num_nextn_predict_layers": extra_layers(meta),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors}


def _afmoe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    values = _grouped_moe(meta, head_dim)
    return {**_alternating(meta, 4), "num_shared_experts": values["n_shared_experts"],
            "num_dense_layers": values["first_k_dense_replace"],
            "route_scale": values["routed_scaling_factor"],
            "moe_intermediate_size": values["moe_intermediate_size"],
            "attention_bias": biased(meta, "attn_q", "attn_k", "attn_v", "attn_output")}


def _exaone_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    values = _grouped_moe(meta, head_dim)
    shared = values.pop("n_shared_experts")
    return {**values, **_exaone4(meta, head_dim), "num_shared_experts": shared,
            "num_nextn_predict_layers": extra_layers(meta)}


def _llama4(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"use_qk_norm": meta.count("expert_count") != 128}  # as llama.cpp has it


def _deepseek2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    if meta.has("attention.temperature_scale"):
        raise UserError(f"{meta.source}: a scale of attention that depends on positions is not "
                        f"supported of a {meta.architecture} model")
    values, rank = _grouped_moe(meta, head_dim), "attention.q_lora_rank"
    kept = {160: 3, 256: 4}.get(meta.count("expert_count"))
    if kept and not meta.has("expert_group_count"):  # the large models in older files
        values |= {"n_group": 8, "topk_group": kept}
    # In older files keys and values are those of attention, not of its cache.
    key, value = (meta.count(f"attention.{name}_length_mla", meta.count(f"attention.{name}_length"))
                  for name in ("key", "value"))
    return {**values, "qk_nope_head_dim": key - head_dim, "v_head_dim": value,
            "q_lora_rank": meta.count(rank) if meta.has(rank) else None,
            "num_key_value_heads": meta.count("attention.head_count"),
            "num_nextn_predict_layers": extra_layers(meta)}


def _deepseek_v2(meta: Metadata, head_dim: int) -> dict[str, Any]:
    values = _deepseek2(meta, head_dim)
    grouped = values["n_group"] > 1
    return {**values, "topk_method": "group_limited_greedy" if grouped else "greedy"}


def _ernie4_5_moe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"moe_num_shared_experts": meta.count("expert_shared_count", 0, least=0),
            "moe_layer_start_index": meta.count("leading_dense_block_count", 0, least=0)}


def _phimoe(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return {"attention_bias": biased(meta, "attn_q", "attn_k", "attn_v", "attn_output"),
            "lm_head_bias": "output.bias" in meta.tensors,
            "sliding_window": meta.count("attention.sliding_window", 0, least=0) or None}


def _phimoe_rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of LongRoPE, whose attention factor has two names on the hub."""
    parameters = phi3_rope(meta, head_dim)
    if parameters["rope_type"] == "longrope":
        del parameters["partial_rotary_factor"]
        scale = meta.number("rope.scaling.attn_factor", 1.0)
        parameters |= {"short_mscale": scale, "long_mscale": scale}
    return parameters


def _gpt_oss(meta: Metadata, head_dim: int) -> dict[str, Any]:
    return _alternating(meta, 2)


_CORRECTION = frozenset({"exp_probs_b"})
_ROUTER = frozenset({"exp_probs_b", "ffn_gate_inp"})
_LLAMA = Architecture("llama", "LlamaForCausalLM", fixed={"hidden_act": "silu"}, more=_llama,
                      interleaved=True)
_ALL_ROUTED: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []})
_GEMMA: Mapping[str, Any] = MappingProxyType({"hidden_activation": "gelu_pytorch_tanh"})
_OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", fixed={"hidden_act": "silu"}, more=_qwen3,
    layer=_table({name: _SANDWICH[name] for name in _SANDWICH
                  if name not in ("attn_norm", "ffn_norm")}, _QK_NORMS))
_LINEAR = _table(linear_conv_kernel_dim="ssm.conv_kernel", linear_key_head_dim="ssm.state_size",
                 linear_num_key_heads="ssm.group_count",
                 linear_num_value_heads="ssm.time_step_rank")
_QWEN35 = Architecture(
    "qwen3_5_text", "Qwen3_5ForCausalLM", counts=_table(_SIZES, _LINEAR), more=_qwen35,
    rope=partial_rope, fixed={"hidden_act": "silu"}, shifted=True, delta_nets=True,
    bare=frozenset({"ssm_a", "ssm_dt"}), layer=_table(_HYBRID, _MLP))
_COHERE = Architecture("cohere", "CohereForCausalLM", numbers=_NORM, fixed={"hidden_act": "silu"},
                       more=_cohere, layer=_table(_ATTENTION, _MLP))

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM",
                          fixed={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", layer=_table(_DECODER, _QK_NORMS),
                          fixed={"hidden_act": "silu", "use_sliding_window": False}, more=_qwen3),
    "phi3": Architecture(
        "phi3", "Phi3ForCausalLM", fixed={"hidden_act": "silu"}, more=_phi3, rope=phi3_rope,
        layer=_table(attn_norm="input_layernorm", attn_qkv="self_attn.qkv_proj",
                     attn_output="self_attn.o_proj", ffn_norm="post_attention_layernorm",
                     ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj")),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", layer=_SANDWICH, fixed=_GEMMA,
                           more=_gemma2, shifted=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", layer=_table(_SANDWICH, _QK_NORMS),
                           fixed=_GEMMA, more=_gemma3, rope=gemma3_rope, shifted=True),
    "olmo2": _OLMO2,
    "exaone4": replace(_OLMO2, model_type="exaone4", class_name="Exaone4ForCausalLM",
                       more=_exaone4),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", more=_llama, interleaved=True,
                            fixed={"hidden_act": "silu", "no_rope_layer_interval": 4}),
    "glm4": Architecture(
        "glm4", "Glm4ForCausalLM", fixed={"hidden_act": "silu"}, more=_qwen3, rope=partial_rope,
        layer=_table(_ATTENTION, post_attention_norm="post_self_attn_layernorm",
                     ffn_norm="post_attention_layernorm", post_ffw_norm="post_mlp_layernorm",
                     ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj")),
    "apertus": Architecture(
        "apertus", "ApertusForCausalLM", fixed={"hidden_act": "xielu"}, more=_qwen3,
        layer_values={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n")},
        layer=_table({name: _DECODER[name] for name in _DECODER if name != "ffn_gate"}, _QK_NORMS,
                     attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm")),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, model_type="cohere2", class_name="Cohere2ForCausalLM",
                       more=_cohere2),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", fixed={"hidden_act": "silu"},
                             more=_ernie4_5),
    "granite": Architecture("granite", "GraniteForCausalLM", fixed={"hidden_act": "silu"},
                            more=_granite, interleaved=True),
    "stablelm": Architecture(
        "stablelm", "StableLmForCausalLM", numbers=_NORM, fixed={"hidden_act": "silu"},
        more=_stablelm, rope=partial_rope,
        layer=_table(_DECODER, attn_q_norm="self_attn.q_layernorm.norms.{}",
                     attn_k_norm="self_attn.k_layernorm.norms.{}")),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", fixed={"hidden_act": "silu"}, more=_seed_oss,
        layer=_table(_ATTENTION, _MLP, post_attention_norm="post_attention_layernorm")),
    "gptneox": Architecture(
        "gpt_neox", "GPTNeoXForCausalLM", numbers=_NORM, fixed={"hidden_act": "gelu"},
        more=_gpt_neox, rope=partial_rope, fused_heads=True, layers="gpt_neox.layers",
        outer=_table({"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm",
                      "output": "embed_out"}),
        layer=_table(attn_norm="input_layernorm", attn_qkv="attention.query_key_value",
                     attn_output="attention.dense", ffn_norm="post_attention_layernorm",
                     ffn_up="mlp.dense_h_to_4h", ffn_down="mlp.dense_4h_to_h")),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", counts=_ROUTED, more=_qwen2_moe,
        fixed={**_ALL_ROUTED, "norm_topk_prob": False, "use_sliding_window": False},
        single_rows=frozenset({"ffn_gate_inp_shexp"}),
        layer=_table(_EXPERTS, _SHARED_EXPERT)),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35, model_type="qwen3_5_moe_text", class_name="Qwen3_5MoeForCausalLM",
        counts=_table({name: value for name, value in _ROUTED.items()
                       if name != "intermediate_size"}, _LINEAR),
        more=_qwen35_moe, single_rows=frozenset({"ffn_gate_inp_shexp"}),
        layer=_table({name: value for name, value in _EXPERTS.items() if name != "ffn_norm"},
                     _SHARED_EXPERT, _HYBRID)),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", counts=_ROUTED, layer=_table(_EXPERTS, _QK_NORMS),
        fixed={**_ALL_ROUTED, "norm_topk_prob": True, "use_sliding_window": False},
        more=_qwen3_moe),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", counts=_ROUTED,
                          layer=_table(_EXPERTS, _QK_NORMS), more=_qwen3,
                          fixed={"hidden_act": "silu", "norm_topk_prob": False}),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", more=_gpt_oss, bare=frozenset({"attn_sinks"}),
        fused_experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        counts=_table({name: _SIZES[name] for name in _SIZES if name != "intermediate_size"},
                      intermediate_size="expert_feed_forward_length",
                      num_local_experts="expert_count", num_experts_per_tok="expert_used_count"),
        fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0},
        layer=_table(_ATTENTION, post_attention_norm="post_attention_layernorm",
                     attn_sinks="self_attn.sinks", ffn_gate_inp="mlp.router",
                     **{name: _EXPERTS[name] for name in EXPERTS})),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", counts=_GROUPED, more=_glm4_moe, rope=partial_rope,
        fixed={"hidden_act": "silu"}, bare=_CORRECTION, float32=_ROUTER,
        layer=_table({name: _SHARED_EXPERTS[name] for name in _SHARED_EXPERTS
                      if name != "ffn_norm"}, _QK_NORMS,
                     post_attention_norm="post_attention_layernorm")),
    "dots1": Architecture(
        "dots1", "Dots1ForCausalLM", counts=_GROUPED, more=_grouped_moe, bare=_CORRECTION,
        fixed={"hidden_act": "silu"}, float32=_ROUTER, layer=_table(_SHARED_EXPERTS, _QK_NORMS)),
    "deepseek2": Architecture(
        "deepseek_v3", "DeepseekV3ForCausalLM", more=_deepseek2, rope=deepseek_rope,
        counts=_table(_GROUPED, kv_lora_rank="attention.kv_lora_rank",
                      qk_rope_head_dim="rope.dimension_count"),
        bare=_CORRECTION, fixed={"hidden_act": "silu"}, float32=_ROUTER, layer=_LATENT),
    "llama4": Architecture(
        "llama4_text", "Llama4ForCausalLM", more=_llama4,
        counts=_table({**_LOCAL, "intermediate_size": "expert_feed_forward_length"},
                      intermediate_size_mlp="feed_forward_length",
                      interleave_moe_layer_step="interleave_moe_layer_step"),
        fixed={"hidden_act": "silu", "attention_bias": False, "no_rope_layer_interval": 4,
               "attention_chunk_size": 8192, "attn_temperature_tuning": True,
               "floor_scale": 8192, "attn_scale": 0.1},
        fused_experts=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
        layer=_table({name: value.replace("mlp.shared_experts", "mlp.shared_expert").replace(
                          "mlp.", "feed_forward.") for name, value in _SHARED_EXPERTS.items()
                      if name != "exp_probs_b"}, ffn_gate_inp="feed_forward.router")),
    "afmoe": Architecture(
        "afmoe", "AfmoeForCausalLM", counts=_ROUTED, more=_afmoe, bare=_CORRECTION, float32=_ROUTER,
        fixed={"hidden_act": "silu", "mup_enabled": True, "global_attn_every_n_layers": 4},
        layer=_table(_SHARED_EXPERTS, _QK_NORMS, attn_gate="self_attn.gate_proj",
                     post_attention_norm="post_attention_layernorm", ffn_norm="pre_mlp_layernorm",
                     post_ffw_norm="post_mlp_layernorm", ffn_gate_inp="mlp.router.gate",
                     exp_probs_b="mlp.expert_bias")),
    "exaone-moe": Architecture(
        "exaone_moe", "ExaoneMoeForCausalLM", counts=_ROUTED, more=_exaone_moe,
        fixed={"hidden_act": "silu"}, bare=_CORRECTION, float32=_ROUTER,
        layer=_table(_SHARED_EXPERTS, _QK_NORMS, exp_probs_b="mlp.e_score_correction_bias")),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", more=_ernie4_5_moe, bare=_CORRECTION,
        counts=_table(_SIZES, moe_num_experts="expert_count", moe_k="expert_used_count",
                      moe_layer_interval="interleave_moe_layer_step",
                      moe_intermediate_size="expert_feed_forward_length"),
        fixed={"hidden_act": "silu", "use_bias": False}, single_rows=_CORRECTION, float32=_ROUTER,
        layer=_table(_SHARED_EXPERTS, exp_probs_b="mlp.moe_statics.e_score_correction_bias")),
    "minimax-m2": Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", rope=partial_rope, fixed={"hidden_act": "silu"},
        counts=_table({name: _LOCAL[name] for name in _LOCAL if name != "intermediate_size"},
                      intermediate_size="expert_feed_forward_length"),
        bare=_CORRECTION, float32=_ROUTER,
        layer=_table(_BLOCK_EXPERTS, _QK_NORMS,
                     exp_probs_b="block_sparse_moe.e_score_correction_bias")),
    "granitemoe": Architecture(
        "granitemoe", "GraniteMoeForCausalLM", counts=_LOCAL, more=_granite_moe, interleaved=True,
        fixed={"hidden_act": "silu"},
        fused_experts=("block_sparse_moe.input_linear.weight",
                       "block_sparse_moe.output_linear.weight"),
        layer=_table({name: value.replace("mlp.", "block_sparse_moe.")
                      for name, value in _EXPERTS.items()},
                     ffn_gate_inp="block_sparse_moe.router.layer")),
    "phimoe": Architecture(
        "phimoe", "PhimoeForCausalLM", counts=_LOCAL, more=_phimoe, rope=_phimoe_rope,
        fixed={"hidden_act": "silu"}, layer=_BLOCK_EXPERTS),
})
"""By `general.architecture`."""

_MIXTRAL = replace(
    _LLAMA, model_type="mixtral", class_name="MixtralForCausalLM", more=lambda meta, head_dim: {},
    counts=_LOCAL, layer=_BLOCK_EXPERTS)
_DEEPSEEK_V2 = replace(ARCHITECTURES["deepseek2"], model_type="deepseek_v2",
                       class_name="DeepseekV2ForCausalLM", more=_deepseek_v2)
_OLMO3 = replace(_OLMO2, model_type="olmo3", class_name="Olmo3ForCausalLM", more=_olmo3,
                 rope=layered_rope)


def variant(meta: Metadata) -> Architecture | None:
    """Return the architecture of a file; None if it is not supported.

    Mixtral is stored as a "llama" with experts, OLMo 3 as an "olmo2" with windows, DeepSeek V2 as
    a "deepseek2" whose routers have no correction. GLM-4.7-Flash computes as DeepSeek V3.
    """
    if meta.architecture == "deepseek2" and not any("exp_probs_b" in name for name in meta.tensors):
        return _DEEPSEEK_V2
    if meta.architecture == "llama" and meta.count("expert_count", 0, least=0):
        return _MIXTRAL
    if meta.architecture == "olmo2" and meta.has("attention.sliding_window"):
        return _OLMO3
    return ARCHITECTURES.get(meta.architecture)
