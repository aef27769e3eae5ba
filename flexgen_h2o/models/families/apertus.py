"""Apertus (arXiv 2509.14233): LLaMA with norms of heads, and an MLP without a gate whose
activation, xIELU, has learned parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import (
    Decoder,
    attention_specs,
    linear_specs,
    norm_specs,
    normed,
    row_blocks,
)
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, ModelWeights, TensorSpec
from flexgen_h2o.models.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations

_ALPHAS = ("alpha_p", "alpha_n")


class Apertus(Decoder):
    DEFAULTS = {
        "apertus": {
            "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 14336, "num_attention_heads": 32,
            "max_position_embeddings": 65536, "hidden_act": "xielu", "rms_norm_eps": 1e-5,
            "attention_bias": False, "rope_theta": 12000000.0, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0},
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        bias = f.flag("attention_bias")
        rope = f.mapping("rope_scaling") or f.mapping("rope_parameters")
        return ModelConfig(
            **f.decoder("apertus", read_rope(f, parameters=rope)),
            attention_bias=bias,
            out_bias=bias,
            qk_norm=True,
        )

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        weights = super().weights(cfg)
        return replace(weights, mlp=weights.mlp + _ALPHAS)

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, ffn = cfg.hidden_size, cfg.ffn_size
        return {**norm_specs("ln1", f"{prefix}attention_layernorm", hidden),
                **norm_specs("ln2", f"{prefix}feedforward_layernorm", hidden),
                **self.qk_norm_specs(cfg, prefix), **attention_specs(cfg, prefix),
                **linear_specs("up", f"{prefix}mlp.up_proj", (ffn, hidden)),
                **linear_specs("down", f"{prefix}mlp.down_proj", (hidden, ffn)),
                **{name: TensorSpec(f"{prefix}mlp.act_fn.{name}", (1,)) for name in _ALPHAS}}

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        """Add ``down(xielu(up(norm(x))))`` to x [rows, hidden] and return x."""
        for block in row_blocks(len(x)):
            source = normed(cfg, w, "ln2", x[block], ops)
            wide = ops.get("up", (len(source), cfg.ffn_size), x.dtype)
            ops.linear(source, w["up"], None, out=wide)
            ops.xielu_(wide, *(w[name] for name in _ALPHAS))
            ops.add_linear_(x[block], wide, w["down"], None)
        return x


FAMILY = Apertus()
