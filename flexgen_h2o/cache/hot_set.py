"""Hot sets: fast memory for the tokens of a larger cache that were selected most recently.

With recall (`h2o.recall`) a decode step attends to few tokens. `ZeroCopyTier` keeps the cache in
host memory beside a GPU; `disk_recall.DiskRecallTier` keeps it on disk. Both fetch only the
selected tokens that their hot set lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.layout import Capacity, SlotLayout
from flexgen_h2o.cache.tiers import FetchedTier, SelectedTokens
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.device import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import Transfers


@dataclass
class RecallCounts:
    """Counts of tokens that decode steps have selected, one for each KV head.

    Attributes
    ----------
    hits : int
        Selected tokens that were in fast memory.
    loads : int
        Selected tokens that were fetched, and tokens that filled a hot set.
    prefetches : int
        Tokens that were prefetched, used or not.
    wait_seconds : float
        Time for which compute waited for fetches.
    """

    hits: int = 0
    loads: int = 0
    prefetches: int = 0
    wait_seconds: float = 0.0


class HotSet:
    """Which tokens occupy the slots of fast memory, for each head (a KV head of a sequence).

    The evicted token is the one with the lowest attention weight, by a running mean of logarithms,
    among tokens that are not selected.

    Parameters
    ----------
    heads : int
    tokens : int
        Maximum number of tokens of a head.
    slots : int
        Slots per head.
    newest : int
        Slots of the newest tokens, after the other slots; token i is in slot i modulo `newest`.
    device : torch.device, optional
        The device that assigns slots; None: the host.

    Attributes
    ----------
    log_weights : int32 Tensor [heads, tokens]
        The running means. `ops.select_keys` updates them: `reference.recall.update_log_weights`.
    """

    def __init__(self, heads: int, tokens: int, slots: int, newest: int, *,
                 device: torch.device | None = None):
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._slot_of = torch.full((heads, tokens), -1, **options)
        self._token_of = torch.full((heads, slots), -1, **options)
        self.log_weights = torch.zeros((heads, tokens), **options)
        self._newest = newest

    def assign(self, selected: Tensor, first_recent: Tensor, *, head: int = 0
             ) -> tuple[Tensor, Tensor, int]:
        """Assign slots to the tokens that heads from number `head` on have selected.

        Arguments and results are as in `reference_recall.assign_slots`, but missing tokens have
        the head's number in this set.
        """
        heads = slice(head, head + selected.shape[0] * selected.shape[1])
        slots, missing, hits = ops.assign_slots(
            selected, first_recent, slot_of=self._slot_of[heads], token_of=self._token_of[heads],
            log_weights=self.log_weights[heads], newest=self._newest)
        missing[0] += head
        return slots, missing, hits

    def claim(self, selected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Assign slots for all heads without synchronizing: see `reference_recall.claim_slots`."""
        return ops.claim_slots(selected, slot_of=self._slot_of, token_of=self._token_of,
                               log_weights=self.log_weights)

    def forget(self, first: Tensor) -> None:
        """Free the slots of tokens from a position on, int Tensor [heads]."""
        forgotten = self._token_of >= first[:, None]
        head, slot = forgotten.nonzero(as_tuple=True)
        self._slot_of[head, self._token_of[head, slot].long()] = -1
        self._token_of.masked_fill_(forgotten, -1)
        positions = torch.arange(self.log_weights.shape[1], device=first.device)
        self.log_weights.masked_fill_(positions >= first[:, None], 0)


@dataclass
class _GpuHotTokens:
    """Tokens of one (layer, batch) in the GPU's memory.

    `entries` [kinds, sequences, kv_heads, slots + 1, width] are the slots of the hot set, and
    behind them the slot of the newest token. `newest`, int32 [sequences], are the positions of
    these; None once they are written back to host memory.
    """

    entries: Tensor
    hot_set: HotSet
    newest: Tensor | None = None


class ZeroCopyTier(FetchedTier):
    """A tier in page-locked host memory that GPU kernels read and write in place (zero-copy).

    Prompts are fetched and stored by whole layers, as in `FetchedTier`. A decode step reads only
    the tokens that it selects over the link. With a hot set in the GPU's memory, it reads only
    those that the hot set lacks.

    Parameters
    ----------
    recalled : sequence of bool
        Layers in which steps select tokens. The others are fetched whole.
    hot_slots : sequence of int
        Slots of the hot set in each layer: 0, or at least as many as a step selects.
    """

    def __init__(self, slot_layout: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 transfers: Transfers, recalled: Sequence[bool], hot_slots: Sequence[int]):
        super().__init__(slot_layout, first, last, capacity=capacity, transfers=transfers,
                         path=None)
        self._recalled = recalled
        self._slots = hot_slots
        self._hot_bytes = [
            round_up(slot_layout.nbytes(last - first, slots + 1), PAGE) if slots else 0
            for slots in hot_slots]
        self._starts = [0, *accumulate(size * capacity.batches for size in self._hot_bytes)]
        self._buffer = self._device.empty(self._starts[-1])
        self._hot: dict[tuple[int, int], _GpuHotTokens] = {}
        self._counts = torch.zeros(2, dtype=torch.int64, device=self._device.torch_device)
        """Tokens selected, and tokens loaded."""

    @property
    def counts(self) -> RecallCounts:
        """Counts so far; reading them waits for the device."""
        selected, loads = self._counts.tolist()
        return RecallCounts(hits=selected - loads, loads=loads)

    def fetches_selected(self, layer):
        return self._recalled[layer]

    def begin(self, layer, sizes):
        super().begin(layer, sizes)
        slots, layout = self._slots[layer], self.slot_layout
        for batch in range(len(sizes) if slots else 0):
            sequences, tokens = self._sizes[layer, batch]
            start = self._starts[layer] + batch * self._hot_bytes[layer]
            self._hot[layer, batch] = _GpuHotTokens(
                typed(self._buffer, start, layout.shape(sequences, slots + 1), layout.dtype),
                HotSet(sequences * layout.kv_heads, tokens, slots, 1,
                       device=self._device.torch_device))

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        if self._recalled[layer]:
            # Decode steps write in place, to a store that has all slots from the start.
            cached = None
            self._write_newest(layer, batch)
            self._stores[layer, batch].busy.append(
                self._device.record_event())  # type: ignore[arg-type]  # `load` waits for an Event, too
        super().load(layer, batch, fetch=fetch, keys_only=keys_only, cached=cached)

    def on_prompt_cached(self, layer, batch, tokens):
        if self._slots[layer]:
            sequences, slots = self._sizes[layer, batch]
            firsts = torch.full((sequences, self.slot_layout.kv_heads), slots)
            for sequence, first, _ in tokens:
                firsts[sequence - self.first] = first
            self._hot[layer, batch].hot_set.forget(firsts.view(-1).to(self._device.torch_device))

    def log_weights(self, layer, batch, rows):
        if not self._slots[layer]:
            return super().log_weights(layer, batch, rows)
        return self._hot[layer, batch].hot_set.log_weights.unflatten(
            0, (-1, self.slot_layout.kv_heads))[rows]

    def fetch_selected(self, layer, batch, rows, selected):
        if not self._slots[layer]:
            return super().fetch_selected(layer, batch, rows, selected)
        hot = self._hot[layer, batch]
        self._write_newest(layer, batch)
        slots, moves, counts = hot.hot_set.claim(selected.slots)
        ops.copy_tokens(self._in_place(layer, batch), hot.entries, moves, counts)
        positions, attended = selected.metadata
        self._counts += torch.stack((attended.sum() * self.slot_layout.kv_heads, counts.sum()))
        hot.newest = positions
        newest_slot = self._slots[layer]
        spans = selected.spans.clone()
        spans[0] = newest_slot
        metadata = torch.stack((torch.full_like(positions, newest_slot), attended))
        return SelectedTokens(slots, metadata, spans)

    def selected_entries(self, layer, batch, rows):
        if not self._recalled[layer]:
            return super().selected_entries(layer, batch, rows)
        entries = self._hot[layer, batch].entries if self._slots[layer] else (
            self._in_place(layer, batch))
        return entries[:, rows]

    def _in_place(self, layer: int, batch: int) -> Tensor:
        """Return all slots in host memory, once running transfers to them are done."""
        store = self._stores[layer, batch]
        for handle in store.busy:
            self._transfers.ready(handle)
        store.busy = []
        return typed(store.host, 0, self._shape(layer, batch, store.slots), self.slot_layout.dtype)

    def _write_newest(self, layer: int, batch: int) -> None:
        """Write the newest tokens back to host memory."""
        hot = self._hot.get((layer, batch))
        if hot is not None and hot.newest is not None:
            targets = hot.newest[:, None, None].expand(-1, self.slot_layout.kv_heads, 1)
            moves = torch.stack((torch.full_like(targets, self._slots[layer]), targets))
            ops.copy_tokens(hot.entries, self._in_place(layer, batch), moves,
                            torch.ones_like(moves[0, ..., 0]))
            hot.newest = None
