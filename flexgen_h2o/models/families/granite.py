"""Granite 3 (architecture of arXiv 2408.13359): LLaMA with scaled embeddings, residuals, attention
and logits."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope


class Granite(Decoder):
    DEFAULTS = {
        "granite": {
            "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 11008, "num_attention_heads": 32,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
            "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        bias = f.flag("attention_bias")
        common = f.decoder("granite", read_rope(f))
        return ModelConfig(
            **common,
            attention_bias=bias,
            out_bias=bias,
            mlp_bias=f.flag("mlp_bias"),
            embed_scale=f.number("embedding_multiplier"),
            residual_scale=f.number("residual_multiplier"),
            logit_divisor=f.number("logits_scaling"),
            attention=f.attention_variants((False,) * common["num_layers"],
                              scale=f.number("attention_multiplier")),
        )


FAMILY = Granite()
