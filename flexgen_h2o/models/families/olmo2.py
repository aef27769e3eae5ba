"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP, and over all query and key
heads. In OLMo 3 three of four layers have windows; rope scaling applies to the other layers."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.models.decoder import Decoder, attention_specs, mlp_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import read_layer_ropes, read_rope

_OLMO2 = {
    "vocab_size": 50304, "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 11008, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 50279,
}


class Olmo2(Decoder):
    DEFAULTS = {
        "olmo2": _OLMO2,
        "olmo3": {**_OLMO2, "rope_theta": 500000.0, "sliding_window": 4096},
    }

    def read(self, f: Fields) -> ModelConfig:
        bias = f.flag("attention_bias")
        windows: dict[str, Any] = {}
        if f.values["model_type"] == "olmo2":
            rope = read_rope(f)
        else:
            local = f.local_layers(lambda layer: (layer + 1) % 4 != 0)
            rope, local_rope = read_layer_ropes(f)
            windows["attention"] = f.attention_variants(local)
            if local_rope != rope:
                windows |= {"other_rope": local_rope, "other_rope_layers": local}
        return ModelConfig(
            **f.decoder("olmo2", rope),
            **windows,
            attention_bias=bias,
            out_bias=bias,
            qk_norm=True,
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return {**norm_specs("post1", f"{prefix}post_attention_layernorm", cfg.hidden_size),
                **norm_specs("post2", f"{prefix}post_feedforward_layernorm", cfg.hidden_size),
                **self.qk_norm_specs(cfg, prefix),
                **attention_specs(cfg, prefix), **mlp_specs(cfg, prefix)}

    def qk_norm_widths(self, cfg: ModelConfig) -> tuple[int, int]:
        return cfg.q_size, cfg.kv_size


FAMILY = Olmo2()
