"""Phi-3 (arXiv 2404.14219), Phi-3.5 and Phi-4: LLaMA with fused matrices."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, fused_mlp_specs, linear_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import TensorSpec


class Phi3(Decoder):
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


FAMILY = Phi3()
