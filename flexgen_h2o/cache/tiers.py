"""The bytes of a cache on its tiers: slots of records, used in place or fetched (`fetched`).

A *record* is one cached key or value at rest: a vector in the run's dtype, or codes with their
scales in bytes. A *part* is the sequences of every GPU batch that live on one tier. What is in a
slot is none of a part's business; it moves whole slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from flexgen_h2o.config.limits import CACHE_BUFFERS, GROWTH, WRITE_BACK_TOKENS
from flexgen_h2o.storage.buffer_ring import BackingStore, BufferRing, StagingBuffer
from flexgen_h2o.storage.disk import AlignedRead, Extent
from flexgen_h2o.storage.tiers import PAGE, Device, round_up, typed
from flexgen_h2o.storage.transfer import D2H, H2D, Handle, Lane, Transfers


@dataclass(frozen=True)
class SlotLayout:
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
class Capacity:
    """The most that parts hold: batches of a block, and slots of a sequence in each layer."""

    batches: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class SlotUpdate:
    """The changes of a decode step: [kinds, sequences, kv_heads, width] into slots [sequences,
    kv_heads]"""

    fresh: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def gather(cls, held: torch.Tensor, slots: torch.Tensor) -> SlotUpdate:
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
class SelectedTokens:
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


def gather_slots(values: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
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

    def __init__(self, records: SlotLayout, first: int, last: int):
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

    def synchronize(self) -> None:
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

    def expect(self, layer: int, batch: int, chosen: SelectedTokens) -> None:
        """Start bringing tokens that the next `ask` may choose."""

    def log_weights(self, layer: int, batch: int, rows: slice) -> torch.Tensor | None:
        """Running means that a choice for some sequences is to bring up to date, int32 [sequences,
        kv_heads, tokens], as `ops.choose_keys` does; None where none are kept."""
        return None

    def turns(self, layer: int, sequences: int) -> list[slice]:
        """Neighbouring sequences whose chosen tokens are asked for together, one group after the
        other: attention over some goes on while those of others come."""
        return [slice(0, sequences)]

    def ask(self, layer: int, batch: int, rows: slice, chosen: SelectedTokens) -> SelectedTokens:
        """Start bringing the tokens that some sequences choose, where token i has slot i; `chosen`
        with their slots in `recalled`."""
        return chosen

    def recalled(self, layer: int, batch: int, rows: slice) -> torch.Tensor:
        """The records that these sequences have asked for, as those of `get`, maybe strided."""
        return self.get(layer, batch)[:, rows]

    def gather(self, layer: int, batch: int, index: torch.Tensor) -> torch.Tensor:
        """The values in some slots, as of `gather_slots`, on the host until the buffer moves on."""
        raise NotImplementedError

    def store(self, layer: int, batch: int, changed: SlotUpdate | None) -> None:
        """Start writing back what compute changed; None: everything."""


class ResidentPart(CachePart):
    """A part in the memory of what attends over it, used in place."""

    def __init__(self, records: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 device: Device, on_host: bool = False):
        super().__init__(records, first, last)
        self.on_host = on_host
        self._batches = capacity.batches
        self._strides = [round_up(records.nbytes(last - first, slots), PAGE)
                         for slots in capacity.slots]
        self._starts = [0, *accumulate(stride * capacity.batches for stride in self._strides)]
        make = device.host_empty if on_host else device.empty
        self._buffer = make(self._starts[-1])

    def get(self, layer, batch):
        start = self._starts[layer] + batch * self._strides[layer]
        shape = self.records.shape(*self._sizes[layer, batch])
        return typed(self._buffer, start, shape, self.records.dtype)


# The part of a cache that is fetched before use and written back: host memory beside a GPU, disk.
#
# Its records rest in *backing stores*, one for each (layer, batch), and come to one of three
# staging
# buffers. Where nothing is evicted a backing store grows with its text, so that no empty slots
# travel.


@dataclass
class WriteBackLog:
    """The newest changes of a backing store on disk, in their order: `WRITE_BACK_TOKENS` times
    records and slots, the first `count`."""

    fresh: torch.Tensor
    slots: torch.Tensor
    count: int = 0

    def write(self, held: torch.Tensor) -> None:
        """Put the records into their slots of `held` [kinds, sequences, kv_heads, slots, width], on
        the host. Of those for one slot the newest stays."""
        kinds, sequences, heads, slots, width = held.shape
        lines = torch.arange(kinds * sequences * heads).view(kinds, sequences, heads)
        places = lines * slots + self.slots[: self.count, None, :sequences]
        # NumPy assigns in order, and all at once: compute, beside which it runs, waits for few
        # calls. A record is one element of it.
        record = np.dtype((np.void, width * held.element_size()))
        fresh = self.fresh[: self.count, :, :sequences].reshape(-1).contiguous()
        there, new = (each.view(torch.uint8).numpy().view(record)
                      for each in (held.view(-1), fresh))
        there[places.view(-1).numpy()] = new


@dataclass
class CacheStore(BackingStore):
    """The backing store of one (layer, batch) of a fetched part.

    `slots` are those of a head, once all that has been submitted is done; 0: nothing rests here.
    """

    slots: int = 0
    log: WriteBackLog | None = None


class FetchedPart(CachePart):
    """A part whose backing store is host memory beside a GPU, or disk.

    What a decode step changes goes back alone. Host memory gives single values. On disk, where they
    are too small to be read one by one, whole backing stores are read and written: few large
    transfers. The newest changes wait in memory (the write-back log) and are laid over what was
    read; every `WRITE_BACK_TOKENS` tokens the whole is written. A cache that grows rests in as many
    slots as it needs, and up to `GROWTH` more.
    """

    moves = True

    def __init__(self, records: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 transfers: Transfers, path: str | None):
        super().__init__(records, first, last)
        self._transfers = transfers
        self._device = transfers.device
        self.gathers_values = path is None
        sequences = last - first
        sizes, staged = zip(*self._layer_sizes(sequences, capacity), strict=True)
        keys = [(layer, b) for layer in range(len(sizes)) for b in range(capacity.batches)]
        if path is None:
            self._stores = {key: CacheStore(host=self._device.host_empty(sizes[key[0]]))
                            for key in keys}
        else:
            starts = accumulate((sizes[layer] for layer, _ in keys), initial=0)
            self._stores = {
                key: CacheStore(extent=Extent(path, start, sizes[key[0]]),
                                   log=self._log(sequences))
                for key, start in zip(keys, starts, strict=False)
            }
        self._ring: BufferRing[tuple[int, int]] = BufferRing(
            transfers, [self._staging(max(staged), sequences) for _ in range(CACHE_BUFFERS)])

    @staticmethod
    def file_bytes(records: SlotLayout, sequences: int, capacity: Capacity) -> int:
        """Bytes of the file that a part of so many sequences takes on disk."""
        return capacity.batches * sum(round_up(records.nbytes(sequences, slots), PAGE)
                                  for slots in capacity.slots)

    def _layer_sizes(self, sequences: int, capacity: Capacity) -> list[tuple[int, int]]:
        """Bytes of each layer's backing store, and of a staging buffer for it."""
        sizes = [round_up(self.records.nbytes(sequences, slots), PAGE) for slots in capacity.slots]
        return list(zip(sizes, sizes, strict=True))

    def _staging(self, nbytes: int, sequences: int) -> StagingBuffer:
        host = self._device.host_empty(nbytes)
        if not self._device.separate:
            return StagingBuffer(host, host)
        records = self.records
        landing = (records.nbytes(sequences, 1), sequences * records.kv_heads * 8)
        return StagingBuffer(self._device.empty(nbytes), host,
                             tuple(map(self._device.host_empty, landing)))

    def _log(self, sequences: int) -> WriteBackLog:
        records = self.records
        fresh = torch.empty((WRITE_BACK_TOKENS, records.kinds, sequences, records.kv_heads,
                             records.width), dtype=records.dtype)
        return WriteBackLog(fresh, torch.empty((WRITE_BACK_TOKENS, sequences, records.kv_heads),
                                               dtype=torch.int64))

    def begin(self, layer, sizes):
        super().begin(layer, sizes)
        for batch in range(len(sizes)):
            store = self._stores[layer, batch]
            store.slots, store.busy = 0, []

    def reset(self):
        self._ring.reset()

    def synchronize(self):
        self._ring.settle()

    def _shape(self, layer: int, batch: int, slots: int) -> tuple[int, ...]:
        return self.records.shape(self._sizes[layer, batch][0], slots)

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        store = self._stores[layer, batch]
        _, slots = self._sizes[layer, batch]
        if cached is not None:
            fits = fetch and cached < store.slots
            slots = store.slots if fits else min(slots, cached + GROWTH)
        fill = partial(self._fetch, store=store, keys_only=keys_only,
                       stored_shape=self._shape(layer, batch, store.slots or slots),
                       shape=self._shape(layer, batch, slots))
        before, store.busy, store.slots = store.busy, [], slots
        self._ring.load((layer, batch), fill if fetch else lambda lane, staging: None, after=before)

    def _fetch(self, lane: Lane, staging: StagingBuffer, *, store: CacheStore,
               stored_shape: tuple[int, ...], shape: tuple[int, ...], keys_only: bool
               ) -> list[Handle]:
        """Fill the staging buffer; what else must be over before it is filled again.

        A backing store of shape `stored_shape` grows to `shape`.
        """
        records = self.records
        device, host = (typed(buffer, 0, shape, records.dtype)
                        for buffer in (staging.device, staging.host))
        if store.host is not None:
            expand_slots(store.host, stored_shape, shape, records.dtype.itemsize)
            kinds = 1 if keys_only else records.kinds
            source = typed(store.host, 0, shape, records.dtype)
            lane.copy(device[:kinds], source[:kinds], H2D)
            return []
        there = staging.host[: round_up(math.prod(stored_shape) * records.dtype.itemsize, PAGE)]
        lane.disk.read([AlignedRead(store.extent.path, store.extent.offset, there.nbytes, 0)],
                       there)
        expand_slots(staging.host, stored_shape, shape, records.dtype.itemsize)
        log, writes = store.log, []
        if log.count:
            log.write(host)
        if log.count == WRITE_BACK_TOKENS or stored_shape != shape:
            log.count = 0
            writes.append(self._write_back(store, staging.host[: round_up(host.nbytes, PAGE)]))
            store.busy.extend(writes)
        if self._device.separate:
            lane.copy(device, host, H2D)
        return writes

    def _write_back(self, store: CacheStore, staged: torch.Tensor) -> Handle:
        """Write the staged bytes to disk. What compute changes meanwhile is in the write-back log
        too."""
        extent = Extent(store.extent.path, store.extent.offset, staged.nbytes)

        def job(lane: Lane) -> None:
            lane.disk.write(extent, staged)

        return self._transfers.submit("stores", job)

    def get(self, layer, batch):
        shape = self._shape(layer, batch, self._stores[layer, batch].slots)
        return typed(self._ring.get((layer, batch)).device, 0, shape, self.records.dtype)

    def gather(self, layer, batch, index):
        # The buffer's host side is free, as nothing of a backing store in memory passes through it.
        staging, store = self._ring.get((layer, batch)), self._stores[layer, batch]
        values = typed(store.host, 0, self._shape(layer, batch, store.slots), self.records.dtype)[1]
        chosen = (index.numel(), self.records.width)
        return gather_slots(values, index, typed(staging.host, 0, chosen, self.records.dtype))

    def store(self, layer, batch, changed):
        store = self._stores[layer, batch]
        some = {"store": store, "shape": self._shape(layer, batch, store.slots)}
        empty = partial(self._store_all, **some) if changed is None else (
            partial(self._store_changed, **some, changed=changed))
        store.busy.append(self._ring.store((layer, batch), empty))

    def _store_all(self, lane: Lane, staging: StagingBuffer, *, store: CacheStore,
                   shape: tuple[int, ...]) -> None:
        held = typed(staging.device, 0, shape, self.records.dtype)
        if store.host is not None:
            lane.copy(typed(store.host, 0, shape, self.records.dtype), held, D2H)
            return
        if self._device.separate:
            lane.copy(typed(staging.host, 0, shape, self.records.dtype), held, D2H)
            lane.flush()
        store.log.count = 0
        extent = Extent(store.extent.path, store.extent.offset, round_up(held.nbytes, PAGE))
        lane.disk.write(extent, staging.host[: extent.nbytes])

    def _store_changed(self, lane: Lane, staging: StagingBuffer, *, store: CacheStore,
                       changed: SlotUpdate, shape: tuple[int, ...]) -> None:
        if self._device.separate:
            sources = (changed.fresh, changed.slots)
            landed = [typed(buffer, 0, source.shape, source.dtype)
                      for buffer, source in zip(staging.landing, sources, strict=True)]
            for target, source in zip(landed, sources, strict=True):
                lane.copy(target, source, D2H)
            lane.flush()
            changed = SlotUpdate(*landed)
        if store.host is not None:
            changed.write(typed(store.host, 0, shape, self.records.dtype))
            return
        log, sequences = store.log, shape[1]
        log.fresh[log.count, :, :sequences] = changed.fresh
        log.slots[log.count, :sequences] = changed.slots
        log.count += 1


def expand_slots(buffer: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...],
                 itemsize: int) -> None:
    """Move the heads' records apart, in place.

    Parameters
    ----------
    buffer : Tensor [bytes], uint8
    before, after : tuple of int
        What lies there, [kinds, sequences, kv_heads, slots, width] elements, and the same with no
        fewer slots, of which the last are left as they happen to be.
    itemsize : int
        Bytes of an element.
    """
    lines = math.prod(after[:3])
    small, large = (buffer[: math.prod(shape) * itemsize].view(lines, -1).numpy()
                    for shape in (before, after))
    width, end = small.shape[1], lines if before != after else 1
    while end > 1:  # the first line stays where it is
        # From there on nothing is overwritten that has yet to be moved; but for the last lines,
        # which come one by one: NumPy sees that they overlap.
        first = min(end - 1, -(-end * width // large.shape[1]))
        large[first:end, :width] = small[first:end]
        end = first
