"""The bytes of a cache on its tiers: slots of records, used in place or fetched (`fetched`).

A *record* is one cached key or value at rest: a vector in the run's dtype, or codes with their
scales in bytes. A *part* is the sequences of every GPU batch that live on one tier. What is in a
slot is none of a part's business; it moves whole slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from flexgen_h2o.storage.tiers import PAGE, Device, round_up, typed


@dataclass(frozen=True)
class Records:
    """The contents of a slot: for each of `kinds`, `width` elements of `dtype` per KV head.

    The kinds are keys and values; or there is one, whose records hold both (`CacheLayout`).
    """

    kv_heads: int
    width: int
    dtype: torch.dtype
    kinds: int = 2

    def shape(self, sequences: int, slots: int) -> tuple[int, ...]:
        """[kinds, sequences, kv_heads, slots, width]"""
        return self.kinds, sequences, self.kv_heads, slots, self.width

    def nbytes(self, sequences: int, slots: int) -> int:
        """Bytes of keys and values of one layer."""
        return self.kinds * sequences * self.kv_heads * slots * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Grid:
    """The most that parts hold: batches of a block, and slots of a sequence in each layer."""

    batches: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Changed:
    """The changes of a decode step: [kinds, sequences, kv_heads, width] into slots [sequences,
    kv_heads]"""

    fresh: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def read(cls, held: torch.Tensor, slots: torch.Tensor) -> Changed:
        """The contents of some slots of `held` [kinds, sequences, kv_heads, slots, width]."""
        place = slots[None, ..., None, None].expand(len(held), -1, -1, 1, held.shape[-1])
        return cls(held.gather(3, place).squeeze(3), slots)

    def write(self, held: torch.Tensor) -> None:
        """Put the records into their slots of `held` [kinds, sequences, kv_heads, slots, width]."""
        *heads, slots, width = held.shape
        lines = torch.arange(math.prod(heads), device=held.device).view(heads)
        flat = (lines * slots + self.slots).view(-1)
        held.view(-1, width).index_copy_(0, flat, self.fresh.reshape(-1, width))


@dataclass(frozen=True)
class Chosen:
    """The slots that a decode step attends to, and those that it writes.

    Attributes
    ----------
    slots : int32 Tensor [sequences, kv_heads, most]
        Those that each new token attends to, -1 behind the last.
    metadata : int32 Tensor [2, sequences]
        The slot that it takes, and how many it attends to.
    spans : int32 Tensor [3, sequences], on the host
        The slot that it takes, which token it is, and 1.
    """

    slots: torch.Tensor
    metadata: torch.Tensor
    spans: torch.Tensor


def picked(values: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
           ) -> torch.Tensor:
    """The records in some slots of each head.

    values [sequences, kv_heads, slots, width], contiguous; index [sequences, kv_heads, n]; out
    [sequences * kv_heads * n, width]. Returns [sequences, kv_heads, n, width].
    """
    sequences, heads, slots, width = values.shape
    lines = torch.arange(sequences * heads, device=values.device).view(sequences, heads, 1)
    found = torch.index_select(values.view(-1, width), 0, (lines * slots + index).view(-1), out=out)
    return found.view(*index.shape, width)


class CachePart:
    """Sequences first:last of every batch, on one tier."""

    on_host = False
    """True if attention over this part runs on the host although compute is elsewhere."""

    moves = False
    """True if what compute changes has to be written back."""

    gathers_values = False
    """True if keys can be fetched alone, and `gather` then gives single values."""

    def __init__(self, records: Records, first: int, last: int):
        self.records = records
        self.first = first
        self.last = last
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}

    def place(self, device: torch.device) -> torch.device:
        """The device on which attention over this part runs, if compute is on `device`."""
        return torch.device("cpu") if self.on_host else device

    def begin(self, layer: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Start a layer of a block: sequences of each batch, and slots of each. Nothing is under
        way, and what was cached there is forgotten."""
        for batch, (count, slots) in enumerate(sizes):
            self._sizes[layer, batch] = max(0, min(self.last, count) - self.first), slots

    def reset(self) -> None:
        """Wait for all that is under way; what is cached and what went wrong does not count."""

    def settle(self) -> None:
        """Wait for all that is under way and keep what is cached. Raises what went wrong in it."""

    def sequences(self, batch: int) -> slice:
        """The sequences of a batch that live here."""
        return slice(self.first, self.first + self._sizes[0, batch][0])

    def load(self, layer: int, batch: int, *, fetch: bool, keys_only: bool = False,
             cached: int | None = None) -> None:
        """Start bringing (layer, batch) to where attention runs; not `fetch`: only make room.

        Parameters
        ----------
        fetch : bool
        keys_only : bool
            Values are left where they are if the part can gather them.
        cached : int or None
            Tokens of a cache that grows by one a step, in its first slots; None: all slots count.
        """

    def get(self, layer: int, batch: int) -> torch.Tensor:
        """The records, ready for compute: [kinds, sequences, kv_heads, slots, width], contiguous.

        Slots that a growing cache does not need yet may be missing.
        """
        raise NotImplementedError

    def recalls(self, layer: int) -> bool:
        """True if a decode step needs no more than `recall`, and neither `load` nor `store`."""
        return False

    def filled(self, layer: int, batch: int, tokens: Sequence[tuple[int, int, int]]) -> None:
        """Take note of tokens of prompts that have been put into slots: (sequence of the batch,
        first, end)."""

    def room(self, layer: int, batch: int) -> Sequence[int]:
        """Tokens that fast memory has room for, of each sequence of which it has had none; 0 of
        others, and where all is in fast memory."""
        return ()

    def expect(self, layer: int, batch: int, chosen: Chosen) -> None:
        """Start bringing tokens that the next `ask` may choose."""

    def log_weights(self, layer: int, batch: int, rows: slice) -> torch.Tensor | None:
        """Running means that a choice for some sequences is to bring up to date, int32 [sequences,
        kv_heads, tokens], as `ops.choose_keys` does; None where none are kept."""
        return None

    def turns(self, layer: int, sequences: int) -> list[slice]:
        """Neighbouring sequences whose chosen tokens are asked for together, one group after the
        other: attention over some goes on while those of others come."""
        return [slice(0, sequences)]

    def ask(self, layer: int, batch: int, rows: slice, chosen: Chosen) -> Chosen:
        """Start bringing the tokens that some sequences choose, where token i has slot i; `chosen`
        with their slots in `recalled`."""
        return chosen

    def recalled(self, layer: int, batch: int, rows: slice) -> torch.Tensor:
        """The records that these sequences have asked for, as those of `get`, maybe strided."""
        return self.get(layer, batch)[:, rows]

    def gather(self, layer: int, batch: int, index: torch.Tensor) -> torch.Tensor:
        """The values in some slots, as `picked` has them, on the host until the buffer moves on."""
        raise NotImplementedError

    def store(self, layer: int, batch: int, changed: Changed | None) -> None:
        """Start writing back what compute changed; None: everything."""


class ResidentPart(CachePart):
    """A part in the memory of what attends over it, used in place."""

    def __init__(self, records: Records, first: int, last: int, *, grid: Grid, device: Device,
                 on_host: bool = False):
        super().__init__(records, first, last)
        self.on_host = on_host
        self._batches = grid.batches
        self._strides = [round_up(records.nbytes(last - first, slots), PAGE)
                         for slots in grid.slots]
        self._starts = [0, *accumulate(stride * grid.batches for stride in self._strides)]
        make = device.host_empty if on_host else device.empty
        self._buffer = make(self._starts[-1])

    def get(self, layer, batch):
        start = self._starts[layer] + batch * self._strides[layer]
        shape = self.records.shape(*self._sizes[layer, batch])
        return typed(self._buffer, start, shape, self.records.dtype)
