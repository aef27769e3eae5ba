"""Attention within the prompts of a block, which caches the tokens that stay.

A prompt is computed whole, in chunks, or as a prefix that several prompts share and the rest. It is
cut to its budget at its end (arXiv 2306.14048), or evicts with each chunk (`chunked_prefill`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexgen_h2o.cache.chunked_prefill import LayerAttention, SequenceState, append_chunk
from flexgen_h2o.cache.eviction_state import EvictionStates, Rope
from flexgen_h2o.cache.layout import CacheShape
from flexgen_h2o.cache.retrieval import Recall
from flexgen_h2o.cache.tiers import CacheTier
from flexgen_h2o.config.cache_layout import split_slots
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptSpan
from flexgen_h2o.h2o.eviction import Cut, clear_scores_outside_window, narrow_state
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.torch_ops import rotated


class PromptAttention:
    """Attention within the prompts of a block, which caches them.

    Parameters
    ----------
    shape : CacheShape
    h2o : H2OConfig or None
        None: never evict.
    tiers : sequence of CacheTier
        Tiers of the cache.
    prompt_tiers : sequence of CacheTier
        Tiers that hold prompts until their last chunk: `tiers`, or others that hold whole prompts.
    evictions : EvictionStates
        Eviction states of the cache, which calls their `begin`.
    recall : Recall or None
    """

    def __init__(self, shape: CacheShape, h2o: H2OConfig | None, *, tiers: Sequence[CacheTier],
                 prompt_tiers: Sequence[CacheTier], evictions: EvictionStates,
                 recall: Recall | None):
        self._shape = shape
        self._h2o = h2o
        self._tiers = tiers
        self._prompt_tiers = prompt_tiers
        self._separate = prompt_tiers is not tiers
        self._evictions = evictions
        self._recall = recall
        self._batch_layouts: Sequence[BatchLayout] = ()
        self._scores: dict[tuple[int, int, int], torch.Tensor] = {}
        """Scores of prompts in progress, by layer, batch and sequence."""
        self._prefix: tuple[torch.Tensor | None, ...] = ()
        """Keys, values, keys to be cached, and scores of the shared prefix in this layer."""

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block, or continue its sequences."""
        self._batch_layouts = batches
        self._scores.clear()
        self._prefix = ()

    def attend(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptSpan],
               rope: Rope | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend within each prompt from spans of prompts, and cache them.

        Parameters
        ----------
        q : Tensor [rows, heads, head_dim]
        k, v : Tensor [rows, kv_heads, head_dim]
            Rows of all spans, packed. q and k are rotated in place.
        spans : sequence of PromptSpan
        rope : Rope or None
            RoPE tables of the rows.
        sinks : Tensor [heads] or None
            The layer's attention sinks.

        Returns
        -------
        Tensor [rows, heads, elements of a value]
        """
        batch_layout = self._batch_layouts[batch]
        rolling = rope is not None and self._evictions.rolls(layer, batch)
        appends = batch_layout.appends and not self._separate
        cached = k.clone() if rolling and not appends else k
        if not (rolling and appends):
            for x in (q, k):
                ops.rotate_(x, rope)
        lengths = [len(span) for span in spans]
        attention = LayerAttention(self._shape.attention_variant(layer), sinks)
        if batch_layout.appends:
            attend = self._append if appends else self._attend_chunk
            rows = zip(*(x.split(lengths) for x in (q, cached, v)), strict=True)
            outputs = [attend(layer, batch, span, span_q, span_k, span_v, attention)
                       for span, (span_q, span_k, span_v) in zip(spans, rows, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        length = batch_layout.lengths[spans[0].sequence]
        if spans[0].start > 0 or spans[0].end < length:
            return self._attend_shared(layer, batch, spans[0], q, k, v, cached_keys=cached,
                                       attention=attention)
        scores = None
        if self._evictions.scored(layer, batch):
            scores = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, lengths, scores=scores,
                                    decay=self._evictions.eviction.decay, **attention.options)
        self._cut_and_cache(layer, batch, spans, cached, v, scores)
        return out

    def _attend_shared(self, layer: int, batch: int, span: PromptSpan, q, k, v, *, cached_keys,
                       attention: LayerAttention) -> torch.Tensor:
        """Attend within the prefix that several prompts share, or from the rest of one prompt.

        The remainders follow in the same layer; each one caches its whole prompt.
        `cached_keys` are the keys as they are cached.
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

    def _append(self, layer: int, batch: int, span: PromptSpan, q, k, v,
                attention: LayerAttention) -> torch.Tensor:
        """Append a chunk to the cache of its sequence, and evict down to the budget."""
        tier = self._tier_of(span.sequence)
        row = span.sequence - tier.first
        limit = budgets.budget(self._h2o, layer, self._batch_layouts[batch].lengths[span.sequence])
        state = self._evictions.state(layer, batch, tier)
        sequence = SequenceState(cached=span.start, tokens=span.start)
        if state is not None:
            sequence = SequenceState(min(span.start, limit.total), span.start, limit.heavy,
                                     limit.recent, scored=self._evictions.scored(layer, batch))
            state = narrow_state(state, slice(row, row + 1))
            if state.ranks is not None:
                tables = self._evictions.rope_tables(sequence.cached + len(span))
                state = replace(state, rope=tables)
        out = append_chunk(q, k, v, slots=tier.get(layer, batch)[:, row], sequence=sequence,
                           state=state, layout=self._shape.layout, attention=attention,
                           smoothing=self._evictions.smoothing(layer, batch))
        self._on_cached(layer, batch, tier, [(span.sequence, span.start, span.end)])
        return out

    def _attend_chunk(self, layer: int, batch: int, span: PromptSpan, q, k, v,
                      attention: LayerAttention) -> torch.Tensor:
        """Attend from a chunk over its whole prompt so far; cut the prompt at its end."""
        tier = next(tier for tier in self._prompt_tiers if span.sequence < tier.last)
        prompt = tier.get(layer, batch)[:, span.sequence - tier.first]
        for target, new in zip(prompt, (k, v), strict=False):  # a latent cache has keys only
            target[:, span.start : span.end] = new.transpose(0, 1)
        cached, values = ops.split_vectors(
            prompt[:, :, : span.end].to(q.device).transpose(1, 2), v)
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

    def _cut_and_cache(self, layer: int, batch: int, spans: Sequence[PromptSpan], k, v, scores
                       ) -> None:
        """Cut whole prompts to their budgets, and put the tokens that stay into slots.

        k and v are [rows, kv_heads, head_dim], scores [kv_heads, rows] or None. `spans` are the
        last spans of prompts of neighbouring sequences.
        """
        smoothing = self._evictions.smoothing(layer, batch)
        if smoothing is not None:
            k = k.clone()
            ops.rotate_(k, None, smoothing.keys)
        first = 0
        for tier in self._tiers:
            tier_spans = [span for span in spans if tier.first <= span.sequence < tier.last]
            if not tier_spans:
                continue
            cuts = [self._cut(layer, span.end) for span in tier_spans]
            rows = slice(first, first + sum(cut.length for cut in cuts))
            first = rows.stop
            sequences = slice(tier_spans[0].sequence - tier.first,
                              tier_spans[-1].sequence + 1 - tier.first)
            slots = tier.get(layer, batch)[:, sequences]
            state = self._evictions.state(layer, batch, tier)
            if state is not None:
                state = narrow_state(state, sequences)
                if state.eviction.window and state.eviction.policy.in_kernels:
                    clear_scores_outside_window(scores[:, rows], cuts, state.eviction.window)
                packed = (x if x is None else x.to(slots.device) for x in (
                    k[rows], v[rows], None if scores is None else scores[:, rows]))
                ops.select_heavy_hitters(*packed, cuts=cuts, slots=slots, state=state,
                                         layout=self._shape.layout)
            elif self._batch_layouts[batch].chunk is None or self._separate:
                # Otherwise the chunks are in their slots already.
                self._cache_whole(slots, cuts, k[rows], v[rows])
                self._on_cached(layer, batch, tier, [(span.sequence, 0, span.end)
                                                     for span in tier_spans])

    def _cut(self, layer: int, length: int) -> Cut:
        budget = budgets.budget(self._h2o, layer, length)
        return Cut(length, length, 0) if budget is None else (
            Cut(length, budget.heavy, budget.recent))

    def _cache_whole(self, slots: torch.Tensor, cuts: Sequence[Cut], *packed: torch.Tensor
                     ) -> None:
        """Put prompts that nothing is evicted from into their first slots."""
        layout = self._shape.layout
        for targets, x, groups in zip(  # a latent cache has keys only
                split_slots(slots, layout), packed,
                (None, None) if layout is None else (layout.keys, layout.values), strict=False):
            x = x if groups is None else ops.quantize_groups(x, groups)
            for target, rows in zip(targets, x.split([cut.length for cut in cuts]), strict=True):
                target[:, : len(rows)] = rows.transpose(0, 1)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Copy the cached prompt of one sequence of a batch to others with the same prompt."""
        originals = self._prompt_tensors(layer, batch, source)
        for target in targets:
            for original, copy in zip(originals, self._prompt_tensors(layer, batch, target),
                                      strict=True):
                copy.copy_(original)
            self._on_cached(layer, batch, self._tier_of(target), [
                (target, 0, self._batch_layouts[batch].lengths[target])])

    def _prompt_tensors(self, layer: int, batch: int, sequence: int) -> list[torch.Tensor]:
        """Return the slots of a cached prompt, and the tensors of its eviction state."""
        tier = self._tier_of(sequence)
        row = sequence - tier.first
        slots = tier.get(layer, batch)[:, row]
        state = self._evictions.state(layer, batch, tier)
        if state is None:
            return [slots[:, :, : self._batch_layouts[batch].lengths[sequence]]]
        return [slots, *(x[row] for x in state.tensors)]

    def _tier_of(self, sequence: int) -> CacheTier:
        return next(tier for tier in self._tiers if sequence < tier.last)

    def _on_cached(self, layer: int, batch: int, tier: CacheTier,
                   tokens: Sequence[tuple[int, int, int]]) -> None:
        """Index tokens (sequence, first, end) that were put into slots, if there is recall."""
        if self._recall is not None:
            self._recall.on_prompt_cached(layer, batch, tier, tokens=tokens)
