"""Parts of an OPT layer that are timed by themselves, called the way that the engine does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexgen_h2o.config.formats import CacheLayout
from flexgen_h2o.h2o.eviction import Eviction, EvictionState
from flexgen_h2o.kernels import native, ops
from flexgen_h2o.kernels.arguments import EvictionArguments
from flexgen_h2o.kernels.program import Program
from flexgen_h2o.models.families import opt
from flexgen_h2o.models.layers import Operations, add_linear_, linear
from flexgen_h2o.models.spec import ModelConfig


class DecodeStep:
    """A step over full slots in the middle of a generation with heavy hitters: each call evicts.

    Parameters
    ----------
    slots : Tensor [2, sequences, kv_heads, slots, width]
        Keys and values, or their records.
    bits, head_dim : int
    """

    def __init__(self, slots: Tensor, *, bits: int, head_dim: int):
        self._slots = slots
        self._layout = CacheLayout.of(head_dim, bits)
        shape, count = slots.shape[1:4], slots.shape[3]
        order = torch.rand(shape, device=slots.device).argsort(-1)
        self._state = EvictionState(Eviction(), torch.rand(shape, device=slots.device),
                                    order.to(torch.int32))
        metadata = torch.tensor([count, count, max(1, count // 2), 1], dtype=torch.int32)
        self._metadata = metadata[:, None].repeat(1, shape[0]).to(slots.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a new token; q [sequences, heads, head_dim], k and v with their heads."""
        self._metadata[1] += 1
        return ops.decode_attention(q, k, v, slots=self._slots, metadata=self._metadata,
                                    layout=self._layout, state=self._state)[0]

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, steps: Program) -> Tensor:
        """Note a call among the steps of a program; the result is what these write."""
        return native.decode_attention(q, k, v, slots=self._slots, metadata=self._metadata,
                                       layout=self._layout, steps=steps,
                                       eviction=EvictionArguments.of(self._state))[0]


def run_layer(config: ModelConfig, weights: dict[str, Tensor], x: Tensor, do: Operations, *,
              attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """A decoder layer, as the executor calls it; x [rows, hidden] is updated in place."""
    attended = attend(*opt.attention_inputs(config, weights, x, do))
    opt.attention_output(config, weights, x, attended, do)
    opt.mlp(config, weights, x, do)


def run_products(weights: dict[str, Tensor], source: Tensor, x: Tensor, do: Operations) -> None:
    """The products of such a layer alone, of source [rows, hidden]; two are added to x."""
    q, _, _, wide = (linear(source, weights[name], out=do.get(
        name, (len(source), len(weights[name])), source.dtype)) for name in ("q", "k", "v", "fc1"))
    add_linear_(x, q, weights["out"])
    add_linear_(x, wide, weights["fc2"])
