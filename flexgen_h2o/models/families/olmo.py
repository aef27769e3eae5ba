"""OLMo 2 and 3, their mixtures, and EXAONE 4.0 (arXiv 2507.11407)."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts, read_grouped_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope, read_layer_ropes, read_rope

_OLMO2 = {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": 50279}


class Olmo2(Decoder):
    """OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after attention and MLP.

    In OLMo 3 three of four layers have windows; rope scaling applies to the other layers.
    """

    DEFAULTS = {
        "olmo2": _OLMO2,
        "olmo3": {**_OLMO2, "rope_theta": 500000.0, "sliding_window": 4096},
    }
    norms = {"post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"}
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        windows: dict[str, Any] = {}
        if f.values["model_type"] == "olmo2":
            rope = read_rope(f)
        else:
            local = f.local_layers(lambda layer: (layer + 1) % 4 != 0)
            rope, local_rope = read_layer_ropes(f)
            windows["attention"] = f.attention_variants(local)
            if local_rope != rope:
                windows |= {"other_rope": local_rope, "other_rope_layers": local}
        return ModelConfig(**self.common(f, rope), **windows, qk_norm=True)


class Olmoe(MixtureDecoder):
    """OLMoE (arXiv 2409.02060): many small experts."""

    DEFAULTS = {
        "olmoe": {
            "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16,
            "intermediate_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64,
            "norm_topk_prob": False, "eos_token_id": 50279,
        },
    }
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f),
            qk_norm=True,
            clip_qkv=f.number_or("clip_qkv", 0.0),
            experts=read_experts(f, width="intermediate_size"),
        )


class FlexOlmo(MixtureDecoder):
    """FlexOlmo (arXiv 2507.07024): OLMo 2 with a mixture of experts in each layer."""

    DEFAULTS = {
        "flex_olmo": {
            "vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000.0,
            "num_experts_per_tok": 5, "num_experts": 7, "norm_topk_prob": False,
            "eos_token_id": 100257,
        },
    }
    norms = Olmo2.norms
    qk_norm_of_all_heads = True

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(**self.common(f), qk_norm=True,
                           experts=read_experts(f, width="intermediate_size"))


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
        return ModelConfig(**self.common(f, bias=""), **_exaone_windows(f), qk_norm=True)


def _exaone_windows(f: Fields) -> dict[str, Any]:
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
            **_exaone_windows(f),
            **read_grouped_experts(f, "num_shared_experts"),
            qk_norm=True,
        )
