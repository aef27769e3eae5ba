"""Phi-3 and its mixture (arXiv 2404.14219), Phi-3.5 and Phi-4."""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import Decoder, fused_mlp_specs, linear_specs
from flexgen_h2o.models.families.mixtral import Mixtral
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeConfig, read_rope
from flexgen_h2o.models.tensors import TensorSpec


class Phi3(Decoder):
    """Phi-3, Phi-3.5 and Phi-4: LLaMA with fused matrices."""

    DEFAULTS = {
        "phi3": {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        rope_parameters = dict(f.mapping("rope_scaling") or f.mapping("rope_parameters"))
        kind = rope_parameters.get("rope_type") or rope_parameters.get("type")
        if kind in ("su", "yarn"):  # older names of LongRoPE
            rope_parameters["rope_type"] = "longrope"
        rope = read_rope(f, parameters=rope_parameters, partial=True)
        return ModelConfig(**self.common(f, rope, bias=""), attention=f.attention_variants(True))

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        name, hidden = f"{prefix}self_attn.", cfg.hidden_size
        return {**linear_specs("qkv", f"{name}qkv_proj", (cfg.q_size + 2 * cfg.kv_size, hidden)),
                **linear_specs("out", f"{name}o_proj", (hidden, cfg.q_size))}

    def mlp_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return fused_mlp_specs(cfg, prefix)


class PhiMoe(Mixtral):
    """Phi-3.5-MoE: layer norms, biases, experts selected by SparseMixer."""

    DEFAULTS = {
        "phimoe": {
            "vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "num_experts_per_tok": 2, "num_local_experts": 16, "router_jitter_noise": 0.01,
            "lm_head_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        },
    }
    norm_bias = True
    renames = ((".block_sparse_moe.gate.", ".mlp.router."), (".block_sparse_moe.", ".mlp."))

    def read(self, f: Fields) -> ModelConfig:
        router = RouterConfig("sparsemixer", jitter=f.value(float, "router_jitter_noise"))
        return ModelConfig(
            **self.common(f, _rope(f)),
            head_bias=f.flag("lm_head_bias"),
            attention=f.attention_variants(True),
            experts=read_experts(f, width="intermediate_size", router=router),
        )


def _rope(f: Fields) -> RopeConfig:
    """Return the rope, in which `short_mscale` and `long_mscale` are the attention factor."""
    parameters = dict(f.mapping("rope_scaling") or f.mapping("rope_parameters"))
    scales = {parameters.pop(key) for key in ("short_mscale", "long_mscale") if key in parameters}
    if len(scales) > 1:
        raise UserError(f"{f.name}: rope with a short_mscale that differs from its long_mscale is "
                        "not supported")
    if scales:
        parameters["attention_factor"] = scales.pop()
    return read_rope(f, parameters=parameters)
