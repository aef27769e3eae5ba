"""The choice of which expert gives up its slot in fast memory: a pure policy. No torch.

Experts are used in the order of the layers, over and over. What was used longest ago is then what
is needed next, so that plain "least recently used" keeps nothing when there are fewer slots than
experts. Here an expert is worth how often it was chosen, of late: a use counts 1 and fades by
`FADE` with each pass of the expert's own layer. What is worth least goes; among equals the one
whose layer comes last. (LRFU, Lee et al., 2001, with the layers' passes as the clock.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from flexgen_h2o.config.experts import COMING, ExpertChoices, ExpertsConfig, Key
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine.weight_files import Weight
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.kernels.cpu.experts import ExpertTable
from flexgen_h2o.models.mixture import MATRICES
from flexgen_h2o.storage.transfer import Lane, Transfers

FADE = 0.9


class SlotPolicy:
    """Experts and the slots that they have.

    Parameters
    ----------
    slots, layers : int
        Slots in all, and decoder layers, the last that has experts being the last of them.
    """

    def __init__(self, slots: int, layers: int):
        self._layers = layers
        self._free = list(range(slots))[::-1]
        self._slots: dict[Key, int] = {}
        self._held: list[set[Key]] = [set() for _ in range(layers)]
        self._passes = [0] * layers
        self._worth: dict[Key, tuple[float, int]] = {}
        self._pinned: set[Key] = set()
        self._lowest: dict[int, tuple[float, Key] | None] = {}
        self._layer = 0

    def begin(self, layer: int) -> None:
        """A pass of a layer begins."""
        self._layer = layer
        self._passes[layer] += 1
        self._lowest.pop(layer, None)

    def use(self, key: Key) -> None:
        """Count a use of an expert in the pass of its layer."""
        self._worth[key] = (self.worth(key) + 1, self._passes[key[0]])
        self._lowest.pop(key[0], None)

    def worth(self, key: Key) -> float:
        """The uses of an expert, faded with its passes."""
        worth, seen = self._worth.get(key, (0.0, 0))
        return worth * FADE ** (self._passes[key[0]] - seen)

    def slot(self, key: Key) -> int | None:
        """The slot that an expert has; None if it has none."""
        return self._slots.get(key)

    def pin(self, key: Key) -> None:
        """Let an expert keep its slot until `unpin`."""
        self._pinned.add(key)
        self._lowest.pop(key[0], None)

    def unpin(self, key: Key) -> None:
        """Let an expert give up its slot, if it has one, to another."""
        self._pinned.discard(key)
        self._lowest.pop(key[0], None)

    @property
    def held(self) -> Collection[Key]:
        """The experts that have slots."""
        return self._slots.keys()

    def take(self, key: Key) -> int | None:
        """Give an expert, which has none, a slot; None if all are of pinned experts.

        A free slot if there is one, else that of `victim`, which has none then.
        """
        if self._free:
            slot = self._free.pop()
        else:
            victim = self.victim()
            if victim is None:
                return None
            slot = self._slots[victim]
            self.forget(victim)
            self._free.pop()
        self._slots[key] = slot
        self._held[key[0]].add(key)
        self._lowest.pop(key[0], None)
        return slot

    def forget(self, key: Key) -> None:
        """Take an expert's slot from it."""
        self._free.append(self._slots.pop(key))
        self._held[key[0]].discard(key)
        self.unpin(key)

    def victim(self) -> Key | None:
        """The expert to give up its slot next; None if all are pinned or there is none."""
        found = []
        for layer, held in enumerate(self._held):
            if held and layer not in self._lowest:
                self._lowest[layer] = min(((self.worth(key), key) for key in held
                                           if key not in self._pinned), default=None)
            lowest = self._lowest.get(layer) if held else None
            if lowest is not None:
                ahead = (layer - self._layer - 1) % self._layers
                found.append((lowest[0], -ahead, lowest[1]))
        return min(found)[2] if found else None


# Counts of the experts that tokens choose, while they do.


class ChoiceCounter:
    """The choices of a run, of layers whose numbers begin with a rank's first.

    Parameters
    ----------
    experts : ExpertsConfig
    """

    def __init__(self, experts: ExpertsConfig):
        self._experts = experts
        self.clear()

    def clear(self) -> None:
        """Forget all choices."""
        self._counts: dict[int, list[int]] = {}
        self._texts = self._tokens = self._touched = 0

    def add(self, layer: int, ids: Tensor, counts: Sequence[int],
            beginnings: Sequence[slice] = ()) -> None:
        """Count choices of a layer.

        Parameters
        ----------
        layer : int
        ids : Tensor [tokens, experts of a token], int64
        counts : sequence of int
            How many tokens chose each expert, of those that count.
        beginnings : sequence of slice
            The tokens with which prompts begin.
        """
        known = self._counts.setdefault(layer, [0] * self._experts.count)
        self._counts[layer] = [before + more for before, more in zip(known, counts, strict=True)]
        if beginnings:
            seen = torch.zeros(len(beginnings), len(counts), dtype=torch.bool, device=ids.device)
            for text, tokens in zip(seen, beginnings, strict=True):
                text[ids[tokens].flatten()] = True
            self._texts += len(beginnings)
            self._tokens += sum(tokens.stop - tokens.start for tokens in beginnings)
            self._touched += int(seen.sum())  # a GPU is waited for once

    def summary(self, layers: int) -> ExpertChoices:
        """The choices of so many decoder layers, some of which may have no experts."""
        return ExpertChoices(tuple(tuple(self._counts.get(layer, ())) for layer in range(layers)),
                             self._experts.per_token, self._texts, self._tokens, self._touched)


# Experts on their way to compute: those in compute memory as they lie, the others through slots.
#
# A slot is a staging buffer that keeps its expert until another one needs it. Which one gives up
# its
# slot is the choice of `slot_policy`; loads are jobs beside compute, one an expert.


TOGETHER = 16
"""Experts that are computed together once they have come; their slots are free only then."""

Group = list[tuple[Key, Mapping[str, Weight]]]
"""Experts of a layer and their weights, by short names."""


def put(table: ExpertTable, number: int, w: Mapping[str, Weight]) -> None:
    """Have an expert of these weights, by short names, in a table."""
    biases = [w[f"{name}_bias"] for name in MATRICES if f"{name}_bias" in w]
    table.put(number, *(w[name] for name in MATRICES), biases=biases)


@dataclass
class ExpertCounts:
    """Counts of experts by what became of them.

    A touch is one expert of one layer for all tokens of a forward pass.
    `touches` are all, `hits` those of experts that had a slot when they were asked for, `loads`
    those that had to be brought then, and `guesses` the experts that were brought before they were
    asked for, needed or not. `bytes` were brought in all.
    """

    touches: int = 0
    hits: int = 0
    loads: int = 0
    guesses: int = 0
    bytes: int = 0

    def since(self, before: ExpertCounts) -> ExpertCounts:
        """Counts of what came after another count."""
        return ExpertCounts(*(getattr(self, each.name) - getattr(before, each.name)
                              for each in fields(self)))


class ExpertSlots:
    """The experts of a model, ready when a layer needs them.

    `counts` are of all runs, `choices` of the one that goes on.

    Parameters
    ----------
    weights : WeightStore
        Loaded; where the experts rest.
    transfers : Transfers
    experts : ExpertsConfig
    tokens : int
        Sequences of a block.
    given : int or None
        Slots; None: as `ExpertsConfig.slots` says.
    overlap : bool
        Load beside compute and ahead of it, or one expert at a time when its turn comes.
    host_computes : bool
        Experts in host memory beside a GPU stay there, and are not for slots.
    """

    def __init__(self, weights: WeightStore, transfers: Transfers, experts: ExpertsConfig, *,
                 tokens: int, given: int | None, overlap: bool, host_computes: bool = False):
        self._weights, self._transfers, self._overlap = weights, transfers, overlap
        device = transfers.device
        self._hosted = frozenset(
            key for key, unit in weights.experts.items()
            if host_computes and device.separate and unit.fetched and not unit.disk_bytes)
        self._away = frozenset(key for key, unit in weights.experts.items()
                               if unit.fetched_bytes and key not in self._hosted)
        away = [weights.experts[key] for key in self._away]
        self._buffers = weights.staging_buffers(away, experts.slots(tokens, len(away), given))
        self._layers = 1 + max((layer for layer, _ in weights.experts), default=-1)
        self._policy = SlotPolicy(len(self._buffers), self._layers)
        self._waiting: deque[Key] = deque()
        self._wanted: dict[Key, None] = {}
        self._guessed: deque[Key] = deque()
        self._protected: set[Key] = set()
        self._coming: set[Key] = set()
        self._ready: dict[Key, Mapping[str, Weight]] = {}
        self._holders: dict[int, Key] = {}
        self._tables: dict[int, ExpertTable] = {}
        self._host_tables: dict[int, ExpertTable] = {}
        self._count = experts.count
        self.counts = ExpertCounts()
        self.choices = ChoiceCounter(experts)

    @property
    def options(self) -> WeightOptions:
        """Storage options of the experts' matrices."""
        return self._weights.options

    def is_resident(self, key: Key) -> bool:
        """True if an expert is in compute memory for good."""
        return key not in self._away and key not in self._hosted

    def table(self, layer: int) -> ExpertTable:
        """A layer's experts that are in compute memory, for good or in slots, for
        `kernels.cpu.experts`."""
        if layer not in self._tables:
            self._tables[layer] = self._tabled({
                number: w for number in range(self._count)
                if (w := self._there((layer, number))) is not None})
        return self._tables[layer]

    def _there(self, key: Key) -> Mapping[str, Weight] | None:
        """An expert's weights if it is in compute memory."""
        if self.is_resident(key):
            return self._weights.experts[key].resident
        return self._ready.get(key)

    def host_table(self, layer: int) -> ExpertTable:
        """The same of those in host memory that compute there."""
        if layer not in self._host_tables:
            keys = [key for key in self._hosted if key[0] == layer]
            self._host_tables[layer] = self._tabled(self.on_host(keys))
        return self._host_tables[layer]

    def _tabled(self, group: Mapping[int, Mapping[str, Weight]]) -> ExpertTable:
        table = ExpertTable(self._count)
        for number, w in group.items():
            put(table, number, w)
        return table

    def on_host(self, keys: Iterable[Key]) -> dict[int, dict[str, Weight]]:
        """Weights, by number, of experts of a layer that compute in host memory."""
        return {key[1]: self._weights.host_weights(self._weights.experts[key]) for key in keys}

    @property
    def wanted_on_host(self) -> list[Key]:
        """The experts that were asked for and compute in host memory."""
        return [key for key in self._wanted if key in self._hosted]

    @property
    def guesses(self) -> bool:
        """True if it helps to say early which experts may be needed."""
        return self._overlap and bool(self._buffers)

    def reset(self) -> None:
        """Forget what was asked for and will not be used; what has come stays. Between runs."""
        self.choices.clear()
        self._waiting.clear()
        self._wanted.clear()
        self._end_guesses()
        for key in list(self._policy.held):
            self._policy.unpin(key)
            buffer = self._buffers[self._policy.slot(key)]
            try:
                for handle in buffer.busy:
                    handle.synchronize()
            except Exception:  # whatever it was, its bytes have not come
                self._leave(self._policy.slot(key))
                self._policy.forget(key)
            buffer.busy = []
        self._coming.clear()

    def clear(self) -> None:
        """Give up what has come: a run was broken off, and maybe between a slot and its expert."""
        for buffer in self._buffers:
            for handle in buffer.busy:
                with suppress(Exception):
                    handle.synchronize()
            buffer.busy = []
        self._policy = SlotPolicy(len(self._buffers), self._layers)
        for held in (self._ready, self._holders, self._tables):
            held.clear()

    def begin(self, layer: int) -> None:
        """Begin a pass of a layer: what was guessed of it so far may be given up."""
        self._policy.begin(layer)
        self._wanted.clear()

    def want(self, keys: Iterable[Key]) -> None:
        """Ask for experts of the layer that has begun; each is loaded once."""
        for key in keys:
            if key in self._wanted:
                continue
            self._wanted[key] = None
            self.counts.touches += 1
            if key not in self._away:
                continue
            self._policy.use(key)
            if self._policy.slot(key) is None:
                self.counts.loads += 1
                self._waiting.append(key)
            else:
                self.counts.hits += 1
                self._policy.pin(key)
        if self._overlap:
            self._advance()

    def guess(self, keys: Iterable[Key]) -> None:
        """Say which experts the next layer may need, the likeliest first."""
        self._end_guesses()
        for key in keys:
            if key in self._away:
                self._guessed.append(key)
        if self._overlap:
            self._advance()

    def arrivals(self) -> Iterator[tuple[Group, Callable[[], ExpertTable] | None]]:
        """The experts that were asked for: first all that are there, then some as they come.

        Those that compute in host memory are not among them. With those that are there is what
        gives the table that has them; no later one is in it yet.

        Weights may be used by what compute is given until the next are asked for.
        """
        here = [(key, w) for key in self._wanted if (w := self._there(key)) is not None]
        if here:
            yield here, partial(self.table, here[0][0][0])
            self._release(key for key, _ in here if not self.is_resident(key))
            if self._overlap:
                self._advance()
        under_way = [key for key in self._wanted
                     if self._policy.slot(key) is not None and key not in self._ready]
        while under_way or self._waiting:
            if not under_way:
                under_way.append(self._start())
            there = [key for key in under_way if self._is_there(key)][:TOGETHER] or under_way[:1]
            under_way = [key for key in under_way if key not in there]
            group = [(key, self._come(key)) for key in there]
            yield group, None
            self._release(there)
            for key, w in group:
                self._enter(key, w)
            if self._overlap:
                under_way += self._advance()

    def _come(self, key: Key) -> Mapping[str, Weight]:
        """The weights of an expert under way, for what compute is given from now on."""
        buffer = self._buffers[self._policy.slot(key)]
        self._transfers.ready(buffer.loaded)
        return self._weights.unit_weights(self._weights.experts[key], buffer)

    def _release(self, keys: Iterable[Key]) -> None:
        """Let experts that compute has been given keep their slots only while they are worth it."""
        mark = self._transfers.device.mark()
        for key in keys:
            self._buffers[self._policy.slot(key)].free = mark
            self._policy.unpin(key)
            self._coming.discard(key)

    def _enter(self, key: Key, w: Mapping[str, Weight]) -> None:
        """Have an expert, which has come, among those that are there."""
        self._ready[key] = w
        if key[0] in self._tables:
            put(self._tables[key[0]], key[1], w)

    def _leave(self, slot: int) -> None:
        """Have the expert that a slot was loaded with, if any, there no more."""
        key = self._holders.pop(slot, None)
        if self._ready.pop(key, None) is not None and key[0] in self._tables:
            self._tables[key[0]].drop(key[1])

    def _is_there(self, key: Key) -> bool:
        loaded = self._buffers[self._policy.slot(key)].loaded
        return loaded is None or loaded.done

    def _start(self) -> Key:
        """Load the next expert that is waited for; there is no other under way."""
        key = self._waiting.popleft()
        slot = self._policy.take(key)
        if slot is None:  # guesses have all of them
            self._end_guesses()
            slot = self._policy.take(key)
        self._policy.pin(key)
        self._load(key, slot)
        return key

    def _advance(self) -> list[Key]:
        """Start loads of what is waited for, and then of guesses, while there are slots.

        No more than `COMING` at a time.
        """
        begun = []
        while self._waiting:
            if len(self._coming) >= COMING and self._protected:
                self._end_guesses()
            if len(self._coming) >= COMING:
                return begun
            slot = self._policy.take(self._waiting[0])
            if slot is None and self._protected:
                self._end_guesses()
                continue
            if slot is None:
                return begun
            key = self._waiting.popleft()
            self._policy.pin(key)
            self._load(key, slot)
            begun.append(key)
        while self._guessed:
            key = self._guessed[0]
            held = self._policy.slot(key)
            if held is None and len(self._coming) >= COMING:
                break
            slot = self._policy.take(key) if held is None else held
            if slot is None:
                break
            self._guessed.popleft()
            self._policy.pin(key)
            self._protected.add(key)
            if held is None:
                self.counts.guesses += 1
                self._load(key, slot)
        return begun

    def _end_guesses(self) -> None:
        """Let guesses that were not asked for give up their slots."""
        self._guessed.clear()
        for key in self._protected - self._wanted.keys():
            self._policy.unpin(key)
            self._coming.discard(key)
        self._protected.clear()

    def _load(self, key: Key, slot: int) -> None:
        buffer, unit = self._buffers[slot], self._weights.experts[key]
        before = buffer.busy
        free = self._transfers.device.mark() if buffer.free is None else buffer.free
        self.counts.bytes += unit.fetched_bytes
        self._leave(slot)
        self._holders[slot] = key
        self._coming.add(key)

        def job(lane: Lane) -> None:
            for handle in before:
                with suppress(Exception):  # of an expert that is not wanted any more
                    handle.synchronize()
            self._weights.load_unit(lane, buffer, unit=unit)

        buffer.loaded = self._transfers.submit("experts", job, after=(free,))
        buffer.busy = [buffer.loaded]
