"""EXAONE 4.0 (arXiv 2507.11407) and K-EXAONE."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.models.families.olmo import Olmo2
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_grouped_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope

_EXAONE = {
    "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4,
}


class Exaone4(Olmo2):
    """EXAONE 4.0: OLMo 2 with a norm for each head.

    In the 32B three of four layers have windows, and the others do not rotate.
    """

    DEFAULTS = {"exaone4": {**_EXAONE, "bos_token_id": 0, "eos_token_id": 2}}
    qk_norm_of_all_heads = False

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(**self.common(f, bias=""), **_windows(f), qk_norm=True)


def _windows(f: Fields) -> dict[str, Any]:
    """Return the fields of layers with windows and, beside these, of layers without rotation."""
    windows = f.window() is not None
    local = f.local_layers(
        lambda layer: windows and bool((layer + 1) % f.count("sliding_window_pattern")))
    return {**nope([windows and not is_local for is_local in local]),
            "attention": f.attention_variants(local)}


class ExaoneMoe(MixtureDecoder):
    """K-EXAONE: the windows of EXAONE 4.0, the experts of DeepSeek V3."""

    DEFAULTS = {
        "exaone_moe": {
            **_EXAONE, "first_k_dense_replace": 1, "moe_intermediate_size": 1024,
            "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
            "bos_token_id": 1, "eos_token_id": 53,
        },
    }
    correction = "e_score_correction_bias"
    renames = ((".mlp.e_score_", ".mlp.gate.e_score_"),)

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f, bias=""),
            **_windows(f),
            **read_grouped_experts(f, "num_shared_experts"),
            qk_norm=True,
        )
