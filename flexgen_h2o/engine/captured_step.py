"""Decode steps of resident decoder layers, captured once for a block and replayed at each step.

The family's functions capture a layer's norms, matmuls, rotation, attention with eviction or
recall, activation and residual in `CapturedCalls` (in a mixture of experts, only the part before
the router). A replay reads new rotation tables and decode metadata from the same tensors. If the
cache cannot capture (`KVCache.supports_capture`), attention is a call between two captured parts.
Other layers run operation by operation: see `capture_obstacle`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexgen_h2o.config.policy import Policy
from flexgen_h2o.engine.schedule import Action
from flexgen_h2o.engine.weight_files import attention_sinks
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import Workspace
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import CapturingOperations
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeTables, all_tables

_log = logging.getLogger(__name__)


def capture_obstacle(workspace: Workspace, policy: Policy, *, device: torch.device,
                     mixture: bool) -> str | None:
    """Return why no layer of a block can be captured; None if resident layers can.

    In a `mixture` of experts, only the half before the router is captured.
    """
    obstacles = (
        (device.type != "cpu", "compute is not on a CPU"),
        (workspace.dtype != torch.bfloat16, f"{workspace.dtype} runs PyTorch's operations"),
        (ops.uses_reference("cpu"), "the C++ kernels are missing or disabled"),
        (policy.sep_layer and not mixture, "attention and MLP are separate units"),
        (not workspace.hidden.is_resident, "hidden states move between tiers"),
    )
    return next((reason for applies, reason in obstacles if applies), None)


@dataclass(frozen=True)
class _CapturedLayer:
    """A captured unit of a batch.

    `before` is the whole layer. If the cache cannot capture attention, `before` ends with `qkv`,
    and `after` begins with the output of attention, `attended`.
    """

    before: CapturedCalls
    x: torch.Tensor  # [rows, hidden], input and output
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    attended: torch.Tensor  # [rows, heads, elements of a value]
    after: CapturedCalls


class CapturedLayers:
    """The captured decoder layers of one block.

    Parameters
    ----------
    weights : WeightStore
        Weights, already loaded. A layer with weights that are fetched is not captured.
    workspace : Workspace
        Its cache has begun or resumed the block before the first replay.

    Attributes
    ----------
    units : frozenset of int
        The captured units, numbered as in the schedule.
    complete : bool
        True if every decoder layer is captured, with its attention. Recurrent layers never are.
    """

    def __init__(self, config: ModelConfig, weights: WeightStore, workspace: Workspace, *,
                 policy: Policy, device: torch.device):
        self._config = config
        self._family = family(config)
        self._weights = weights
        self._workspace = workspace
        self._layers: dict[tuple[int, int], _CapturedLayer] = {}
        self._rope: dict[int, tuple[RopeTables, ...]] = {}
        self._attended: dict[tuple[int, torch.Size], torch.Tensor] = {}
        mixture = config.experts is not None
        units_per_layer = 2 if mixture else 1
        layers = range(1, len(weights.units) - 1, units_per_layer)
        reason = capture_obstacle(workspace, policy, device=device, mixture=mixture)
        if reason is not None:
            _log.debug("decode steps go operation by operation: %s", reason)
        self.units = frozenset(
            unit for unit in layers if reason is None and weights.is_resident(unit)
            and not config.is_recurrent((unit - 1) // units_per_layer))
        self._captures_attention = workspace.cache.supports_capture
        self.complete = self._captures_attention and len(self.units) == len(layers)

    def prepare_replay(self, batch: int, positions: torch.Tensor, lengths: torch.Tensor | None,
                       token: int) -> None:
        """Write the inputs of a replayed decode step: rotation tables and decode metadata.

        Parameters
        ----------
        positions, lengths : Tensor
            See `models.rope.all_tables`.
        token : int
            Number of the block's new token, from 1.
        """
        if not (self.units and self._captures_attention):
            return
        self._workspace.cache.prepare_replay(batch, token)
        tables = all_tables(self._config.ropes, positions, torch.float32, lengths)
        if batch not in self._rope:
            self._rope[batch] = tables
            return
        for captured, new in zip(self._rope[batch], tables, strict=True):
            for target, table in zip(captured, new, strict=True):
                target.copy_(table)

    def run(self, action: Action, *, cache_layer: int, rope_number: int, rows: int,
            attend: Callable[..., torch.Tensor]) -> None:
        """Compute a unit on the hidden states of a batch: replay it, or capture it first.

        Parameters
        ----------
        cache_layer, rope_number : int
            Number of its layer in the cache, and `ModelConfig.rope_number`.
        rows : int
            Rows of the hidden states.
        attend : callable (action, x, q, k, v) -> Tensor [rows, heads, elements of a value]
            Attention over new tokens, if the cache cannot capture. x is the layer's input; q, k and
            v are not rotated.
        """
        layer = self._layers.get((action.unit, action.batch))
        if layer is None:
            layer = self._capture(action.unit, action.batch, cache_layer, rope_number, rows)
            self._layers[action.unit, action.batch] = layer
        layer.before.replay()
        if not self._captures_attention:
            layer.attended.copy_(attend(action, layer.x, *layer.qkv))
            layer.after.replay()

    def _capture(self, layer: int, batch: int, cache_layer: int, rope_number: int, rows: int
                 ) -> _CapturedLayer:
        config, weights = self._config, self._weights.get(layer)
        calls = before = CapturedCalls()
        operations = CapturingOperations(self._workspace.operations, calls)
        x = self._workspace.hidden.get(batch, rows)
        q, k, v = self._family.attention_inputs(config, weights, x, operations)
        out = self._attended.setdefault((batch, q.shape), torch.empty(q.shape, dtype=q.dtype))
        attended = out[..., k.shape[-1] - v.shape[-1] :]
        if self._captures_attention:
            ropes = self._rope[batch]
            rope = ropes[rope_number] if ropes else None
            self._workspace.cache.capture_token(
                cache_layer, batch, q, k, v, rope=rope, sinks=attention_sinks(weights), out=out,
                capture=calls)
        else:
            calls = CapturedCalls()
            operations = CapturingOperations(self._workspace.operations, calls)
        self._family.attention_output(config, weights, x, attended, operations)
        if not config.parallel_residual and config.experts is None:
            self._family.mlp(config, weights, x, operations)
        return _CapturedLayer(before, x, (q, k, v), attended, after=calls)
