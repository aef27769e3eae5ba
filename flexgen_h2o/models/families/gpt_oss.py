"""gpt-oss (arXiv 2508.10925): learned attention sinks, a window in every second layer, experts with
biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.decoder import linear_specs
from flexgen_h2o.models.fields import Fields, first
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "truncate": False, "original_max_position_embeddings": 4096}


class GptOss(MixtureDecoder):
    DEFAULTS = {
        "gpt_oss": {
            "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36,
            "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "sliding_window": 128, "attention_bias": True,
            "num_experts_per_tok": 4, "num_local_experts": 128, "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        rope_parameters = first(f.values.get("rope_scaling"), f.values.get("rope_parameters"),
                                _ROPE)
        local = f.local_layers(lambda layer: layer % 2 == 0)
        return ModelConfig(
            **self.common(f, read_rope(f, parameters=rope_parameters)),
            attention=f.attention_variants(local, sinks=True),
            experts=replace(read_experts(f, width="intermediate_size", router=RouterConfig()),
                            gate_slope=f.number("swiglu_alpha"),
                            gate_limit=f.number("swiglu_limit")),
        )

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return {**super().attention_specs(cfg, prefix),
                "sinks": TensorSpec(f"{prefix}self_attn.sinks", (cfg.num_heads,))}

    def router_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return linear_specs("router", f"{prefix}mlp.router",
                            (cfg.experts.count, cfg.hidden_size), True)

    def expert_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, ffn = cfg.hidden_size, cfg.experts.ffn_size
        return {**linear_specs("gate", f"{prefix}gate_proj", (ffn, hidden), True),
                **linear_specs("up", f"{prefix}up_proj", (ffn, hidden), True),
                **linear_specs("down", f"{prefix}down_proj", (hidden, ffn), True)}

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        """Return the views of experts' tensors in the stacked tensors of a checkpoint.

        The rows of gate and up alternate in one tensor, [experts, inputs, outputs], or [experts,
        outputs, inputs] in MXFP4.
        """
        stacked_rows = 2 * cfg.experts.ffn_size
        parts = (("gate", "gate_up_proj", range(0, stacked_rows, 2)),
                 ("up", "gate_up_proj", range(1, stacked_rows, 2)), ("down", "down_proj", None))
        views: dict[str, Sequence[View]] = {}
        for layer, experts in enumerate(cfg.weights.experts):
            for number, specs in enumerate(experts):
                for short, tensor, rows in parts:
                    stack = f"model.layers.{layer}.mlp.experts.{tensor}"
                    views[specs[short].name] = (
                        *self.views_of(stack, entry=number, transposed=True, rows=rows),
                        *self.views_of(f"{stack}_blocks", entry=number, rows=rows))
                    views[specs[f"{short}_bias"].name] = self.views_of(
                        f"{stack}_bias", entry=number, rows=rows)
        return views

    def expert(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
               ops: Operations) -> Tensor:
        """Return ``down((up(x) + 1) * gate(x) * sigmoid(slope * gate(x)))``.

        gate(x) and up(x) are clamped.
        """
        shape, limit = (len(x), cfg.experts.ffn_size), cfg.experts.gate_limit
        gate, up, slopes = (ops.get(f"expert's {name}", shape, x.dtype)
                            for name in ("gate", "up", "slopes"))
        ops.linear(x, w["gate"], w["gate_bias"], out=gate)
        ops.linear(x, w["up"], w["up_bias"], out=up)
        gate.clamp_(max=limit)
        gate *= ops.sigmoid_(slopes.copy_(gate).mul_(cfg.experts.gate_slope))
        gate *= up.clamp_(-limit, limit).add_(1)
        out = ops.get("expert's output", (len(x), cfg.hidden_size), x.dtype)
        ops.linear(gate, w["down"], w["down_bias"], out=out)
        return out
