"""Qwen3-Next, and the text models of Qwen3.5 and Qwen3.6, dense and mixtures of experts.

Three of four layers have a gated DeltaNet (arXiv 2412.06464), the others gated attention. The
short names of a DeltaNet's tensors are

- "mixed": queries, keys and values of all heads, which go through a causal convolution,
- "beta", "step": a gate of how much each head's state takes in, and of how much it forgets,
- "conv" [channels, 1, kernel], "log_decay" and "step_bias" [value heads],
- "z": the gate of the output, whose heads are normed by "z_norm", and "out".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from flexgen_h2o.config.layers import RecurrentConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.decoder import (
    add_linear_,
    layer_number,
    linear_specs,
    move_last,
    normed,
    product,
    row_blocks,
)
from flexgen_h2o.models.fields import Fields
from flexgen_h2o.models.mixture import MixtureDecoder, read_dense_layers, read_experts
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import read_rope
from flexgen_h2o.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.checkpoint import View
    from flexgen_h2o.models.layers import Operations

_COMMON = {
    "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "head_dim": 256,
    "full_attention_interval": 4, "num_attention_heads": 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DENSE = {**_COMMON, "vocab_size": 248320, "intermediate_size": 12288, "num_key_value_heads": 4}
_MIXTURE = {**_COMMON, "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
            "intermediate_size": 5632, "num_key_value_heads": 2,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8, "num_experts": 256, "norm_topk_prob": True}


class Qwen3Next(MixtureDecoder):
    DEFAULTS = {
        "qwen3_next": {**_MIXTURE, "vocab_size": 151936, "num_hidden_layers": 48,
                       "num_experts_per_tok": 10, "num_experts": 512},
        "qwen3_5_text": _DENSE,
        "qwen3_5_moe_text": _MIXTURE,
    }
    shared_expert = "mlp.shared_expert"
    gated_shared = True

    def read(self, f: Fields) -> ModelConfig:
        if f.value(str, "hidden_act") != "silu":
            raise UserError(f"{f.name}: hidden_act = {f.raw('hidden_act')} is not supported in a "
                            f"{f.values['model_type']} model (silu is)")
        mixture: dict[str, Any] = {}
        if f.values["model_type"] != "qwen3_5_text":
            shared = f.count("shared_expert_intermediate_size")
            mixture = {"experts": read_experts(f, shared_ffn_size=shared),
                       "dense_layers": read_dense_layers(f)}
        return ModelConfig(
            **self.common(f, read_rope(f, partial=True)),
            norm_offset=1.0,  # weights are stored minus one
            qk_norm=True,
            attention_gate=True,
            **mixture,
            recurrent=_read_recurrent(f),
            recurrent_layers=_read_recurrent_layers(f),
        )

    def attention_specs(self, cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
        """Return a gated DeltaNet, or gated attention.

        Checkpoints have the queries and the gate of each head in one matrix.
        """
        if cfg.is_recurrent(layer_number(prefix)):
            return _delta_specs(cfg, f"{prefix}linear_attn.")
        specs = super().attention_specs(cfg, prefix)
        for short, name in (("q", "query"), ("out_gate", "gate")):
            specs |= linear_specs(short, f"{prefix}self_attn.q_proj.{name}",
                                  (cfg.q_size, cfg.hidden_size), cfg.attention_bias)
        return move_last(specs, "out")

    def recurrent(self, cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                  advance: Callable[..., Tensor], ops: Operations) -> Tensor:
        """Add the output of a gated DeltaNet to x [rows, hidden] and return x."""
        from flexgen_h2o.kernels.ops import gated_delta_net  # here, because it imports torch

        heads, rows = cfg.recurrent, len(x)
        assert heads is not None
        mixed, beta, step = (ops.get(name, (rows, width), x.dtype) for name, width in (
            ("mixed", heads.conv_size), ("beta", heads.value_heads), ("step", heads.value_heads)))
        for block in row_blocks(rows):
            source = normed(cfg, w, "ln1", x[block], ops)
            for name, out in (("mixed", mixed), ("beta", beta), ("step", step)):
                ops.linear(source, w[name], None, out=out[block])
        weights = w["conv"].squeeze(1), w["log_decay"], w["step_bias"]
        values = advance(partial(gated_delta_net, weights=weights, config=heads),
                         mixed, beta, step).view(rows, heads.value_size)
        for block in row_blocks(rows):
            z = product(w, "z", normed(cfg, w, "ln1", x[block], ops), ops)
            by_head = values[block].view(-1, heads.value_dim)
            ops.rms_norm(by_head, w["z_norm"], eps=cfg.norm_eps, out=by_head)
            ops.activate_(z, "silu", values[block])
            add_linear_(cfg, w, x[block], z, ops, matrix="out", post_norm="post1")
        return x

    def views(self, cfg: ModelConfig) -> dict[str, Sequence[View]]:
        """Return the views of experts, of queries and gates, and of Qwen3-Next's projections."""
        views = super().views(cfg)
        for layer in range(cfg.num_layers):
            prefix = f"model.layers.{layer}."
            if cfg.is_recurrent(layer):
                views |= self._delta_views(cfg, f"{prefix}linear_attn.")
                continue
            for name, number in (("query", 0), ("gate", 1)):
                rows = _block_rows(cfg.num_heads, (cfg.head_dim, cfg.head_dim), number)
                for end in ("weight", "bias") if cfg.attention_bias else ("weight",):
                    views[f"{prefix}self_attn.q_proj.{name}.{end}"] = self.views_of(
                        f"{prefix}self_attn.q_proj.{end}", row_ranges=rows)
        return views

    def _delta_views(self, cfg: ModelConfig, prefix: str) -> dict[str, Sequence[View]]:
        """Return the views of a DeltaNet's projections in two matrices.

        Both have a block of rows for each key head and its value heads.
        """
        heads = cfg.recurrent
        assert heads is not None
        shared = heads.value_heads // heads.key_heads
        values = shared * heads.value_dim
        widths, tensor = (heads.key_dim, heads.key_dim, values, values), f"{prefix}in_proj_qkvz"
        query, key, value, gate = (_block_rows(heads.key_heads, widths, number)
                                   for number in range(4))
        beta, step = (_block_rows(heads.key_heads, (shared, shared), number)
                      for number in range(2))
        return {f"{prefix}{name}.weight": self.views_of(f"{source}.weight", row_ranges=rows)
                for name, source, rows in (
                    ("in_proj_qkv", tensor, query + key + value), ("in_proj_z", tensor, gate),
                    ("in_proj_b", f"{prefix}in_proj_ba", beta),
                    ("in_proj_a", f"{prefix}in_proj_ba", step))}


def _delta_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
    """Return the tensors of a gated DeltaNet under the names of Qwen3.5, in the order of use."""
    heads, hidden = cfg.recurrent, cfg.hidden_size
    assert heads is not None
    gates = (heads.value_heads, hidden)
    return {**linear_specs("mixed", f"{prefix}in_proj_qkv", (heads.conv_size, hidden)),
            **linear_specs("beta", f"{prefix}in_proj_b", gates),
            **linear_specs("step", f"{prefix}in_proj_a", gates),
            **linear_specs("z", f"{prefix}in_proj_z", (heads.value_size, hidden)),
            **linear_specs("out", f"{prefix}out_proj", (hidden, heads.value_size)),
            "conv": TensorSpec(f"{prefix}conv1d.weight", (heads.conv_size, 1, heads.kernel)),
            "log_decay": TensorSpec(f"{prefix}A_log", (heads.value_heads,)),
            "step_bias": TensorSpec(f"{prefix}dt_bias", (heads.value_heads,)),
            "z_norm": TensorSpec(f"{prefix}norm.weight", (heads.value_dim,))}


def _block_rows(blocks: int, widths: Sequence[int], number: int) -> tuple[range, ...]:
    """Return the rows of part `number` of each block, whose parts have these widths."""
    starts = [0, *accumulate(widths)]
    return tuple(range(block + starts[number], block + starts[number + 1])
                 for block in range(0, blocks * starts[-1], starts[-1]))


def _read_recurrent(f: Fields) -> RecurrentConfig:
    heads = RecurrentConfig(f.count("linear_num_key_heads"), f.count("linear_num_value_heads"),
                            f.count("linear_key_head_dim"), f.count("linear_value_head_dim"),
                            f.count("linear_conv_kernel_dim"))
    if heads.value_heads % heads.key_heads:
        raise UserError(f"{f.name}: {heads.value_heads} value heads of linear attention cannot "
                        f"share {heads.key_heads} key heads evenly; the config is wrong")
    return heads


def _read_recurrent_layers(f: Fields) -> tuple[bool, ...]:
    """Return whether each layer is recurrent: by layer_types, or all but every fourth."""
    interval = f.count("full_attention_interval")
    recurrent = f.local_layers(lambda layer: (layer + 1) % interval > 0,
                               types=("full_attention", "linear_attention"))
    if all(recurrent):
        raise UserError(f"{f.name}: a model without any layer of full attention is not supported")
    return recurrent
