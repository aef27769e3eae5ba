"""The two kinds of layers of an `H2OCache`: slots that are really freed, and the definition.

See arXiv 2306.14048, algorithm 1.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from flexgen_h2o.cache.prefill import SequenceState, append_chunk
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import GROWTH
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
from flexgen_h2o.h2o.simulation import SimulatedCache
from flexgen_h2o.integrations.transformers.layer import H2OLayer
from flexgen_h2o.integrations.transformers.passes import ForwardPass, PassTracker
from flexgen_h2o.integrations.transformers.rotations import Rotations
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.rotary import rotated_to


class SlotLayer(H2OLayer):
    """Keys and values in slots [kinds, sequences, kv_heads, slots, width], as in `KVCache`.

    A layer that evicts has as many slots as the budget has tokens once that many have come.
    """

    def __init__(self, index: int, h2o: H2OConfig, progress: PassTracker,
                 rotations: Rotations | None, *, layout: CacheLayout | None):
        super().__init__(index, h2o, progress, rotations)
        self._layout = layout
        self._forget()

    def _forget(self) -> None:
        self._slots: torch.Tensor | None = None
        self._state: EvictionState | None = None

    def nbytes(self) -> int:
        """Bytes of the slots; what eviction knows of them comes on top."""
        return 0 if self._slots is None else self._slots.nbytes

    def _prompt(self, step: ForwardPass, q, k, v, *, bare) -> torch.Tensor:
        sizes = [self._budget(step, sequence) for sequence in range(len(step.new))]
        evicts, scores = sizes[0] is not None, None
        if evicts and self._scored(step):
            scores = torch.zeros((k.shape[1], len(k)), device=k.device)
        out = ops.prefill_attention(q, k, v, list(step.new), scores=scores,
                                    decay=eviction_of(self._h2o).decay,
                                    **self._attention.options)
        self._reserve(step, max(budgets.kept(self._h2o, self._index, new) for new in step.new), k)
        if evicts:
            cuts = [Cut(new, size.heavy, size.recent)
                    for new, size in zip(step.new, sizes, strict=True)]
            eviction = self._state.eviction
            if eviction.window and eviction.policy is None:
                forget_hidden(scores, cuts, eviction.window)
            ops.select_heavy_hitters(bare[1], v, scores, cuts=cuts, slots=self._slots,
                                     state=self._state, layout=self._layout)
            self._settle()
            return out
        for held, keys, values in zip(self._slots.unbind(1), k.split(step.new), v.split(step.new),
                                      strict=True):
            fresh = torch.stack((keys, values)).transpose(1, 2)
            held[:, :, : len(keys)] = ops.pack_slots(fresh, self._layout)
        return out

    def _extend(self, step: ForwardPass, sequence: int, past: int, q, k, v) -> torch.Tensor:
        size, tokens = self._budget(step, sequence), past + len(q)
        cached = self._cached(step, sequence, past)
        self._reserve(step, self._cached(step, sequence, tokens), k)
        before, state = SequenceState(cached, past), None
        if self._state is not None:
            # With rotations there is an eviction state although nothing more is to go: all are
            # heavy then.
            heavy = size.heavy if self._evicts(step, sequence, tokens) else tokens
            before = SequenceState(cached, past, heavy, size.recent, scored=self._scored(step))
            state = narrowed(self._state, slice(sequence, sequence + 1))
            if self._rotations is not None:
                state = replace(state, rope=self._rope(cached + len(q), k.device))
        out = append_chunk(q, k, v, slots=self._slots[:, sequence], sequence=before, state=state,
                           layout=self._layout, attention=self._attention)
        if sequence == len(step.new) - 1 and tokens == step.prompts[sequence]:
            self._settle()
        return out

    def _decode(self, step: ForwardPass, q, k, v) -> torch.Tensor:
        metadata, needed = step.metadata(self._h2o, self._index, q.device)
        self._reserve(step, needed, k)
        out, _ = ops.decode_attention(q, k, v, slots=self._slots, metadata=metadata,
                                      layout=self._layout, state=self._state,
                                      **self._attention.options)
        return out

    def _cached(self, step: ForwardPass, sequence: int, tokens: int) -> int:
        """Slots that a sequence fills once it has so many tokens."""
        prompt = step.prompts[sequence]
        if tokens < prompt:
            size = self._budget(step, sequence)
            return tokens if size is None else min(tokens, size.total)
        return budgets.cached(self._h2o, self._index, prompt, tokens - prompt)

    def _settle(self) -> None:
        """Prompts are cut: where that was all, scores are of no use from here on."""
        if not self._h2o.evicts_generated_at(self._index) and self._rotations is None:
            self._state = None

    def _rope(self, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotations by rank."""
        return self._rotations.tables(torch.arange(ranks, device=device))

    def _reserve(self, step: ForwardPass, needed: int, k: torch.Tensor) -> None:
        """Have at least so many slots; k's last two dimensions are [kv_heads, head_dim]."""
        old = self._slots
        if old is not None and old.shape[3] >= needed:
            return
        sizes = [self._budget(step, sequence) for sequence in range(len(step.prompts))]
        evicts = sizes[0] is not None
        slots = -(-needed // GROWTH) * GROWTH
        if evicts and self._h2o.evicts_generated_at(self._index):
            slots = min(slots, max(size.total for size in sizes))
        kinds, width, dtype = 2, k.shape[-1], k.dtype
        if self._layout is not None:
            kinds, width, dtype = self._layout.kinds, self._layout.width, torch.uint8
        shape = (len(step.prompts), k.shape[-2], slots)
        self._slots = torch.empty((kinds, *shape, width), dtype=dtype, device=k.device)
        state = self._state
        if evicts and (old is None or state is not None):
            rope = None if self._rotations is None else self._rope(slots + 1, k.device)
            self._state = new_state(shape, self._eviction(step), rope=rope, device=k.device)
        if old is not None:
            self._slots[..., : old.shape[3], :] = old
        if state is not None:
            for name in ("scores", "positions", *(("ranks",) if self._rotations else ())):
                getattr(self._state, name)[..., : old.shape[3]] = getattr(state, name)

    def _eviction(self, step: ForwardPass) -> Eviction:
        """The policy. Without heavy hitters no cache holds what its window hides."""
        eviction, window = eviction_of(self._h2o), self._h2o.window(self._index)
        if window is None:
            return eviction
        return replace(eviction, sinks=0, window=window if self._scored(step) else 0)

    def _choose(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._slots.device)
        self._slots = self._slots.index_select(1, index)
        if self._state is not None:
            ranks = self._state.ranks
            self._state = replace(self._state, scores=self._state.scores[index],
                                  positions=self._state.positions[index],
                                  ranks=None if ranks is None else ranks[index])


class SimulatedLayer(H2OLayer):
    """The definition: everything stays, and what eviction took is masked (`H2OConfig.simulate`)."""

    def __init__(self, index: int, h2o: H2OConfig, progress: PassTracker,
                 rotations: Rotations | None):
        super().__init__(index, h2o, progress, rotations)
        self._forget()

    def _forget(self) -> None:
        self._sequences: list[SimulatedCache] = []

    def nbytes(self) -> int:
        """Bytes of all keys and values, in float32."""
        return sum(one.nbytes() for one in self._sequences)

    def _prompt(self, step: ForwardPass, q, k, v, *, bare) -> torch.Tensor:
        rows = zip(*(x.split(step.new) for x in (*bare, v)), strict=True)
        return torch.cat([self._extend(step, sequence, 0, *some)
                          for sequence, some in enumerate(rows)])

    def _extend(self, step: ForwardPass, sequence: int, past: int, q, k, v) -> torch.Tensor:
        if past == 0:
            self._start(step, sequence)
        one, tokens = self._sequences[sequence], past + len(q)
        # A span is evicted from if it ends its prompt.
        end = tokens if self._evicts(step, sequence, tokens) else tokens + 1
        one.resume([BatchLayout((end,), 0)])
        return one.attend_prompt(0, 0, q, k, v, spans=[PromptChunk(0, past, tokens)],
                                 sinks=self._attention.sinks)

    def _start(self, step: ForwardPass, sequence: int) -> None:
        """Give a sequence a cache of its own, its budget in tokens."""
        size = self._budget(step, sequence)
        h2o = H2OConfig(simulate=True)
        if size is not None:
            h2o = H2OConfig(
                heavy_tokens=size.heavy, recent_tokens=size.recent, sink_tokens=size.sinks,
                score=self._h2o.score, decay=self._h2o.decay, positions=self._h2o.positions,
                evict_generated=self._h2o.evicts_generated_at(self._index), simulate=True)
        one = SimulatedCache(h2o, lambda x, places, layer: rotated_to(x, places, self._rope),
                             lambda layer: self._attention.form)
        one.begin([BatchLayout((step.prompts[sequence],), 0)])
        self._sequences.append(one)

    def _rope(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._rotations is None else self._rotations.tables(places)

    def _decode(self, step: ForwardPass, q, k, v) -> torch.Tensor:
        rows = zip(*(x.split(1) for x in (q, k, v)), strict=True)
        return torch.cat([one.attend_token(0, 0, *some, sinks=self._attention.sinks)
                          for one, some in zip(self._sequences, rows, strict=True)])

    def _choose(self, rows: list[int]) -> None:
        self._sequences = [copy.deepcopy(self._sequences[row]) for row in rows]
