"""Attention within prompts, and what stays of them in the cache.

A prompt comes whole, in chunks, or in two pieces of which several prompts share the first. It is
cut to its budget at its end (`PromptAttention`, arXiv 2306.14048), or tokens are evicted with each
chunk (`append_chunk`), so that a prompt of any length, or the next turn of a conversation, goes
through a cache of fixed size.
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
"""Queries that plain PyTorch computes together where a window's keys have gaps."""


@dataclass(frozen=True)
class LayerAttention:
    """Arguments of a layer's attention.

    Attributes
    ----------
    form : AttentionForm
    sinks : Tensor [heads] or None
        Attention sinks, if the form has them.
    offsets : Tensor [sequences, heads] or None
        Added to the products of a new token's queries (`h2o.key_smoothing`).
    """

    form: AttentionForm = DEFAULT_FORM
    sinks: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments by their names in `kernels.ops`."""
        options = {"form": self.form, "sinks": self.sinks}
        return options if self.offsets is None else options | {"offsets": self.offsets}


class PromptAttention:
    """Attention within the prompts of a block, which caches them.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        None: every token stays cached.
    parts : sequence of CachePart
        Of the cache.
    prompt_parts : sequence of CachePart
        Parts that hold prompts until their last chunk: `parts`, or others that hold whole prompts.
    evictions : EvictionStates
        Of the cache, which begins their blocks.
    recall : Recall or None
    """

    def __init__(self, shape: CacheShape, h2o: H2OConfig | None, *, parts: Sequence[CachePart],
                 prompt_parts: Sequence[CachePart], evictions: EvictionStates,
                 recall: Recall | None):
        self._shape = shape
        self._h2o = h2o
        self._parts = parts
        self._prompt_parts = prompt_parts
        self._separate = prompt_parts is not parts
        self._evictions = evictions
        self._recall = recall
        self._batch_layouts: Sequence[BatchLayout] = ()
        self._scores: dict[tuple[int, int, int], torch.Tensor] = {}
        """Scores of prompts in progress, by layer, batch and sequence."""
        self._prefix: tuple[torch.Tensor | None, ...] = ()
        """Of the shared prefix in this layer step: keys, values, keys to be cached, scores."""

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block, or continue its sequences."""
        self._batch_layouts = batches
        self._scores.clear()
        self._prefix = ()

    def attend(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptChunk],
               rope: Rope | None, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend within each prompt from spans of prompts, and cache them.

        Parameters
        ----------
        layer, batch : int
        q : Tensor [rows, heads, head_dim]
        k, v : Tensor [rows, kv_heads, head_dim]
            Rows of all spans, packed. q and k are rotated in place.
        spans : sequence of PromptChunk
        rope : Rope or None
            Of the rows.
        sinks : Tensor [heads] or None
            The layer's attention sinks.

        Returns
        -------
        Tensor [rows, heads, head_dim]
        """
        batch_layout = self._batch_layouts[batch]
        rolling = rope is not None and self._evictions.rolls(layer, batch)
        appends = batch_layout.appends and not self._separate
        cached = k.clone() if rolling and not appends else k
        if not (rolling and appends):
            for x in (q, k):
                ops.rotate_(x, rope)
        lengths = [len(span) for span in spans]
        attention = LayerAttention(self._shape.form(layer), sinks)
        if batch_layout.appends:
            attend = self._append if appends else self._attend_chunk
            rows = zip(*(x.split(lengths) for x in (q, cached, v)), strict=True)
            outputs = [attend(layer, batch, span, *qkv, attention)
                       for span, qkv in zip(spans, rows, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        length = batch_layout.lengths[spans[0].sequence]
        if spans[0].start > 0 or spans[0].end < length:
            return self._attend_shared(layer, batch, *spans, q, k, v, cached_keys=cached,
                                       attention=attention)
        scores = None
        if self._evictions.scored(layer, batch):
            scores = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, lengths, scores=scores,
                                    decay=self._evictions.eviction.decay, **attention.options)
        self._cut_and_cache(layer, batch, spans, cached, v, scores)
        return out

    def _attend_shared(self, layer: int, batch: int, span: PromptChunk, q, k, v, *, cached_keys,
                       attention: LayerAttention) -> torch.Tensor:
        """Attend within the prefix that several prompts share, or from the rest of one prompt.

        The rests come in the same layer step; each caches its whole prompt. `cached_keys` are the
        keys as they are cached.
        """
        scores = None
        if self._evictions.scored(layer, batch):
            scores = torch.zeros((k.shape[1], span.end), device=k.device)
        if span.start > 0:
            *prefix, prefix_scores = self._prefix
            k, v, cached_keys = (torch.cat(pair) for pair
                                 in zip(prefix, (k, v, cached_keys), strict=True))
            if scores is not None:
                scores[:, : span.start] = prefix_scores
        out = ops.prefill_attention(q, k, v, [len(span)], key_lengths=[span.end], scores=scores,
                                    decay=self._evictions.eviction.decay, **attention.options)
        if span.start > 0:
            self._cut_and_cache(layer, batch, [span], cached_keys, v, scores)
        else:  # copies: the arguments are scratch memory
            self._prefix = k.clone(), v.clone(), cached_keys.clone(), scores
        return out

    def _append(self, layer: int, batch: int, span: PromptChunk, q, k, v,
                attention: LayerAttention) -> torch.Tensor:
        """Append a chunk to the cache of its sequence, and evict down to the budget."""
        part = self._part_of(span.sequence)
        row = span.sequence - part.first
        limit = budgets.budget(self._h2o, layer, self._batch_layouts[batch].lengths[span.sequence])
        state = self._evictions.state(layer, batch, part)
        sequence = SequenceState(cached=span.start, tokens=span.start)
        if state is not None:
            sequence = SequenceState(min(span.start, limit.total), span.start, limit.heavy,
                                     limit.recent, scored=self._evictions.scored(layer, batch))
            state = narrowed(state, slice(row, row + 1))
            if state.ranks is not None:
                tables = self._evictions.rope_tables(sequence.cached + len(span))
                state = replace(state, rope=tables)
        out = append_chunk(q, k, v, slots=part.get(layer, batch)[:, row], sequence=sequence,
                           state=state, layout=self._shape.layout, attention=attention,
                           smoothing=self._evictions.smoothing(layer, batch))
        self._on_cached(layer, batch, part, [(span.sequence, span.start, span.end)])
        return out

    def _attend_chunk(self, layer: int, batch: int, span: PromptChunk, q, k, v,
                      attention: LayerAttention) -> torch.Tensor:
        """Attend from a chunk over its whole prompt so far; cut the prompt at its end."""
        part = next(part for part in self._prompt_parts if span.sequence < part.last)
        prompt = part.get(layer, batch)[:, span.sequence - part.first]
        for target, new in zip(prompt, (k, v), strict=True):
            target[:, span.start : span.end] = new.transpose(0, 1)
        cached, values = prompt[:, :, : span.end].to(q.device).transpose(1, 2)
        keys = cached
        if self._evictions.rolls(layer, batch):
            tables = self._evictions.rope_tables(span.end)
            keys = rotated(cached, *(table[: span.end, None] for table in tables))
        key = (layer, batch, span.sequence)
        length = self._batch_layouts[batch].lengths[span.sequence]
        scores = None
        if self._evictions.scored(layer, batch):
            if key not in self._scores:
                self._scores[key] = torch.zeros((prompt.shape[1], length), device=q.device)
            scores = self._scores[key][:, : span.end]
        out = ops.prefill_attention(q, keys, values, [len(span)], key_lengths=[span.end],
                                    scores=scores, decay=self._evictions.eviction.decay,
                                    **attention.options)
        if span.end == length:
            self._cut_and_cache(layer, batch, [span], cached, values, self._scores.pop(key, None))
        return out

    def _cut_and_cache(self, layer: int, batch: int, spans: Sequence[PromptChunk], k, v, scores
                       ) -> None:
        """Cut whole prompts to their budgets, and put what stays into slots.

        k and v are [rows, kv_heads, head_dim], scores [kv_heads, rows] or None. `spans` are the
        last spans of prompts of neighbouring sequences.
        """
        smoothing = self._evictions.smoothing(layer, batch)
        if smoothing is not None:
            k = k.clone()
            ops.rotate_(k, None, smoothing.keys)
        first = 0
        for part in self._parts:
            here = [span for span in spans if part.first <= span.sequence < part.last]
            if not here:
                continue
            cuts = [self._cut(layer, span.end) for span in here]
            rows = slice(first, first + sum(cut.length for cut in cuts))
            first = rows.stop
            sequences = slice(here[0].sequence - part.first, here[-1].sequence + 1 - part.first)
            slots = part.get(layer, batch)[:, sequences]
            state = self._evictions.state(layer, batch, part)
            if state is not None:
                state = narrowed(state, sequences)
                if state.eviction.window and state.eviction.policy is None:
                    forget_hidden(scores[:, rows], cuts, state.eviction.window)
                packed = (x if x is None else x.to(slots.device) for x in (
                    k[rows], v[rows], None if scores is None else scores[:, rows]))
                ops.select_heavy_hitters(*packed, cuts=cuts, slots=slots, state=state,
                                         layout=self._shape.layout)
            elif self._batch_layouts[batch].chunk is None or self._separate:
                # Otherwise the chunks are in their slots already.
                self._cache_whole(slots, cuts, k[rows], v[rows])
                self._on_cached(layer, batch, part, [(span.sequence, 0, span.end)
                                                     for span in here])

    def _cut(self, layer: int, length: int) -> Cut:
        budget = budgets.budget(self._h2o, layer, length)
        return Cut(length, length, 0) if budget is None else (
            Cut(length, budget.heavy, budget.recent))

    def _cache_whole(self, slots: torch.Tensor, cuts: Sequence[Cut], *packed: torch.Tensor
                     ) -> None:
        """Put prompts that nothing is evicted from into their first slots."""
        layout = self._shape.layout
        for targets, x, groups in zip(
                split_slots(slots, layout), packed,
                (None, None) if layout is None else (layout.keys, layout.values), strict=True):
            x = x if groups is None else ops.quantize_groups(x, groups)
            for target, rows in zip(targets, x.split([cut.length for cut in cuts]), strict=True):
                target[:, : len(rows)] = rows.transpose(0, 1)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache the prompt of one sequence for others with the same prompt.

        Parameters
        ----------
        layer, batch : int
        source : int
            Place in the batch of the sequence whose whole prompt `attend` has cached.
        *targets : int
            Places of the others.
        """
        originals = self._prompt_tensors(layer, batch, source)
        for target in targets:
            for original, copy in zip(originals, self._prompt_tensors(layer, batch, target),
                                      strict=True):
                copy.copy_(original)
            self._on_cached(layer, batch, self._part_of(target), [
                (target, 0, self._batch_layouts[batch].lengths[target])])

    def _prompt_tensors(self, layer: int, batch: int, sequence: int) -> list[torch.Tensor]:
        """Return the slots of a cached prompt, and the tensors of its eviction state."""
        part = self._part_of(sequence)
        row = sequence - part.first
        slots = part.get(layer, batch)[:, row]
        state = self._evictions.state(layer, batch, part)
        if state is None:
            return [slots[:, :, : self._batch_layouts[batch].lengths[sequence]]]
        return [slots, *(x[row] for x in state.tensors)]

    def _part_of(self, sequence: int) -> CachePart:
        return next(part for part in self._parts if sequence < part.last)

    def _on_cached(self, layer: int, batch: int, part: CachePart,
                   tokens: Sequence[tuple[int, int, int]]) -> None:
        """Index tokens (sequence, first, end) that were put into slots, if there is recall."""
        if self._recall is not None:
            self._recall.on_prompt_cached(layer, batch, part, tokens=tokens)


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
        Of the budget, without sinks; unused if nothing is evicted.
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
        Of the chunk; before rotation if positions roll (`state.ranks`), and before smoothing.
    slots : Tensor [kinds, kv_heads, slots, width]
        Of the sequence, written in place; may be in another memory than q. Without an eviction
        state they have capacity for the chunk.
    sequence : SequenceState
    state : EvictionState or None
        Of the sequence alone, [1, kv_heads, slots]. With ranks its rotations cover slots and
        chunk. None: nothing is evicted, and slots are in the order of positions.
    layout : CacheLayout or None
        Of quantized slots.
    attention : LayerAttention
    smoothing : KeySmoothing or None
        Of the cached keys.

    Returns
    -------
    Tensor [rows, heads, head_dim]
    """
    chunk = torch.stack((k, v)).transpose(1, 2)  # [2, kv_heads, rows, head_dim]
    entries = chunk
    if smoothing is not None:
        smoothed = k.clone()
        ops.rotate_(smoothed, None, smoothing.keys)
        entries = torch.stack((smoothed, v)).transpose(1, 2)
    entries = ops.pack_slots(entries, layout).to(slots.device)
    if state is None:
        return _append_in_order(q, chunk, entries, slots=slots, cached=sequence.cached,
                                layout=layout, attention=attention, smoothing=smoothing)
    old = _ordered_entries(slots, state, sequence.cached)
    vectors = torch.cat((_unpacked(old.entries, layout, smoothing, like=q), chunk), dim=2)
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
           vectors=vectors.to(slots.device) if state.eviction.needs else None)
    return out


def _append_in_order(q, chunk, entries, *, slots, cached, layout, attention, smoothing
                     ) -> torch.Tensor:
    """Do the work of `append_chunk` where nothing is evicted: the chunk takes the next slots."""
    end = cached + len(q)
    slots[:, :, cached:end] = entries
    if layout is None and smoothing is None:
        keys, values = slots[:, :, :end].to(q.device)
    else:  # the chunk's own vectors are exact, as a new token's are in a decode step
        old = _unpacked(slots[:, :, :cached], layout, smoothing, like=q)
        keys, values = torch.cat((old, chunk), dim=2)
    return _causal_attention(q, keys, values, scores=None, decay=1.0, attention=attention)


def _causal_attention(q, keys, values, *, scores, decay, attention) -> torch.Tensor:
    """Attend from the last tokens over keys and values [kv_heads, tokens, head_dim]."""
    return ops.prefill_attention(q, keys.transpose(0, 1), values.transpose(0, 1), [len(q)],
                                 key_lengths=[keys.shape[1]], scores=scores, decay=decay,
                                 **attention.options)


def _window_attention(q, keys, values, positions, *, scores, decay, attention) -> torch.Tensor:
    """Attend within a window over tokens at ascending positions [kv_heads, tokens] with gaps."""
    heads, tokens = positions.shape
    rows, out = len(q), torch.empty_like(q)
    keys, values = keys.float(), values.float()
    sinks = None if attention.sinks is None else attention.sinks.view(heads, -1, 1, 1)
    if scores is not None:
        scores.mul_(decay**rows)
    for chunk in torch.arange(rows, device=q.device).split(WINDOW_QUERIES):
        query_positions = positions[:, tokens - rows + chunk][..., None]
        hidden = (positions[:, None] > query_positions) | (
            positions[:, None] <= query_positions - attention.form.window)
        products = torch.einsum("rkgd,ktd->kgrt", q[chunk].float().unflatten(1, (heads, -1)), keys)
        weights = attention_weights(products, hidden[:, None], dim=q.shape[-1],
                                    form=attention.form, sinks=sinks)
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


def _unpacked(entries: torch.Tensor, layout: CacheLayout | None, smoothing: KeySmoothing | None,
              *, like: torch.Tensor) -> torch.Tensor:
    """Return entries as vectors before smoothing, [2, kv_heads, tokens, head_dim].

    They have the dtype and device of `like`.
    """
    keys, values = ops.unpack_slots(entries, layout).to(like.device)
    if smoothing is not None:
        keys = smoothing.restored(keys)
    return torch.stack((keys.to(like), values.to(like)))


def _evict(entries: torch.Tensor, scores: torch.Tensor, old_positions: torch.Tensor, *,
           slots: torch.Tensor, sequence: SequenceState, state: EvictionState,
           vectors: torch.Tensor | None) -> None:
    """Keep the budget's tokens of a cache with a chunk, in the first slots by position.

    Parameters
    ----------
    entries : Tensor [kinds, kv_heads, tokens, width]
        Cached tokens by position, and the chunk.
    scores : float32 Tensor [kv_heads, tokens]
    old_positions : int32 Tensor [kv_heads, cached]
    slots, sequence, state
        See `append_chunk`; `slots` and `state` are written.
    vectors : Tensor [2, kv_heads, tokens, head_dim] or None
        Keys and values, if the eviction policy needs them.
    """
    heads, tokens = scores.shape
    new = torch.arange(sequence.tokens, sequence.tokens + tokens - old_positions.shape[1],
                       dtype=old_positions.dtype, device=old_positions.device)
    positions = torch.cat((old_positions, new.expand(heads, -1)), dim=1)
    index = state.eviction.select(scores, Cut(tokens, sequence.heavy, sequence.recent),
                                  positions, vectors=vectors)
    kept = index.shape[1]
    slots[:, :, :kept] = entries.gather(
        2, index[None, ..., None].expand(len(entries), -1, -1, entries.shape[-1]))
    state.scores[0, :, :kept] = scores.gather(1, index)
    state.positions[0, :, :kept] = positions.gather(1, index)
    if state.ranks is not None:
        state.ranks[0, :, :kept] = torch.arange(kept, device=index.device)
