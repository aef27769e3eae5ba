"""Phi-3.5-MoE (arXiv 2404.14219): layer norms, biases, experts chosen by SparseMixer."""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeConfig, read_rope


class PhiMoe(MixtureDecoder):
    DEFAULTS = {
        "phimoe": {
            "vocab_size": 32064, "hidden_size": 4096, "num_hidden_layers": 32,
            "intermediate_size": 6400, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0, "num_experts_per_tok": 2, "num_local_experts": 16,
            "router_jitter_noise": 0.01, "attention_bias": False, "lm_head_bias": False,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        },
    }
    norm_bias = True
    block = "block_sparse_moe"
    renames = ((".block_sparse_moe.gate.", ".mlp.router."), (".block_sparse_moe.", ".mlp."))
    expert_names = {"gate": "w1", "up": "w3", "down": "w2"}

    def read(self, f: Fields) -> ModelConfig:
        common = f.decoder("phimoe", _rope(f))
        router = RouterConfig("sparsemixer", jitter=f.value(float, "router_jitter_noise"))
        return ModelConfig(
            **common,
            attention_bias=f.flag("attention_bias"),
            out_bias=f.flag("attention_bias"),
            head_bias=f.flag("lm_head_bias"),
            attention=f.attention_variants((True,) * common["num_layers"]),
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


FAMILY = PhiMoe()
