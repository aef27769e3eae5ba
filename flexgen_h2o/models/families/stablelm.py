"""StableLM 3B and StableLM 2 (arXiv 2402.17834): layer norms, partial rotation.

StableLM 2 12B has separate norms for each query and key head, and a parallel residual.
"""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, attention_specs, mlp_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import read_rope


class StableLm(Decoder):
    DEFAULTS = {
        "stablelm": {
            "vocab_size": 50304, "hidden_size": 2560, "num_hidden_layers": 32,
            "intermediate_size": 6912, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4096, "hidden_act": "silu", "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
            "qk_layernorm": False, "use_parallel_residual": False,
            "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        },
    }
    norm_bias = True

    def read(self, f: Fields) -> ModelConfig:
        common = f.decoder("stablelm", read_rope(f, partial=True), eps="layer_norm_eps")
        return ModelConfig(
            **common,
            attention_bias=f.flag("use_qkv_bias"),
            qk_norm=f.flag("qk_layernorm"),
            parallel_residual=f.flag("use_parallel_residual"),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, parallel = cfg.hidden_size, cfg.parallel_residual
        specs = norm_specs("ln1", f"{prefix}input_layernorm", hidden, True)
        if not parallel:
            specs |= norm_specs("ln2", f"{prefix}post_attention_layernorm", hidden, True)
        attention = attention_specs(cfg, prefix)
        for name, heads in (("q", cfg.num_heads), ("k", cfg.num_kv_heads)) if cfg.qk_norm else ():
            for head in range(heads):
                specs |= norm_specs(f"{name}_norm{head}",
                                    f"{prefix}self_attn.{name}_layernorm.norms.{head}",
                                    cfg.head_dim)
        last = {"out": attention.pop("out")} if parallel else {}  # the order of `attention_output`
        return {**specs, **attention, **mlp_specs(cfg, prefix), **last}


FAMILY = StableLm()
