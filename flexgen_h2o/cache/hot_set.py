"""The tokens that fast memory holds of each KV head, and the slots that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from torch import Tensor

from flexgen_h2o.cache.tiers import Capacity, FetchedPart, SelectedTokens, SlotLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import Transfers


@dataclass
class RecallCounts:
    """Counts of tokens that decode steps have chosen, one for each KV head.

    Of those that rest on a slower tier `hits` were in fast memory when they were asked for, and
    `loads` had to be read then, with all that filled the fast set; `guesses` were read ahead,
    needed or not.
    `wait_seconds` is the time for which compute waited for reads.
    """

    hits: int = 0
    loads: int = 0
    guesses: int = 0
    wait_seconds: float = 0.0

    def since(self, before: RecallCounts) -> RecallCounts:
        """Counts of what came after another count."""
        return RecallCounts(*(getattr(self, each.name) - getattr(before, each.name)
                              for each in fields(self)))


class HotSet:
    """A cache of tokens, of which each head has as many as it has slots: their numbers alone.

    A head is one KV head of one sequence. Of the tokens that are not chosen now, those give their
    slots up first whose weights were the least, by the running mean of their logarithms: choices go
    by weight, and tokens that were nearly chosen soon are.

    Parameters
    ----------
    heads : int
    tokens : int
        The most that a head ever has.
    slots : int
        Of each head.
    newest : int
        Places of the newest tokens behind them, whose number alone says where they lie.
    device : torch.device, optional
        What gives slots to tokens; without one the host does.

    Attributes
    ----------
    log_weights : int32 Tensor [heads, tokens]
        Those means, which whoever chooses brings up to date: see `reference_recall.note_weights`.
    """

    def __init__(self, heads: int, tokens: int, slots: int, newest: int, *,
                 device: torch.device | None = None):
        some = {"dtype": torch.int32, "device": device}
        self._slot_of = torch.full((heads, tokens), -1, **some)
        self._token_of = torch.full((heads, slots), -1, **some)
        self.log_weights = torch.zeros((heads, tokens), **some)
        self._newest = newest

    def take(self, chosen: Tensor, firsts: Tensor, *, head: int = 0) -> tuple[Tensor, Tensor, int]:
        """Give each token that heads from number `head` on have chosen a slot: see
        `reference_recall.take_slots`. What is missing names heads by their numbers here."""
        heads = slice(head, head + chosen.shape[0] * chosen.shape[1])
        slots, missing, held = ops.take_slots(
            chosen, firsts, slot_of=self._slot_of[heads], token_of=self._token_of[heads],
            log_weights=self.log_weights[heads], newest=self._newest)
        missing[0] += head
        return slots, missing, held

    def claim(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for all heads, where nothing waits to learn what is missing: see
        `reference_recall.claim_slots`."""
        return ops.claim_slots(chosen, slot_of=self._slot_of, token_of=self._token_of,
                               log_weights=self.log_weights)

    def forget(self, firsts: Tensor) -> None:
        """Give up the slots of tokens from a number on, int Tensor [heads]: others may come."""
        gone = self._token_of >= firsts[:, None]
        head, slot = gone.nonzero(as_tuple=True)
        self._slot_of[head, self._token_of[head, slot].long()] = -1
        self._token_of.masked_fill_(gone, -1)
        every = torch.arange(self.log_weights.shape[1], device=firsts.device)
        self.log_weights.masked_fill_(every >= firsts[:, None], 0)


# The part of a cache that stays in host memory, of which a GPU reads what it recalls in place.


@dataclass
class _FastTokens:
    """Tokens of one (layer, batch) in the GPU's memory.

    Attributes
    ----------
    records : Tensor [kinds, sequences, kv_heads, slots + 1, width]
        The slots of the fast set, and behind them that of the newest token.
    found : HotSet
    newest : int32 Tensor [sequences] or None
        Which tokens the newest ones are; None once they are in host memory.
    """

    records: Tensor
    found: HotSet
    newest: Tensor | None = None


class ZeroCopyPart(FetchedPart):
    """A part in page-locked host memory beside a GPU whose kernels read and write it in place
    (zero-copy).

    Prompts come and go by whole layers, as in any part that is fetched. In a decode step attention
    reads over the link the tokens that it has chosen, and no others. With a *fast set*, the GPU's
    memory holds tokens that had most weight lately, and those alone cross the link that it has not.

    Parameters
    ----------
    recalled : sequence of bool
        Layers in which steps choose. The others are fetched whole.
    fast : sequence of int
        Slots of the fast set in each layer: none, or at least as many as a step chooses.
    """

    def __init__(self, records: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 transfers: Transfers, recalled: Sequence[bool], fast: Sequence[int]):
        super().__init__(records, first, last, capacity=capacity, transfers=transfers, path=None)
        self._recalled = recalled
        self._slots = fast
        self._sizes_of_fast = [
            round_up(records.nbytes(last - first, slots + 1), PAGE) if slots else 0
            for slots in fast]
        self._starts = [0, *accumulate(size * capacity.batches for size in self._sizes_of_fast)]
        self._buffer = self._device.empty(self._starts[-1])
        self._fast: dict[tuple[int, int], _FastTokens] = {}
        self._counted = torch.zeros(2, dtype=torch.int64, device=self._device.torch)

    @property
    def counts(self) -> RecallCounts:
        """The tokens chosen so far, and those loaded for it; it waits for the device."""
        chosen, loads = self._counted.tolist()
        return RecallCounts(hits=chosen - loads, loads=loads)

    def recalls(self, layer):
        return self._recalled[layer]

    def begin(self, layer, sizes):
        super().begin(layer, sizes)
        slots, records = self._slots[layer], self.records
        for batch in range(len(sizes) if slots else 0):
            sequences, tokens = self._sizes[layer, batch]
            start = self._starts[layer] + batch * self._sizes_of_fast[layer]
            self._fast[layer, batch] = _FastTokens(
                typed(self._buffer, start, records.shape(sequences, slots + 1), records.dtype),
                HotSet(sequences * records.kv_heads, tokens, slots, 1,
                        device=self._device.torch))

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        if self._recalled[layer]:
            # Decode steps write where nothing grows, and what they wrote is to be there.
            cached = None
            self._keep_newest(layer, batch)
            self._stores[layer, batch].busy.append(self._device.mark())
        super().load(layer, batch, fetch=fetch, keys_only=keys_only, cached=cached)

    def filled(self, layer, batch, tokens):
        if self._slots[layer]:
            rest = self._sizes[layer, batch][1]
            firsts = torch.full((self._sizes[layer, batch][0], self.records.kv_heads), rest)
            for sequence, first, _ in tokens:
                firsts[sequence - self.first] = first
            self._fast[layer, batch].found.forget(firsts.view(-1).to(self._device.torch))

    def log_weights(self, layer, batch, rows):
        if not self._slots[layer]:
            return super().log_weights(layer, batch, rows)
        return self._fast[layer, batch].found.log_weights.unflatten(
            0, (-1, self.records.kv_heads))[rows]

    def ask(self, layer, batch, rows, chosen):
        if not self._slots[layer]:
            return super().ask(layer, batch, rows, chosen)
        fast = self._fast[layer, batch]
        self._keep_newest(layer, batch)
        slots, moves, counts = fast.found.claim(chosen.slots)
        ops.copy_tokens(self._in_place(layer, batch), fast.records, moves, counts)
        before, asked = chosen.metadata
        self._counted += torch.stack((asked.sum() * self.records.kv_heads, counts.sum()))
        fast.newest = before
        last = self._slots[layer]
        spans = chosen.spans.clone()
        spans[0] = last
        return SelectedTokens(slots, torch.stack((torch.full_like(before, last), asked)), spans)

    def recalled(self, layer, batch, rows):
        if not self._recalled[layer]:
            return super().recalled(layer, batch, rows)
        held = self._fast[layer, batch].records if self._slots[layer] else (
            self._in_place(layer, batch))
        return held[:, rows]

    def _in_place(self, layer: int, batch: int) -> Tensor:
        """All records where they rest, once what was on its way there has come."""
        store = self._stores[layer, batch]
        for handle in store.busy:
            self._transfers.ready(handle)
        store.busy = []
        return typed(store.host, 0, self._shape(layer, batch, store.slots), self.records.dtype)

    def _keep_newest(self, layer: int, batch: int) -> None:
        """Put the newest tokens from behind the fast set to where they rest."""
        fast = self._fast.get((layer, batch))
        if fast is not None and fast.newest is not None:
            heads = self.records.kv_heads
            places = fast.newest[:, None, None].expand(-1, heads, 1)
            moves = torch.stack((torch.full_like(places, self._slots[layer]), places))
            ops.copy_tokens(fast.records, self._in_place(layer, batch), moves,
                            torch.ones_like(moves[0, ..., 0]))
            fast.newest = None
