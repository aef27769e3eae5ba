"""The KV cache of a model whose layers have different heads: one `KVCache` for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from flexgen_h2o.cache.decode_attention import PendingAttention
from flexgen_h2o.cache.hot_set import RecallCounts
from flexgen_h2o.cache.kv_cache import KVCache
from flexgen_h2o.h2o.batch_layout import BatchLayout


class GroupedCache:
    """A cache with the interface of `KVCache`, whose layers have heads of different sizes.

    Parameters
    ----------
    groups : mapping of tuple of int to KVCache
        The cache of each group of layers, which it numbers from 0.
    """

    def __init__(self, groups: Mapping[tuple[int, ...], KVCache]):
        self._groups = groups
        self._caches = tuple(groups.values())
        self._places = {layer: (cache, number) for layers, cache in groups.items()
                        for number, layer in enumerate(layers)}

    # Blocks

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block: see `KVCache.begin`."""
        for layers, cache in self._groups.items():
            cache.begin([batch_layout.select_layers(layers) for batch_layout in batches])

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Continue the sequences of `begin` in another run."""
        for layers, cache in self._groups.items():
            cache.resume([batch_layout.select_layers(layers) for batch_layout in batches])

    def nbytes(self) -> int:
        """Return the bytes of the block's keys and values once the prompts are cut."""
        return sum(cache.nbytes() for cache in self._caches)

    @property
    def attends_on_host(self) -> bool:
        """True if attention over a tier runs on the host although compute is on a GPU."""
        return any(cache.attends_on_host for cache in self._caches)

    @property
    def is_resident(self) -> bool:
        """True if `load` and `store` are no-ops."""
        return all(cache.is_resident for cache in self._caches)

    # Layers: arguments are as in `KVCache`

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start loading the cache that compute of (layer, batch) needs."""
        cache, number = self._places[layer]
        cache.load(number, batch, forward_pass)

    def attend_prompt(self, layer: int, batch: int, q, k, v, **options: Any) -> torch.Tensor:
        """Attend within prompts, and cache them."""
        cache, number = self._places[layer]
        return cache.attend_prompt(number, batch, q, k, v, **options)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache the prompt of one sequence for others."""
        cache, number = self._places[layer]
        cache.repeat(number, batch, source, *targets)

    def attend_token(self, layer: int, batch: int, q, k, v, **options: Any) -> PendingAttention:
        """Start attention from one new token of each sequence; cache the new tokens; evict."""
        cache, number = self._places[layer]
        return cache.attend_token(number, batch, q, k, v, **options)

    def prefetch_token(self, layer: int, batch: int, q, k, **options: Any) -> None:
        """Start fetching the tokens that a new token may select."""
        cache, number = self._places[layer]
        cache.prefetch_token(number, batch, q, k, **options)

    def store(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start writing back the slots that compute of (layer, batch) changed."""
        cache, number = self._places[layer]
        cache.store(number, batch, forward_pass)

    def capture_token(self, layer: int, batch: int, q, k, v, **options: Any) -> None:
        """Capture `attend_token`."""
        cache, number = self._places[layer]
        cache.capture_token(number, batch, q, k, v, **options)

    # Prefetch of selected tokens; capture and replay

    @property
    def recall_counts(self) -> RecallCounts | None:
        """Counts of recalled tokens so far; None without a hot set. Waits for a GPU's counts."""
        counts = [count for cache in self._caches if (count := cache.recall_counts) is not None]
        return RecallCounts(*(sum(getattr(count, field.name) for count in counts)
                              for field in fields(RecallCounts))) if counts else None

    @property
    def supports_prefetch(self) -> bool:
        """True if `prefetch_token` can fetch tokens ahead of their selection."""
        return any(cache.supports_prefetch for cache in self._caches)

    @property
    def supports_capture(self) -> bool:
        """True if `capture_token` can capture attention over new tokens once for a block."""
        return all(cache.supports_capture for cache in self._caches)

    def prepare_replay(self, batch: int, token: int) -> None:
        """Undo rejected drafts, and write the metadata of new token `token` (from 1)."""
        for cache in self._caches:
            cache.prepare_replay(batch, token)
