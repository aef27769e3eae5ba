"""The part of a cache that is fetched before use and written back: host memory beside a GPU, disk.

Its records rest in *backing stores*, one for each (layer, batch), and come to one of three staging
buffers. Where nothing is evicted a backing store grows with its text, so that no empty slots
travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from flexgen_h2o.cache.parts import CachePart, Changed, Grid, Records, picked
from flexgen_h2o.config.limits import CACHE_BUFFERS, GROWTH, WRITE_BACK_TOKENS
from flexgen_h2o.storage.buffer_ring import BackingStore, BufferRing, StagingBuffer
from flexgen_h2o.storage.disk import AlignedRead
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import D2H, H2D, Handle, Lane, Transfers


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
class CachedRecords(BackingStore):
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

    def __init__(self, records: Records, first: int, last: int, *, grid: Grid,
                 transfers: Transfers, path: str | None):
        super().__init__(records, first, last)
        self._transfers = transfers
        self._device = transfers.device
        self.gathers_values = path is None
        sequences = last - first
        sizes, staged = zip(*self._layer_sizes(sequences, grid), strict=True)
        keys = [(layer, b) for layer in range(len(sizes)) for b in range(grid.batches)]
        if path is None:
            self._stores = {key: CachedRecords(host=self._device.host_empty(sizes[key[0]]))
                            for key in keys}
        else:
            starts = accumulate((sizes[layer] for layer, _ in keys), initial=0)
            self._stores = {
                key: CachedRecords(extent=Extent(path, start, sizes[key[0]]),
                                   log=self._log(sequences))
                for key, start in zip(keys, starts, strict=False)
            }
        self._ring: BufferRing[tuple[int, int]] = BufferRing(
            transfers, [self._staging(max(staged), sequences) for _ in range(CACHE_BUFFERS)])

    @staticmethod
    def file_bytes(records: Records, sequences: int, grid: Grid) -> int:
        """Bytes of the file that a part of so many sequences takes on disk."""
        return grid.batches * sum(round_up(records.nbytes(sequences, slots), PAGE)
                                  for slots in grid.slots)

    def _layer_sizes(self, sequences: int, grid: Grid) -> list[tuple[int, int]]:
        """Bytes of each layer's backing store, and of a staging buffer for it."""
        sizes = [round_up(self.records.nbytes(sequences, slots), PAGE) for slots in grid.slots]
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

    def settle(self):
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

    def _fetch(self, lane: Lane, staging: StagingBuffer, *, store: CachedRecords,
               stored_shape: tuple[int, ...], shape: tuple[int, ...], keys_only: bool
               ) -> list[Handle]:
        """Fill the staging buffer; what else must be over before it is filled again.

        A backing store of shape `stored_shape` grows to `shape`.
        """
        records = self.records
        device, host = (typed(buffer, 0, shape, records.dtype)
                        for buffer in (staging.device, staging.host))
        if store.host is not None:
            move_apart(store.host, stored_shape, shape, records.dtype.itemsize)
            kinds = 1 if keys_only else records.kinds
            source = typed(store.host, 0, shape, records.dtype)
            lane.copy(device[:kinds], source[:kinds], H2D)
            return []
        there = staging.host[: round_up(math.prod(stored_shape) * records.dtype.itemsize, PAGE)]
        lane.disk.read([AlignedRead(store.extent.path, store.extent.offset, there.nbytes, 0)],
                       there)
        move_apart(staging.host, stored_shape, shape, records.dtype.itemsize)
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

    def _write_back(self, store: CachedRecords, staged: torch.Tensor) -> Handle:
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
        return picked(values, index, typed(staging.host, 0, chosen, self.records.dtype))

    def store(self, layer, batch, changed):
        store = self._stores[layer, batch]
        some = {"store": store, "shape": self._shape(layer, batch, store.slots)}
        empty = partial(self._store_all, **some) if changed is None else (
            partial(self._store_changed, **some, changed=changed))
        store.busy.append(self._ring.store((layer, batch), empty))

    def _store_all(self, lane: Lane, staging: StagingBuffer, *, store: CachedRecords,
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

    def _store_changed(self, lane: Lane, staging: StagingBuffer, *, store: CachedRecords,
                       changed: Changed, shape: tuple[int, ...]) -> None:
        if self._device.separate:
            sources = (changed.fresh, changed.slots)
            landed = [typed(buffer, 0, source.shape, source.dtype)
                      for buffer, source in zip(staging.landing, sources, strict=True)]
            for target, source in zip(landed, sources, strict=True):
                lane.copy(target, source, D2H)
            lane.flush()
            changed = Changed(*landed)
        if store.host is not None:
            changed.write(typed(store.host, 0, shape, self.records.dtype))
            return
        log, sequences = store.log, shape[1]
        log.fresh[log.count, :, :sequences] = changed.fresh
        log.slots[log.count, :sequences] = changed.slots
        log.count += 1


def move_apart(buffer: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...], itemsize: int
               ) -> None:
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
