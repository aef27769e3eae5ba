"""The KV cache of a block: fixed slots over tiers; load, attend, store.

Each decoder layer has a tensor [kinds, sequences, kv_heads, slots, width] for each GPU batch. The
kinds are keys and values, or one kind that holds both (`config.cache_layout.CacheLayout`). A step
neither shifts nor concatenates. The sequences of a batch are split over the tiers (`tiers`). With
an eviction policy (arXiv 2306.14048) there are as many slots as the budget has tokens, a new token
takes the slot of an evicted one, and the order of slots has no meaning. Prompts that are prefilled
in chunks are held whole until they are cut, unless tokens are evicted with each chunk
(`chunked_prefill`).

A unit of the schedule is ``load``, then ``attend_prompt`` (see `prefill`) or ``attend_token`` (see
`token_attention`), then ``store``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from flexgen_h2o.cache.disk_recall import DiskRecallTier, make_tiers
from flexgen_h2o.cache.eviction_state import (
    ContinuedEntries,
    EvictionStates,
    Rope,
    copy_continued,
    write_continued,
)
from flexgen_h2o.cache.hot_set import RecallCounts, ZeroCopyTier
from flexgen_h2o.cache.layout import CacheShape, CacheSize, Capacity, SlotLayout
from flexgen_h2o.cache.prefill import PromptAttention
from flexgen_h2o.cache.retrieval import Recall
from flexgen_h2o.cache.tiers import CacheTier
from flexgen_h2o.cache.token_attention import TokenAttention, tiers_of
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.placement import split
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.key_smoothing import LayerSmoothing
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import Transfers


class KVCache:
    """The cache of one block of GPU batches, reused by the next block.

    Layers count from 0.

    Parameters
    ----------
    shape : CacheShape
    size : CacheSize
    policy : Policy
        Where the cache is, and where attention over host memory runs.
    h2o : H2OConfig or None
        None: never evict.
    rope : callable (positions) -> Rope or None
        RoPE tables of a model with rotary embeddings, for rolling positions.
    transfers : Transfers
    run_folder : RunFolder
        For the cache on disk.
    smoothing : sequence of LayerSmoothing
        Key smoothing of each layer; empty: keys are not smoothed.
    suffix : str
        End of the names of its files in the folder, before the extension.

    Attributes
    ----------
    tiers : list of CacheTier
        The cache by tiers.
    attend_prompt, repeat : callable
        `PromptAttention.attend` and `repeat`.
    attend_token, prefetch_token, capture_token, prepare_replay : callable
        `TokenAttention.attend`, `prefetch`, `capture` and `prepare_replay`.
    """

    def __init__(self, shape: CacheShape, size: CacheSize, policy: Policy, *,
                 h2o: H2OConfig | None, rope: Callable[[torch.Tensor], Rope | None],
                 transfers: Transfers, run_folder: RunFolder,
                 smoothing: Sequence[LayerSmoothing] = (), suffix: str = ""):
        self.shape = shape
        self._h2o = None if h2o is None or h2o.is_full else h2o
        self._fetches_selected = policy.selective_fetch
        self._batch_layouts: list[BatchLayout] = []
        self._evictions = EvictionStates(
            shape, self._h2o, rope=rope, device=transfers.device.torch_device, smoothing=smoothing)
        counts = split(size.sequences, policy.cache) if shape.num_layers else (0, 0, 0)

        def new_tiers(name: str, slot_layout: SlotLayout, slots: tuple[int, ...], *,
                      on_host: bool = False, **recall: Any) -> list[CacheTier]:
            return make_tiers(
                slot_layout, Capacity(size.batches, slots), counts, transfers=transfers,
                on_host=on_host, run_folder=run_folder, name=f"{name}{suffix}.bin", **recall)

        self.tiers: list[CacheTier] = new_tiers(
            "cache", shape.slot_layout(), size.slots,
            on_host=policy.cpu_cache_compute and transfers.device.is_gpu,
            recalled=[h2o is not None and budgets.num_selected(h2o, layer, 1) is not None
                      for layer in range(shape.num_layers)],
            hot_slots=[budgets.num_hot_slots(h2o, layer, slots, policy.hot_set)
                       if policy.selective_fetch else 0 for layer, slots in enumerate(size.slots)])
        self._prompt_tiers: list[CacheTier] = self.tiers
        """Tiers that hold prompts until their last chunk. A full cache has capacity for them."""
        evicts_chunks = self._h2o is not None and self._h2o.evicts_chunks(
            compressed=shape.layout is not None)
        if size.prompt and not evicts_chunks and (self._h2o is not None
                                                  or shape.layout is not None):
            self._prompt_tiers = new_tiers("prompts", shape.slot_layout(quantized=False),
                                           (size.prompt,) * shape.num_layers)

        self._recall: Recall | None = None
        if h2o is not None and h2o.recall:
            self._recall = Recall(shape, size, h2o, tiers=self.tiers, device=transfers.device)
        self._prompt_attention = prompts = PromptAttention(
            shape, self._h2o, tiers=self.tiers, prompt_tiers=self._prompt_tiers,
            evictions=self._evictions, recall=self._recall)
        self._token_attention = tokens = TokenAttention(
            shape, self._h2o, tiers=self.tiers, evictions=self._evictions, recall=self._recall,
            transfers=transfers)
        self.attend_prompt, self.repeat = prompts.attend, prompts.repeat
        self.attend_token, self.prefetch_token = tokens.attend, tokens.prefetch
        self.capture_token, self.prepare_replay = tokens.capture, tokens.prepare_replay

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block. Discard the cache, except for sequences that continue in the block.

        These are moved layer by layer, so that only one layer is stored twice at a time.
        """
        self._token_attention.reset()
        continues = any(batch_layout.has_continued for batch_layout in batches)
        for tier in dict.fromkeys([*self.tiers, *self._prompt_tiers]):
            if continues:
                tier.synchronize()
            else:
                tier.reset()
        self._roll_back_continued(batches)
        states = self._evictions.begin(batches)
        if not continues:
            states.clear()
        self._begin_batches(batches)
        for layer in range(self.shape.num_layers):
            layer_states = {key[1:]: states.pop(key) for key in list(states) if key[0] == layer}
            entries: ContinuedEntries = {}
            if continues:
                entries = copy_continued(layer, self.tiers, batches, states=layer_states,
                                         h2o=self._h2o)
            for tier in self.tiers:
                tier.begin(layer, [(len(batch_layout), plans[layer].slots) for batch_layout, plans
                                   in zip(batches, self._evictions.plans, strict=True)])
            for tier in self._prompt_tiers if self._prompt_tiers is not self.tiers else ():
                tier.begin(layer, [(len(batch_layout), max(batch_layout.lengths))
                                   for batch_layout in batches])
            # Eviction states are small and live until the block ends. Created during a prefill,
            # they would fragment the heap: the next large tensor no longer fits where the last was.
            for batch in range(len(batches)):
                for tier in self._tiers_of(batch):
                    self._evictions.state(layer, batch, tier)
            for batch in range(len(batches)):
                self._write_continued(layer, batch, entries)

    def _write_continued(self, layer: int, batch: int, entries: ContinuedEntries) -> None:
        """Cache the continued sequences of a batch."""
        batch_layout = self._batch_layouts[batch]
        for tier in self._tiers_of(batch):
            if self._holds_continued(batch, tier):
                state = self._evictions.state(layer, batch, tier)
                sequences = tier.sequences(batch)
                tier.load(layer, batch, fetch=False,
                          cached=batch_layout.max_tokens(0) if state is None else None)
                write_continued(entries, batch_layout.continued[sequences],
                                tier.get(layer, batch), state)
                if self._recall is not None:
                    self._recall.on_prompt_cached(layer, batch, tier, tokens=[
                        (sequence, 0, batch_layout.tokens(sequence, 0)
                         if batch_layout.origin(sequence) else 0)
                        for sequence in range(sequences.start, sequences.stop)])
                tier.store(layer, batch, None)

    def _roll_back_continued(self, batches: Sequence[BatchLayout]) -> None:
        """Undo the rejected drafts of sequences that continue in the next block."""
        for batch_layout in batches:
            for origin, length in zip(batch_layout.continued, batch_layout.lengths, strict=False):
                for layer in range(self.shape.num_layers) if origin is not None else ():
                    for tier in self._tiers_of(origin.batch):
                        if self._token_attention.has_drafts(layer, origin.batch, tier):
                            tier.load(layer, origin.batch, fetch=True)
                            self._token_attention.roll_back(layer, origin.batch, tier,
                                                            length + origin.generated - 1)
                            tier.store(layer, origin.batch, None)
        self._token_attention.keep_drafts()

    def _holds_continued(self, batch: int, tier: CacheTier) -> bool:
        """Return whether a tier holds continued sequences of a batch."""
        return any(self._batch_layouts[batch].continued[tier.sequences(batch)])

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Continue the sequences of `begin` in another run.

        Their slots stay as `begin` allocated them, so `begin` must be given the final lengths.
        """
        self._token_attention.reset()
        for tier in self.tiers:
            tier.synchronize()
        self._begin_batches(batches)

    def _begin_batches(self, batches: Sequence[BatchLayout]) -> None:
        self._batch_layouts = list(batches)
        self._prompt_attention.begin(self._batch_layouts)
        self._token_attention.begin(self._batch_layouts, captured=self.supports_capture)

    def nbytes(self) -> int:
        """Return the bytes of the block's keys and values once the prompts are cut."""
        slot_layout = self.shape.slot_layout()
        return sum(slot_layout.nbytes(len(batch_layout), plan.slots) for batch_layout, plans
                   in zip(self._batch_layouts, self._evictions.plans, strict=True)
                   for plan in plans)

    def _tiers_of(self, batch: int, tiers: list[CacheTier] | None = None) -> list[CacheTier]:
        """Return the tiers that hold sequences of a batch."""
        return tiers_of(tiers or self.tiers, self._batch_layouts[batch])

    @property
    def attends_on_host(self) -> bool:
        """True if attention over a tier runs on the host although compute is on a GPU."""
        return any(tier.on_host for tier in self.tiers)

    @property
    def is_resident(self) -> bool:
        """True if `load` and `store` are no-ops."""
        return all(tier.is_resident for tier in (*self.tiers, *self._prompt_tiers))

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start loading the cache that compute of (layer, batch) needs."""
        batch_layout = self._batch_layouts[batch]
        cached = None  # with eviction any slot may be in use
        if not self._evictions.plans[batch][layer].evicts:
            newest, drafts = batch_layout.token(forward_pass) - 1, batch_layout.draft_tokens
            if drafts:  # at most, as the tokens of the last forward pass may not be verified yet
                newest = self._token_attention.newest_token(batch) + drafts
            cached = batch_layout.max_tokens(max(0, newest))
        if not batch_layout.in_prefill(forward_pass):
            for tier in self._tiers_of(batch):
                if not tier.fetches_selected(layer):
                    tier.load(layer, batch, fetch=True, cached=cached,
                              keys_only=self.shape.attn_sparsity < 1)
            return
        separate = self._prompt_tiers is not self.tiers
        if batch_layout.appends:
            for tier in self._tiers_of(batch, self._prompt_tiers):
                continued = not separate and self._holds_continued(batch, tier)
                tier.load(layer, batch, fetch=continued or batch_layout.has_cached(forward_pass),
                          cached=None if separate else cached)
        if batch_layout.token(forward_pass) == 0 and (separate or not batch_layout.appends):
            for tier in self._tiers_of(batch):
                tier.load(layer, batch, fetch=self._holds_continued(batch, tier), cached=cached)

    def store(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start writing back the slots that compute of (layer, batch) changed."""
        batch_layout = self._batch_layouts[batch]
        cut = batch_layout.token(forward_pass) >= 0
        decode = not batch_layout.in_prefill(forward_pass)
        for tier in self._tiers_of(batch, self.tiers if cut else self._prompt_tiers):
            if not (decode and tier.fetches_selected(layer)):
                tier.store(layer, batch, self._token_attention.take_update(layer, batch, tier))

    @property
    def recall_counts(self) -> RecallCounts | None:
        """Counts of recalled tokens so far; None without a hot set. Waits for a GPU's counts."""
        return next((replace(tier.counts) for tier in self.tiers if self._fetches_selected
                     and isinstance(tier, DiskRecallTier | ZeroCopyTier)), None)

    @property
    def supports_prefetch(self) -> bool:
        """True if `prefetch_token` can fetch tokens ahead of their selection."""
        return any(isinstance(tier, DiskRecallTier) for tier in self.tiers)

    @property
    def supports_capture(self) -> bool:
        """True if `capture_token` can capture attention over new tokens once for a block."""
        return self._token_attention.supports_capture and self.is_resident


def _on_layer(method: str) -> Callable[..., Any]:
    """Return a method of `GroupedCache`: `KVCache.method` of the layer's group."""
    def call(self: GroupedCache, layer: int, batch: int, *args: Any, **options: Any) -> Any:
        cache, number = self._places[layer]
        return getattr(cache, method)(number, batch, *args, **options)

    return call


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

    load = _on_layer("load")
    attend_prompt = _on_layer("attend_prompt")
    repeat = _on_layer("repeat")
    attend_token = _on_layer("attend_token")
    prefetch_token = _on_layer("prefetch_token")
    store = _on_layer("store")
    capture_token = _on_layer("capture_token")

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        for layers, cache in self._groups.items():
            cache.begin([batch_layout.select_layers(layers) for batch_layout in batches])

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        for layers, cache in self._groups.items():
            cache.resume([batch_layout.select_layers(layers) for batch_layout in batches])

    def prepare_replay(self, batch: int, token: int) -> None:
        for cache in self._caches:
            cache.prepare_replay(batch, token)

    def nbytes(self) -> int:
        return sum(cache.nbytes() for cache in self._caches)

    @property
    def attends_on_host(self) -> bool:
        return any(cache.attends_on_host for cache in self._caches)

    @property
    def is_resident(self) -> bool:
        return all(cache.is_resident for cache in self._caches)

    @property
    def supports_prefetch(self) -> bool:
        return any(cache.supports_prefetch for cache in self._caches)

    @property
    def supports_capture(self) -> bool:
        return all(cache.supports_capture for cache in self._caches)

    @property
    def recall_counts(self) -> RecallCounts | None:
        counts = [count for cache in self._caches if (count := cache.recall_counts) is not None]
        return RecallCounts(*(sum(getattr(count, field.name) for count in counts)
                              for field in fields(RecallCounts))) if counts else None
