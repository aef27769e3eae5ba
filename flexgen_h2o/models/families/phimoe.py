"""Phi-3.5-MoE (arXiv 2404.14219): layer norms, biases, experts chosen by SparseMixer."""

from __future__ import annotations

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.families.mixtral import Mixtral
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeConfig, read_rope


class PhiMoe(Mixtral):
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


FAMILY = PhiMoe()
