"""Attention from the new tokens of decode steps, which caches them and evicts.

Each tier of the cache (`tiers`) attends by itself: by the kernels, by recall, with sparse values,
or as a job on the host. Drafted tokens can be undone. On a CPU a step can be captured once and
replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.chunked_prefill import LayerAttention
from flexgen_h2o.cache.eviction_state import EvictionStates, Rope, StepMetadata
from flexgen_h2o.cache.layout import CacheShape
from flexgen_h2o.cache.retrieval import Recall, RecallStep
from flexgen_h2o.cache.tiers import CacheTier, SlotUpdate, gather_slots
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.eviction import EvictionState
from flexgen_h2o.h2o.key_smoothing import BasisChange
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import EvictionArguments, VariantArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.storage.transfer import ATTENTION, D2H, H2D, Handle, TransferQueue, Transfers


@dataclass
class PendingAttention:
    """Attention over the tiers of a batch, which may still be running.

    Attributes
    ----------
    outputs : dict of int to Tensor [sequences, heads, elements of a value]
        Outputs of each tier, by the tier's first sequence.
    handles : list of Handle
        Jobs that still fill some of the outputs.
    """

    outputs: dict[int, Tensor] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)

    def result(self, transfers: Transfers) -> Tensor:
        """Return [sequences, heads, elements of a value] of the whole batch, ready for compute.

        Raise the errors of attention on the host.
        """
        for handle in self.handles:
            transfers.ready(handle)
        outputs = [self.outputs[first] for first in sorted(self.outputs)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class HostAttention:
    """Attention on the host for compute on a GPU, one job at a time."""

    def __init__(self, transfers: Transfers):
        self._transfers = transfers
        self._latest: Handle | None = None
        self._sinks: dict[int, Tensor] = {}

    def sinks_on_host(self, layer: int, sinks: Tensor) -> Tensor:
        """Return the attention sinks [heads] of a layer in host memory.

        They are copied once: the copy waits for compute.
        """
        if layer not in self._sinks:
            self._sinks[layer] = sinks.to("cpu", copy=True)
        return self._sinks[layer]

    def start(self, q: Tensor, k: Tensor, v: Tensor,
              attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
              ) -> tuple[Tensor, Handle]:
        """Start ``attend(q, k, v)`` on the host once compute has produced its inputs.

        `attend` is called with copies in host memory. q [rows, heads, head_dim], k and v [rows,
        kv_heads, head_dim] may be overwritten when this returns. The first tensor of its result is
        copied to the returned one, [rows, heads, elements of a value], by the end of the handle.
        """
        shapes = [x.shape[1:] for x in (q, k, v)]
        packed = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))

        def job(queue: TransferQueue) -> None:
            inputs, outputs = queue.host_like(packed, out)
            queue.copy(inputs, packed, D2H)
            queue.flush()
            split = inputs.split([shape.numel() for shape in shapes], dim=1)
            rows = (x.unflatten(1, shape) for x, shape in zip(split, shapes, strict=True))
            with self._transfers.trace.span("attention", "cpu attention"):
                outputs.copy_(attend(*rows)[0])
            queue.copy(out, outputs, H2D)

        mark = self._transfers.device.record_event()
        self._latest = self._transfers.submit(ATTENTION, job, after=(mark,))
        return out, self._latest

    def reset(self) -> None:
        """Wait for the running job and discard its result."""
        if self._latest is not None:
            with contextlib.suppress(Exception):
                self._latest.synchronize()
        self._latest = None


class SparseAttention:
    """Decode attention that reads all keys, but only the values with the largest weights.

    FlexGen's sparse attention (arXiv 2303.06865, section 5).

    Parameters
    ----------
    shape : CacheShape
        With `attn_sparsity` below 1.
    transfers : Transfers
    """

    def __init__(self, shape: CacheShape, transfers: Transfers):
        self._shape = shape
        self._transfers = transfers

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, tier: CacheTier, where: tuple[int, int],
               max_cached: int, metadata: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        """Attend over a tier from one new token of each sequence, and cache the new tokens.

        Arguments and results are as in `ops.decode_attention`. `max_cached` are the cached tokens
        of the longest sequence.
        """
        cache, layout = tier.get(*where), self._shape.layout
        index, weights = ops.select_values(q, k, keys=cache[0, :, :, :max_cached],
                                           metadata=metadata, layout=layout,
                                           sparsity=self._shape.attn_sparsity, **attention)
        if tier.gathers_values:
            index = self._copy(index, "cpu", D2H)
            values = self._copy(tier.gather_values(*where, index),
                                self._transfers.device.torch_device, H2D)
        else:
            values = gather_slots(cache[1], index)
        return ops.attend_selected(k, v, slots=cache, values=values, weights=weights,
                                   metadata=metadata, layout=layout)

    def _copy(self, x: Tensor, device, link: str) -> Tensor:
        """Return a copy on the other side of a link, and wait for it."""
        began = self._transfers.device.record_timestamp()
        copied = x.to(device)
        self._transfers.moved(link, x.nbytes, began, self._transfers.device.record_timestamp())
        return copied


_TierKey = tuple[int, int, int]
"""A tier of the cache in a layer: layer, batch, and the tier's first sequence."""


def tiers_of(tiers: Sequence[CacheTier], batch_layout: BatchLayout) -> list[CacheTier]:
    """Return the tiers that hold sequences of a batch."""
    return [tier for tier in tiers if tier.first < len(batch_layout)]


class TokenAttention:
    """Attention from the new tokens of a block's decode steps, which caches them.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        None: never evict.
    tiers : sequence of CacheTier
        Tiers of the cache.
    evictions : EvictionStates
        Eviction states of the cache, which calls their `begin`.
    recall : Recall or None
    transfers : Transfers
    """

    def __init__(self, shape: CacheShape, h2o: H2OConfig | None, *, tiers: Sequence[CacheTier],
                 evictions: EvictionStates, recall: Recall | None, transfers: Transfers):
        self._shape = shape
        self._h2o = h2o
        self._tiers = tiers
        self._evictions = evictions
        self._recall = recall
        self._device = transfers.device.torch_device
        self._host = HostAttention(transfers)
        self._sparse = SparseAttention(shape, transfers)
        self._journal = _DraftJournal()
        self._batch_layouts: Sequence[BatchLayout] = ()
        self._updates: dict[_TierKey, SlotUpdate] = {}
        """Slots written by a decode step."""
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

    def take_update(self, layer: int, batch: int, tier: CacheTier) -> SlotUpdate | None:
        """Return the slots that the last decode step wrote, once; None: it may be any slot."""
        return self._updates.pop((layer, batch, tier.first), None)

    # Drafted tokens

    def has_drafts(self, layer: int, batch: int, tier: CacheTier) -> bool:
        """Return whether a tier holds drafted tokens that may be rejected."""
        return (layer, batch, tier.first) in self._journal

    def roll_back(self, layer: int, batch: int, tier: CacheTier, cached: int) -> bool:
        """Undo drafted tokens past the first `cached` tokens; return whether there were any."""
        where = layer, batch, tier.first
        return where in self._journal and self._journal.roll_back(
            where, cached, tier.get(layer, batch))

    def keep_drafts(self) -> None:
        """Keep the drafted tokens that were not undone, at the end of a block."""
        self._journal.clear()

    # Decode steps

    def attend(self, layer: int, batch: int, q, k, v, *, token: int, rope: Rope | None,
               sinks: Tensor | None = None, drafted: bool = False) -> PendingAttention:
        """Start attention from one new token of each sequence; cache the new tokens; evict.

        Attention over a tier in host memory may run as a background job on the CPU.

        Parameters
        ----------
        q : Tensor [sequences, heads, head_dim]
        k, v : Tensor [sequences, kv_heads, head_dim]
            Before rotation. All three may be overwritten, and may be reused when this returns.
        token : int
            Number of the new token in the block, from 1.
        rope : Rope or None
            RoPE tables of the sequences.
        sinks : Tensor [heads] or None
            The layer's attention sinks.
        drafted : bool
            The new token may be rejected: it is, if a later call has the same or a lower `token`.
        """
        offsets = self._rotate(layer, batch, q, k, rope)
        pending = PendingAttention()
        self._newest[batch] = token
        # Host jobs first: they need not wait for attention on the device.
        tiers = tiers_of(self._tiers, self._batch_layouts[batch])
        for tier in sorted(tiers, key=lambda tier: not tier.on_host):
            sequences = tier.sequences(batch)
            tier_q, tier_k, tier_v = (x[sequences] for x in (q, k, v))
            tier_sinks = sinks
            if tier.on_host and sinks is not None:
                tier_sinks = self._host.sinks_on_host(layer, sinks)
            attention = LayerAttention(self._shape.attention_variant(layer), tier_sinks,
                                       None if offsets is None else offsets[sequences])
            where = layer, batch, tier.first
            cached = self._batch_layouts[batch].tokens(tier.first, token) - 1
            rolled_back = not drafted and self.roll_back(layer, batch, tier, cached)
            attend = self._tier_attention(layer, batch, tier, token, attention.options)
            state = self._evictions.state(layer, batch, tier)
            if drafted and state is not None:
                attend = partial(self._journal.attend, where, cached, tier.get(layer, batch),
                                 state, attend)
            if any(tier.prefetch_capacity(layer, batch)):
                self._prefetch(layer, batch, tier, tier_q, tier_k, token=token,
                               attention=attention)
            if tier.on_host:
                out, handle = self._host.start(tier_q, tier_k, tier_v, attend)
                pending.handles.append(handle)
            else:
                out, slots = attend(tier_q, tier_k, tier_v)
                if drafted or rolled_back:
                    self._updates.pop(where, None)  # the store then writes all slots
                elif not tier.is_resident and not tier.fetches_selected(layer):
                    self._updates[where] = SlotUpdate.gather(tier.get(layer, batch), slots)
            pending.outputs[tier.first] = out
        return pending

    def _rotate(self, layer: int, batch: int, q, k, rope: Rope | None) -> Tensor | None:
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

    def _empty_offsets(self, layer: int, q: Tensor, change: BasisChange | None
                       ) -> Tensor | None:
        """Return a tensor [sequences, heads] for the offsets of products, or None.

        Only soft caps and attention sinks need them: see `h2o.key_smoothing`.
        """
        variant = self._shape.attention_variant(layer)
        if change is None or not (variant.softcap or variant.sinks) or self._device.type != "cpu":
            return None  # see `KeySampler` for GPUs
        return torch.empty(q.shape[:2])

    def _tier_attention(self, layer: int, batch: int, tier: CacheTier, token: int,
                        options: Mapping[str, Any]
                        ) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the function (q, k, v) -> (output, slots of the new tokens) of a tier."""
        step = self._recall_step(layer, batch, tier, token)
        if step is not None:
            return partial(self._recall.attend, tier=tier, where=(layer, batch), step=step,
                           **options)
        metadata = self._update_metadata(layer, batch, tier, token)
        if self._shape.attn_sparsity < 1:
            max_cached = max(self._step_metadata.tokens(batch, tier, token)) - 1
            return partial(self._sparse.attend, tier=tier, where=(layer, batch),
                           metadata=metadata, max_cached=max_cached, **options)
        return partial(
            ops.decode_attention, slots=tier.get(layer, batch), metadata=metadata,
            layout=self._shape.layout, state=self._evictions.state(layer, batch, tier), **options)

    def _update_metadata(self, layer: int, batch: int, tier: CacheTier, token: int
                         ) -> Tensor:
        return self._step_metadata.update(layer, batch, tier, token=token,
                                          device=tier.attention_device(self._device))

    def _recall_step(self, layer: int, batch: int, tier: CacheTier, token: int
                     ) -> RecallStep | None:
        """Return the recall metadata of a step; None if new tokens attend to all tokens."""
        if self._recall is None:
            return None
        return self._recall.step(layer, batch, tier, device=tier.attention_device(self._device),
                                 tokens=self._step_metadata.tokens(batch, tier, token))

    # Prefetch of selected tokens

    def prefetch(self, layer: int, batch: int, q, k, *, token: int, rope: Rope | None,
                 sinks: Tensor | None = None) -> None:
        """Start fetching the tokens that a new token may select, by a predicted query and key.

        Arguments are as in `attend`. Results do not depend on the prediction.
        """
        offsets = self._rotate(layer, batch, q, k, rope)
        for tier in tiers_of(self._tiers, self._batch_layouts[batch]):
            if tier.fetches_selected(layer):
                sequences = tier.sequences(batch)
                attention = LayerAttention(self._shape.attention_variant(layer), sinks,
                                           None if offsets is None else offsets[sequences])
                self._prefetch(layer, batch, tier, q[sequences], k[sequences], token=token,
                               attention=attention)

    def _prefetch(self, layer: int, batch: int, tier: CacheTier, q, k, *, token: int,
                  attention: LayerAttention) -> None:
        """Fetch the tokens that a tier's sequences select, and more where its hot set is empty."""
        step = self._recall_step(layer, batch, tier, token)
        step = step.widen(tier.prefetch_capacity(layer, batch))
        tier.prefetch(layer, batch, self._recall.select(
            q, k, index=self._recall.index(layer, batch, tier), step=step,
            **attention.options))

    # Capture and replay on a CPU

    @property
    def supports_capture(self) -> bool:
        """True if `capture` can capture attention over new tokens once for a block."""
        one_tier = len(self._tiers) == 1 and self._shape.attn_sparsity == 1
        in_kernels = self._evictions.eviction.policy.in_kernels
        return self._device.type == "cpu" and one_tier and in_kernels

    def capture(self, layer: int, batch: int, q, k, v, *, rope: Rope | None,
                sinks: Tensor | None = None, out: Tensor,
                capture: cpu_library.CapturedCalls) -> None:
        """Capture `attend`: a replay reads q, k and v and writes `out`, like q.

        It caches the token of the last `prepare_replay`. If values have fewer elements than keys,
        the last elements of `out` are the output.
        """
        tier, = tiers_of(self._tiers, self._batch_layouts[batch])
        rotations = self._rotations(layer, batch, rope)
        offsets = self._empty_offsets(layer, q, rotations[0][1])
        for x, (tables, change), sums in zip((q, k), rotations, (offsets, None), strict=True):
            if tables is not None or change is not None:
                native.rotate(x, *(tables or (None, None)), change, sums, capture=capture)
        variant = self._shape.attention_variant(layer)
        arguments = VariantArguments.from_variant(variant, sinks, offsets)
        if self._recall is not None and self._recall.index(layer, batch, tier) is not None:
            self._recall.capture(q, k, v, tier=tier, where=(layer, batch), variant=arguments,
                                 out=out, capture=capture)
            return
        assert self._evictions.eviction.policy.in_kernels, "kernels lack this policy"
        state = EvictionArguments.from_state(self._evictions.state(layer, batch, tier))
        values, slots, layout = ops.kernel_values(k, v, tier.get(layer, batch), self._shape.layout)
        native.decode_attention(q, k, values, slots=slots, layout=layout,
                                metadata=self._step_metadata.newest(layer, batch, tier),
                                eviction=state, out=out, capture=capture, variant=arguments)

    def prepare_replay(self, batch: int, token: int) -> None:
        """Undo rejected drafts, and write the metadata of new token `token` (from 1)."""
        tier, = tiers_of(self._tiers, self._batch_layouts[batch])
        cached = self._batch_layouts[batch].tokens(0, token) - 1
        for layer in range(self._shape.num_layers):
            self.roll_back(layer, batch, tier, cached)
        plans = enumerate(self._evictions.plans[batch])
        for layer in {plan.budget_group: layer for layer, plan in plans}.values():
            self._update_metadata(layer, batch, tier, token)
        for layer in () if self._recall is None else self._recall.budget_layers:
            self._recall_step(layer, batch, tier, token)


@dataclass(frozen=True)
class _DraftedToken:
    """The content that one drafted token has overwritten."""

    position: int
    slots: SlotUpdate  # that it took, with their contents before
    state: EvictionState
    before: list[Tensor]  # copies of the state's tensors


class _DraftJournal:
    """The drafted tokens that are not verified yet, in each tier of a cache that evicts.

    A cache without eviction needs none: the next token takes the slot of the first rejected one.
    """

    def __init__(self) -> None:
        self._tokens: dict[_TierKey, list[_DraftedToken]] = {}
        self._cache: Tensor  # copy of the slots before the next token

    def __contains__(self, key: _TierKey) -> bool:
        return key in self._tokens

    def attend(self, key: _TierKey, position: int, cache: Tensor, state: EvictionState,
               attend: Callable[..., tuple[Tensor, Tensor]], *qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``attend(*qkv)`` of a drafted token at a position, and record changed content.

        Call it for all drafted tokens of one key before the next key. `attend` computes the
        attention of a token, caches the token in `cache` [kinds, sequences, kv_heads, slots,
        width], evicts, and returns the output and the slots.
        """
        if key not in self._tokens:
            self._tokens[key] = []
            self._cache = cache.clone()  # the slot to be taken is not known before
        before = [x.clone() for x in state.tensors]
        out, slots = attend(*qkv)
        self._tokens[key].append(_DraftedToken(
            position, SlotUpdate.gather(self._cache, slots), state, before))
        SlotUpdate.gather(cache, slots).write(self._cache)
        return out, slots

    def roll_back(self, key: _TierKey, cached: int, cache: Tensor) -> bool:
        """Undo the tokens from position `cached` on, and forget the others, which are accepted.

        Return whether any was undone. `cache` is as in `attend`.
        """
        rejected = [token for token in self._tokens.pop(key) if token.position >= cached]
        for token in reversed(rejected):
            token.slots.write(cache)
        for token in rejected[:1]:
            for target, before in zip(token.state.tensors, token.before, strict=True):
                target.copy_(before)
        return bool(rejected)

    def clear(self) -> None:
        """Forget all tokens."""
        self._tokens.clear()
