"""StableLM 3B and StableLM 2 (arXiv 2402.17834): layer norms, partial rotation.

StableLM 2 12B has separate norms for each query and key head, and a parallel residual.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import TensorSpec


class StableLm(Decoder):
    DEFAULTS = {
        "stablelm": {
            "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912,
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": False,
            "use_parallel_residual": False, "bos_token_id": 0, "eos_token_id": 0,
        },
    }
    norm_bias = True

    def read(self, f: Fields) -> ModelConfig:
        rope = read_rope(f, partial=True)
        common = self.common(f, rope, eps="layer_norm_eps", bias="use_qkv_bias")
        return ModelConfig(
            **common | {"out_bias": False},
            qk_norm=f.flag("qk_layernorm"),
            parallel_residual=f.flag("use_parallel_residual"),
        )

    def layer_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().layer_norm_specs(cfg, prefix)
        return {short: spec for short, spec in specs.items()
                if not (cfg.parallel_residual and short.startswith("ln2"))}

    def qk_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for name, heads in (("q", cfg.num_heads), ("k", cfg.num_kv_heads)) if cfg.qk_norm else ():
            for head in range(heads):
                specs |= norm_specs(f"{name}_norm{head}",
                                    f"{prefix}self_attn.{name}_layernorm.norms.{head}",
                                    cfg.head_dim)
        return specs


FAMILY = StableLm()
