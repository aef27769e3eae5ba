"""dots.llm1 (arXiv 2506.05767): the attention of Qwen3, the experts of DeepSeek V3."""

from __future__ import annotations

from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_grouped_experts
from flexgen_h2o.models.model_config import ModelConfig


class Dots1(MixtureDecoder):
    DEFAULTS = {
        "dots1": {
            "vocab_size": 152064, "hidden_size": 4608, "num_hidden_layers": 62,
            "intermediate_size": 10944, "num_key_value_heads": 32, "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 0, "norm_topk_prob": False, "sliding_window": 4096,
            "max_window_layers": 62,
        },
    }
    correction = "gate.e_score_correction_bias"

    def read(self, f: Fields) -> ModelConfig:
        local = f.local_layers(lambda layer: f.window() is not None
                               and layer >= f.value(int, "max_window_layers"))
        return ModelConfig(
            **self.common(f),
            **read_grouped_experts(f),
            qk_norm=True,
            attention=f.attention_variants(local),
        )


FAMILY = Dots1()
