"""The text models of Llama 4: a shared and one routed expert per token, layers without rotation.

The context ends where attention in chunks begins, and the scale of queries that grows with the
position (arXiv 2501.19399). Before, both change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import layer_number
from flexgen_h2o.models.families.smollm3 import rotated_layers
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import nope
from flexgen_h2o.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations


class Llama4(MixtureDecoder):
    """In layers whose query and key heads are normed, "q" and "k" are "normed_q" and "normed_k"."""

    DEFAULTS = {
        "llama4_text": {
            "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "no_rope_layer_interval": 4, "use_qk_norm": True, "attention_chunk_size": 8192,
            "attn_temperature_tuning": True, "floor_scale": 8192, "num_experts_per_tok": 1,
            "num_local_experts": 16, "interleave_moe_layer_step": 1, "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }
    block = "feed_forward"
    router = "router"
    shared_expert = "feed_forward.shared_expert"
    stacks = (("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),)
    transposed_stacks = True

    def read(self, f: Fields) -> ModelConfig:
        common, rotated = self.common(f), rotated_layers(f)
        experts = read_experts(f, width="intermediate_size",
                               router=RouterConfig("sigmoid", normalize=False),
                               shared_ffn_size=f.count("intermediate_size"))
        if experts.per_token > 1:
            raise UserError(f"{f.name}: num_experts_per_tok = {experts.per_token} is not supported "
                            "in a llama4_text model (1 is)")
        return ModelConfig(
            **common | {"ffn_size": f.count("intermediate_size_mlp"),
                        "max_positions": min(common["max_positions"], *_ends(f, rotated))},
            **nope([not rotates for rotates in rotated]),
            rope_interleaved=True,
            qk_norm=f.flag("use_qk_norm"),
            experts=replace(experts, scale_inputs=True),
            dense_layers=_dense_layers(f),
        )

    def layer_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        specs = super().layer_specs(cfg, prefix)
        if not cfg.qk_norm or cfg.rope_number(layer_number(prefix)):
            return specs
        return {f"normed_{short}" if short.split("_")[0] in ("q", "k") else short: spec
                for short, spec in specs.items()}

    def qk_norm_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        return {}  # they have no weights

    def attention_inputs(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                         ops: Operations) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; a rotation does not change norms, so it comes later."""
        named = {short.removeprefix("normed_"): weight for short, weight in w.items()}
        q, k, v = super().attention_inputs(cfg, named, x, ops)
        for heads in (q, k) if "normed_q" in w else ():
            rows = heads.view(-1, cfg.head_dim)
            ops.rms_norm(rows, None, eps=cfg.norm_eps, out=rows)
        return q, k, v


def _ends(f: Fields, rotated: list[bool]) -> list[int]:
    """Return the positions at which chunks and the scale of queries begin."""
    ends = [f.count("max_position_embeddings")]
    if f.values.get("attention_chunk_size", 0) is not None:
        ends.append(f.count("attention_chunk_size"))
    if f.raw("attn_temperature_tuning") and not all(rotated):
        ends.append(f.count("floor_scale") - 1)
    return ends


def _dense_layers(f: Fields) -> tuple[bool, ...]:
    """Return for each layer whether it has an MLP."""
    layers, step, listed = (f.count("num_hidden_layers"), f.count("interleave_moe_layer_step"),
                            f.raw("moe_layers"))
    mixtures = (range(step - 1, layers, step) if listed is None
                else f.fit(list[int], listed, "moe_layers"))
    return tuple(layer not in mixtures for layer in range(layers))


FAMILY = Llama4()
