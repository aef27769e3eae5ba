"""Granite 3 (architecture of arXiv 2408.13359): LLaMA with scaled embeddings, residuals, attention
and logits."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig


class Granite(Decoder):
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


FAMILY = Granite()
