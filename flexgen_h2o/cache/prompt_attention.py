"""Attention within prompts, which puts what stays of them into the cache.

A prompt comes whole, in chunks, or in two pieces of which several prompts share the first. It is
cut to its budget at its end (arXiv 2306.14048), or evicted from with each chunk (`appending`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexgen_h2o.cache.appending import CacheState, LayerAttention, append
from flexgen_h2o.cache.eviction_states import EvictionStates, Rope
from flexgen_h2o.cache.parts import CachePart
from flexgen_h2o.cache.recall import Recall
from flexgen_h2o.cache.shape import CacheShape
from flexgen_h2o.config.formats import split_slots
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptChunk
from flexgen_h2o.h2o.eviction import Cut, forget_hidden, narrowed
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.rotary import rotated


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
        appends = batch_layout.grows and not self._apart
        cached = k.clone() if rolling and not appends else k
        if not (rolling and appends):
            for x in (q, k):
                ops.rotate_(x, rope)
        lengths = [len(span) for span in spans]
        attention = LayerAttention(self._shape.form(layer), sinks)
        if batch_layout.grows:
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
