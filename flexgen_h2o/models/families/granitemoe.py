"""Granite 3 mixtures (architecture of arXiv 2408.13359), also with a shared expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.families.granite import FAMILY as GRANITE
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig

if TYPE_CHECKING:
    from flexgen_h2o.models.checkpoint import View

_MIXTURE = {**GRANITE.DEFAULTS["granite"], "num_experts_per_tok": 2, "num_local_experts": 8}


class GraniteMoe(MixtureDecoder):
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
        return replace(GRANITE.read(f), experts=experts)

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        views, ffn = super().views(cfg), cfg.experts.shared_ffn_size
        for layer, specs in enumerate(cfg.weights.layers if ffn else ()):
            for short, tensor, rows in (("gate", "input_linear", range(ffn)),
                                        ("up", "input_linear", range(ffn, 2 * ffn)),
                                        ("down", "output_linear", None)):
                views[specs[f"shared_{short}"].name] = self.views_of(
                    f"model.layers.{layer}.shared_mlp.{tensor}.weight", rows=rows)
        return views


FAMILY = GraniteMoe()
