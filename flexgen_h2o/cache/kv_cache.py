"""The KV cache of a block: fixed slots over tiers; append, attend, evict, write back.

The cache of a GPU batch is ``[keys and values, sequences, kv_heads, slots, width]`` for each
decoder layer, contiguous; a step shifts and concatenates nothing. A percentage of the cache is a
share of each batch's sequences. With an eviction policy (arXiv 2306.14048) there are as many
slots as the budget has tokens, and a new token takes its victim's slot; the slots' order means
nothing then. Prompts that come in chunks are held whole until they are cut, unless chunks are to be
evicted as they come (`appending`). A sequence may go on in a later run. With sparse attention
(arXiv 2303.06865) a new token reads every key, and of the values those that matter most to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flexgen_h2o.cache.appending import CacheState, LayerAttention, append
from flexgen_h2o.cache.attending import HostAttentionQueue, PendingAttention
from flexgen_h2o.cache.carrying import Moved, put, take
from flexgen_h2o.cache.parts import CachePart, Changed, Grid, Records
from flexgen_h2o.cache.placed import make_parts
from flexgen_h2o.cache.recall import Recall, RecallStep
from flexgen_h2o.cache.recalled import RecallCounts, RecalledPart
from flexgen_h2o.cache.shape import CacheShape, CacheSize, LayerCachePlan, layer_cache_plans
from flexgen_h2o.cache.sparse import SparseAttention
from flexgen_h2o.cache.step_metadata import StepMetadata
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptChunk
from flexgen_h2o.h2o.eviction import (
    Cut,
    Eviction,
    EvictionState,
    eviction_of,
    forget_hidden,
    narrowed,
    new_state,
)
from flexgen_h2o.kernels import native, ops
from flexgen_h2o.kernels.arguments import EvictionArguments, FormArguments
from flexgen_h2o.kernels.rotary import apply_rope_, rotated
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.transfer import Transfers

Rope = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [rows, rotary_dim / 2] each."""


class KVCache:
    """The cache of one block of GPU batches, reused by the next.

    Parameters
    ----------
    shape : CacheShape
    size : CacheSize
    policy : Policy
        Where the cache lives, and where attention over host memory runs.
    h2o : H2OConfig or None
        What stays cached; None is everything.
    rope : callable (positions) -> Rope or None
        float32 tables, for positions that roll.
    run_folder : callable
        Makes the folder of the disk's share.
    """

    def __init__(self, shape: CacheShape, size: CacheSize, policy: Policy, *,
                 h2o: H2OConfig | None, rope: Callable[[torch.Tensor], Rope | None],
                 transfers: Transfers, run_folder: Callable[[], RunFolder]):
        self.shape = shape
        self._h2o = None if h2o is None or h2o.is_full else h2o
        self._eviction = eviction_of(self._h2o)
        self._evicts_within = self._h2o is not None and self._h2o.evicts_chunks(shape.bits)
        self._transfers = transfers
        self._device = transfers.device.torch
        self._rope = rope
        self._tables: Rope | None = None
        self._batch_layouts: list[BatchLayout] = []
        self._plans: list[list[LayerCachePlan]] = []
        self._states: dict[tuple, EvictionState] = {}
        self._scores: dict[tuple, torch.Tensor] = {}
        self._changed: dict[tuple, Changed] = {}
        self._prefix: tuple[torch.Tensor | None, ...] = ()
        """Of the layer step: keys, values and keys to be cached of what prompts begin with, and the
        attention that these have received."""
        counts = split(size.sequences, policy.cache)
        self._host = HostAttentionQueue(counts[1], transfers)

        def make(name: str, records: Records, slots: tuple[int, ...], *, on_host: bool = False,
                 fast: Sequence[int] = ()):
            return make_parts(
                records, Grid(size.batches, slots), counts, transfers=transfers, on_host=on_host,
                file=lambda nbytes: run_folder().file(f"{name}.bin", nbytes), fast=fast)

        self.parts: list[CachePart] = make(
            "cache", shape.records(), size.slots,
            on_host=policy.cpu_cache_compute and transfers.device.separate,
            fast=[budgets.fast_slots(h2o, layer, most) if policy.fetch_chosen else 0
                  for layer, most in enumerate(size.slots)])
        self._prompts: list[CachePart] = self.parts
        """Parts in which prompts are gathered that come in chunks. The full cache has room for
        them."""
        if size.prompt and not self._evicts_within and (
                self._h2o is not None or shape.bits != 16):
            self._prompts = make("prompts", shape.plain(), (size.prompt,) * shape.num_layers)

        self._sparse = SparseAttention(shape, transfers)
        self._recall: Recall | None = None
        if h2o is not None and h2o.recall:
            self._recall = Recall(shape, size, h2o, parts=self.parts, device=transfers.device)

    @property
    def attends_on_host(self) -> bool:
        """True if attention over a part runs on the host although compute is elsewhere."""
        return any(part.on_host for part in self.parts)

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a new block: forget what is cached, but for the sequences that are carried into it.

        These are moved layer by layer: one layer's at a time are held twice.
        """
        self._host.reset()
        carries = any(batch_layout.carries for batch_layout in batches)
        for part in dict.fromkeys([*self.parts, *self._prompts]):
            if carries:
                part.settle()
            else:
                part.reset()
        states, self._states = self._states if carries else {}, {}
        self._batch_layouts = list(batches)
        self._plans = [layer_cache_plans(batch_layout, self._h2o, self.shape.num_layers)
                       for batch_layout in batches]
        self._scores.clear()
        if self._recall is not None:
            self._recall.begin(batches)
        self._begin_metadata()
        self._changed.clear()
        self._prefix = ()
        for layer in range(self.shape.num_layers):
            mine = {key[1:]: states.pop(key) for key in list(states) if key[0] == layer}
            moved = take(layer, self.parts, batches, states=mine, h2o=self._h2o) if carries else {}
            for part in self.parts:
                part.begin(layer, [(len(batch_layout), each[layer].slots) for batch_layout, each
                                   in zip(batches, self._plans, strict=True)])
            for part in self._prompts if self._prompts is not self.parts else ():
                part.begin(layer, [(len(batch_layout), max(batch_layout.lengths))
                                   for batch_layout in batches])
            # Eviction states are small and last. Made in the middle of a prefill, each takes a part
            # of the hole that the last large tensor has left in the heap, and the next one no
            # longer fits there.
            for batch, each in enumerate(self._plans):
                for part in self._here(batch) if each[layer].evicts else ():
                    self._state(layer, batch, part)
            for batch in range(len(batches)):
                self._put(layer, batch, moved)

    def _put(self, layer: int, batch: int, moved: Moved) -> None:
        """Cache what was moved of the sequences of a batch."""
        batch_layout, evicts = self._batch_layouts[batch], self._plans[batch][layer].evicts
        for part in self._here(batch):
            if self._holds_carried(batch, part):
                part.load(layer, batch, fetch=False,
                          cached=None if evicts else batch_layout.most_tokens(0))
                put(moved, batch_layout.carried[part.sequences(batch)], part.get(layer, batch),
                    self._state(layer, batch, part) if evicts else None)
                mine = part.sequences(batch)
                self._index(layer, batch, part, [
                    (sequence, 0, batch_layout.tokens(sequence, 0)
                     if batch_layout.origin(sequence) else 0)
                    for sequence in range(mine.start, mine.stop)])
                part.store(layer, batch, None)

    def _index(self, layer: int, batch: int, part: CachePart,
               tokens: Sequence[tuple[int, int, int]]) -> None:
        """Let recall know of the tokens (sequence, first, end) that have been put into slots."""
        if self._recall is not None:
            self._recall.cached(layer, batch, part, tokens=tokens)
            part.filled(layer, batch, tokens)

    def _holds_carried(self, batch: int, part: CachePart) -> bool:
        """True if a sequence of a batch that lives in a part is carried."""
        mine = part.sequences(batch)
        return any(self._batch_layouts[batch].carried[mine])

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Go on with the sequences of `begin`, in a run that finds what the last one left.

        Sequences keep the slots that they were given: `begin` has to be told of the most.
        """
        self._host.reset()
        self._batch_layouts = list(batches)
        for part in self.parts:
            part.settle()
        if self._recall is not None:
            self._recall.begin(batches)
        self._begin_metadata()
        self._changed.clear()

    def _begin_metadata(self) -> None:
        self._step_metadata = StepMetadata(self._batch_layouts, self._plans, self._h2o,
                                           stays=self.binds)

    def nbytes(self) -> int:
        """Bytes of all keys and values of the block at rest, once the prompts have been cut."""
        records = self.shape.records()
        return sum(records.nbytes(len(batch_layout), plan.slots)
                   for batch_layout, each in zip(self._batch_layouts, self._plans, strict=True)
                   for plan in each)

    def _here(self, batch: int, parts: list[CachePart] | None = None) -> list[CachePart]:
        return [part
                for part in parts or self.parts if part.first < len(self._batch_layouts[batch])]

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start bringing what compute of (layer, batch) needs; layer counts from 0."""
        batch_layout = self._batch_layouts[batch]
        cached = None  # which slots count, eviction knows
        if not self._plans[batch][layer].evicts:
            cached = batch_layout.most_tokens(max(0, batch_layout.token(forward_pass) - 1))
        if not batch_layout.in_prefill(forward_pass):
            for part in self._here(batch):
                if not part.recalls(layer):
                    part.load(layer, batch, fetch=True, cached=cached,
                              keys_only=self.shape.attn_sparsity < 1)
            return
        apart = self._prompts is not self.parts
        if batch_layout.grows:
            for part in self._here(batch, self._prompts):
                carried = not apart and self._holds_carried(batch, part)
                part.load(layer, batch, fetch=carried or batch_layout.begun(forward_pass),
                          cached=None if apart else cached)
        if batch_layout.token(forward_pass) == 0 and (apart or not batch_layout.grows):
            for part in self._here(batch):
                part.load(layer, batch, fetch=self._holds_carried(batch, part), cached=cached)

    def store(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start writing back what compute of (layer, batch) changed."""
        batch_layout = self._batch_layouts[batch]
        last = batch_layout.token(forward_pass) >= 0
        decode = not batch_layout.in_prefill(forward_pass)
        for part in self._here(batch, self.parts if last else self._prompts):
            if not (decode and part.recalls(layer)):
                part.store(layer, batch, self._changed.pop((layer, batch, part.first), None))

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[PromptChunk],
                      rope: Rope | None, sinks: torch.Tensor | None = None) -> torch.Tensor:
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
        rolling = rope is not None and self._rolls(layer, batch)
        appends = self._batch_layouts[batch].grows and self._prompts is self.parts
        cached = k.clone() if rolling and not appends else k
        if rope is not None and not (rolling and appends):
            for x in (q, k):
                apply_rope_(x, *rope)
        lengths = [len(span) for span in spans]
        attention = LayerAttention(self.shape.form(layer), sinks)
        if self._batch_layouts[batch].grows:
            attend = self._append if appends else self._attend_span
            rows = zip(*(x.split(lengths) for x in (q, cached, v)), strict=True)
            outputs = [attend(layer, batch, span, *some, attention)
                       for span, some in zip(spans, rows, strict=True)]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        length = self._batch_layouts[batch].lengths[spans[0].sequence]
        if spans[0].start > 0 or spans[0].end < length:
            return self._attend_shared(layer, batch, *spans, q, k, v, bare=cached,
                                       attention=attention)
        scores = None
        if self._scored(layer, batch):
            scores = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, lengths, scores=scores, decay=self._eviction.decay,
                                    **attention.options)
        self._keep(layer, batch, spans, cached, v, scores)
        return out

    def _attend_shared(self, layer: int, batch: int, span: PromptChunk, q, k, v, *, bare,
                       attention: LayerAttention) -> torch.Tensor:
        """Attend within what several prompts begin with; then, from the rest of each, over both.

        The rest of a prompt comes in the same layer step, and the prompt is cached with it. `bare`
        are the keys as they are cached.
        """
        scores = None
        if self._scored(layer, batch):
            scores = torch.zeros((k.shape[1], span.end), device=k.device)
        if span.start > 0:
            *before, received = self._prefix
            k, v, bare = (torch.cat(both) for both in zip(before, (k, v, bare), strict=True))
            if scores is not None:
                scores[:, : span.start] = received
        out = ops.prefill_attention(q, k, v, [len(span)], key_lengths=[span.end], scores=scores,
                                    decay=self._eviction.decay, **attention.options)
        if span.start > 0:
            self._keep(layer, batch, [span], bare, v, scores)
        else:  # copies: what is given lies in scratch memory
            self._prefix = k.clone(), v.clone(), bare.clone(), scores
        return out

    def _append(self, layer: int, batch: int, span: PromptChunk, q, k, v,
                attention: LayerAttention) -> torch.Tensor:
        """Put a chunk onto what is cached of its sequence, and evict what is over the budget."""
        part = next(p for p in self.parts if span.sequence < p.last)
        row = span.sequence - part.first
        limit = budgets.budget(self._h2o, layer, self._batch_layouts[batch].lengths[span.sequence])
        state = None
        cache_state = CacheState(cached=span.start, tokens=span.start)
        if self._plans[batch][layer].evicts:
            cache_state = CacheState(min(span.start, limit.total), span.start, limit.heavy,
                                     limit.recent, scored=self._scored(layer, batch))
            state = narrowed(self._state(layer, batch, part), slice(row, row + 1))
            if state.ranks is not None:
                state = replace(state, rope=self._table(cache_state.cached + len(span)))
        out = append(q, k, v, held=part.get(layer, batch)[:, row], cache_state=cache_state,
                     state=state, layout=self.shape.layout, attention=attention)
        self._index(layer, batch, part, [(span.sequence, span.start, span.end)])
        return out

    def _attend_span(self, layer: int, batch: int, span: PromptChunk, q, k, v,
                     attention: LayerAttention) -> torch.Tensor:
        """Attend from a chunk of a prompt over all that came before; cut the prompt at its end."""
        part = next(p for p in self._prompts if span.sequence < p.last)
        held = part.get(layer, batch)[:, span.sequence - part.first]
        for cached, new in zip(held, (k, v), strict=True):
            cached[:, span.start : span.end] = new.transpose(0, 1)
        cached, values = held[:, :, : span.end].to(q.device).transpose(1, 2)
        keys = cached
        if self._rolls(layer, batch):
            keys = rotated(cached, *(table[: span.end, None] for table in self._table(span.end)))
        key = (layer, batch, span.sequence)
        length = self._batch_layouts[batch].lengths[span.sequence]
        scores = None
        if self._scored(layer, batch):
            if key not in self._scores:
                self._scores[key] = torch.zeros((held.shape[1], length), device=q.device)
            scores = self._scores[key][:, : span.end]
        out = ops.prefill_attention(q, keys, values, [len(span)], key_lengths=[span.end],
                                    scores=scores, decay=self._eviction.decay,
                                    **attention.options)
        if span.end == length:
            self._keep(layer, batch, [span], cached, values, self._scores.pop(key, None))
        return out

    def _keep(self, layer: int, batch: int, spans: Sequence[PromptChunk], k, v, scores) -> None:
        """Cut whole prompts to their budgets and put what stays into slots.

        k, v [rows, kv_heads, head_dim]; scores [kv_heads, rows] or None. The spans are the prompts'
        last; their sequences are neighbours.
        """
        first = 0
        for part in self._here(batch):
            mine = [span for span in spans if part.first <= span.sequence < part.last]
            if not mine:
                continue
            cuts = [self._cut(layer, span.end) for span in mine]
            rows = slice(first, first + sum(cut.length for cut in cuts))
            first = rows.stop
            sequences = slice(mine[0].sequence - part.first, mine[-1].sequence + 1 - part.first)
            held = part.get(layer, batch)[:, sequences]
            if self._plans[batch][layer].evicts:
                state = narrowed(self._state(layer, batch, part), sequences)
                if state.eviction.window and state.eviction.policy is None:
                    forget_hidden(scores[:, rows], cuts, state.eviction.window)
                some = (x if x is None else x.to(held.device)
                        for x in (k[rows], v[rows], None if scores is None else scores[:, rows]))
                ops.select_heavy_hitters(*some, cuts=cuts, slots=held, state=state,
                                         layout=self.shape.layout)
            elif self._batch_layouts[batch].chunk is None or self._prompts is not self.parts:
                # Else the prompt came in chunks and lies in its slots already.
                self._fill(held, cuts, k[rows], v[rows])
                self._index(layer, batch, part, [(span.sequence, 0, span.end) for span in mine])

    def _fill(self, held: torch.Tensor, cuts: Sequence[Cut], *packed: torch.Tensor) -> None:
        """Put prompts of which everything stays into their first slots."""
        for slots, x in zip(held, packed, strict=True):
            for mine, rows in zip(slots, x.split([cut.length for cut in cuts]), strict=True):
                new = rows.transpose(0, 1)
                if self.shape.layout is not None:
                    new = ops.quantize_groups(new, self.shape.layout)
                mine[:, : new.shape[1]] = new

    def _cut(self, layer: int, length: int) -> Cut:
        budget = budgets.budget(self._h2o, layer, length)
        return Cut(length, length, 0) if budget is None else (
            Cut(length, budget.heavy, budget.recent))

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache the prompt of one sequence, which has ended, for others that have the same.

        Parameters
        ----------
        source : int
            Place in the batch of the sequence whose prompt `attend_prompt` has just cached.
        targets : int
            Those of the others.
        """
        originals = self._of_sequence(layer, batch, source)
        for target in targets:
            for original, copy in zip(originals, self._of_sequence(layer, batch, target),
                                      strict=True):
                copy.copy_(original)
            part = next(p for p in self.parts if target < p.last)
            self._index(layer, batch, part, [
                (target, 0, self._batch_layouts[batch].lengths[target])])

    def _of_sequence(self, layer: int, batch: int, sequence: int) -> list[torch.Tensor]:
        """Everything held of a prompt in a layer: its slots, and what eviction knows of them."""
        part = next(p for p in self.parts if sequence < p.last)
        row = sequence - part.first
        held = part.get(layer, batch)[:, row]
        if not self._plans[batch][layer].evicts:
            return [held[:, :, : self._batch_layouts[batch].lengths[sequence]]]
        state = self._state(layer, batch, part)
        return [held, *(x[row] for x in state.tensors)]

    def attend_token(self, layer: int, batch: int, q, k, v, *, token: int,
                     rope: Rope | None, sinks: torch.Tensor | None = None) -> PendingAttention:
        """Start attending from one new token of each sequence over what is cached and itself.

        The new tokens are cached. Over host memory a job attends, over the rest the device. q is
        [sequences, heads, head_dim], k and v [sequences, kv_heads, head_dim], before rotation; all
        may be overwritten, and are free again when this returns. rope is of the sequences, sinks
        as of `attend_prompt`.
        """
        if rope is not None and not self._rolls(layer, batch):
            for x in (q, k):
                apply_rope_(x, *rope)
        attending = PendingAttention()
        # The host's comes first: it need not wait for what the device is about to attend to.
        for part in sorted(self._here(batch), key=lambda part: not part.on_host):
            mine = part.sequences(batch)
            rows = [x[mine] for x in (q, k, v)]
            own = sinks.cpu() if part.on_host and sinks is not None else sinks
            attend = self._attention(layer, batch, part, token,
                                     LayerAttention(self.shape.form(layer), own).options)
            if part.on_host:
                out, handle = self._host.start(*rows, attend)
                attending.handles.append(handle)
            else:
                out, taken = attend(*rows)
                if part.moves and not part.recalls(layer):
                    self._changed[layer, batch, part.first] = Changed.read(
                        part.get(layer, batch), taken)
            attending.outputs[part.first] = out
        return attending

    def _attention(self, layer: int, batch: int, part: CachePart, token: int,
                   options: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """A function of q, k and v that attends over a part, caches the new tokens and returns
        their slots too."""
        step = self._recall_step(layer, batch, part, token)
        if step is not None:
            return partial(self._recall.attend, index=self._recall.index(layer, batch, part),
                           step=step, recall=partial(part.recall, layer, batch), **options)
        metadata = self._metadata(layer, batch, part, token)
        if self.shape.attn_sparsity < 1:
            return partial(
                self._sparse.attend, part=part, where=(layer, batch), metadata=metadata,
                most=max(self._step_metadata.tokens(batch, part, token)) - 1, **options)
        evicts = self._plans[batch][layer].evicts
        return partial(
            ops.decode_attention, slots=part.get(layer, batch), metadata=metadata,
            layout=self.shape.layout,
            state=self._state(layer, batch, part) if evicts else None, **options)

    @property
    def recall_counts(self) -> RecallCounts | None:
        """Counts of what has been recalled from disk so far; None where nothing can be."""
        return next((part.counts for part in self.parts if isinstance(part, RecalledPart)), None)

    def expect_token(self, layer: int, batch: int, q, k, *, token: int, rope: Rope | None,
                     sinks: torch.Tensor | None = None) -> None:
        """Start bringing what a new token of each sequence may recall, by a guess at its query and
        key. Arguments as of `attend_token`; results do not depend on it."""
        if rope is not None:
            for x in (q, k):
                apply_rope_(x, *rope)
        options = LayerAttention(self.shape.form(layer), sinks).options
        for part in self._here(batch):
            if part.recalls(layer):
                mine, step = part.sequences(batch), self._recall_step(layer, batch, part, token)
                part.expect(layer, batch, self._recall.choose(
                    q[mine], k[mine], index=self._recall.index(layer, batch, part), step=step,
                    **options))

    def _recall_step(self, layer: int, batch: int, part: CachePart, token: int
                     ) -> RecallStep | None:
        """The metadata of a decode step for recall; None where a new token attends to all."""
        if self._recall is None:
            return None
        return self._recall.step(layer, batch, part, place=self._place(part),
                                 tokens=self._step_metadata.tokens(batch, part, token))

    @property
    def stays(self) -> bool:
        """True if `load` and `store` have nothing to do."""
        return not any(part.moves for part in (*self.parts, *self._prompts))

    @property
    def binds(self) -> bool:
        """True if attention over new tokens can be noted once for a block: `bind_token`."""
        whole = len(self.parts) == 1 and self.shape.attn_sparsity == 1
        known = self._eviction.policy is None and self._recall is None
        return self._device.type == "cpu" and whole and known and self.stays

    def bind_token(self, layer: int, batch: int, q, k, v, *, rope: Rope | None,
                   sinks: torch.Tensor | None = None, out: torch.Tensor,
                   steps: native.Steps) -> None:
        """Note `attend_token` among the steps of a program, which then attends to what q, k and v
        hold, writes to `out` (like q) and caches the token that `begin_token` named."""
        part, = self._here(batch)
        if rope is not None and not self._rolls(layer, batch):
            for x in (q, k):
                native.rotate(x, *rope, steps=steps)
        evicts = self._plans[batch][layer].evicts
        assert self._eviction.policy is None, "see `binds`: the kernels don't know it"
        state = EvictionArguments.of(self._state(layer, batch, part) if evicts else None)
        native.decode_attention(q, k, v, slots=part.get(layer, batch), bits=self.shape.bits,
                                metadata=self._step_metadata.newest(layer, batch, part),
                                eviction=state, out=out, steps=steps,
                                form=FormArguments.of(self.shape.form(layer), sinks))

    def begin_token(self, batch: int, token: int) -> None:
        """Bring the metadata of what is bound of a batch to new token `token` (from 1)."""
        part, = self._here(batch)
        for layer in {plan.like: layer for layer, plan in enumerate(self._plans[batch])}.values():
            self._metadata(layer, batch, part, token)

    def _scored(self, layer: int, batch: int) -> bool:
        plan = self._plans[batch][layer]
        return plan.evicts and plan.scored

    def _rolls(self, layer: int, batch: int) -> bool:
        """True if positions are ranks. As long as nothing is evicted, the two are the same."""
        return self._plans[batch][layer].evicts and self._h2o.positions == "rolling"

    def _table(self, positions: int) -> Rope:
        """Rotations at the first `positions` positions, or more."""
        if self._tables is None or len(self._tables[0]) < positions:
            most = max(plan.slots for each in self._plans for plan in each) + 1
            self._tables = self._rope(torch.arange(max(positions, most), device=self._device))
        return self._tables

    def _state(self, layer: int, batch: int, part: CachePart) -> EvictionState:
        """The eviction state of a part's sequences; `_keep` fills it in."""
        key = (layer, batch, part.first)
        if key not in self._states:
            mine, place = part.sequences(batch), self._place(part)
            slots = self._plans[batch][layer].slots
            rope = None
            if self._rolls(layer, batch):
                rope = tuple(table.to(place) for table in self._table(slots + 1))
            self._states[key] = new_state((mine.stop - mine.start, self.shape.kv_heads, slots),
                                          self._eviction_in(layer, batch), rope=rope, device=place)
        return self._states[key]

    def _eviction_in(self, layer: int, batch: int) -> Eviction:
        """The policy in a layer. Without heavy hitters no cache holds what its window hides."""
        window = self._h2o.window(layer)
        if window is None:
            return self._eviction
        return replace(self._eviction, sinks=0,
                       window=window if self._plans[batch][layer].scored else 0)

    def _metadata(self, layer: int, batch: int, part: CachePart, token: int) -> torch.Tensor:
        return self._step_metadata.new(layer, batch, part, token=token, place=self._place(part))

    def _place(self, part: CachePart) -> torch.device:
        """The device on which attention over a part runs."""
        return torch.device("cpu") if part.on_host else self._device
