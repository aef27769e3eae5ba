"""Chunked prefill with eviction: append a chunk to the cache of a sequence, and evict.

A prompt of any length, or the next turn of a conversation, goes through a cache of fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.h2o.eviction import Cut, EvictionState, attention_weights
from flexgen_h2o.h2o.key_smoothing import KeySmoothing
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.torch_ops import rotated

WINDOW_QUERIES = 64
"""Queries that plain PyTorch computes together where a window's keys have gaps."""


@dataclass(frozen=True)
class LayerAttention:
    """Arguments of a layer's attention.

    Attributes
    ----------
    variant : AttentionVariant
    sinks : Tensor [heads] or None
        Attention sinks, if the variant has them.
    offsets : Tensor [sequences, heads] or None
        Added to the products of a new token's queries (`h2o.key_smoothing`).
    """

    variant: AttentionVariant = DEFAULT_VARIANT
    sinks: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments by their names in `kernels.ops`."""
        options = {"variant": self.variant, "sinks": self.sinks}
        return options if self.offsets is None else options | {"offsets": self.offsets}


@dataclass(frozen=True)
class SequenceState:
    """The cache of one sequence before a chunk is appended.

    Attributes
    ----------
    cached : int
        Tokens in its first slots.
    tokens : int
        Tokens so far, evicted ones included.
    heavy, recent : int
        Budget without sinks; unused if nothing is evicted.
    scored : bool
        Scores decide which tokens stay.
    """

    cached: int
    tokens: int
    heavy: int = 0
    recent: int = 0
    scored: bool = False


def append_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, slots: torch.Tensor,
                 sequence: SequenceState, state: EvictionState | None,
                 layout: CacheLayout | None, attention: LayerAttention,
                 smoothing: KeySmoothing | None = None) -> torch.Tensor:
    """Attend from a chunk of one sequence over its cache and itself; cache it; evict.

    This is algorithm 1 of arXiv 2306.14048 by chunks: one token is a decode step, the whole prompt
    is the cut of a prompt.

    Parameters
    ----------
    q : Tensor [rows, heads, head_dim]
    k, v : Tensor [rows, kv_heads, head_dim]
        Keys and values of the chunk, before smoothing, and before rotation if positions roll
        (`state.ranks`).
    slots : Tensor [kinds, kv_heads, slots, width]
        Slots of the sequence, written in place. They may be in another memory than q. Without an
        eviction state they have capacity for the chunk.
    state : EvictionState or None
        State of this sequence only, [1, kv_heads, slots]. With ranks, its rotations cover slots and
        chunk. None: nothing is evicted, and slots are in the order of positions.
    layout : CacheLayout or None
        Layout of quantized slots.
    smoothing : KeySmoothing or None
        Smoothing of the cached keys.

    Returns
    -------
    Tensor [rows, heads, elements of a value]
    """
    chunk = k.transpose(0, 1), v.transpose(0, 1)  # [kv_heads, rows, head_dim] each
    cached_keys = chunk[0]
    if smoothing is not None:
        smoothed = k.clone()
        ops.rotate_(smoothed, None, smoothing.keys)
        cached_keys = smoothed.transpose(0, 1)
    entries = ops.pack_slots(ops.stack_vectors(cached_keys, chunk[1]), layout).to(slots.device)
    if state is None:
        return _append_in_order(q, chunk, entries, slots=slots, cached=sequence.cached,
                                layout=layout, attention=attention, smoothing=smoothing)
    old = _ordered_entries(slots, state, sequence.cached)
    vectors = _appended(old.entries, chunk, layout, smoothing)
    scores = None
    if sequence.scored:
        new = old.scores.new_zeros((len(old.scores), len(k)))
        scores = torch.cat((old.scores, new), dim=1).to(q.device)
    keys, values = vectors
    if state.ranks is not None:
        cos, sin = (table.to(q.device) for table in state.rope)
        keys = rotated(keys, cos[: keys.shape[1]], sin[: keys.shape[1]])
        rows = slice(sequence.cached, sequence.cached + len(q))
        q = rotated(q, cos[rows, None], sin[rows, None])
    if state.eviction.window:  # the cached tokens have gaps
        new = torch.arange(sequence.tokens, sequence.tokens + len(q), device=q.device)
        positions = torch.cat((old.positions.to(q.device), new.expand(len(keys), -1)), dim=1)
        out = _window_attention(q, keys, values, positions, scores=scores,
                                decay=state.eviction.decay, attention=attention)
    else:
        out = _causal_attention(q, keys, values, scores=scores, decay=state.eviction.decay,
                                attention=attention)
    if scores is None:
        scores = old.scores.new_zeros((len(old.scores), keys.shape[1]))
    _evict(torch.cat((old.entries, entries), dim=2), scores.to(slots.device), old.positions,
           slots=slots, sequence=sequence, state=state,
           vectors=[x.to(slots.device) for x in vectors] if state.eviction.needs else None)
    return out


def _append_in_order(q, chunk, entries, *, slots, cached, layout, attention, smoothing
                     ) -> torch.Tensor:
    """Do the work of `append_chunk` where nothing is evicted: the chunk takes the next slots."""
    end = cached + len(q)
    slots[:, :, cached:end] = entries
    if layout is None and smoothing is None:
        keys, values = ops.split_vectors(slots[:, :, :end].to(q.device), chunk[1])
    else:  # the chunk's own vectors are exact, as a new token's are in a decode step
        keys, values = _appended(slots[:, :, :cached], chunk, layout, smoothing)
    return _causal_attention(q, keys, values, scores=None, decay=1.0, attention=attention)


def _causal_attention(q, keys, values, *, scores, decay, attention) -> torch.Tensor:
    """Attend from the last tokens over keys and values [kv_heads, tokens, head_dim]."""
    return ops.prefill_attention(q, keys.transpose(0, 1), values.transpose(0, 1), [len(q)],
                                 key_lengths=[keys.shape[1]], scores=scores, decay=decay,
                                 **attention.options)


def _window_attention(q, keys, values, positions, *, scores, decay, attention) -> torch.Tensor:
    """Attend within a window over tokens at ascending positions [kv_heads, tokens] with gaps."""
    heads, tokens = positions.shape
    rows, out = len(q), q.new_empty((*q.shape[:2], values.shape[-1]))
    keys, values = keys.float(), values.float()
    sinks = None if attention.sinks is None else attention.sinks.view(heads, -1, 1, 1)
    if scores is not None:
        scores.mul_(decay**rows)
    for chunk in torch.arange(rows, device=q.device).split(WINDOW_QUERIES):
        query_positions = positions[:, tokens - rows + chunk][..., None]
        hidden = (positions[:, None] > query_positions) | (
            positions[:, None] <= query_positions - attention.variant.window)
        products = torch.einsum("rkgd,ktd->kgrt", q[chunk].float().unflatten(1, (heads, -1)), keys)
        weights = attention_weights(products, hidden[:, None], dim=q.shape[-1],
                                    variant=attention.variant, sinks=sinks)
        if scores is not None:
            scores += torch.einsum("kgrt,r->kt", weights, decay ** (rows - 1 - chunk).float())
        attended = torch.einsum("kgrt,ktd->rkgd", weights, values)
        out[chunk] = attended.flatten(1, 2).to(q.dtype)
    return out


@dataclass(frozen=True)
class _CachedEntries:
    """Cached tokens in the order of their positions.

    entries are [kinds, kv_heads, cached, width], scores and positions [kv_heads, cached].
    """

    entries: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor


def _ordered_entries(slots: torch.Tensor, state: EvictionState, cached: int) -> _CachedEntries:
    """Return copies of the filled slots by position: decode steps leave them in any order."""
    positions, order = state.positions[0, :, :cached].sort(dim=-1)
    index = order[None, ..., None].expand(len(slots), -1, -1, slots.shape[-1])
    return _CachedEntries(slots.gather(2, index), state.scores[0].gather(1, order), positions)


def _appended(entries: torch.Tensor, chunk: tuple[torch.Tensor, torch.Tensor],
              layout: CacheLayout | None, smoothing: KeySmoothing | None) -> list[torch.Tensor]:
    """Return keys and values before smoothing: of entries, then of a chunk.

    They are [kv_heads, tokens, head_dim] each, of the chunk's dtype and device.
    """
    unpacked = ops.unpack_slots(entries, layout).to(chunk[0].device)
    keys, values = ops.split_vectors(unpacked, chunk[1])
    if smoothing is not None:
        keys = smoothing.restored(keys)
    return [torch.cat((old.to(new), new), dim=1)
            for old, new in zip((keys, values), chunk, strict=True)]


def _evict(entries: torch.Tensor, scores: torch.Tensor, old_positions: torch.Tensor, *,
           slots: torch.Tensor, sequence: SequenceState, state: EvictionState,
           vectors: Sequence[torch.Tensor] | None) -> None:
    """Keep the budget's tokens of a cache with a chunk, in the first slots by position.

    `entries` [kinds, kv_heads, tokens, width] and `scores` [kv_heads, tokens] are of the cached
    tokens by position, at `old_positions` [kv_heads, cached], and of the chunk. `vectors` are keys
    and values, if the policy needs them. `slots` and `state` are written; see `append_chunk`.
    """
    heads, tokens = scores.shape
    new = torch.arange(sequence.tokens, sequence.tokens + tokens - old_positions.shape[1],
                       dtype=old_positions.dtype, device=old_positions.device)
    positions = torch.cat((old_positions, new.expand(heads, -1)), dim=1)
    index = state.eviction.select(scores, Cut(tokens, sequence.heavy, sequence.recent),
                                  positions, vectors=vectors)
    num_kept = index.shape[1]
    slots[:, :, :num_kept] = entries.gather(
        2, index[None, ..., None].expand(len(entries), -1, -1, entries.shape[-1]))
    state.scores[0, :, :num_kept] = scores.gather(1, index)
    state.positions[0, :, :num_kept] = positions.gather(1, index)
    if state.ranks is not None:
        state.ranks[0, :, :num_kept] = torch.arange(num_kept, device=index.device)
