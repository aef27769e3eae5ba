"""FlexOlmo (arXiv 2507.07024): OLMo 2 with a mixture of experts in each layer."""

from __future__ import annotations

from flexgen_h2o.models.decoder import norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import read_rope


class FlexOlmo(MixtureDecoder):
    DEFAULTS = {
        "flex_olmo": {
            "vocab_size": 100352, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 11008, "num_attention_heads": 32, "max_position_embeddings": 4096,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
            "attention_bias": False, "num_experts_per_tok": 5, "num_experts": 7,
            "norm_topk_prob": False, "tie_word_embeddings": False, "eos_token_id": 100257,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        bias = f.flag("attention_bias")
        return ModelConfig(
            **f.decoder("flex_olmo", read_rope(f)),
            attention_bias=bias,
            out_bias=bias,
            qk_norm=True,
            experts=read_experts(f, width="intermediate_size"),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().layer_specs(cfg, prefix)
        del specs["ln1"], specs["router_norm"]
        return {**norm_specs("post1", f"{prefix}post_attention_layernorm", cfg.hidden_size),
                **norm_specs("post2", f"{prefix}post_feedforward_layernorm", cfg.hidden_size),
                **specs}

    def qk_norm_widths(self, cfg: ModelConfig) -> tuple[int, int]:
        return cfg.q_size, cfg.kv_size


FAMILY = FlexOlmo()
