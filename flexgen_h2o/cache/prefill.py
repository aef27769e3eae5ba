"""Putting a chunk of new tokens onto what is cached of a sequence, and evicting down to the budget.

This is how a prompt of any length goes through a cache of fixed size, and how a new turn comes onto
a conversation. A chunk of one token does what a decode step does; one of the whole prompt what the
cut of a prompt does (arXiv 2306.14048, algorithm 1, by chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexgen_h2o.cache.eviction_state import EvictionStates, Rope
from flexgen_h2o.cache.layout import CacheShape
from flexgen_h2o.cache.retrieval import Recall
from flexgen_h2o.cache.tiers import CachePart
from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.config.cache_layout import CacheLayout, split_slots
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.attention_weights import attention_weights
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptChunk
from flexgen_h2o.h2o.eviction import Cut, EvictionState, forget_hidden, narrowed
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
    packed = ops.pack_slots(packed, layout).to(held.device)
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
    keys, values = ops.unpack_slots(records, layout).to(like.device)
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


# Attention within prompts, which puts what stays of them into the cache.
#
# A prompt comes whole, in chunks, or in two pieces of which several prompts share the first. It is
# cut to its budget at its end (arXiv 2306.14048), or evicted from with each chunk (`appending`).


class PromptAttention:
    """Attends within the prompts of a block, and caches them.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        What stays cached; None is everything.
    parts : sequence of CachePart
        Those of the cache.
    gathered : sequence of CachePart
        Parts in which prompts are gathered that come in chunks: `parts`, or others that hold whole
        prompts.
    evictions : EvictionStates
        The cache's, which begins their blocks.
    recall : Recall or None
    """

    def __init__(self, shape: CacheShape, h2o: H2OConfig | None, *, parts: Sequence[CachePart],
                 gathered: Sequence[CachePart], evictions: EvictionStates, recall: Recall | None):
        self._shape = shape
        self._h2o = h2o
        self._parts = parts
        self._gathered = gathered
        self._apart = gathered is not parts
        self._evictions = evictions
        self._recall = recall
        self._batch_layouts: Sequence[BatchLayout] = ()
        self._scores: dict[tuple[int, int, int], torch.Tensor] = {}
        """Of prompts that come in chunks and have not ended, by layer, batch and sequence."""
        self._prefix: tuple[torch.Tensor | None, ...] = ()
        """Of the layer step: keys, values and keys to be cached of what prompts begin with, and the
        attention that these have received."""

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block, or go on with its sequences."""
        self._batch_layouts = batches
        self._scores.clear()
        self._prefix = ()

    def attend(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptChunk],
               rope: Rope | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Cache spans of prompts and attend within each prompt.

        Parameters
        ----------
        q : Tensor [rows, heads, head_dim]
        k, v : Tensor [rows, kv_heads, head_dim]
            Rows of all spans, packed one after the other; q and k before rotation, and rotated in
            place.
        rope : Rope or None
            Of the rows.
        sinks : Tensor [heads] or None
            What the layer's form of attention asks for.

        Returns
        -------
        Tensor [rows, heads, head_dim]
        """
        batch_layout = self._batch_layouts[batch]
        rolling = rope is not None and self._evictions.rolls(layer, batch)
        appends = batch_layout.appends and not self._apart
        cached = k.clone() if rolling and not appends else k
        if not (rolling and appends):
            for x in (q, k):
                ops.rotate_(x, rope)
        lengths = [len(span) for span in spans]
        attention = LayerAttention(self._shape.form(layer), sinks)
        if batch_layout.appends:
            attend = self._append if appends else self._attend_span
            rows = zip(*(x.split(lengths) for x in (q, cached, v)), strict=True)
            outputs = [attend(layer, batch, span, *some, attention)
                       for span, some in zip(spans, rows, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        length = batch_layout.lengths[spans[0].sequence]
        if spans[0].start > 0 or spans[0].end < length:
            return self._attend_shared(layer, batch, *spans, q, k, v, bare=cached,
                                       attention=attention)
        scores = None
        if self._evictions.scored(layer, batch):
            scores = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, lengths, scores=scores,
                                    decay=self._evictions.eviction.decay, **attention.options)
        self._keep(layer, batch, spans, cached, v, scores)
        return out

    def _attend_shared(self, layer: int, batch: int, span: PromptChunk, q, k, v, *, bare,
                       attention: LayerAttention) -> torch.Tensor:
        """Attend within what several prompts begin with; then, from the rest of each, over both.

        The rest of a prompt comes in the same layer step, and the prompt is cached with it. `bare`
        are the keys as they are cached.
        """
        scores = None
        if self._evictions.scored(layer, batch):
            scores = torch.zeros((k.shape[1], span.end), device=k.device)
        if span.start > 0:
            *before, received = self._prefix
            k, v, bare = (torch.cat(both) for both in zip(before, (k, v, bare), strict=True))
            if scores is not None:
                scores[:, : span.start] = received
        out = ops.prefill_attention(q, k, v, [len(span)], key_lengths=[span.end], scores=scores,
                                    decay=self._evictions.eviction.decay, **attention.options)
        if span.start > 0:
            self._keep(layer, batch, [span], bare, v, scores)
        else:  # copies: what is given lies in scratch memory
            self._prefix = k.clone(), v.clone(), bare.clone(), scores
        return out

    def _append(self, layer: int, batch: int, span: PromptChunk, q, k, v,
                attention: LayerAttention) -> torch.Tensor:
        """Put a chunk onto what is cached of its sequence, and evict what is over the budget."""
        part = next(p for p in self._parts if span.sequence < p.last)
        row = span.sequence - part.first
        limit = budgets.budget(self._h2o, layer, self._batch_layouts[batch].lengths[span.sequence])
        state = self._evictions.state(layer, batch, part)
        cache_state = CacheState(cached=span.start, tokens=span.start)
        if state is not None:
            cache_state = CacheState(min(span.start, limit.total), span.start, limit.heavy,
                                     limit.recent, scored=self._evictions.scored(layer, batch))
            state = narrowed(state, slice(row, row + 1))
            if state.ranks is not None:
                state = replace(
                    state, rope=self._evictions.table(cache_state.cached + len(span)))
        out = append(q, k, v, held=part.get(layer, batch)[:, row], cache_state=cache_state,
                     state=state, layout=self._shape.layout, attention=attention,
                     smoothing=self._evictions.smoothing(layer, batch))
        self._index(layer, batch, part, [(span.sequence, span.start, span.end)])
        return out

    def _attend_span(self, layer: int, batch: int, span: PromptChunk, q, k, v,
                     attention: LayerAttention) -> torch.Tensor:
        """Attend from a chunk of a prompt over all that came before; cut the prompt at its end."""
        part = next(p for p in self._gathered if span.sequence < p.last)
        held = part.get(layer, batch)[:, span.sequence - part.first]
        for cached, new in zip(held, (k, v), strict=True):
            cached[:, span.start : span.end] = new.transpose(0, 1)
        cached, values = held[:, :, : span.end].to(q.device).transpose(1, 2)
        keys = cached
        if self._evictions.rolls(layer, batch):
            tables = self._evictions.table(span.end)
            keys = rotated(cached, *(table[: span.end, None] for table in tables))
        key = (layer, batch, span.sequence)
        length = self._batch_layouts[batch].lengths[span.sequence]
        scores = None
        if self._evictions.scored(layer, batch):
            if key not in self._scores:
                self._scores[key] = torch.zeros((held.shape[1], length), device=q.device)
            scores = self._scores[key][:, : span.end]
        out = ops.prefill_attention(q, keys, values, [len(span)], key_lengths=[span.end],
                                    scores=scores, decay=self._evictions.eviction.decay,
                                    **attention.options)
        if span.end == length:
            self._keep(layer, batch, [span], cached, values, self._scores.pop(key, None))
        return out

    def _keep(self, layer: int, batch: int, spans: Sequence[PromptChunk], k, v, scores) -> None:
        """Cut whole prompts to their budgets and put what stays into slots.

        k, v [rows, kv_heads, head_dim]; scores [kv_heads, rows] or None. The spans are the prompts'
        last; their sequences are neighbours.
        """
        smoothing = self._evictions.smoothing(layer, batch)
        if smoothing is not None:
            k = k.clone()
            ops.rotate_(k, None, smoothing.keys)
        first = 0
        for part in self._parts:
            mine = [span for span in spans if part.first <= span.sequence < part.last]
            if not mine:
                continue
            cuts = [self._cut(layer, span.end) for span in mine]
            rows = slice(first, first + sum(cut.length for cut in cuts))
            first = rows.stop
            sequences = slice(mine[0].sequence - part.first, mine[-1].sequence + 1 - part.first)
            held = part.get(layer, batch)[:, sequences]
            state = self._evictions.state(layer, batch, part)
            if state is not None:
                state = narrowed(state, sequences)
                if state.eviction.window and state.eviction.policy is None:
                    forget_hidden(scores[:, rows], cuts, state.eviction.window)
                some = (x if x is None else x.to(held.device)
                        for x in (k[rows], v[rows], None if scores is None else scores[:, rows]))
                ops.select_heavy_hitters(*some, cuts=cuts, slots=held, state=state,
                                         layout=self._shape.layout)
            elif self._batch_layouts[batch].chunk is None or self._apart:
                # Else the prompt came in chunks and lies in its slots already.
                self._fill(held, cuts, k[rows], v[rows])
                self._index(layer, batch, part, [(span.sequence, 0, span.end) for span in mine])

    def _fill(self, held: torch.Tensor, cuts: Sequence[Cut], *packed: torch.Tensor) -> None:
        """Put prompts of which everything stays into their first slots."""
        layout = self._shape.layout
        for slots, x, records in zip(
                split_slots(held, layout), packed,
                (None, None) if layout is None else (layout.keys, layout.values), strict=True):
            x = x if records is None else ops.quantize_groups(x, records)
            for mine, rows in zip(slots, x.split([cut.length for cut in cuts]), strict=True):
                mine[:, : len(rows)] = rows.transpose(0, 1)

    def _cut(self, layer: int, length: int) -> Cut:
        budget = budgets.budget(self._h2o, layer, length)
        return Cut(length, length, 0) if budget is None else (
            Cut(length, budget.heavy, budget.recent))

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache the prompt of one sequence, which has ended, for others that have the same.

        Parameters
        ----------
        source : int
            Place in the batch of the sequence whose prompt `attend` has just cached.
        targets : int
            Those of the others.
        """
        originals = self._of_sequence(layer, batch, source)
        for target in targets:
            for original, copy in zip(originals, self._of_sequence(layer, batch, target),
                                      strict=True):
                copy.copy_(original)
            part = next(p for p in self._parts if target < p.last)
            self._index(layer, batch, part, [
                (target, 0, self._batch_layouts[batch].lengths[target])])

    def _of_sequence(self, layer: int, batch: int, sequence: int) -> list[torch.Tensor]:
        """Everything held of a prompt in a layer: its slots, and what eviction knows of them."""
        part = next(p for p in self._parts if sequence < p.last)
        row = sequence - part.first
        held = part.get(layer, batch)[:, row]
        state = self._evictions.state(layer, batch, part)
        if state is None:
            return [held[:, :, : self._batch_layouts[batch].lengths[sequence]]]
        return [held, *(x[row] for x in state.tensors)]

    def _index(self, layer: int, batch: int, part: CachePart,
               tokens: Sequence[tuple[int, int, int]]) -> None:
        """Let recall know of the tokens (sequence, first, end) that have been put into slots."""
        if self._recall is not None:
            self._recall.cached(layer, batch, part, tokens=tokens)
