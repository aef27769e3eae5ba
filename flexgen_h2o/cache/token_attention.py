"""Attention from the new tokens of decode steps, which caches them and evicts.

Each part of the cache (`tiers`) attends by itself: by the kernels, by recall, with sparse values,
or as a job on the host. Drafted tokens can be undone. On a CPU a step can be captured once and
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flexgen_h2o.cache.chunked_prefill import LayerAttention
from flexgen_h2o.cache.decode_attention import (
    HostAttentionQueue,
    PendingAttention,
    SparseAttention,
)
from flexgen_h2o.cache.draft_journal import DraftJournal
from flexgen_h2o.cache.eviction_state import EvictionStates, Rope, StepMetadata
from flexgen_h2o.cache.layout import CacheShape
from flexgen_h2o.cache.retrieval import Recall, RecallStep
from flexgen_h2o.cache.tiers import CachePart, SlotUpdate
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.key_smoothing import BasisChange
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import EvictionArguments, VariantArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.storage.transfer import Transfers


def parts_of(parts: Sequence[CachePart], batch_layout: BatchLayout) -> list[CachePart]:
    """Return the parts that hold sequences of a batch."""
    return [part for part in parts if part.first < len(batch_layout)]


class TokenAttention:
    """Attention from the new tokens of a block's decode steps, which caches them.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        None: never evict.
    parts : sequence of CachePart
        Parts of the cache.
    evictions : EvictionStates
        Eviction states of the cache, which calls their `begin`.
    recall : Recall or None
    host_sequences : int
        Maximum sequences of a batch in host memory.
    transfers : Transfers
    """

    def __init__(self, shape: CacheShape, h2o: H2OConfig | None, *, parts: Sequence[CachePart],
                 evictions: EvictionStates, recall: Recall | None, host_sequences: int,
                 transfers: Transfers):
        self._shape = shape
        self._h2o = h2o
        self._parts = parts
        self._evictions = evictions
        self._recall = recall
        self._device = transfers.device.torch
        self._host = HostAttentionQueue(host_sequences, transfers)
        self._sparse = SparseAttention(shape, transfers)
        self._journal = DraftJournal()
        self._batch_layouts: Sequence[BatchLayout] = ()
        self._updates: dict[tuple[int, int, int], SlotUpdate] = {}
        """Slots written by a decode step, by layer, batch and the part's first sequence."""
        self._newest: dict[int, int] = {}
        """Number of the newest token of each batch, drafted ones included."""

    def reset(self) -> None:
        """Discard jobs on the host that still run, and their errors."""
        self._host.reset()

    def begin(self, batches: Sequence[BatchLayout], *, captured: bool) -> None:
        """Start a block, or continue its sequences; `captured`: steps may be replayed."""
        self._batch_layouts = batches
        self._updates.clear()
        self._newest.clear()
        if self._recall is not None:
            self._recall.begin(batches, captured=captured)
        self._step_metadata = StepMetadata(batches, self._evictions.plans, self._h2o,
                                           captured=captured)

    def newest_token(self, batch: int) -> int:
        """Return the number of a batch's newest token, drafted ones included; 0 before any."""
        return self._newest.get(batch, 0)

    def take_update(self, layer: int, batch: int, part: CachePart) -> SlotUpdate | None:
        """Return the slots that the last decode step wrote, once; None: it may be any slot."""
        return self._updates.pop((layer, batch, part.first), None)

    # Drafted tokens

    def has_drafts(self, layer: int, batch: int, part: CachePart) -> bool:
        """Return whether a part holds drafted tokens that may be rejected."""
        return (layer, batch, part.first) in self._journal

    def roll_back(self, layer: int, batch: int, part: CachePart, cached: int) -> bool:
        """Undo drafted tokens past the first `cached` tokens; return whether there were any."""
        where = layer, batch, part.first
        return where in self._journal and self._journal.roll_back(
            where, cached, part.get(layer, batch))

    def keep_drafts(self) -> None:
        """Keep the drafted tokens that were not undone, at the end of a block."""
        self._journal.clear()

    # Decode steps

    def attend(self, layer: int, batch: int, q, k, v, *, token: int, rope: Rope | None,
               sinks: torch.Tensor | None, drafted: bool) -> PendingAttention:
        """Start attention from one new token of each sequence: see `KVCache.attend_token`."""
        offsets = self._rotate(layer, batch, q, k, rope)
        pending = PendingAttention()
        self._newest[batch] = token
        # Host jobs first: they need not wait for attention on the device.
        parts = parts_of(self._parts, self._batch_layouts[batch])
        for part in sorted(parts, key=lambda part: not part.on_host):
            sequences = part.sequences(batch)
            part_q, part_k, part_v = (x[sequences] for x in (q, k, v))
            part_sinks = sinks
            if part.on_host and sinks is not None:
                part_sinks = self._host.sinks_on_host(layer, sinks)
            attention = LayerAttention(self._shape.attention_variant(layer), part_sinks,
                                       None if offsets is None else offsets[sequences])
            where = layer, batch, part.first
            cached = self._batch_layouts[batch].tokens(part.first, token) - 1
            rolled_back = not drafted and self.roll_back(layer, batch, part, cached)
            attend = self._part_attention(layer, batch, part, token, attention.options)
            state = self._evictions.state(layer, batch, part)
            if drafted and state is not None:
                attend = partial(self._journal.attend, where, cached, part.get(layer, batch),
                                 state, attend)
            if any(part.prefetch_capacity(layer, batch)):
                self._prefetch(layer, batch, part, part_q, part_k, token=token,
                               attention=attention)
            if part.on_host:
                out, handle = self._host.start(part_q, part_k, part_v, attend)
                pending.handles.append(handle)
            else:
                out, slots = attend(part_q, part_k, part_v)
                if drafted or rolled_back:
                    self._updates.pop(where, None)  # the store then writes all slots
                elif not part.is_resident and not part.fetches_selected(layer):
                    self._updates[where] = SlotUpdate.gather(part.get(layer, batch), slots)
            pending.outputs[part.first] = out
        return pending

    def _rotate(self, layer: int, batch: int, q, k, rope: Rope | None) -> torch.Tensor | None:
        """Rotate and smooth new queries and keys in place; return offsets of their products."""
        query_rotation, key_rotation = self._rotations(layer, batch, rope)
        offsets = self._empty_offsets(layer, q, query_rotation[1])
        ops.rotate_(q, *query_rotation, offsets)
        ops.rotate_(k, *key_rotation)
        return offsets

    def _rotations(self, layer: int, batch: int, rope: Rope | None
                   ) -> list[tuple[Rope | None, BasisChange | None]]:
        """Return the arguments of `ops.rotate_` for new queries, and for new keys."""
        if self._evictions.rolls(layer, batch):
            return [(None, None)] * 2  # attention rotates them by rank
        smoothing = self._evictions.smoothing(layer, batch)
        if smoothing is None:
            return [(rope, None)] * 2
        return [(rope, smoothing.queries), (rope, smoothing.keys)]

    def _empty_offsets(self, layer: int, q: torch.Tensor, change: BasisChange | None
                       ) -> torch.Tensor | None:
        """Return a tensor [sequences, heads] for the offsets of products, or None.

        Only soft caps and attention sinks need them: see `h2o.key_smoothing`.
        """
        variant = self._shape.attention_variant(layer)
        if change is None or not (variant.softcap or variant.sinks) or self._device.type != "cpu":
            return None  # see `KeySampler` for GPUs
        return torch.empty(q.shape[:2])

    def _part_attention(self, layer: int, batch: int, part: CachePart, token: int,
                        options: Mapping[str, Any]
                        ) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return the function (q, k, v) -> (output, slots of the new tokens) of a part."""
        step = self._recall_step(layer, batch, part, token)
        if step is not None:
            return partial(self._recall.attend, part=part, where=(layer, batch), step=step,
                           **options)
        metadata = self._update_metadata(layer, batch, part, token)
        if self._shape.attn_sparsity < 1:
            max_cached = max(self._step_metadata.tokens(batch, part, token)) - 1
            return partial(self._sparse.attend, part=part, where=(layer, batch),
                           metadata=metadata, max_cached=max_cached, **options)
        return partial(
            ops.decode_attention, slots=part.get(layer, batch), metadata=metadata,
            layout=self._shape.layout, state=self._evictions.state(layer, batch, part), **options)

    def _update_metadata(self, layer: int, batch: int, part: CachePart, token: int
                         ) -> torch.Tensor:
        return self._step_metadata.update(layer, batch, part, token=token,
                                          device=part.attention_device(self._device))

    def _recall_step(self, layer: int, batch: int, part: CachePart, token: int
                     ) -> RecallStep | None:
        """Return the recall metadata of a step; None if new tokens attend to all tokens."""
        if self._recall is None:
            return None
        return self._recall.step(layer, batch, part, device=part.attention_device(self._device),
                                 tokens=self._step_metadata.tokens(batch, part, token))

    # Prefetch of selected tokens

    def prefetch(self, layer: int, batch: int, q, k, *, token: int, rope: Rope | None,
                 sinks: torch.Tensor | None) -> None:
        """Start fetching the tokens that a new token may select: `KVCache.prefetch_token`."""
        offsets = self._rotate(layer, batch, q, k, rope)
        for part in parts_of(self._parts, self._batch_layouts[batch]):
            if part.fetches_selected(layer):
                sequences = part.sequences(batch)
                attention = LayerAttention(self._shape.attention_variant(layer), sinks,
                                           None if offsets is None else offsets[sequences])
                self._prefetch(layer, batch, part, q[sequences], k[sequences], token=token,
                               attention=attention)

    def _prefetch(self, layer: int, batch: int, part: CachePart, q, k, *, token: int,
                  attention: LayerAttention) -> None:
        """Fetch the tokens that a part's sequences select, and more where its hot set is empty."""
        step = self._recall_step(layer, batch, part, token)
        step = step.widen(part.prefetch_capacity(layer, batch))
        part.prefetch(layer, batch, self._recall.select(
            q, k, index=self._recall.index(layer, batch, part), step=step,
            **attention.options))

    # Capture and replay on a CPU

    @property
    def supports_capture(self) -> bool:
        """True if `capture` can capture attention over new tokens once for a block."""
        one_part = len(self._parts) == 1 and self._shape.attn_sparsity == 1
        in_kernels = self._evictions.eviction.policy is None
        return self._device.type == "cpu" and one_part and in_kernels

    def capture(self, layer: int, batch: int, q, k, v, *, rope: Rope | None,
                sinks: torch.Tensor | None, out: torch.Tensor,
                capture: cpu_library.CapturedCalls) -> None:
        """Capture `attend`: see `KVCache.capture_token`."""
        part, = parts_of(self._parts, self._batch_layouts[batch])
        rotations = self._rotations(layer, batch, rope)
        offsets = self._empty_offsets(layer, q, rotations[0][1])
        for x, (tables, change), sums in zip((q, k), rotations, (offsets, None), strict=True):
            if tables is not None or change is not None:
                native.rotate(x, *(tables or (None, None)), change, sums, capture=capture)
        variant = self._shape.attention_variant(layer)
        arguments = VariantArguments.from_variant(variant, sinks, offsets)
        if self._recall is not None and self._recall.index(layer, batch, part) is not None:
            self._recall.capture(q, k, v, part=part, where=(layer, batch), variant=arguments,
                                 out=out, capture=capture)
            return
        assert self._evictions.eviction.policy is None, "kernels lack this policy"
        state = EvictionArguments.from_state(self._evictions.state(layer, batch, part))
        values, slots, layout = ops.kernel_values(k, v, part.get(layer, batch), self._shape.layout)
        native.decode_attention(q, k, values, slots=slots, layout=layout,
                                metadata=self._step_metadata.newest(layer, batch, part),
                                eviction=state, out=out, capture=capture, variant=arguments)

    def prepare_replay(self, batch: int, token: int) -> None:
        """Undo rejected drafts, and write the metadata of new token `token` (from 1)."""
        part, = parts_of(self._parts, self._batch_layouts[batch])
        cached = self._batch_layouts[batch].tokens(0, token) - 1
        for layer in range(self._shape.num_layers):
            self.roll_back(layer, batch, part, cached)
        plans = enumerate(self._evictions.plans[batch])
        for layer in {plan.budget_group: layer for layer, plan in plans}.values():
            self._update_metadata(layer, batch, part, token)
        for layer in () if self._recall is None else self._recall.budget_layers:
            self._recall_step(layer, batch, part, token)
