"""Decode steps of decoder layers that are in memory, each bound once for a block and then one call.

A layer's norms, matmuls, rotation, attention with eviction or recall, activation and residual (of
a mixture what comes before the router) are captured in `CapturedCalls` by the family's own
functions; of a step only the rotations and the decode metadata are new. Where the cache does not
support capture (`KVCache.supports_capture`), as it moves between tiers, its attention is a call of
its own between two parts.
Layers that cannot be bound go on operation by operation: `unbound_reason`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexgen_h2o.config.policy import Policy
from flexgen_h2o.engine.schedule import LayerStep
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import Workspace
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import CapturingOperations
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeTables, all_tables

_log = logging.getLogger(__name__)


def unbound_reason(workspace: Workspace, policy: Policy, *, device: torch.device,
                   dtype: torch.dtype, mixture: bool = False) -> str | None:
    """Why no layer of a block can be bound; None if those can whose weights stay in memory.

    Of a `mixture` of experts it is the half before the router, which is a step of its own.
    """
    reasons = (
        (device.type != "cpu", "compute is not on a CPU"),
        (dtype != torch.bfloat16, f"the operations of {dtype} are PyTorch's, bit by bit"),
        (ops.uses_reference("cpu"), "the C++ kernels are missing or not wanted"),
        (policy.sep_layer and not mixture, "attention and MLP are steps of their own"),
        (not workspace.hidden.is_resident, "hidden states move between tiers"),
    )
    return next((why for holds, why in reasons if holds), None)


@dataclass(frozen=True)
class _BoundLayer:
    """A bound layer step of a batch.

    Attributes
    ----------
    before : CapturedCalls
        All of it; where the cache does not bind, what comes before attention.
    x, qkv, attended : Tensors
        The layer's input, and what attention is given and gives.
    after : CapturedCalls
        What comes after attention, where the cache does not bind.
    """

    before: CapturedCalls
    x: torch.Tensor
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    attended: torch.Tensor
    after: CapturedCalls


class TokenLayers:
    """The bound decoder layers of one block.

    Parameters
    ----------
    config : ModelConfig
    weights : WeightStore
        Loaded. A layer that has to be fetched, even in part, is not bound.
    workspace : Workspace
        Its cache has begun or resumed the block before anything is run.
    policy : Policy
    device : torch.device
    dtype : torch.dtype
        Of weights and activations.
    first : int
        The model's layer that is the cache's first.
    """

    def __init__(self, config: ModelConfig, weights: WeightStore, workspace: Workspace, *,
                 policy: Policy, device: torch.device, dtype: torch.dtype, first: int = 0):
        self._config = config
        self._first = first
        self._family = family(config)
        self._weights = weights
        self._workspace = workspace
        self._layers: dict[tuple[int, int], _BoundLayer] = {}
        self._rope: dict[int, tuple[RopeTables, ...]] = {}
        self._attended: dict[int, torch.Tensor] = {}
        mixture = config.experts is not None
        layers = range(1, len(weights.units) - 1, 2 if mixture else 1)
        why = unbound_reason(workspace, policy, device=device, dtype=dtype, mixture=mixture)
        if why is not None:
            _log.debug("decode steps go operation by operation: %s", why)
        self.bound = frozenset(filter(weights.is_resident, layers) if why is None else ())
        """The layer steps (numbered as in the schedule) of new tokens that `run` does."""
        self._captures_attention = workspace.cache.supports_capture
        self.complete = self._captures_attention and len(self.bound) == len(layers)
        """True if these are every decoder layer, or every first half of one, with attention."""

    def prepare_replay(self, batch: int, positions: torch.Tensor, lengths: torch.Tensor | None,
                    token: int) -> None:
        """Begin a forward pass of the block's new token `token` (from 1) of a batch: positions and
        lengths as of `rope_tables`."""
        if not (self.bound and self._captures_attention):
            return
        self._workspace.cache.prepare_replay(batch, token)
        tables = all_tables(self._config.ropes, positions, torch.float32, lengths)
        if batch not in self._rope:
            self._rope[batch] = tables
            return
        for bound, new in zip(self._rope[batch], tables, strict=True):
            for old, table in zip(bound, new, strict=True):
                old.copy_(table)

    def run(self, step: LayerStep, *, cached: int, rows: int,
            attend: Callable[..., torch.Tensor]) -> None:
        """Take the hidden states of a batch through a layer step.

        Parameters
        ----------
        step : LayerStep
        cached : int
            Number of its decoder layer in the cache.
        rows : int
            Of the hidden states.
        attend : callable (step, x, q, k, v) -> Tensor
            Attention over new tokens where the cache does not bind: x [rows, hidden] is the layer's
            input, q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim] before rotation,
            the result like q.
        """
        layer = self._layers.get((step.layer, step.batch))
        if layer is None:
            layer = self._bound(step.layer, step.batch, cached, rows)
            self._layers[step.layer, step.batch] = layer
        layer.before.replay()
        if not self._captures_attention:
            layer.attended.copy_(attend(step, layer.x, *layer.qkv))
            layer.after.replay()

    def _bound(self, layer: int, batch: int, cached: int, rows: int) -> _BoundLayer:
        config, weights = self._config, self._weights.get(layer)
        program = before = CapturedCalls()
        do = CapturingOperations(self._workspace.operations, program)
        x = self._workspace.hidden.get(batch, rows)
        q, k, v = self._family.attention_inputs(config, weights, x, do)
        if batch not in self._attended:
            self._attended[batch] = torch.empty(q.shape, dtype=q.dtype)
        attended = self._attended[batch]
        if self._captures_attention:
            ropes = self._rope[batch]
            rope = ropes[config.rope_number(self._first + cached)] if ropes else None
            self._workspace.cache.capture_token(cached, batch, q, k, v, rope=rope,
                                             sinks=weights.get("sinks"), out=attended,
                                             capture=program)
        else:
            program = CapturedCalls()
            do = CapturingOperations(self._workspace.operations, program)
        self._family.attention_output(config, weights, x, attended, do)
        if not config.parallel_residual and config.experts is None:
            self._family.mlp(config, weights, x, do)
        return _BoundLayer(before, x, (q, k, v), attended, after=program)
