"""Gemma 2 to 4: windows in some layers, norms before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import KVHeads, RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import (
    Decoder,
    layer_number,
    norm,
    norm_specs,
    normed,
    row_blocks,
)
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_layer_ropes, read_rope
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations

_GEMMA = {
    "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "bos_token_id": 2, "eos_token_id": 1,
}


class Gemma(Decoder):
    """Gemma 2 (arXiv 2408.00118) and the text model of Gemma 3 (arXiv 2503.19786).

    Soft caps and scaled embeddings.
    """

    DEFAULTS = {
        "gemma2": {**_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192,
                   "sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
                   "attn_logit_softcapping": 50.0},
        "gemma3_text": {
            **_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    }
    norms = {"ln1": "input_layernorm", "post1": "post_attention_layernorm",
             "ln2": "pre_feedforward_layernorm", "post2": "post_feedforward_layernorm"}

    def read(self, f: Fields) -> ModelConfig:
        f.refuse("use_bidirectional_attention")
        pattern = f.count("sliding_window_pattern")
        local = f.local_layers(lambda layer: bool((layer + 1) % pattern))
        gemma3 = f.values["model_type"] == "gemma3_text"
        rope, local_rope = (read_layer_ropes(f, local_theta=f.raw("rope_local_base_freq"))
                            if gemma3 else (read_rope(f), None))
        return ModelConfig(
            **self.common(f, rope, activation="hidden_activation"),
            norm_offset=1.0,  # weights are stored minus one
            qk_norm=gemma3,
            embed_scale=f.count("hidden_size") ** 0.5,
            # Gemma 3 also has attn_logit_softcapping, which transformers ignores.
            logit_softcap=f.number_or("final_logit_softcapping", 0.0),
            other_rope=local_rope,
            other_rope_layers=local if gemma3 else (),
            attention=f.attention_variants(
                local, scale=f.number("query_pre_attn_scalar") ** -0.5,
                softcap=0.0 if gemma3 else f.number_or("attn_logit_softcapping", 0.0)),
        )


_TEXT = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "attention_k_eq_v": False, "enable_moe_block": False, "bos_token_id": 2, "eos_token_id": 1,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                           "partial_rotary_factor": 0.25}},
}


class Gemma4(MixtureDecoder):
    """The text models of Gemma 4: 12B, 26B-A4B and 31B.

    Global layers have other heads than layers with windows, and rotate a part of each. Their values
    may be their keys, without the norm's weights and the rotation. Each layer's output is scaled. A
    mixture of experts has an MLP beside the experts of each layer.

    Tensors that `Decoder` and `MixtureDecoder` do not have:

    - "layer_scalar" [1]: the factor of a layer's output,
    - "router_scale" [hidden], "router_expert_scale" [experts]: factors of the router's input and of
      routing weights,
    - "post_shared", "post_experts": norms of the MLP's and of the experts' output.

    A layer whose keys are also its values has no "v". Beside experts the MLP is the shared expert.
    """

    DEFAULTS = {
        "gemma4_text": {**_TEXT, "max_position_embeddings": 131072, "sliding_window": 512,
                        "hidden_size_per_layer_input": 256},
        "gemma4_unified_text": {**_TEXT, "max_position_embeddings": 262144,
                                "sliding_window": 1024},
    }
    norms = Gemma.norms
    shared_expert = "mlp"
    stacks = (("experts.gate_up_proj", "experts.down_proj"),)

    def read(self, f: Fields) -> ModelConfig:
        for key, feature in (("hidden_size_per_layer_input", "per-layer embeddings"),
                             ("num_kv_shared_layers", "layers that share keys and values")):
            if f.raw(key):
                raise UserError(f"{f.name}: {feature} ({key} = {f.raw(key)}) of Gemma 4 E2B and "
                                "E4B are not supported")
        if f.raw("use_bidirectional_attention") != "vision":  # of images alone
            f.refuse("use_bidirectional_attention")
        local = (*f.local_layers(lambda layer: bool((layer + 1) % 6))[:-1], False)
        heads = _global_heads(f, local)
        rope, local_rope = read_layer_ropes(f, full_head_dim=heads.dim)
        experts = read_experts(
            f, per_token="top_k_experts", router=RouterConfig(),
            shared_ffn_size=f.count("intermediate_size")) if f.flag("enable_moe_block") else None
        return ModelConfig(
            **self.common(f, rope, activation="hidden_activation"),
            qk_norm=True,
            attention_k_eq_v=f.flag("attention_k_eq_v"),
            embed_scale=f.count("hidden_size") ** 0.5,
            logit_softcap=f.number_or("final_logit_softcapping", 0.0),
            other_rope=local_rope,
            other_rope_layers=local,
            other_heads=heads,
            other_head_layers=tuple(not is_local for is_local in local),
            attention=f.attention_variants(local, scale=1.0),
            experts=experts,
        )

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        weights = super().weights(cfg)
        return replace(weights, mlp=(*weights.mlp, "layer_scalar", "post_shared", "post_experts"))

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return super().layer_specs(cfg, prefix) | {
            "layer_scalar": TensorSpec(f"{prefix}layer_scalar", (1,))}

    def layer_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = Decoder.layer_norm_specs(self, cfg, prefix)
        if cfg.experts is None:
            return specs
        norms = {"router_norm": "pre_feedforward_layernorm_2",
                 "post_shared": "post_feedforward_layernorm_1",
                 "post_experts": "post_feedforward_layernorm_2"}
        for short, name in norms.items():
            specs |= norm_specs(short, f"{prefix}{name}", cfg.hidden_size)
        return specs

    def router_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        assert cfg.experts is not None
        router, count = f"{prefix}router.", cfg.experts.count
        return {"router": TensorSpec(f"{router}proj.weight", (count, cfg.hidden_size),
                                     float32=cfg.float32_routers),
                "router_scale": TensorSpec(f"{router}scale", (cfg.hidden_size,)),
                "router_expert_scale": TensorSpec(f"{router}per_expert_scale", (count,))}

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        layer = cfg.select_layers([layer_number(prefix)])
        specs = super().attention_specs(layer, prefix)
        if cfg.attention_k_eq_v and not layer.rope_number(0):
            specs = {short: spec for short, spec in specs.items() if short not in ("v", "v_bias")}
        return specs

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, whose shapes follow from the layer's matrices."""
        rows, width = len(x), len(w["q_norm"])
        kv_heads = len(w["k"]) // width
        heads = {"q": cfg.num_heads, "k": kv_heads, "v": kv_heads}
        q, k, v = (ops.get(name, (rows, count, width), x.dtype) for name, count in heads.items())
        for block in row_blocks(rows):
            source = normed(cfg, w, "ln1", x[block], ops)
            for name, out in (("q", q), ("k", k), ("v", v)):
                if name in w:
                    ops.linear(source, w[name], w.get(f"{name}_bias"),
                               out=out[block].view(len(source), -1))
                else:
                    ops.copy_(out[block], k[block])
            by_head = [out[block].view(-1, width) for out in (q, k, v)]
            norm(cfg, w, "q_norm", by_head[0], ops, out=by_head[0])
            norm(cfg, w, "k_norm", by_head[1], ops, out=by_head[1])
            ops.rms_norm(by_head[2], None, eps=cfg.norm_eps, out=by_head[2])
        return q, k, v

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        super().mlp(cfg, w, x, ops)
        ops.scale_(x, w["layer_scalar"])
        return x

    def route(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations, *,
              out: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each row. Their input has another norm than the router's."""
        assert cfg.experts is not None
        ops.rms_norm(x, w["router_scale"], eps=cfg.norm_eps, out=out)
        out.mul_(cfg.hidden_size ** -0.5)
        ids, routing_weights = ops.route(out, w["router"], per_token=cfg.experts.per_token,
                                         config=cfg.experts.router)
        norm(cfg, w, "router_norm", x, ops, out=out)
        return ids, routing_weights * w["router_expert_scale"].float()[ids]

    def add_experts(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, inputs: Tensor,
                    sums: Tensor, ops: Operations) -> None:
        """Add the output of MLP and experts to x, and scale it."""
        out = self.shared(cfg, w, normed(cfg, w, "ln2", x, ops), ops)
        norm(cfg, w, "post_shared", out, ops, out=out)
        routed = ops.get("normed", tuple(x.shape), x.dtype).copy_(sums)
        out.add_(norm(cfg, w, "post_experts", routed, ops, out=routed))
        x.add_(norm(cfg, w, "post2", out, ops, out=out)).mul_(w["layer_scalar"])


def _global_heads(f: Fields, local: tuple[bool, ...]) -> KVHeads:
    """Return the key heads of global layers.

    transformers 5.24 saves per_layer_config in place of the keys of published models.
    """
    if "per_layer_config" not in f.values:
        key = "num_global_key_value_heads"
        count = f.raw(key) if f.flag("attention_k_eq_v") else None
        return KVHeads(f.kv_heads() if count is None else f.size(key, count),
                       f.count("global_head_dim"))
    by_layer = {str(layer).lstrip("0") or "0": changes  # keys may have leading zeros
                for layer, changes in f.mapping("per_layer_config").items()}
    changed = [by_layer.pop(str(layer), {}) for layer, is_local in enumerate(local) if not is_local]
    if by_layer or any(changes != changed[0] for changes in changed):
        raise UserError(f"{f.name}: per_layer_config with other layers than those with full "
                        "attention, or with differences between them, is not supported")
    changes = f.fit(dict[str, int], changed[0], "per_layer_config")
    if not changes.keys() <= {"head_dim", "num_key_value_heads"}:
        raise UserError(f"{f.name}: per_layer_config of {', '.join(sorted(changes))} is not "
                        "supported (head_dim and num_key_value_heads are)")
    return KVHeads(f.size("num_key_value_heads",
                          changes.get("num_key_value_heads", f.kv_heads())),
                   f.size("head_dim", changes.get("head_dim", f.head_dim())))
