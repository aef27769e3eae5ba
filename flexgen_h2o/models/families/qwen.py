"""Qwen2 and Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388) and Seed-OSS.

LLaMA with biases of queries, keys and values, or with norms of queries and keys.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig

_QWEN = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}


class Qwen(Decoder):
    DEFAULTS = {
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128},
        "seed_oss": {
            "vocab_size": 155136, "num_hidden_layers": 64, "intermediate_size": 27648,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 524288, "attention_bias": True,
            "attention_out_bias": False, "use_sliding_window": False, "bos_token_id": 0,
            "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        kind, windows = f.values["model_type"], f.flag("use_sliding_window")
        local = f.local_layers(lambda layer: windows and layer >= f.value(int, "max_window_layers"))
        common = self.common(f, bias="" if kind == "qwen2" else "attention_bias")
        if kind == "qwen2":  # has no key for its biases
            common |= {"attention_bias": True}
        elif kind == "seed_oss":
            common |= {"out_bias": f.flag("attention_out_bias"), "mlp_bias": f.flag("mlp_bias")}
        return ModelConfig(
            **common,
            qk_norm=kind == "qwen3",
            attention=f.attention_variants(local) if windows else (),
        )


FAMILY = Qwen()
