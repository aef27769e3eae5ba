"""The state of eviction in a block: states of slots, step metadata, and their migration.

The block that follows continues some sequences: `copy_continued` and `write_continued` move their
cache into it, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from flexgen_h2o.cache.layout import CacheShape, LayerCachePlan, layer_cache_plans
from flexgen_h2o.cache.tiers import CacheTier
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout, ContinuedSequence
from flexgen_h2o.h2o.budget import num_cached
from flexgen_h2o.h2o.eviction import (
    EvictionState,
    decode_metadata,
    eviction_of,
    layer_eviction,
    new_state,
)
from flexgen_h2o.h2o.key_smoothing import KeySmoothing, LayerSmoothing

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [rows, rotary_dim / 2] each."""


class EvictionStates:
    """The eviction state of each layer, batch and tier of a cache that evicts there.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        None: nothing is evicted.
    rope : callable (positions) -> Rope or None
        Rotations of a model with rotary embeddings, for rolling positions.
    device : torch.device
        The device of compute.
    smoothing : sequence of LayerSmoothing
        Key smoothing of each layer; empty: keys are not smoothed.

    Attributes
    ----------
    eviction : Eviction
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
        """Start a block; return the last block's states by (layer, batch, first sequence)."""
        last, self._states = self._states, {}
        self.plans = [layer_cache_plans(batch_layout, self._h2o, self._shape.num_layers)
                      for batch_layout in batches]
        return last

    def state(self, layer: int, batch: int, tier: CacheTier) -> EvictionState | None:
        """Return the state of a tier's sequences, empty at first; None where nothing is evicted."""
        plan = self.plans[batch][layer]
        if not plan.evicts:
            return None
        key = (layer, batch, tier.first)
        if key not in self._states:
            sequences, device = tier.sequences(batch), tier.attention_device(self._device)
            rope: Rope | None = None
            if self.rolls(layer, batch):
                cos, sin = self.rope_tables(plan.slots + 1)
                rope = cos.to(device), sin.to(device)
            smoothing = self.smoothing(layer, batch)
            self._states[key] = new_state(
                (sequences.stop - sequences.start, self._shape.kv_heads, plan.slots),
                layer_eviction(self._h2o, layer, scored=plan.scored), rope=rope, device=device,
                smoothing=None if smoothing is None else smoothing.to(device))
        return self._states[key]

    def scored(self, layer: int, batch: int) -> bool:
        """Return whether scores decide which tokens stay."""
        plan = self.plans[batch][layer]
        return plan.evicts and plan.scored

    def rolls(self, layer: int, batch: int) -> bool:
        """Return whether positions are ranks. Until something is evicted, ranks are positions."""
        return self.plans[batch][layer].evicts and self._h2o.positions == "rolling"

    def smoothing(self, layer: int, batch: int) -> KeySmoothing | None:
        """Return the smoothing of the keys that a layer caches, if any."""
        if not self._smoothing:
            return None
        constants = self._smoothing[layer]
        return constants.unrotated if self.rolls(layer, batch) else constants.rotated

    def rope_tables(self, positions: int) -> Rope:
        """Return rotations at the first `positions` positions, or more."""
        if self._tables is None or len(self._tables[0]) < positions:
            slots = max(plan.slots for plans in self.plans for plan in plans)
            self._tables = self._rope(torch.arange(max(positions, slots + 1), device=self._device))
        return self._tables


class StepMetadata:
    """The metadata of decode steps, created once for all layers of the same budgets.

    Parameters
    ----------
    batch_layouts : sequence of BatchLayout
    plans : sequence of sequences of LayerCachePlan
        Of each batch, by layer.
    h2o : H2OConfig or None
    captured : bool
        Attention is captured: a step overwrites the metadata that replays read.
    """

    def __init__(self, batch_layouts: Sequence[BatchLayout],
                 plans: Sequence[Sequence[LayerCachePlan]], h2o: H2OConfig | None, *,
                 captured: bool):
        self._batch_layouts = batch_layouts
        self._plans = plans
        self._h2o = h2o
        self._captured = captured
        self._metadata: dict[tuple, tuple[int, torch.Tensor]] = {}

    def update(self, layer: int, batch: int, tier: CacheTier, *, token: int, device: torch.device
               ) -> torch.Tensor:
        """Return the metadata of new token `token` (from 1): int32 [4, sequences of the tier]."""
        key = self._key(layer, batch, tier)
        newest, metadata = self._metadata.get(key, (0, None))
        if newest != token:
            prompts = self._batch_layouts[batch].lengths[tier.sequences(batch)]
            fresh = decode_metadata(prompts, self.tokens(batch, tier, token), self._h2o, layer)
            if metadata is None or not self._captured:
                metadata = fresh.to(device)
            else:
                metadata.copy_(fresh)
            self._metadata[key] = (token, metadata)
        return metadata

    def newest(self, layer: int, batch: int, tier: CacheTier) -> torch.Tensor:
        """Return the result of the last `update`."""
        return self._metadata[self._key(layer, batch, tier)][1]

    def tokens(self, batch: int, tier: CacheTier, token: int) -> list[int]:
        """Return the tokens of each sequence of a tier, new token `token` included."""
        sequences, batch_layout = tier.sequences(batch), self._batch_layouts[batch]
        return [batch_layout.tokens(sequence, token)
                for sequence in range(sequences.start, sequences.stop)]

    def _key(self, layer: int, batch: int, tier: CacheTier) -> tuple[int, int, int]:
        return batch, tier.first, self._plans[batch][layer].budget_group


ContinuedEntries = dict[tuple[int, int], list[torch.Tensor]]
"""Of each continued sequence, by its batch and place in the last block: its cached entries [kinds,
kv_heads, tokens, width], and the tensors of its eviction state, [kv_heads, tokens] each."""


def copy_continued(layer: int, tiers: Sequence[CacheTier], batches: Sequence[BatchLayout], *,
                   states: Mapping[tuple[int, int], EvictionState], h2o: H2OConfig | None
                   ) -> ContinuedEntries:
    """Copy the entries of a layer of sequences that continue in `batches` from the last block.

    No transfer may be running. `states` are the last block's eviction states by (batch, first
    sequence of the tier).
    """
    entries: ContinuedEntries = {}
    continued = [(origin, length) for batch_layout in batches
                 for origin, length in zip(batch_layout.continued, batch_layout.lengths,
                                           strict=True) if origin is not None]
    for batch in sorted({origin.batch for origin, _ in continued}):
        for tier in tiers:
            origins = [(origin, length) for origin, length in continued
                       if origin.batch == batch and tier.first <= origin.sequence < tier.last]
            if not origins:
                continue
            tier.load(layer, batch, fetch=True, cached=0)
            cache, state = tier.get(layer, batch), states.get((batch, tier.first))
            for origin, length in origins:
                row = origin.sequence - tier.first
                count = num_cached(h2o, layer, length, origin.generated - 1)
                entries[batch, origin.sequence] = [
                    cache[:, row, :, :count].clone(),
                    *(x[row, :, :count].clone() for x in (state.tensors if state else ()))]
    return entries


def write_continued(entries: ContinuedEntries, continued: Sequence[ContinuedSequence | None],
                    cache: torch.Tensor, state: EvictionState | None) -> None:
    """Write the continued sequences of a tier into their first slots, and into its state.

    In `continued`, None is a new sequence. `cache` is [kinds, sequences, kv_heads, slots, width].
    """
    for row, origin in enumerate(continued):
        if origin is None:
            continue
        slots, *scores = entries[origin.batch, origin.sequence]
        cache[:, row, :, : slots.shape[2]] = slots
        for target, values in zip(state.tensors if state else (), scores, strict=True):
            target[row, :, : values.shape[1]] = values
