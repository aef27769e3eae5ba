"""Layers with a gated DeltaNet (arXiv 2412.06464) in place of attention: tensors and forward pass.

The short names of such a layer's tensors are

- "mixed": queries, keys and values of all heads, which go through a causal convolution,
- "beta", "step": a gate of how much each head's state takes in, and of how much it forgets,
- "conv" [channels, 1, kernel], "log_decay" and "step_bias" [value heads],
- "z": the gate of the output, whose heads are normed by "z_norm", and "out".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from flexgen_h2o.models.decoder import add_linear_, linear_specs, normed, row_blocks
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flexgen_h2o.models.layers import Operations


def delta_specs(cfg: ModelConfig, prefix: str) -> dict[str, TensorSpec]:
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


def add_delta_net_(cfg: ModelConfig, w: Mapping[str, Tensor], x: Tensor,
                   advance: Callable[..., Tensor], ops: Operations) -> Tensor:
    """Add the output of a gated DeltaNet to x [rows, hidden] and return x.

    Parameters
    ----------
    advance : callable (rule, *rows) -> Tensor
        Call ``rule(*rows, states, sequences=..., lengths=...)`` with the states of these rows'
        sequences: see `kernels.reference.delta_rule.gated_delta_net`.
    """
    from flexgen_h2o.kernels.ops import gated_delta_net  # here, because it imports torch

    heads, rows = cfg.recurrent, len(x)
    assert heads is not None
    mixed, beta, step = (ops.get(name, (rows, width), x.dtype) for name, width in (
        ("mixed", heads.conv_size), ("beta", heads.value_heads), ("step", heads.value_heads)))
    for block in row_blocks(rows):
        source = normed(cfg, w, "ln1", x[block], ops)
        for name, out in (("mixed", mixed), ("beta", beta), ("step", step)):
            ops.linear(source, w[name], None, out=out[block])
    conv = w["conv"].squeeze(1)
    rule = partial(gated_delta_net, weights=(conv, w["log_decay"], w["step_bias"]), config=heads)
    values = advance(rule, mixed, beta, step).view(rows, heads.value_size)
    for block in row_blocks(rows):
        z = ops.get("z", (len(x[block]), heads.value_size), x.dtype)
        ops.linear(normed(cfg, w, "ln1", x[block], ops), w["z"], None, out=z)
        by_head = values[block].view(-1, heads.value_dim)
        ops.rms_norm(by_head, w["z_norm"], eps=cfg.norm_eps, out=by_head)
        ops.activate_(z, "silu", values[block])
        add_linear_(cfg, w, x[block], z, ops, matrix="out", post_norm="post1")
    return x
