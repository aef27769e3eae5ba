"""Putting a chunk of new tokens onto what is cached of a sequence, and evicting down to the budget.

This is how a prompt of any length goes through a cache of fixed size, and how a new turn comes onto
a conversation. A chunk of one token does what a decode step does; one of the whole prompt what the
cut of a prompt does (arXiv 2306.14048, algorithm 1, by chunks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.formats import CacheLayout
from flexgen_h2o.h2o.attention_weights import attention_weights
from flexgen_h2o.h2o.eviction import Cut, EvictionState
from flexgen_h2o.h2o.key_smoothing import KeySmoothing
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.rotary import rotated

WINDOW_QUERIES = 64
"""That are treated together where plain PyTorch attends to a window with gaps."""


@dataclass(frozen=True)
class CacheState:
    """The state of a sequence's cache before a chunk comes.

    Attributes
    ----------
    cached : int
        Its first slots, which hold a token each.
    tokens : int
        Its tokens so far, the evicted ones included.
    heavy, recent : int
        Of the budget; sinks come on top. They mean nothing where nothing is evicted.
    scored : bool
        Whether scores decide what stays.
    """

    cached: int
    tokens: int
    heavy: int = 0
    recent: int = 0
    scored: bool = False


@dataclass(frozen=True)
class LayerAttention:
    """The form of attention of a layer, its learned logits [heads] if it has such, and offsets
    [sequences, heads] of the products of a new token's queries."""

    form: AttentionForm = DEFAULT_FORM
    sinks: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """All as arguments of the operations of `kernels.ops`."""
        options = {"form": self.form, "sinks": self.sinks}
        return options if self.offsets is None else options | {"offsets": self.offsets}


def append(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, held: torch.Tensor,
           cache_state: CacheState, state: EvictionState | None,
           layout: CacheLayout | None, attention: LayerAttention,
           smoothing: KeySmoothing | None = None) -> torch.Tensor:
    """Attend from a chunk of one sequence over its slots and itself; cache it, evict what is over.

    Parameters
    ----------
    q : Tensor [rows, heads, head_dim]
    k, v : Tensor [rows, kv_heads, head_dim]
        The chunk's. Where positions roll (`state.ranks`) q and k come before rotation.
    held : Tensor [kinds, kv_heads, slots, width]
        Slots of keys and values, maybe in another memory than q: vectors, or records of `layout`.
        Without an eviction state they have room for the chunk. Written in place.
    cache_state : CacheState
    state : EvictionState or None
        Of the sequence alone, [1, kv_heads, slots]; None: nothing is evicted, and the slots are in
        the order of positions. Where positions roll its rotations reach over slots and chunk.
    layout : CacheLayout or None
    attention : LayerAttention
    smoothing : KeySmoothing or None
        Smoothing of the cached keys. k is passed before smoothing.

    Returns
    -------
    Tensor [rows, heads, head_dim]
    """
    fresh = torch.stack((k, v)).transpose(1, 2)  # [2, kv_heads, rows, head_dim]
    packed = fresh
    if smoothing is not None:
        smoothed = k.clone()
        ops.rotate_(smoothed, None, smoothing.keys)
        packed = torch.stack((smoothed, v)).transpose(1, 2)
    packed = ops.cache_records(packed, layout).to(held.device)
    if state is None:
        return _attend_in_place(q, fresh, packed, held=held, cached=cache_state.cached,
                                layout=layout, attention=attention, smoothing=smoothing)
    old = _in_order(held, state, cache_state.cached)
    exact = torch.cat((_vectors(old.records, layout, smoothing, like=q), fresh), dim=2)
    scores = None
    if cache_state.scored:
        new = old.scores.new_zeros((len(old.scores), len(k)))
        scores = torch.cat((old.scores, new), dim=1).to(q.device)
    keys, values = exact
    if state.ranks is not None:
        cos, sin = (table.to(q.device) for table in state.rope)
        keys = rotated(keys, cos[: keys.shape[1]], sin[: keys.shape[1]])
        mine = slice(cache_state.cached, cache_state.cached + len(q))
        q = rotated(q, cos[mine, None], sin[mine, None])
    if state.eviction.window:  # what is cached has gaps
        new = torch.arange(cache_state.tokens, cache_state.tokens + len(q), device=q.device)
        positions = torch.cat((old.positions.to(q.device), new.expand(len(keys), -1)), dim=1)
        out = _attend_at(q, keys, values, positions, scores=scores, decay=state.eviction.decay,
                         attention=attention)
    else:
        out = _attend(q, keys, values, scores=scores, decay=state.eviction.decay,
                      attention=attention)
    if scores is None:
        scores = old.scores.new_zeros((len(old.scores), keys.shape[1]))
    _keep(torch.cat((old.records, packed), dim=2), scores.to(held.device), old.positions,
          held=held, cache_state=cache_state, state=state,
          vectors=exact.to(held.device) if state.eviction.needs else None)
    return out


def _attend_in_place(q, fresh, packed, *, held, cached, layout, attention, smoothing
                     ) -> torch.Tensor:
    """`append` where everything stays: the chunk takes the next slots."""
    end = cached + len(q)
    held[:, :, cached:end] = packed
    if layout is None and smoothing is None:
        keys, values = held[:, :, :end].to(q.device)
    else:  # the chunk's own vectors are exact, as a new token's are in a decode step
        old = _vectors(held[:, :, :cached], layout, smoothing, like=q)
        keys, values = torch.cat((old, fresh), dim=2)
    return _attend(q, keys, values, scores=None, decay=1.0, attention=attention)


def _attend(q, keys, values, *, scores, decay, attention) -> torch.Tensor:
    """Attention of the last tokens over [kv_heads, tokens, head_dim]; where there is a window, none
    of the tokens between them is missing."""
    return ops.prefill_attention(q, keys.transpose(0, 1), values.transpose(0, 1), [len(q)],
                                 key_lengths=[keys.shape[1]], scores=scores, decay=decay,
                                 **attention.options)


def _attend_at(q, keys, values, positions, *, scores, decay, attention) -> torch.Tensor:
    """The same of tokens at positions [kv_heads, tokens], ascending: each query sees the keys in
    its window. In plain PyTorch, a few queries at a time."""
    heads, tokens = positions.shape
    rows, out = len(q), torch.empty_like(q)
    keys, values = keys.float(), values.float()
    sinks = None if attention.sinks is None else attention.sinks.view(heads, -1, 1, 1)
    if scores is not None:
        scores.mul_(decay**rows)
    for some in torch.arange(rows, device=q.device).split(WINDOW_QUERIES):
        place = positions[:, tokens - rows + some][..., None]
        hidden = (positions[:, None] > place) | (
            positions[:, None] <= place - attention.form.window)
        products = torch.einsum("rkgd,ktd->kgrt", q[some].float().unflatten(1, (heads, -1)), keys)
        weights = attention_weights(products, hidden[:, None], dim=q.shape[-1],
                                    form=attention.form, sinks=sinks)
        if scores is not None:
            scores += torch.einsum("kgrt,r->kt", weights, decay ** (rows - 1 - some).float())
        attended = torch.einsum("kgrt,ktd->rkgd", weights, values)
        out[some] = attended.flatten(1, 2).to(q.dtype)
    return out


@dataclass(frozen=True)
class _Old:
    """Cached vectors by position: records [kinds, kv_heads, cached, width]; [kv_heads, cached]."""

    records: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor


def _in_order(held: torch.Tensor, state: EvictionState, cached: int) -> _Old:
    """Copies of the filled slots in the order of their positions: decode leaves them in any."""
    positions, order = state.positions[0, :, :cached].sort(dim=-1)
    place = order[None, ..., None].expand(len(held), -1, -1, held.shape[-1])
    return _Old(held.gather(2, place), state.scores[0].gather(1, order), positions)


def _vectors(records: torch.Tensor, layout: CacheLayout | None, smoothing: KeySmoothing | None, *,
             like: torch.Tensor) -> torch.Tensor:
    """Return records as keys and values [2, kv_heads, tokens, head_dim] before smoothing, of the
    dtype and in the memory of `like`."""
    keys, values = ops.cache_vectors(records, layout).to(like.device)
    if smoothing is not None:
        keys = smoothing.restored(keys)
    return torch.stack((keys.to(like), values.to(like)))


def _keep(records: torch.Tensor, scores: torch.Tensor, before: torch.Tensor, *,
          held: torch.Tensor, cache_state: CacheState, state: EvictionState,
          vectors: torch.Tensor | None) -> None:
    """Put what stays of old and new into the first slots, by position, and into the eviction state.

    records [kinds, kv_heads, tokens, width], scores [kv_heads, tokens]; `before` are the positions
    of the old ones, `vectors` the records as such if the policy asks for them.
    """
    heads, tokens = scores.shape
    new = torch.arange(cache_state.tokens, cache_state.tokens + tokens - before.shape[1],
                       dtype=before.dtype, device=before.device)
    positions = torch.cat((before, new.expand(heads, -1)), dim=1)
    index = state.eviction.select(scores, Cut(tokens, cache_state.heavy, cache_state.recent),
                                  positions, vectors=vectors)
    kept = index.shape[1]
    held[:, :, :kept] = records.gather(
        2, index[None, ..., None].expand(len(records), -1, -1, records.shape[-1]))
    state.scores[0, :, :kept] = scores.gather(1, index)
    state.positions[0, :, :kept] = positions.gather(1, index)
    if state.ranks is not None:
        state.ranks[0, :, :kept] = torch.arange(kept, device=index.device)
