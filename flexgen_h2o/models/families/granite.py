"""Granite 3 (architecture of arXiv 2408.13359)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig

if TYPE_CHECKING:
    from flexgen_h2o.models.checkpoint import View


class Granite(Decoder):
    """LLaMA with scaled embeddings, residuals, attention and logits."""

    DEFAULTS = {
        "granite": {
            "bos_token_id": 1, "eos_token_id": 2, "embedding_multiplier": 1.0,
            "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f),
            mlp_bias=f.flag("mlp_bias"),
            embed_scale=f.number("embedding_multiplier"),
            residual_scale=f.number("residual_multiplier"),
            logit_divisor=f.number("logits_scaling"),
            attention=f.attention_variants(False, scale=f.number("attention_multiplier")),
        )


_MIXTURE = {**Granite.DEFAULTS["granite"], "num_experts_per_tok": 2, "num_local_experts": 8}


class GraniteMoe(MixtureDecoder):
    """Granite with a mixture of experts, also with a shared expert."""

    DEFAULTS = {"granitemoe": _MIXTURE,
                "granitemoeshared": {**_MIXTURE, "shared_intermediate_size": 0}}
    block = "block_sparse_moe"
    router = "router.layer"
    shared_expert = "shared_mlp"
    stacks = (("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
              ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"))
    renames = ((".router.layer.", ".router."),)

    def read(self, f: Fields) -> ModelConfig:
        shared = f.raw("shared_intermediate_size")
        experts = read_experts(f, width="intermediate_size", router=RouterConfig(),
                               shared_ffn_size=f.count("shared_intermediate_size") if shared else 0)
        return replace(Granite().read(f), experts=experts)

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        views, ffn = super().views(cfg), cfg.experts.shared_ffn_size
        for layer, specs in enumerate(cfg.weights.layers if ffn else ()):
            for short, tensor, rows in (("gate", "input_linear", range(ffn)),
                                        ("up", "input_linear", range(ffn, 2 * ffn)),
                                        ("down", "output_linear", None)):
                views[specs[f"shared_{short}"].name] = self.views_of(
                    f"model.layers.{layer}.shared_mlp.{tensor}.weight", rows=rows)
        return views
