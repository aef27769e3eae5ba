"""The decode metadata of the batches of a block, each made once for all layers that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flexgen_h2o.cache.decode_attention import HostAttentionQueue, PendingAttention
from flexgen_h2o.cache.disk_recall import DiskRecallPart, make_parts
from flexgen_h2o.cache.eviction_state import EvictionStates, Moved, Rope, put, take
from flexgen_h2o.cache.hot_set import RecallCounts, ZeroCopyPart
from flexgen_h2o.cache.layout import CacheShape, CacheSize, LayerCachePlan
from flexgen_h2o.cache.prefill import LayerAttention, PromptAttention
from flexgen_h2o.cache.retrieval import Recall, RecallStep, SparseAttention
from flexgen_h2o.cache.tiers import CachePart, Capacity, SlotLayout, SlotUpdate
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptChunk
from flexgen_h2o.h2o.eviction import decode_metadata
from flexgen_h2o.h2o.key_smoothing import BasisChange, LayerSmoothing
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import EvictionArguments, FormArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.storage.disk import RunFolder
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.transfer import Transfers


class StepMetadata:
    """The newest metadata by batch, part and budgets.

    Parameters
    ----------
    batch_layouts : sequence of BatchLayout
    plans : sequence of sequences of LayerCachePlan
        Of each batch, by layer.
    h2o : H2OConfig or None
    stays : bool
        A new token's metadata is written over the last one's, where what is bound reads it.
    """

    def __init__(self, batch_layouts: Sequence[BatchLayout],
                 plans: Sequence[Sequence[LayerCachePlan]], h2o: H2OConfig | None, *, stays: bool):
        self._batch_layouts = batch_layouts
        self._plans = plans
        self._h2o = h2o
        self._stays = stays
        self._made: dict[tuple, tuple[int, torch.Tensor]] = {}

    def new(self, layer: int, batch: int, part: CachePart, *, token: int, place: torch.device
            ) -> torch.Tensor:
        """The metadata of new token `token` (from 1): int32 [4, sequences of the part]."""
        key = self._key(layer, batch, part)
        made, metadata = self._made.get(key, (0, None))
        if made != token:
            prompts = self._batch_layouts[batch].lengths[part.sequences(batch)]
            found = decode_metadata(prompts, self.tokens(batch, part, token), self._h2o, layer)
            if metadata is None or not self._stays:
                metadata = found.to(place)
            else:
                metadata.copy_(found)
            self._made[key] = (token, metadata)
        return metadata

    def newest(self, layer: int, batch: int, part: CachePart) -> torch.Tensor:
        """The result of the last `new`."""
        return self._made[self._key(layer, batch, part)][1]

    def tokens(self, batch: int, part: CachePart, token: int) -> list[int]:
        """Tokens of each sequence of a part, new token `token` included."""
        mine, batch_layout = part.sequences(batch), self._batch_layouts[batch]
        return [batch_layout.tokens(sequence, token) for sequence in range(mine.start, mine.stop)]

    def _key(self, layer: int, batch: int, part: CachePart) -> tuple[int, int, int]:
        return batch, part.first, self._plans[batch][layer].like


# The KV cache of a block: fixed slots over tiers; append, attend, evict, write back.
#
# The cache of a GPU batch is ``[kinds, sequences, kv_heads, slots, width]`` for each decoder layer,
# contiguous: the kinds are keys and values, or one that holds both
# (`config.cache_layout.CacheLayout`). A step shifts and concatenates nothing.
# A percentage of the cache is a share of each batch's sequences.
# With an eviction policy (arXiv 2306.14048) there are as many
# slots as the budget has tokens, and a new token takes its victim's slot; the slots' order means
# nothing then. Prompts that come in chunks are held whole until they are cut, unless chunks are to
# be
# evicted as they come (`appending`). A sequence may go on in a later run. With sparse attention
# (arXiv 2303.06865) a new token reads every key, and of the values those that matter most to it.


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
    smoothing : sequence of LayerSmoothing
        The constants of each layer, by which its keys are smoothed before they are cached; empty:
        keys are cached as they are.
    """

    def __init__(self, shape: CacheShape, size: CacheSize, policy: Policy, *,
                 h2o: H2OConfig | None, rope: Callable[[torch.Tensor], Rope | None],
                 transfers: Transfers, run_folder: Callable[[], RunFolder],
                 smoothing: Sequence[LayerSmoothing] = ()):
        self.shape = shape
        self._h2o = None if h2o is None or h2o.is_full else h2o
        self._fetches_chosen = policy.fetch_chosen
        self._transfers = transfers
        self._device = transfers.device.torch
        self._batch_layouts: list[BatchLayout] = []
        self._changed: dict[tuple, SlotUpdate] = {}
        self._evictions = EvictionStates(shape, self._h2o, rope=rope, device=self._device,
                                         smoothing=smoothing)
        counts = split(size.sequences, policy.cache)
        self._host = HostAttentionQueue(counts[1], transfers)

        def make(name: str, records: SlotLayout, slots: tuple[int, ...], *, on_host: bool = False,
                 **recall: Sequence):
            return make_parts(
                records, Capacity(size.batches, slots), counts, transfers=transfers,
                on_host=on_host,
                file=lambda nbytes: run_folder().file(f"{name}.bin", nbytes), **recall)

        self.parts: list[CachePart] = make(
            "cache", shape.records(), size.slots,
            on_host=policy.cpu_cache_compute and transfers.device.separate,
            recalled=[h2o is not None and budgets.recalled(h2o, layer, 1) is not None
                      for layer in range(shape.num_layers)],
            fast=[budgets.hot_slots(h2o, layer, most, policy.fast_set)
                  if policy.fetch_chosen else 0
                  for layer, most in enumerate(size.slots)])
        self._prompts: list[CachePart] = self.parts
        """Parts in which prompts are gathered that come in chunks. The full cache has room for
        them."""
        evicts_within = self._h2o is not None and self._h2o.evicts_chunks(
            compressed=shape.layout is not None)
        if size.prompt and not evicts_within and (self._h2o is not None
                                                  or shape.layout is not None):
            self._prompts = make("prompts", shape.plain(), (size.prompt,) * shape.num_layers)

        self._sparse = SparseAttention(shape, transfers)
        self._recall: Recall | None = None
        if h2o is not None and h2o.recall:
            self._recall = Recall(shape, size, h2o, parts=self.parts, device=transfers.device)
        self._prompt_attention = PromptAttention(
            shape, self._h2o, parts=self.parts, gathered=self._prompts, evictions=self._evictions,
            recall=self._recall)

    @property
    def attends_on_host(self) -> bool:
        """True if attention over a part runs on the host although compute is elsewhere."""
        return any(part.on_host for part in self.parts)

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a new block: forget the cache, except for sequences that continue into it.

        These are moved layer by layer: one layer's at a time are held twice.
        """
        self._host.reset()
        continues = any(batch_layout.has_continued for batch_layout in batches)
        for part in dict.fromkeys([*self.parts, *self._prompts]):
            if continues:
                part.synchronize()
            else:
                part.reset()
        states = self._evictions.begin(batches)
        if not continues:
            states.clear()
        self._begin_batches(batches)
        for layer in range(self.shape.num_layers):
            mine = {key[1:]: states.pop(key) for key in list(states) if key[0] == layer}
            moved = {}
            if continues:
                moved = take(layer, self.parts, batches, states=mine, h2o=self._h2o)
            for part in self.parts:
                part.begin(layer, [(len(batch_layout), each[layer].slots) for batch_layout, each
                                   in zip(batches, self._evictions.plans, strict=True)])
            for part in self._prompts if self._prompts is not self.parts else ():
                part.begin(layer, [(len(batch_layout), max(batch_layout.lengths))
                                   for batch_layout in batches])
            # Eviction states are small and last. Made in the middle of a prefill, each takes a part
            # of the hole that the last large tensor has left in the heap, and the next one no
            # longer fits there.
            for batch in range(len(batches)):
                for part in self._here(batch):
                    self._evictions.state(layer, batch, part)
            for batch in range(len(batches)):
                self._put(layer, batch, moved)

    def _put(self, layer: int, batch: int, moved: Moved) -> None:
        """Cache what was moved of the sequences of a batch."""
        batch_layout = self._batch_layouts[batch]
        for part in self._here(batch):
            if self._holds_continued(batch, part):
                state, mine = self._evictions.state(layer, batch, part), part.sequences(batch)
                part.load(layer, batch, fetch=False,
                          cached=batch_layout.max_tokens(0) if state is None else None)
                put(moved, batch_layout.continued[mine], part.get(layer, batch), state)
                if self._recall is not None:
                    self._recall.cached(layer, batch, part, tokens=[
                        (sequence, 0, batch_layout.tokens(sequence, 0)
                         if batch_layout.origin(sequence) else 0)
                        for sequence in range(mine.start, mine.stop)])
                part.store(layer, batch, None)

    def _holds_continued(self, batch: int, part: CachePart) -> bool:
        """True if a sequence of a batch that lives in a part is continued."""
        mine = part.sequences(batch)
        return any(self._batch_layouts[batch].continued[mine])

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Go on with the sequences of `begin`, in a run that finds what the last one left.

        Sequences keep the slots that they were given: `begin` has to be told of the most.
        """
        self._host.reset()
        for part in self.parts:
            part.synchronize()
        self._begin_batches(batches)

    def _begin_batches(self, batches: Sequence[BatchLayout]) -> None:
        """Note the batches of a block, or of what a block goes on with."""
        self._batch_layouts = list(batches)
        self._changed.clear()
        if self._recall is not None:
            self._recall.begin(batches, stays=self.supports_capture)
        self._prompt_attention.begin(self._batch_layouts)
        self._step_metadata = StepMetadata(self._batch_layouts, self._evictions.plans, self._h2o,
                                           stays=self.supports_capture)

    def nbytes(self) -> int:
        """Bytes of all keys and values of the block at rest, once the prompts have been cut."""
        records = self.shape.records()
        return sum(records.nbytes(len(batch_layout), plan.slots) for batch_layout, each
                   in zip(self._batch_layouts, self._evictions.plans, strict=True)
                   for plan in each)

    def _here(self, batch: int, parts: list[CachePart] | None = None) -> list[CachePart]:
        return [part
                for part in parts or self.parts if part.first < len(self._batch_layouts[batch])]

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start bringing what compute of (layer, batch) needs; layer counts from 0."""
        batch_layout = self._batch_layouts[batch]
        cached = None  # which slots count, eviction knows
        if not self._evictions.plans[batch][layer].evicts:
            cached = batch_layout.max_tokens(max(0, batch_layout.token(forward_pass) - 1))
        if not batch_layout.in_prefill(forward_pass):
            for part in self._here(batch):
                if not part.recalls(layer):
                    part.load(layer, batch, fetch=True, cached=cached,
                              keys_only=self.shape.attn_sparsity < 1)
            return
        apart = self._prompts is not self.parts
        if batch_layout.appends:
            for part in self._here(batch, self._prompts):
                continued = not apart and self._holds_continued(batch, part)
                part.load(layer, batch, fetch=continued or batch_layout.has_cached(forward_pass),
                          cached=None if apart else cached)
        if batch_layout.token(forward_pass) == 0 and (apart or not batch_layout.appends):
            for part in self._here(batch):
                part.load(layer, batch, fetch=self._holds_continued(batch, part), cached=cached)

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
        """Cache spans of prompts and attend within each; see `PromptAttention.attend`."""
        return self._prompt_attention.attend(layer, batch, q, k, v, spans=spans, rope=rope,
                                             sinks=sinks)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Cache the prompt of one sequence for others; see `PromptAttention.repeat`."""
        self._prompt_attention.repeat(layer, batch, source, *targets)

    def attend_token(self, layer: int, batch: int, q, k, v, *, token: int,
                     rope: Rope | None, sinks: torch.Tensor | None = None) -> PendingAttention:
        """Start attending from one new token of each sequence over what is cached and itself.

        The new tokens are cached. Over host memory a job attends, over the rest the device. q is
        [sequences, heads, head_dim], k and v [sequences, kv_heads, head_dim], before rotation; all
        may be overwritten, and are free again when this returns. rope is of the sequences, sinks
        as of `attend_prompt`.
        """
        offsets = self._rotate(layer, batch, q, k, rope)
        attending = PendingAttention()
        # The host's comes first: it need not wait for what the device is about to attend to.
        for part in sorted(self._here(batch), key=lambda part: not part.on_host):
            mine = part.sequences(batch)
            rows = [x[mine] for x in (q, k, v)]
            own = sinks
            if part.on_host and sinks is not None:
                own = self._host.sinks(layer, sinks)
            attention = LayerAttention(self.shape.form(layer), own,
                                       None if offsets is None else offsets[mine])
            attend = self._attention(layer, batch, part, token, attention.options)
            if any(part.room(layer, batch)):
                self._expect(layer, batch, part, *rows[:2], token=token, attention=attention)
            if part.on_host:
                out, handle = self._host.start(*rows, attend)
                attending.handles.append(handle)
            else:
                out, taken = attend(*rows)
                if part.moves and not part.recalls(layer):
                    self._changed[layer, batch, part.first] = SlotUpdate.gather(
                        part.get(layer, batch), taken)
            attending.outputs[part.first] = out
        return attending

    def _rotate(self, layer: int, batch: int, q, k, rope: Rope | None) -> torch.Tensor | None:
        """Rotate and smooth new queries and keys in place. Returns the offsets of their products,
        [sequences, heads], where attention needs them."""
        of_queries, of_keys = self._rotations(layer, batch, rope)
        offsets = self._offsets(layer, q, of_queries[1])
        ops.rotate_(q, *of_queries, offsets)
        ops.rotate_(k, *of_keys)
        return offsets

    def _offsets(self, layer: int, q: torch.Tensor, change: BasisChange | None
                 ) -> torch.Tensor | None:
        """Make room for the offsets of queries [sequences, heads, head_dim] in a layer whose logits
        are more than compared with each other; None in others."""
        form = self.shape.form(layer)
        if change is None or not (form.softcap or form.sinks) or self._device.type != "cpu":
            return None  # see `KeySampler` for GPUs
        return torch.empty(q.shape[:2])

    def _rotations(self, layer: int, batch: int, rope: Rope | None
                   ) -> list[tuple[Rope | None, BasisChange | None]]:
        """Return what `ops.rotate_` does to new queries and to new keys before attention."""
        if self._evictions.rolls(layer, batch):
            return [(None, None)] * 2  # attention rotates them by rank
        smoothing = self._evictions.smoothing(layer, batch)
        if smoothing is None:
            return [(rope, None)] * 2
        return [(rope, smoothing.queries), (rope, smoothing.keys)]

    def _attention(self, layer: int, batch: int, part: CachePart, token: int,
                   options: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """A function of q, k and v that attends over a part, caches the new tokens and returns
        their slots too."""
        step = self._recall_step(layer, batch, part, token)
        if step is not None:
            return partial(self._recall.attend, part=part, where=(layer, batch), step=step,
                           **options)
        metadata = self._metadata(layer, batch, part, token)
        if self.shape.attn_sparsity < 1:
            return partial(
                self._sparse.attend, part=part, where=(layer, batch), metadata=metadata,
                most=max(self._step_metadata.tokens(batch, part, token)) - 1, **options)
        return partial(
            ops.decode_attention, slots=part.get(layer, batch), metadata=metadata,
            layout=self.shape.layout, state=self._evictions.state(layer, batch, part), **options)

    @property
    def recall_counts(self) -> RecallCounts | None:
        """Counts of what has been recalled so far where there is a fast set, else None; where that
        is a GPU's, this waits for it."""
        return next((replace(part.counts) for part in self.parts if self._fetches_chosen
                     and isinstance(part, DiskRecallPart | ZeroCopyPart)), None)

    @property
    def supports_prefetch(self) -> bool:
        """True if tokens can come ahead, by a guess at what will be chosen: `prefetch_token`."""
        return any(isinstance(part, DiskRecallPart) for part in self.parts)

    def prefetch_token(self, layer: int, batch: int, q, k, *, token: int, rope: Rope | None,
                     sinks: torch.Tensor | None = None) -> None:
        """Start bringing what a new token of each sequence may recall, by a guess at its query and
        key. Arguments as of `attend_token`; results do not depend on it."""
        offsets = self._rotate(layer, batch, q, k, rope)
        for part in self._here(batch):
            if part.recalls(layer):
                mine = part.sequences(batch)
                attention = LayerAttention(self.shape.form(layer), sinks,
                                           None if offsets is None else offsets[mine])
                self._expect(layer, batch, part, q[mine], k[mine], token=token,
                             attention=attention)

    def _expect(self, layer: int, batch: int, part: CachePart, q, k, *, token: int,
                attention: LayerAttention) -> None:
        """Let a part bring what its sequences' queries choose, and as much more as it has room."""
        step = self._recall_step(layer, batch, part, token).widened(part.room(layer, batch))
        part.expect(layer, batch, self._recall.choose(
            q, k, index=self._recall.index(layer, batch, part), step=step,
            **attention.options))

    def _recall_step(self, layer: int, batch: int, part: CachePart, token: int
                     ) -> RecallStep | None:
        """The metadata of a decode step for recall; None where a new token attends to all."""
        if self._recall is None:
            return None
        return self._recall.step(layer, batch, part, place=part.place(self._device),
                                 tokens=self._step_metadata.tokens(batch, part, token))

    @property
    def is_resident(self) -> bool:
        """True if `load` and `store` have nothing to do."""
        return not any(part.moves for part in (*self.parts, *self._prompts))

    @property
    def supports_capture(self) -> bool:
        """True if attention over new tokens can be noted once for a block: `capture_token`."""
        whole = len(self.parts) == 1 and self.shape.attn_sparsity == 1
        known = self._evictions.eviction.policy is None
        return self._device.type == "cpu" and whole and known and self.is_resident

    def capture_token(self, layer: int, batch: int, q, k, v, *, rope: Rope | None,
                   sinks: torch.Tensor | None = None, out: torch.Tensor,
                   capture: cpu_library.CapturedCalls) -> None:
        """Note `attend_token` among the steps of a program, which then attends to what q, k and v
        hold, writes to `out` (like q) and caches the token that `prepare_replay` named."""
        part, = self._here(batch)
        rotations = self._rotations(layer, batch, rope)
        offsets = self._offsets(layer, q, rotations[0][1])
        for x, (tables, change), sums in zip((q, k), rotations, (offsets, None), strict=True):
            if tables is not None or change is not None:
                native.rotate(x, *(tables or (None, None)), change, sums, capture=capture)
        form = FormArguments.of(self.shape.form(layer), sinks, offsets)
        if self._recall is not None and self._recall.index(layer, batch, part) is not None:
            self._recall.bind(q, k, v, part=part, where=(layer, batch), form=form, out=out,
                              capture=capture)
            return
        assert self._evictions.eviction.policy is None, "kernels lack this policy"
        state = EvictionArguments.of(self._evictions.state(layer, batch, part))
        native.decode_attention(q, k, v, slots=part.get(layer, batch), layout=self.shape.layout,
                                metadata=self._step_metadata.newest(layer, batch, part),
                                eviction=state, out=out, capture=capture, form=form)

    def prepare_replay(self, batch: int, token: int) -> None:
        """Bring the metadata of what is bound of a batch to new token `token` (from 1)."""
        part, = self._here(batch)
        plans = enumerate(self._evictions.plans[batch])
        for layer in {plan.like: layer for layer, plan in plans}.values():
            self._metadata(layer, batch, part, token)
        for layer in () if self._recall is None else self._recall.distinct:
            self._recall_step(layer, batch, part, token)

    def _metadata(self, layer: int, batch: int, part: CachePart, token: int) -> torch.Tensor:
        return self._step_metadata.new(layer, batch, part, token=token,
                                       place=part.place(self._device))
