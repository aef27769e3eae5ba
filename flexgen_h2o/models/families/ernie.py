"""ERNIE 4.5: LLaMA whose heads rotate in interleaved pairs."""

from __future__ import annotations

from dataclasses import replace

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.models.decoder import Decoder
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.tensors import TensorSpec


class Ernie(Decoder):
    DEFAULTS = {
        "ernie4_5": {
            "vocab_size": 103424, "hidden_size": 1024, "num_hidden_layers": 18,
            "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0, "use_bias": False, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        return ModelConfig(
            **self.common(f, bias="use_bias"),
            mlp_bias=f.flag("use_bias"),
            rope_interleaved=True,
        )


class Ernie45Moe(MixtureDecoder):
    """A mixture: softmax routers with a correction, shared experts, leading dense layers."""

    DEFAULTS = {
        "ernie4_5_moe": {
            "vocab_size": 103424, "hidden_size": 2560, "num_hidden_layers": 28,
            "intermediate_size": 12288, "num_attention_heads": 20, "num_key_value_heads": 4,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
            "moe_layer_interval": 1, "moe_norm_min": 1e-12, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    }
    correction = "moe_statics.e_score_correction_bias"
    renames = ((".mlp.moe_statics.", ".mlp.gate.moe_statics."),)

    def read(self, f: Fields) -> ModelConfig:
        f.refuse("use_bias")
        router = RouterConfig(min_sum=f.number("moe_norm_min"))
        return ModelConfig(
            **self.common(f, bias=""),
            rope_interleaved=True,
            experts=read_experts(f, per_token="moe_k", router=router,
                                 shared_experts="moe_num_shared_experts"),
            dense_layers=_layers_without_experts(f),
        )

    def router_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().router_specs(cfg, prefix)
        correction = specs["router_correction"]
        return {**specs, "router_correction": replace(correction, shape=(1, *correction.shape))}


def _layers_without_experts(f: Fields) -> tuple[bool, ...]:
    """Return for each layer whether it has an MLP."""
    layers, interval = f.count("num_hidden_layers"), f.count("moe_layer_interval")
    start, end = (f.value(int, f"moe_layer_{name}_index") for name in ("start", "end"))
    last = layers - 1 if end == -1 else end
    return tuple((layer + 1) % interval > 0 or not start <= layer <= last
                 for layer in range(layers))
