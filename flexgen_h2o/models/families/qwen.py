"""Qwen2 and Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388) and Seed-OSS.

LLaMA with biases of queries, keys and values, or with norms of queries and keys.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope

_QWEN = {
    "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 32,
    "intermediate_size": 22016, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28,
}


class Qwen(Decoder):
    DEFAULTS = {
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
        "seed_oss": {
            "vocab_size": 155136, "hidden_size": 4096, "num_hidden_layers": 64,
            "intermediate_size": 27648, "num_attention_heads": 80, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 524288, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
            "use_sliding_window": False, "bos_token_id": 0, "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        rope, kind = read_rope(f), f.values["model_type"]
        windows = f.flag("use_sliding_window")
        local = f.local_layers(lambda layer: windows and layer >= f.value(int, "max_window_layers"))
        # Qwen2 has no key for its biases: it ignores an attention_bias.
        bias = kind == "qwen2" or f.flag("attention_bias")
        common = f.decoder("qwen", rope)
        return ModelConfig(
            **common,
            attention_bias=bias,
            out_bias=(f.flag("attention_out_bias") if kind == "seed_oss"
                      else bias and kind == "qwen3"),
            mlp_bias=kind == "seed_oss" and f.flag("mlp_bias"),
            qk_norm=kind == "qwen3",
            attention=f.attention_variants(local) if windows else (),
        )


FAMILY = Qwen()
