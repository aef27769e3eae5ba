"""gpt-oss (arXiv 2508.10925): attention with learned sinks, windows in every second layer, and
experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import (
    aliases,
    attention_inputs,
    attention_output,
    attention_specs,
    embed,
    head,
    linear_specs,
    model_specs,
    norm_specs,
)
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.mixture import read_experts, route
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec
from flexgen_h2o.models.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

__all__ = ["DEFAULTS", "aliases", "attention_inputs", "attention_output", "embed", "expert", "head",
           "read", "route", "views", "weights"]

DEFAULTS = {
    "gpt_oss": {
        "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 131072, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128,
        "attention_bias": True, "num_experts_per_tok": 4, "num_local_experts": 128,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "truncate": False, "original_max_position_embeddings": 4096}


def read(f: Fields) -> ModelConfig:
    """The model of a config.json."""
    given = first(f.values.get("rope_scaling"), f.values.get("rope_parameters"), _ROPE)
    local = f.local_layers(lambda layer: layer % 2 == 0)
    bias = f.flag("attention_bias")
    return ModelConfig(
        **f.decoder("gpt_oss", read_rope(f, given=given)),
        attention_bias=bias,
        out_bias=bias,
        attention=f.forms(local, sinks=True),
        experts=replace(read_experts(f, width="intermediate_size", normalise=True),
                        gate_slope=f.number("swiglu_alpha"), gate_limit=f.number("swiglu_limit")),
    )


def weights(cfg: ModelConfig) -> ModelWeights:
    """The tensors, by short names. Checkpoints stack those of experts: see `views`."""
    hidden, wide, count = cfg.hidden_size, cfg.experts.ffn_size, cfg.experts.count

    def layer(prefix: str) -> dict[str, TensorSpec]:
        return {**norm_specs("ln1", f"{prefix}input_layernorm", hidden),
                **norm_specs("router_norm", f"{prefix}post_attention_layernorm", hidden),
                **attention_specs(cfg, prefix),
                "sinks": TensorSpec(f"{prefix}self_attn.sinks", (cfg.num_heads,)),
                **linear_specs("router", f"{prefix}mlp.router", (count, hidden), True)}

    def one(prefix: str) -> dict[str, TensorSpec]:
        return {**linear_specs("gate", f"{prefix}gate_proj", (wide, hidden), True),
                **linear_specs("up", f"{prefix}up_proj", (wide, hidden), True),
                **linear_specs("down", f"{prefix}down_proj", (hidden, wide), True)}

    every = tuple(tuple(one(f"model.layers.{place}.mlp.experts.{number}.")
                        for number in range(count)) for place in range(cfg.num_layers))
    return replace(model_specs(cfg, layer), mlp=(), experts=every)


def views(cfg: ModelConfig) -> dict[str, Sequence[View]]:
    """Places of each expert's tensors: all of a layer are one, with gates and ups in turn, which is
    [experts, inputs, outputs], or [experts, outputs, inputs] in MXFP4."""
    from flexgen_h2o.models.checkpoint import View  # only now: it loads torch

    in_turn = 2 * cfg.experts.ffn_size
    parts = (("gate", "gate_up_proj", range(0, in_turn, 2)),
             ("up", "gate_up_proj", range(1, in_turn, 2)), ("down", "down_proj", None))
    found: dict[str, Sequence[View]] = {}
    for place, layer in enumerate(cfg.weights.experts):
        stacks = [f"{start}layers.{place}.mlp.experts." for start in ("model.", "")]
        for number, specs in enumerate(layer):
            for short, tensor, rows in parts:
                found[specs[short].name] = tuple(
                    View(f"{stack}{tensor}{end}", number, transposed=not end, rows=rows)
                    for stack in stacks for end in ("", "_blocks"))
                found[specs[f"{short}_bias"].name] = tuple(
                    View(f"{stack}{tensor}_bias", number, rows=rows) for stack in stacks)
    return found


def expert(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, do: Operations) -> Tensor:
    """``down((up(x) + 1) * gate(x) * sigmoid(slope * gate(x)))`` of x [rows, hidden], with gate and
    up within the limit, in a buffer of `do`."""
    shape, limit = (len(x), cfg.experts.ffn_size), cfg.experts.gate_limit
    gate, up, slopes = (do.get(f"expert's {name}", shape, x.dtype)
                        for name in ("gate", "up", "slopes"))
    do.linear(x, w["gate"], w["gate_bias"], out=gate)
    do.linear(x, w["up"], w["up_bias"], out=up)
    gate.clamp_(max=limit)
    gate *= slopes.copy_(gate).mul_(cfg.experts.gate_slope).sigmoid_()
    gate *= up.clamp_(-limit, limit).add_(1)
    out = do.get("expert's output", (len(x), cfg.hidden_size), x.dtype)
    do.linear(gate, w["down"], w["down_bias"], out=out)
    return out
