"""The layers of an `H2OCache`: slots that eviction frees, and the simulation of H2O.

`update` caches nothing: it hands the layer on to the attention function, which has the queries and
so can score keys (arXiv 2306.14048, algorithm 1).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from flexgen_h2o.cache.chunked_prefill import LayerAttention, SequenceState, append_chunk
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.config.h2o import H2OConfig, add_windows
from flexgen_h2o.config.layers import DEFAULT_VARIANT
from flexgen_h2o.config.limits import CACHE_GROWTH
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o import budget as budgets
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptSpan
from flexgen_h2o.h2o.budget import Budget
from flexgen_h2o.h2o.eviction import (
    Cut,
    EvictionState,
    clear_scores_outside_window,
    eviction_of,
    layer_eviction,
    narrow_state,
    new_state,
)
from flexgen_h2o.h2o.simulation import SimulatedCache
from flexgen_h2o.integrations.transformers.forward_pass import ForwardPass, PassTracker, Rotations
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.torch_ops import rotated_to


class H2OLayer(CacheLayerMixin):
    """Base of the layers: counts columns, packs tokens without pads, and dispatches the work.

    Parameters
    ----------
    index : int
        Number of the layer, from 0.
    h2o : H2OConfig
    tracker : PassTracker
        Shared by the layers of a cache; the first layer begins its passes.
    rotations : Rotations or None
        Rotations of cached keys, if positions roll.
    """

    is_sliding = False

    def __init__(self, index: int, h2o: H2OConfig, tracker: PassTracker,
                 rotations: Rotations | None):
        super().__init__()
        self._index, self._h2o, self._tracker = index, h2o, tracker
        self._attention = LayerAttention()
        # Without eviction ranks are positions.
        self._rotations = None if h2o.is_full_at(index) else rotations
        self._columns = 0
        self._updated = False
        self._clear()

    # transformers' interface of a cache's layer

    def lazy_initialization(self, key_states, value_states=None) -> None:
        """Do nothing: sizes are known when the layer attends."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values; the keys' `h2o_layer` is this layer."""
        if self._updated:
            raise UserError("an H2OCache only works under enable_h2o(model, ...), and for one "
                            "forward pass at a time")
        self._updated = True
        keys = key_states.view_as(key_states)
        keys.h2o_layer = self  # type: ignore[attr-defined]  # read by the attention function
        return keys, value_states

    def get_seq_length(self, *args) -> int:
        """Return the columns so far, pads and evicted tokens included; positions need it."""
        return self._columns

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        """Return (0, 0): attention needs only a mask of pads."""
        return 0, 0

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def reset(self) -> None:
        """Forget everything."""
        self._columns, self._updated = 0, False
        self._clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue some of the sequences, in this order: the beams that survive."""
        if self._columns:
            self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Continue some of the sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise `UserError`: `generate` does not need it."""
        raise UserError("an H2OCache cannot repeat its sequences: repeat the prompts")

    def crop(self, *args) -> None:
        """Raise `UserError`: tokens that cropped tokens have evicted cannot be restored."""
        raise UserError("an H2OCache cannot remove tokens, as evicted ones cannot be restored: "
                        "assisted decoding and other uses of crop() don't work with it")

    # Attention

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
               mask: torch.Tensor | None, positions: torch.Tensor | None,
               attention: LayerAttention) -> torch.Tensor:
        """Attend from new tokens over the cache and each other; cache them; evict.

        Parameters
        ----------
        q : Tensor [sequences, heads, columns, head_dim]
        k, v : Tensor [sequences, kv_heads, columns, head_dim]
            After rotation.
        mask : bool Tensor [sequences, columns so far], or None
            False for pads.
        positions : int Tensor [sequences or 1, columns], or None
            Positions of q and k; required if positions roll.
        attention : LayerAttention
            The layer's, with the same variant in every pass. A window bounds the cached tokens.

        Returns
        -------
        Tensor [sequences, columns, heads, head_dim]
            0 for pads.
        """
        self._updated = False
        if attention.variant != self._attention.variant and not self._columns:
            variants = [DEFAULT_VARIANT] * self._index + [attention.variant]
            self._h2o = add_windows(self._h2o, variants)
        self._attention = attention
        sequences, _, columns, _ = q.shape
        if self._index == 0:
            self._tracker.begin(self._columns, sequences, columns, mask)
        step = self._tracker.step
        if step is None or step.start != self._columns or step.columns != columns:
            raise UserError("an earlier forward pass broke off in the middle: make a new H2OCache")
        self._columns += columns
        q, k, v = (step.packed(x.transpose(1, 2)) for x in (q, k, v))
        unrotated = (q, k) if self._rotations is None else (
            self._rotations.undo(step, positions, q, k))
        if step.is_decode:
            return step.padded(self._decode(step, unrotated[0], unrotated[1], v))
        if step.is_prompt and self._h2o.prompt_chunk is None:
            return step.padded(self._prompt(step, q, k, v, unrotated=unrotated))
        out = torch.empty_like(q)
        parts = (x.split(step.new) for x in (*unrotated, v, out))
        for sequence, (past, new, *tensors) in enumerate(
                zip(step.past, step.new, *parts, strict=True)):
            for rows in _chunks(new, self._h2o.prompt_chunk):
                *chunk, chunk_out = (x[rows] for x in tensors)
                chunk_out.copy_(self._append(step, sequence, past + rows.start, *chunk))
        return step.padded(out)

    def _budget(self, step: ForwardPass, sequence: int) -> Budget | None:
        return budgets.budget(self._h2o, self._index, step.prompts[sequence])

    def _evicts(self, step: ForwardPass, sequence: int, tokens: int) -> bool:
        """Return whether a sequence of `tokens` tokens is cut to its budget."""
        return (self._h2o.evicts_generated_at(self._index)
                or tokens <= step.prompts[sequence])

    def _scored(self, step: ForwardPass) -> bool:
        """Return whether any sequence has heavy hitters."""
        sizes = (self._budget(step, sequence) for sequence in range(len(step.prompts)))
        return any(size is not None and size.heavy > 0 for size in sizes)

    @abstractmethod
    def nbytes(self) -> int:
        """Return the bytes of the cached keys and values."""

    @abstractmethod
    def _prompt(self, step: ForwardPass, q, k, v, *, unrotated) -> torch.Tensor:
        """Attend within whole prompts, packed [tokens, heads, head_dim], and cut them.

        `unrotated` are q and k as they are cached: before rotation where positions roll.
        """

    @abstractmethod
    def _append(self, step: ForwardPass, sequence: int, past: int, q, k, v) -> torch.Tensor:
        """Append a chunk [tokens, heads, head_dim] to `past` tokens of a sequence.

        q and k are as they are cached.
        """

    @abstractmethod
    def _decode(self, step: ForwardPass, q, k, v) -> torch.Tensor:
        """Attend from one new token of each sequence, [sequences, heads, head_dim].

        q and k are as they are cached.
        """

    @abstractmethod
    def _select(self, rows: list[int]) -> None:
        """Keep the cache of these sequences, in this order."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop the cache."""


def _chunks(tokens: int, chunk: int | None) -> list[slice]:
    """Return the rows of each chunk; chunks are counted from the end."""
    ends = range(tokens, 0, -(chunk or tokens)) if tokens else ()
    return [slice(max(0, end - (chunk or tokens)), end) for end in reversed(ends)]


class SlotLayer(H2OLayer):
    """Keys and values in slots [kinds, sequences, kv_heads, slots, width], as in `KVCache`.

    A layer that evicts has no more slots than its budget has tokens.
    """

    def __init__(self, index: int, h2o: H2OConfig, tracker: PassTracker,
                 rotations: Rotations | None, *, layout: CacheLayout | None):
        super().__init__(index, h2o, tracker, rotations)
        self._layout = layout

    def _clear(self) -> None:
        self._slots: torch.Tensor | None = None
        self._state: EvictionState | None = None

    def nbytes(self) -> int:
        """Return the bytes of the slots, without the eviction state."""
        return 0 if self._slots is None else self._slots.nbytes

    def _prompt(self, step: ForwardPass, q, k, v, *, unrotated) -> torch.Tensor:
        sizes = [self._budget(step, sequence) for sequence in range(len(step.new))]
        evicts, scores = sizes[0] is not None, None
        if evicts and self._scored(step):
            scores = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, list(step.new), scores=scores,
                                    decay=eviction_of(self._h2o).decay,
                                    **self._attention.options)
        self._reserve(step, max(budgets.num_cached(self._h2o, self._index, new, 0)
                                for new in step.new), k)
        if evicts:
            cuts = [Cut(new, size.heavy, size.recent)
                    for new, size in zip(step.new, sizes, strict=True)]
            eviction = self._state.eviction
            if eviction.window and eviction.policy.in_kernels:
                clear_scores_outside_window(scores, cuts, eviction.window)
            ops.select_heavy_hitters(unrotated[1], v, scores, cuts=cuts, slots=self._slots,
                                     state=self._state, layout=self._layout)
            self._end_prompts()
            return out
        for slots, keys, values in zip(self._slots.unbind(1), k.split(step.new), v.split(step.new),
                                       strict=True):
            entries = torch.stack((keys, values)).transpose(1, 2)
            slots[:, :, : len(keys)] = ops.pack_slots(entries, self._layout)
        return out

    def _append(self, step: ForwardPass, sequence: int, past: int, q, k, v) -> torch.Tensor:
        size, tokens = self._budget(step, sequence), past + len(q)
        cached = self._cached(step, sequence, past)
        self._reserve(step, self._cached(step, sequence, tokens), k)
        before, state = SequenceState(cached, past), None
        if self._state is not None:
            # With rotations there is an eviction state even if nothing more is evicted: then all
            # tokens are heavy.
            heavy = size.heavy if self._evicts(step, sequence, tokens) else tokens
            before = SequenceState(cached, past, heavy, size.recent, scored=self._scored(step))
            state = narrow_state(self._state, slice(sequence, sequence + 1))
            if self._rotations is not None:
                state = replace(state, rope=self._rank_tables(cached + len(q), k.device))
        out = append_chunk(q, k, v, slots=self._slots[:, sequence], sequence=before, state=state,
                           layout=self._layout, attention=self._attention)
        if sequence == len(step.new) - 1 and tokens == step.prompts[sequence]:
            self._end_prompts()
        return out

    def _decode(self, step: ForwardPass, q, k, v) -> torch.Tensor:
        metadata, slots = step.metadata(self._h2o, self._index, q.device)
        self._reserve(step, slots, k)
        out, _ = ops.decode_attention(q, k, v, slots=self._slots, metadata=metadata,
                                      layout=self._layout, state=self._state,
                                      **self._attention.options)
        return out

    def _cached(self, step: ForwardPass, sequence: int, tokens: int) -> int:
        """Return the slots that a sequence of `tokens` tokens fills."""
        prompt = step.prompts[sequence]
        if tokens < prompt:
            size = self._budget(step, sequence)
            return tokens if size is None else min(tokens, size.total)
        return budgets.num_cached(self._h2o, self._index, prompt, tokens - prompt)

    def _end_prompts(self) -> None:
        """Drop the eviction state if only prompts are cut."""
        if not self._h2o.evicts_generated_at(self._index) and self._rotations is None:
            self._state = None

    def _rank_tables(self, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotations by rank."""
        return self._rotations.tables(torch.arange(ranks, device=device))

    def _reserve(self, step: ForwardPass, num_slots: int, k: torch.Tensor) -> None:
        """Grow to at least `num_slots` slots. k's last dimensions are [kv_heads, head_dim]."""
        old = self._slots
        if old is not None and old.shape[3] >= num_slots:
            return
        sizes = [self._budget(step, sequence) for sequence in range(len(step.prompts))]
        evicts = sizes[0] is not None
        slots = -(-num_slots // CACHE_GROWTH) * CACHE_GROWTH
        if evicts and self._h2o.evicts_generated_at(self._index):
            slots = min(slots, max(size.total for size in sizes))
        kinds, width, dtype = 2, k.shape[-1], k.dtype
        if self._layout is not None:
            kinds, width, dtype = self._layout.kinds, self._layout.width, torch.uint8
        shape = (len(step.prompts), k.shape[-2], slots)
        self._slots = torch.empty((kinds, *shape, width), dtype=dtype, device=k.device)
        state = self._state
        if evicts and (old is None or state is not None):
            rope = None if self._rotations is None else self._rank_tables(slots + 1, k.device)
            eviction = layer_eviction(self._h2o, self._index, scored=self._scored(step))
            self._state = new_state(shape, eviction, rope=rope, device=k.device)
        if old is not None:
            self._slots[..., : old.shape[3], :] = old
        if state is not None:
            for target, values in zip(self._state.tensors, state.tensors, strict=True):
                target[..., : old.shape[3]] = values

    def _select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._slots.device)
        self._slots = self._slots.index_select(1, index)
        if self._state is not None:
            ranks = self._state.ranks
            self._state = replace(self._state, scores=self._state.scores[index],
                                  positions=self._state.positions[index],
                                  ranks=None if ranks is None else ranks[index])


class SimulatedLayer(H2OLayer):
    """A full cache in which evicted tokens are masked (`H2OConfig.simulate`)."""

    def _clear(self) -> None:
        self._sequences: list[SimulatedCache] = []

    def nbytes(self) -> int:
        """Return the bytes of all keys and values, in float32."""
        return sum(cache.nbytes() for cache in self._sequences)

    def _prompt(self, step: ForwardPass, q, k, v, *, unrotated) -> torch.Tensor:
        rows = zip(*(x.split(step.new) for x in (*unrotated, v)), strict=True)
        return torch.cat([self._append(step, sequence, 0, *qkv)
                          for sequence, qkv in enumerate(rows)])

    def _append(self, step: ForwardPass, sequence: int, past: int, q, k, v) -> torch.Tensor:
        if past == 0:
            self._sequences.append(self._new_cache(step, sequence))
        cache, tokens = self._sequences[sequence], past + len(q)
        # The simulation evicts only at a prompt's end; tokens + 1 marks a span that is not the end.
        end = tokens if self._evicts(step, sequence, tokens) else tokens + 1
        cache.resume([BatchLayout((end,), 0)])
        return cache.attend_prompt(0, 0, q, k, v, spans=[PromptSpan(0, past, tokens)],
                                   sinks=self._attention.sinks)

    def _new_cache(self, step: ForwardPass, sequence: int) -> SimulatedCache:
        """Return the cache of one sequence, with its budget in tokens."""
        size = self._budget(step, sequence)
        h2o = H2OConfig(simulate=True)
        if size is not None:
            h2o = H2OConfig(
                heavy_tokens=size.heavy, recent_tokens=size.recent, sink_tokens=size.sinks,
                score=self._h2o.score, decay=self._h2o.decay, positions=self._h2o.positions,
                evict_generated=self._h2o.evicts_generated_at(self._index), simulate=True)
        cache = SimulatedCache(
            h2o, lambda x, positions, layer: rotated_to(x, positions, self._tables),
            lambda layer: self._attention.variant)
        cache.begin([BatchLayout((step.prompts[sequence],), 0)])
        return cache

    def _tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._rotations is None else self._rotations.tables(positions)

    def _decode(self, step: ForwardPass, q, k, v) -> torch.Tensor:
        rows = zip(*(x.split(1) for x in (q, k, v)), strict=True)
        return torch.cat([cache.attend_token(0, 0, *qkv, sinks=self._attention.sinks)
                          for cache, qkv in zip(self._sequences, rows, strict=True)])

    def _select(self, rows: list[int]) -> None:
        self._sequences = [copy.deepcopy(self._sequences[row]) for row in rows]
