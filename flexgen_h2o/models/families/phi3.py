"""Phi-3 (arXiv 2404.14219), Phi-3.5 and Phi-4: LLaMA with fused matrices."""

from __future__ import annotations

from flexgen_h2o.models.decoder import Decoder, linear_specs, norm_specs
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.model_config import ModelConfig, TensorSpec
from flexgen_h2o.models.rope import read_rope


class Phi3(Decoder):
    DEFAULTS = {
        "phi3": {
            "vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32,
            "intermediate_size": 8192, "num_attention_heads": 32, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1,
            "eos_token_id": 32000,
        },
    }

    def read(self, f: Fields) -> ModelConfig:
        rope_parameters = dict(f.mapping("rope_scaling") or f.mapping("rope_parameters"))
        kind = rope_parameters.get("rope_type") or rope_parameters.get("type")
        if kind in ("su", "yarn"):  # older names of LongRoPE
            rope_parameters["rope_type"] = "longrope"
        rope = read_rope(f, parameters=rope_parameters, partial=True)
        common = f.decoder("phi3", rope)
        return ModelConfig(
            **common,
            attention=f.attention_variants((True,) * common["num_layers"]),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        hidden, ffn = cfg.hidden_size, cfg.ffn_size
        qkv = (cfg.q_size + 2 * cfg.kv_size, hidden)
        return {**norm_specs("ln1", f"{prefix}input_layernorm", hidden),
                **norm_specs("ln2", f"{prefix}post_attention_layernorm", hidden),
                **linear_specs("qkv", f"{prefix}self_attn.qkv_proj", qkv),
                **linear_specs("out", f"{prefix}self_attn.o_proj", (hidden, cfg.q_size)),
                **linear_specs("gate_up", f"{prefix}mlp.gate_up_proj", (2 * ffn, hidden)),
                **linear_specs("down", f"{prefix}mlp.down_proj", (hidden, ffn))}


FAMILY = Phi3()
