"""Moving sequences out of one block's cache into the next one's, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from flexgen_h2o.cache.layout import CacheShape, LayerCachePlan, layer_cache_plans
from flexgen_h2o.cache.tiers import CachePart
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout, ContinuedSequence
from flexgen_h2o.h2o.budget import cached
from flexgen_h2o.h2o.eviction import Eviction, EvictionState, eviction_of, new_state
from flexgen_h2o.h2o.key_smoothing import KeySmoothing, LayerSmoothing

Moved = dict[tuple[int, int], list[torch.Tensor]]
"""Of each sequence, by the batch and place that it had: the records of its tokens [kinds, kv_heads,
tokens, width], and what their eviction state holds, [kv_heads, tokens] each."""


def take(layer: int, parts: Sequence[CachePart], batches: Sequence[BatchLayout], *,
         states: Mapping[tuple[int, int], EvictionState], h2o: H2OConfig | None) -> Moved:
    """Copies of what the last block holds in a layer of the sequences that are continued.

    Parameters
    ----------
    parts : sequence of CachePart
        As the last block left them, all that was under way done.
    batches : sequence of BatchLayout
        The next block.
    states : mapping
        Eviction states of the layer by batch and the part's first sequence, where it evicts.
    h2o : H2OConfig or None
    """
    found: Moved = {}
    continued = [(one, length) for batch_layout in batches
               for one, length in zip(batch_layout.continued, batch_layout.lengths, strict=True)
               if one is not None]
    for batch in sorted({one.batch for one, _ in continued}):
        for part in parts:
            mine = [(one, length) for one, length in continued
                    if one.batch == batch and part.first <= one.sequence < part.last]
            if not mine:
                continue
            part.load(layer, batch, fetch=True, cached=0)
            held, state = part.get(layer, batch), states.get((batch, part.first))
            for one, length in mine:
                row, count = one.sequence - part.first, cached(h2o, layer, length,
                                                               one.generated - 1)
                found[batch, one.sequence] = [
                    held[:, row, :, :count].clone(),
                    *(x[row, :, :count].clone() for x in (state.tensors if state else ()))]
    return found


def put(moved: Moved, continued: Sequence[ContinuedSequence | None], held: torch.Tensor,
        state: EvictionState | None) -> None:
    """Fill the first slots of sequences with what was moved of them.

    Parameters
    ----------
    moved : Moved
    continued : sequence of (ContinuedSequence or None)
        The sequences of a part; None: its prompt is yet to come.
    held : Tensor [kinds, sequences, kv_heads, slots, width]
    state : EvictionState or None
        Of the part's sequences.
    """
    for row, one in enumerate(continued):
        if one is None:
            continue
        records, *others = moved[one.batch, one.sequence]
        held[:, row, :, : records.shape[2]] = records
        for target, values in zip(state.tensors if state else (), others, strict=True):
            target[row, :, : values.shape[1]] = values


# The eviction states of a block of batches, and the plans of its layers.


Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [rows, rotary_dim / 2] each."""


class EvictionStates:
    """One eviction state for each layer, batch and part of a cache that loses tokens there.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        None: nothing is evicted.
    rope : callable (positions) -> Rope or None
        float32 tables, for positions that roll.
    device : torch.device
        Where compute runs.
    smoothing : sequence of LayerSmoothing
        The constants of each layer; empty: keys are not smoothed.

    Attributes
    ----------
    eviction : Eviction
        The policy.
    plans : list of list of LayerCachePlan
        Of each batch of the block, by layer.
    """

    def __init__(self, shape: CacheShape, h2o: H2OConfig | None, *,
                 rope: Callable[[torch.Tensor], Rope | None], device: torch.device,
                 smoothing: Sequence[LayerSmoothing] = ()):
        self._shape = shape
        self._smoothing = smoothing
        self._h2o = h2o
        self._rope = rope
        self._device = device
        self._tables: Rope | None = None
        self._states: dict[tuple[int, int, int], EvictionState] = {}
        self.eviction = eviction_of(h2o)
        self.plans: list[list[LayerCachePlan]] = []

    def begin(self, batches: Sequence[BatchLayout]) -> dict[tuple[int, int, int], EvictionState]:
        """Start a block. Returns the states of the last one, by layer, batch and the part's first
        sequence."""
        last, self._states = self._states, {}
        self.plans = [layer_cache_plans(batch_layout, self._h2o, self._shape.num_layers)
                      for batch_layout in batches]
        return last

    def state(self, layer: int, batch: int, part: CachePart) -> EvictionState | None:
        """The state of a part's sequences, empty when it is first asked for; None where nothing is
        evicted."""
        plan = self.plans[batch][layer]
        if not plan.evicts:
            return None
        key = (layer, batch, part.first)
        if key not in self._states:
            mine, place = part.sequences(batch), part.place(self._device)
            rope = None
            if self.rolls(layer, batch):
                rope = tuple(table.to(place) for table in self.table(plan.slots + 1))
            smoothing = self.smoothing(layer, batch)
            self._states[key] = new_state(
                (mine.stop - mine.start, self._shape.kv_heads, plan.slots),
                self._eviction_in(layer, plan), rope=rope, device=place,
                smoothing=None if smoothing is None else smoothing.to(place))
        return self._states[key]

    def _eviction_in(self, layer: int, plan: LayerCachePlan) -> Eviction:
        """The policy in a layer. Without heavy hitters no cache holds what its window hides."""
        window = self._h2o.window(layer)
        if window is None:
            return self.eviction
        return replace(self.eviction, sinks=0, window=window if plan.scored else 0)

    def scored(self, layer: int, batch: int) -> bool:
        """True if scores decide what stays."""
        plan = self.plans[batch][layer]
        return plan.evicts and plan.scored

    def rolls(self, layer: int, batch: int) -> bool:
        """True if positions are ranks. As long as nothing is evicted, the two are the same."""
        return self.plans[batch][layer].evicts and self._h2o.positions == "rolling"

    def smoothing(self, layer: int, batch: int) -> KeySmoothing | None:
        """The smoothing of the keys that a layer caches; None where they are cached as they are."""
        if not self._smoothing:
            return None
        constants = self._smoothing[layer]
        return constants.unrotated if self.rolls(layer, batch) else constants.rotated

    def table(self, positions: int) -> Rope:
        """Rotations at the first `positions` positions, or more."""
        if self._tables is None or len(self._tables[0]) < positions:
            most = max(plan.slots for each in self.plans for plan in each) + 1
            self._tables = self._rope(torch.arange(max(positions, most), device=self._device))
        return self._tables
