"""Slots: fast memory for experts that are stored on slower tiers.

A slot is a staging buffer that keeps its expert until another expert needs it, also between runs.
The slots of all layers are one pool. Loads overlap compute; each is a job for one expert.
`SlotPolicy` selects the expert to evict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.config.layers import MAX_EXPERT_LOADS, ExpertChoices, ExpertKey, ExpertsConfig
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine.slot_policy import DECAY, SlotPolicy
from flexgen_h2o.engine.weight_files import Weight
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.kernels.cpu.experts import ExpertTable
from flexgen_h2o.models.mixture import MATRICES
from flexgen_h2o.storage.transfer import Transfers

MAX_USES = 1 / (1 - DECAY)
"""Upper limit of the uses that a pass adds to the score of an expert: the score of an expert that
one token chooses in each pass. Without it, one pass over many tokens would outweigh all later
ones."""

MAX_GROUP = 16
"""Loaded experts that are computed together; their slots can be reused only afterwards."""

Group = list[tuple[ExpertKey, Mapping[str, Weight]]]
"""Experts of one layer, and their weights by local name."""


class ChoiceCounter:
    """Counts the experts that the tokens of a run choose, by layer."""

    def __init__(self, experts: ExpertsConfig):
        self._experts = experts
        self.clear()

    def clear(self) -> None:
        """Reset all counts."""
        self._counts: dict[int, list[int]] = {}
        self._texts = self._text_tokens = self._text_experts = 0

    def add(self, layer: int, ids: Tensor, counts: Sequence[int],
            prompt_starts: Sequence[slice] = ()) -> None:
        """Count the choices of a layer among the layers of this rank.

        `counts` are the tokens of each expert that count. `prompt_starts` are the tokens that begin
        each prompt; their choices are `ids`, int64 [tokens, experts per token].
        """
        totals = self._counts.setdefault(layer, [0] * self._experts.count)
        self._counts[layer] = [total + new for total, new in zip(totals, counts, strict=True)]
        if prompt_starts:
            used_experts = torch.zeros(len(prompt_starts), len(counts), dtype=torch.bool,
                                       device=ids.device)
            for row, tokens in zip(used_experts, prompt_starts, strict=True):
                row[ids[tokens].flatten()] = True
            self._texts += len(prompt_starts)
            self._text_tokens += sum(tokens.stop - tokens.start for tokens in prompt_starts)
            self._text_experts += int(used_experts.sum())  # synchronizes with a GPU once

    def summary(self, layers: int) -> ExpertChoices:
        """Return the choices of a number of decoder layers, with and without experts."""
        return ExpertChoices(tuple(tuple(self._counts.get(layer, ())) for layer in range(layers)),
                             self._experts.per_token, self._texts, self._text_tokens,
                             self._text_experts)


@dataclass
class ExpertCounts:
    """Expert uses by outcome. One use is one expert of one layer in one forward pass.

    Attributes
    ----------
    touches : int
        All uses.
    hits : int
        Uses of experts that had a slot when they were requested.
    loads : int
        Uses of experts that were loaded on request.
    prefetches : int
        Experts that were prefetched, used or not.
    prefetch_hits : int
        Prefetched experts that the next layer used.
    bytes : int
        Bytes of all loads.
    """

    touches: int = 0
    hits: int = 0
    loads: int = 0
    prefetches: int = 0
    prefetch_hits: int = 0
    bytes: int = 0


def put(table: ExpertTable, number: int, weights: Mapping[str, Weight]) -> None:
    """Put an expert into a table for `kernels.cpu.experts`."""
    biases: list[Any] = [weights[f"{name}_bias"] for name in MATRICES if f"{name}_bias" in weights]
    matrices: list[Any] = [weights[name] for name in MATRICES]
    table.put(number, *matrices, biases=biases)


class ExpertSlots:
    """The experts of a model: resident ones in place, others through slots.

    Parameters
    ----------
    weights : WeightStore
        Loaded.
    tokens : int
        Sequences of a block.
    requested : int or None
        Number of slots in addition to those for `WeightStore.pooled` experts; None: see
        `ExpertsConfig.slots`.
    overlap : bool
        Overlap loads with compute, and prefetch. False: load one expert at a time, on demand.
    host_computes : bool
        Experts in host memory beside a GPU are computed there and need no slots.

    Attributes
    ----------
    counts : ExpertCounts
        Counts over all runs.
    choices : ChoiceCounter
        Choices of the current block.
    history : ExpertChoices or None
        Choices of all runs.
    """

    def __init__(self, weights: WeightStore, transfers: Transfers, experts: ExpertsConfig, *,
                 tokens: int, requested: int | None, overlap: bool, host_computes: bool = False):
        self._weights, self._transfers, self._overlap = weights, transfers, overlap
        self._on_host = frozenset(
            key for key, unit in weights.experts.items() if host_computes
            and transfers.device.is_gpu and unit.fetched and not unit.disk_bytes)
        self._offloaded = frozenset(key for key, unit in weights.experts.items()
                                    if unit.fetched and key not in self._on_host)
        self._buffers = weights.staging_buffers(
            [weights.experts[key] for key in self._offloaded],
            experts.slots(tokens, len(self._offloaded), requested, weights.pooled), small=True)
        self._layers = 1 + max((layer for layer, _ in weights.experts), default=-1)
        self._policy = SlotPolicy(len(self._buffers), self._layers)
        self._requested: dict[ExpertKey, None] = {}
        self._waiting: deque[ExpertKey] = deque()  # requested, without a slot
        self._predicted: deque[ExpertKey] = deque()  # of the next layer, not prefetched yet
        self._prefetched: set[ExpertKey] = set()  # pinned predictions
        self._prefetch_loads: set[ExpertKey] = set()  # of them, those that were loaded
        self._loading: set[ExpertKey] = set()  # loaded or being loaded, not computed yet
        self._loaded: dict[ExpertKey, Mapping[str, Weight]] = {}  # ready in slots
        self._contents: dict[int, ExpertKey] = {}  # the expert that a slot was last loaded with
        self._tables: dict[int, ExpertTable] = {}
        self._host_tables: dict[int, ExpertTable] = {}
        self._count = experts.count
        self.counts = ExpertCounts()
        self.choices = ChoiceCounter(experts)
        self.history: ExpertChoices | None = None

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._buffers)

    @property
    def options(self) -> WeightOptions:
        """Storage options of the experts' matrices."""
        return self._weights.options

    def is_resident(self, key: ExpertKey) -> bool:
        """Return True if an expert is in compute memory permanently."""
        return key not in self._offloaded and key not in self._on_host

    def table(self, layer: int) -> ExpertTable:
        """Return the experts of a layer in compute memory, resident or in slots."""
        if layer not in self._tables:
            self._tables[layer] = self._new_table({
                number: weights for number in range(self._count)
                if (weights := self._ready_weights((layer, number))) is not None})
        return self._tables[layer]

    def host_table(self, layer: int) -> ExpertTable:
        """Return the experts of a layer that are computed in host memory."""
        if layer not in self._host_tables:
            keys = [key for key in self._on_host if key[0] == layer]
            self._host_tables[layer] = self._new_table(self.host_weights(keys))
        return self._host_tables[layer]

    def _new_table(self, group: Mapping[int, Mapping[str, Weight]]) -> ExpertTable:
        table = ExpertTable(self._count)
        for number, weights in group.items():
            put(table, number, weights)
        return table

    def _ready_weights(self, key: ExpertKey) -> Mapping[str, Weight] | None:
        """Return the weights of an expert in compute memory, or None."""
        if self.is_resident(key):
            return self._weights.experts[key].resident
        return self._loaded.get(key)

    def host_weights(self, keys: Iterable[ExpertKey]) -> dict[int, dict[str, Weight]]:
        """Return the weights, by expert number, of experts that are computed in host memory."""
        return {key[1]: self._weights.host_weights(self._weights.experts[key]) for key in keys}

    @property
    def requested_on_host(self) -> list[ExpertKey]:
        """Requested experts that are computed in host memory."""
        return [key for key in self._requested if key in self._on_host]

    @property
    def prefetches(self) -> bool:
        """True if `prefetch` has an effect."""
        return self._overlap and bool(self._buffers)

    def reset(self) -> None:
        """Drop requests between blocks; experts in slots stay."""
        self.choices.clear()
        self._waiting.clear()
        self._requested.clear()
        self._end_prefetch()
        for key in list(self._policy.cached):
            self._policy.unpin(key)
            buffer = self._buffers[self._policy.slot(key)]
            try:
                for handle in buffer.busy:
                    handle.synchronize()
            except Exception:  # the load failed
                self._remove(self._policy.slot(key))
                self._policy.evict(key)
            buffer.busy = []
        self._loading.clear()

    def clear(self) -> None:
        """Drop all experts in slots after an interrupt, whose state may be inconsistent."""
        for buffer in self._buffers:
            for handle in buffer.busy:
                with suppress(Exception):
                    handle.synchronize()
            buffer.busy = []
        self._policy = SlotPolicy(len(self._buffers), self._layers)
        for state in (self._loaded, self._contents, self._tables):
            state.clear()

    def fill(self, choices: ExpertChoices | None) -> None:
        """Load the experts that were chosen most often into free slots; None: some of each layer.
        """
        keys = choices.ranked if choices else sorted(self._offloaded, key=lambda key: key[::-1])
        keys = [key for key in keys if key in self._offloaded][: len(self._buffers)]
        for key in keys:
            if choices and (count := choices.counts[key[0]][key[1]]):
                share = count * choices.per_token / sum(choices.counts[key[0]])
                self._policy.use(key, MAX_USES * share)
            self._read(key, self._policy.allocate(key))
        for key in keys:
            self._loaded[key] = self._wait_for(key)

    def begin(self, layer: int, tokens: int) -> None:
        """Begin a pass of a layer; its prefetched experts may be evicted until they are requested.
        """
        self._policy.begin(layer)
        self._uses = min(1.0, MAX_USES / max(tokens, 1))
        self._requested.clear()

    def request(self, choices: Mapping[ExpertKey, int]) -> None:
        """Request experts of the current layer, each with the number of tokens that chose it."""
        for key, tokens in choices.items():
            if key in self._offloaded:
                self._policy.use(key, self._uses * tokens)
            if key in self._requested:
                continue
            self._requested[key] = None
            self.counts.touches += 1
            if key not in self._offloaded:
                continue
            if self._policy.slot(key) is None:
                self.counts.loads += 1
                self._waiting.append(key)
            else:
                self.counts.hits += 1
                self.counts.prefetch_hits += key in self._prefetch_loads
                self._policy.pin(key)
        if self._overlap:
            self._start_loads()

    def prefetch(self, keys: Iterable[ExpertKey]) -> None:
        """Prefetch experts that the next layer may need, in descending order of probability."""
        self._end_prefetch()
        self._prefetch_loads.clear()
        self._predicted.extend(key for key in keys if key in self._offloaded)
        if self._overlap:
            self._start_loads()

    def arrivals(self) -> Iterator[tuple[Group, Callable[[], ExpertTable] | None]]:
        """Yield the requested experts: first all that are ready, then groups as they are loaded.

        The first group comes with a function that returns a table of exactly the ready experts.
        Experts that are computed in host memory are left out. The weights of a group are valid for
        compute that is queued before the next group is taken.
        """
        ready = [(key, weights) for key in self._requested
                 if (weights := self._ready_weights(key)) is not None]
        if ready:
            yield ready, partial(self.table, ready[0][0][0])
            self._release(key for key, _ in ready if not self.is_resident(key))
            if self._overlap:
                self._start_loads()
        pending = [key for key in self._requested
                   if self._policy.slot(key) is not None and key not in self._loaded]
        while pending or self._waiting:
            if not pending:
                pending.append(self._start_next())
            keys = [key for key in pending if self._load_done(key)][:MAX_GROUP] or pending[:1]
            pending = [key for key in pending if key not in keys]
            group = [(key, self._wait_for(key)) for key in keys]
            yield group, None
            self._release(keys)
            for key, weights in group:
                self._loaded[key] = weights
                if key[0] in self._tables:
                    put(self._tables[key[0]], key[1], weights)
            if self._overlap:
                pending += self._start_loads()

    def _load_done(self, key: ExpertKey) -> bool:
        loaded = self._buffers[self._policy.slot(key)].loaded
        return loaded is None or loaded.done

    def _wait_for(self, key: ExpertKey) -> Mapping[str, Weight]:
        """Order compute after the load of an expert, and return its weights."""
        buffer = self._buffers[self._policy.slot(key)]
        self._transfers.ready(buffer.loaded)
        return self._weights.unit_weights(self._weights.experts[key], buffer)

    def _release(self, keys: Iterable[ExpertKey]) -> None:
        """Allow the eviction of experts after the compute that is queued so far."""
        mark = self._transfers.device.record_event()
        for key in keys:
            self._buffers[self._policy.slot(key)].free = mark
            self._policy.unpin(key)
            self._loading.discard(key)

    def _remove(self, slot: int) -> None:
        """Remove the expert that a slot was loaded with from the ready ones and its table."""
        key = self._contents.pop(slot, None)
        if self._loaded.pop(key, None) is not None and key[0] in self._tables:
            self._tables[key[0]].drop(key[1])

    def _start_next(self) -> ExpertKey:
        """Load the next waiting expert; no other load is pending."""
        key = self._waiting.popleft()
        slot = self._policy.allocate(key)
        if slot is None:  # prefetched experts have all slots
            self._end_prefetch()
            slot = self._policy.allocate(key)
        self._policy.pin(key)
        self._load(key, slot)
        return key

    def _start_loads(self) -> list[ExpertKey]:
        """Start loads of waiting experts, then prefetches, while there are slots.

        At most `MAX_EXPERT_LOADS` experts are loading at a time. Return the requested ones.
        """
        started: list[ExpertKey] = []
        while self._waiting:
            if len(self._loading) >= MAX_EXPERT_LOADS and self._prefetched:
                self._end_prefetch()
            if len(self._loading) >= MAX_EXPERT_LOADS:
                return started
            slot = self._policy.allocate(self._waiting[0])
            if slot is None and self._prefetched:
                self._end_prefetch()
                continue
            if slot is None:
                return started
            key = self._waiting.popleft()
            self._policy.pin(key)
            self._load(key, slot)
            started.append(key)
        while self._predicted:
            key = self._predicted[0]
            cached = self._policy.slot(key)
            if cached is None and len(self._loading) >= MAX_EXPERT_LOADS:
                break
            slot = self._policy.allocate(key) if cached is None else cached
            if slot is None:
                break
            self._predicted.popleft()
            self._policy.pin(key)
            self._prefetched.add(key)
            if cached is None:
                self.counts.prefetches += 1
                self._prefetch_loads.add(key)
                self._load(key, slot)
        return started

    def _end_prefetch(self) -> None:
        """Allow the eviction of prefetched experts that have not been requested."""
        self._predicted.clear()
        for key in self._prefetched - self._requested.keys():
            self._policy.unpin(key)
            self._loading.discard(key)
        self._prefetched.clear()

    def _load(self, key: ExpertKey, slot: int) -> None:
        self.counts.bytes += self._weights.experts[key].fetched_bytes
        self._loading.add(key)
        self._read(key, slot)

    def _read(self, key: ExpertKey, slot: int) -> None:
        """Start to fill a slot with an expert."""
        self._remove(slot)
        self._contents[slot] = key
        load = partial(self._weights.load_unit, unit=self._weights.experts[key])
        # The errors are of the load of the evicted expert.
        self._buffers[slot].fill(self._transfers, "experts", load, ignore_errors=True)
