"""Apertus (arXiv 2509.14233): LLaMA with norms of heads, and an MLP without a gate whose
activation, xIELU, has learned parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import Decoder, normed, product, row_blocks
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import ModelWeights, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations

_ALPHAS = ("alpha_p", "alpha_n")


class Apertus(Decoder):
    DEFAULTS = {
        "apertus": {
            "vocab_size": 131072, "intermediate_size": 14336, "max_position_embeddings": 65536,
            "hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12000000.0,
            "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0},
        },
    }
    norms = {"ln1": "attention_layernorm", "ln2": "feedforward_layernorm"}

    def read(self, f: Fields) -> ModelConfig:
        rope = f.mapping("rope_scaling") or f.mapping("rope_parameters")
        return ModelConfig(**self.common(f, read_rope(f, parameters=rope)), qk_norm=True)

    def weights(self, cfg: ModelConfig) -> ModelWeights:
        weights = super().weights(cfg)
        return replace(weights, mlp=weights.mlp + _ALPHAS)

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().mlp_specs(cfg, prefix)
        del specs["gate"]
        return specs | {name: TensorSpec(f"{prefix}mlp.act_fn.{name}", (1,)) for name in _ALPHAS}

    def mlp(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor, ops: Operations) -> Tensor:
        """Add ``down(xielu(up(norm(x))))`` to x [rows, hidden] and return x."""
        for block in row_blocks(len(x)):
            source = normed(cfg, w, "ln2", x[block], ops)
            wide = product(w, "up", source, ops)
            ops.xielu_(wide, *(w[name] for name in _ALPHAS))
            ops.add_linear_(x[block], wide, w["down"], None)
        return x
