"""The bytes of a cache on its tiers: slots that are used in place, or fetched before use.

A `CacheTier` holds the sequences of every GPU batch that live on one tier. It moves whole slots and
does not look into them. `ResidentTier` and `FetchedTier` are here. Tiers whose decode
steps fetch only selected tokens are in `hot_set` (host memory beside a GPU) and `disk_recall`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexgen_h2o.cache.layout import Capacity, SlotLayout
from flexgen_h2o.config.limits import CACHE_BUFFERS, CACHE_GROWTH, WRITE_BACK_TOKENS
from flexgen_h2o.storage.device import PAGE, Device, round_up, typed
from flexgen_h2o.storage.disk import AlignedRead, Extent
from flexgen_h2o.storage.offload_dirs import StripedFile
from flexgen_h2o.storage.transfer import (
    D2H,
    H2D,
    BackingStore,
    BufferRing,
    Handle,
    StagingBuffer,
    TransferQueue,
    Transfers,
)


@dataclass(frozen=True)
class SlotUpdate:
    """Slots that a decode step has written.

    Attributes
    ----------
    entries : Tensor [kinds, sequences, kv_heads, width]
    slots : int64 Tensor [sequences, kv_heads]
        The slot of each entry.
    """

    entries: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def gather(cls, cache: torch.Tensor, slots: torch.Tensor) -> SlotUpdate:
        """Return the update that copies slots of `cache` [kinds, sequences, kv_heads, slots,
        width]."""
        index = slots[None, ..., None, None].expand(len(cache), -1, -1, 1, cache.shape[-1])
        return cls(cache.gather(3, index).squeeze(3), slots)

    def write(self, cache: torch.Tensor) -> None:
        """Write the entries to `cache` [kinds, sequences, kv_heads, slots, width]."""
        *heads, slots, width = cache.shape
        rows = torch.arange(math.prod(heads), device=cache.device).view(heads)
        index = (rows * slots + self.slots).view(-1)
        cache.view(-1, width).index_copy_(0, index, self.entries.reshape(-1, width))


@dataclass(frozen=True)
class SelectedTokens:
    """Slots that a decode step attends to, and the slot that it writes.

    Attributes
    ----------
    slots : int32 Tensor [sequences, kv_heads, top_k]
        Slots that the new token of each sequence attends to, padded with -1.
    metadata : int32 Tensor [2, sequences]
        The slot that the new token takes, and the number of slots that it attends to.
    spans : int32 Tensor [3, sequences], on the host
        The slot that the new token takes, its position, and 1: as in `ops.index_keys`.
    """

    slots: torch.Tensor
    metadata: torch.Tensor
    spans: torch.Tensor


def gather_slots(values: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
                 ) -> torch.Tensor:
    """Return entries of slots `index` [sequences, kv_heads, n] of each head.

    values [sequences, kv_heads, slots, width] are contiguous. The result is [sequences, kv_heads,
    n, width], a view of `out` [sequences * kv_heads * n, width] if given.
    """
    sequences, heads, slots, width = values.shape
    rows = torch.arange(sequences * heads, device=values.device).view(sequences, heads, 1)
    gathered = torch.index_select(values.view(-1, width), 0, (rows * slots + index).view(-1),
                                  out=out)
    return gathered.view(*index.shape, width)


class CacheTier:
    """Sequences first:last of every batch, on one tier.

    Attributes
    ----------
    on_host : bool
        Attention over this tier runs on the host although compute is on a GPU.
    is_resident : bool
        Attention uses the tier in place: `load` and `store` are no-ops.
    gathers_values : bool
        Keys can be fetched without values, and `gather_values` fetches single values.
    """

    on_host = False
    is_resident = True
    gathers_values = False

    def __init__(self, slot_layout: SlotLayout, first: int, last: int):
        self.slot_layout = slot_layout
        self.first = first
        self.last = last
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}
        """(sequences, slots) of each (layer, batch)."""

    def attention_device(self, device: torch.device) -> torch.device:
        """Return the device on which attention over this tier runs if compute is on `device`."""
        return torch.device("cpu") if self.on_host else device

    def begin(self, layer: int, sizes: Sequence[tuple[int, int]]) -> None:
        """Start a layer of a block, and forget its cached tokens; no transfer may be running.

        `sizes` are the sequences of each batch, and the slots of each sequence.
        """
        for batch, (count, slots) in enumerate(sizes):
            self._sizes[layer, batch] = max(0, min(self.last, count) - self.first), slots

    def reset(self) -> None:
        """Wait for running transfers, and discard the cached tokens and errors."""

    def synchronize(self) -> None:
        """Wait for running transfers and keep the cached tokens. Raise their errors."""

    def sequences(self, batch: int) -> slice:
        """Return the sequences of a batch that live here."""
        return slice(self.first, self.first + self._sizes[0, batch][0])

    # Whole layers

    def load(self, layer: int, batch: int, *, fetch: bool, keys_only: bool = False,
             cached: int | None = None) -> None:
        """Start bringing (layer, batch) to where attention runs.

        Parameters
        ----------
        fetch : bool
            False: only provide a buffer.
        keys_only : bool
            Leave values where they are if the tier can gather them.
        cached : int or None
            Tokens of a cache that grows by one token a step, in its first slots; None: all slots
            are needed.
        """

    def get(self, layer: int, batch: int) -> torch.Tensor:
        """Return the slots, ready for compute: [kinds, sequences, kv_heads, slots, width].

        The tensor is contiguous. A growing cache may have fewer slots than it was planned with.
        """
        raise NotImplementedError

    def gather_values(self, layer: int, batch: int, index: torch.Tensor) -> torch.Tensor:
        """Return values of some slots on the host, as `gather_slots`; valid while the buffer is."""
        raise NotImplementedError

    def store(self, layer: int, batch: int, update: SlotUpdate | None) -> None:
        """Start writing back the slots that compute changed; None: all slots."""

    # Selective fetch

    def fetches_selected(self, layer: int) -> bool:
        """Return whether decode steps fetch only the tokens that they select.

        They then need neither `load` nor `store`.
        """
        return False

    def on_prompt_cached(self, layer: int, batch: int, tokens: Sequence[tuple[int, int, int]]
                         ) -> None:
        """Note that tokens of prompts were put into slots: (sequence of the batch, first, end)."""

    def prefetch_capacity(self, layer: int, batch: int) -> Sequence[int]:
        """Return for each sequence how many tokens of its prompt fit into an empty hot set.

        0 for sequences whose hot set has been filled; empty without a hot set to fill.
        """
        return ()

    def prefetch(self, layer: int, batch: int, selected: SelectedTokens) -> None:
        """Start fetching tokens that the next `fetch_selected` may select."""

    def log_weights(self, layer: int, batch: int, rows: slice) -> torch.Tensor | None:
        """Return running means of attention weights that `ops.select_keys` updates in place.

        int32 [sequences, kv_heads, tokens], for some sequences; None if the tier keeps none.
        """
        return None

    def fetch_groups(self, layer: int, sequences: int) -> list[slice]:
        """Return groups of neighbouring sequences that fetch their tokens one after the other.

        Attention over one group overlaps with the fetch of the next.
        """
        return [slice(0, sequences)]

    def fetch_selected(self, layer: int, batch: int, rows: slice, selected: SelectedTokens
                       ) -> SelectedTokens:
        """Start fetching selected tokens of some sequences.

        `selected` names token i as slot i. Return it with the slots of `selected_entries`.
        """
        return selected

    def selected_entries(self, layer: int, batch: int, rows: slice) -> torch.Tensor:
        """Return the slots that `fetch_selected` has filled; as `get`, but maybe strided."""
        return self.get(layer, batch)[:, rows]


class ResidentTier(CacheTier):
    """A tier in the memory of the device that attends over it, used in place."""

    def __init__(self, slot_layout: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 device: Device, on_host: bool = False):
        super().__init__(slot_layout, first, last)
        self.on_host = on_host
        self._strides = [round_up(slot_layout.nbytes(last - first, slots), PAGE)
                         for slots in capacity.slots]
        self._starts = [0, *accumulate(stride * capacity.batches for stride in self._strides)]
        empty = device.host_empty if on_host else device.empty
        self._buffer = empty(self._starts[-1])

    def get(self, layer, batch):
        start = self._starts[layer] + batch * self._strides[layer]
        shape = self.slot_layout.shape(*self._sizes[layer, batch])
        return typed(self._buffer, start, shape, self.slot_layout.dtype)


@dataclass
class WriteBackLog:
    """The newest updates of a cache store on disk, in order: the first `count` of each tensor.

    Attributes
    ----------
    entries : Tensor [WRITE_BACK_TOKENS, kinds, sequences, kv_heads, width]
    slots : int64 Tensor [WRITE_BACK_TOKENS, sequences, kv_heads]
    count : int
    """

    entries: torch.Tensor
    slots: torch.Tensor
    count: int = 0

    def write(self, cache: torch.Tensor) -> None:
        """Apply the updates to `cache` [kinds, sequences, kv_heads, slots, width], on the host.

        The newest update of a slot wins.
        """
        kinds, sequences, heads, slots, width = cache.shape
        rows = torch.arange(kinds * sequences * heads).view(kinds, sequences, heads)
        index = rows * slots + self.slots[: self.count, None, :sequences]
        # NumPy assigns in order and in one call, so that concurrent compute rarely waits for the
        # interpreter. An entry is one element of it.
        entry = np.dtype((np.void, width * cache.element_size()))
        entries = self.entries[: self.count, :, :sequences].reshape(-1).contiguous()
        target, source = (x.view(torch.uint8).numpy().view(entry)
                          for x in (cache.view(-1), entries))
        target[index.view(-1).numpy()] = source


@dataclass
class CacheStore(BackingStore):
    """The backing store of one (layer, batch) of a fetched tier.

    `slots` is the number of slots of a head once all submitted transfers are done; 0: empty.
    """

    slots: int = 0
    log: WriteBackLog | None = None


class FetchedTier(CacheTier):
    """A tier that is fetched before use and written back: host memory beside a GPU, or disk.

    Each (layer, batch) has a backing store and comes to one of a few staging buffers. A decode
    step writes back only the slots that it changed. On disk these are too small to be written one
    by one: updates wait in memory (`WriteBackLog`) and are applied to read slots, and every
    `WRITE_BACK_TOKENS` tokens the whole store is written. A store whose cache grows has as many
    slots as it needs, and up to `CACHE_GROWTH` more, so that empty slots are not transferred.

    Parameters
    ----------
    path : Path, StripedFile or None
        The file of a tier on disk; None: host memory.
    """

    is_resident = False

    def __init__(self, slot_layout: SlotLayout, first: int, last: int, *, capacity: Capacity,
                 transfers: Transfers, path: Path | StripedFile | None):
        super().__init__(slot_layout, first, last)
        self._transfers = transfers
        self._device = transfers.device
        self.gathers_values = path is None
        sequences = last - first
        sizes, staged = zip(*self._layer_bytes(sequences, capacity), strict=True)
        keys = [(layer, b) for layer in range(len(sizes)) for b in range(capacity.batches)]
        if path is None:
            self._stores = {key: CacheStore(host=self._device.host_empty(sizes[key[0]]))
                            for key in keys}
        else:
            starts = accumulate((sizes[layer] for layer, _ in keys), initial=0)
            self._stores = {
                key: CacheStore(extent=Extent(path, start, sizes[key[0]]),
                                log=self._new_log(sequences))
                for key, start in zip(keys, starts, strict=False)
            }
        self._ring: BufferRing[tuple[int, int]] = BufferRing(
            transfers, [self._staging(max(staged), sequences) for _ in range(CACHE_BUFFERS)])

    @staticmethod
    def file_bytes(slot_layout: SlotLayout, sequences: int, capacity: Capacity) -> int:
        """Return the bytes of the file of a tier with a number of sequences on disk."""
        return capacity.batches * sum(round_up(slot_layout.nbytes(sequences, slots), PAGE)
                                      for slots in capacity.slots)

    def _layer_bytes(self, sequences: int, capacity: Capacity) -> list[tuple[int, int]]:
        """Return the bytes of each layer's backing store, and of a staging buffer for it."""
        sizes = [round_up(self.slot_layout.nbytes(sequences, slots), PAGE)
                 for slots in capacity.slots]
        return list(zip(sizes, sizes, strict=True))

    def _staging(self, nbytes: int, sequences: int) -> StagingBuffer:
        host = self._device.host_empty(nbytes)
        if not self._device.is_gpu:
            return StagingBuffer(host, host)
        updates = (self.slot_layout.nbytes(sequences, 1), sequences * self.slot_layout.kv_heads * 8)
        return StagingBuffer(self._device.empty(nbytes), host,
                             tuple(map(self._device.host_empty, updates)))

    def _new_log(self, sequences: int) -> WriteBackLog:
        layout = self.slot_layout
        shape = (WRITE_BACK_TOKENS, layout.kinds, sequences, layout.kv_heads, layout.width)
        slots = torch.empty((WRITE_BACK_TOKENS, sequences, layout.kv_heads), dtype=torch.int64)
        return WriteBackLog(torch.empty(shape, dtype=layout.dtype), slots)

    def begin(self, layer, sizes):
        super().begin(layer, sizes)
        for batch in range(len(sizes)):
            store = self._stores[layer, batch]
            store.slots, store.busy = 0, []

    def reset(self):
        self._ring.reset()

    def synchronize(self):
        self._ring.synchronize()

    def _shape(self, layer: int, batch: int, slots: int) -> tuple[int, ...]:
        return self.slot_layout.shape(self._sizes[layer, batch][0], slots)

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        store = self._stores[layer, batch]
        _, slots = self._sizes[layer, batch]
        if cached is not None:
            fits = fetch and cached < store.slots
            slots = store.slots if fits else min(slots, cached + CACHE_GROWTH)
        fill = partial(self._fetch, store=store, keys_only=keys_only,
                       stored_shape=self._shape(layer, batch, store.slots or slots),
                       shape=self._shape(layer, batch, slots))
        before, store.busy, store.slots = store.busy, [], slots
        self._ring.load((layer, batch), fill if fetch else None, after=before)

    def _fetch(self, queue: TransferQueue, staging: StagingBuffer, *, store: CacheStore,
               stored_shape: tuple[int, ...], shape: tuple[int, ...], keys_only: bool
               ) -> list[Handle]:
        """Fill a staging buffer; the store grows from `stored_shape` to `shape`.

        Return the jobs that must end before the buffer is filled again.
        """
        layout = self.slot_layout
        device, host = (typed(buffer, 0, shape, layout.dtype)
                        for buffer in (staging.device, staging.host))
        if store.host is not None:
            expand_slots(store.host, stored_shape, shape, layout.dtype.itemsize)
            kinds = 1 if keys_only else layout.kinds
            source = typed(store.host, 0, shape, layout.dtype)
            queue.copy(device[:kinds], source[:kinds], H2D)
            return []
        stored = staging.host[: round_up(math.prod(stored_shape) * layout.dtype.itemsize, PAGE)]
        queue.disk.read([AlignedRead(store.extent.path, store.extent.offset, stored.nbytes, 0)],
                       stored)
        expand_slots(staging.host, stored_shape, shape, layout.dtype.itemsize)
        log, writes = store.log, []
        if log.count:
            log.write(host)
        if log.count == WRITE_BACK_TOKENS or stored_shape != shape:
            log.count = 0
            writes.append(self._write_back(store, staging.host[: round_up(host.nbytes, PAGE)]))
            store.busy.extend(writes)
        if self._device.is_gpu:
            queue.copy(device, host, H2D)
        return writes

    def _write_back(self, store: CacheStore, staged: torch.Tensor) -> Handle:
        """Write staged bytes to disk. Slots that compute changes meanwhile are in the log too."""
        extent = Extent(store.extent.path, store.extent.offset, staged.nbytes)

        def job(queue: TransferQueue) -> None:
            queue.disk.write(extent, staged)

        return self._transfers.submit("stores", job)

    def get(self, layer, batch):
        shape = self._shape(layer, batch, self._stores[layer, batch].slots)
        return typed(self._ring.get((layer, batch)).device, 0, shape, self.slot_layout.dtype)

    def gather_values(self, layer, batch, index):
        # Stores in host memory do not pass through the host side of the buffer: it is free.
        layout = self.slot_layout
        staging, store = self._ring.get((layer, batch)), self._stores[layer, batch]
        values = typed(store.host, 0, self._shape(layer, batch, store.slots), layout.dtype)[1]
        return gather_slots(values, index, typed(staging.host, 0, (index.numel(), layout.width),
                                                 layout.dtype))

    def store(self, layer, batch, update):
        store = self._stores[layer, batch]
        options: dict[str, Any] = {"store": store, "shape": self._shape(layer, batch, store.slots)}
        if update is None:
            empty = partial(self._store_all, **options)
        else:
            empty = partial(self._store_update, **options, update=update)
        store.busy.append(self._ring.store((layer, batch), empty))

    def _store_all(self, queue: TransferQueue, staging: StagingBuffer, *, store: CacheStore,
                   shape: tuple[int, ...]) -> None:
        dtype = self.slot_layout.dtype
        cache = typed(staging.device, 0, shape, dtype)
        if store.host is not None:
            queue.copy(typed(store.host, 0, shape, dtype), cache, D2H)
            return
        if self._device.is_gpu:
            queue.copy(typed(staging.host, 0, shape, dtype), cache, D2H)
            queue.flush()
        store.log.count = 0
        extent = Extent(store.extent.path, store.extent.offset, round_up(cache.nbytes, PAGE))
        queue.disk.write(extent, staging.host[: extent.nbytes])

    def _store_update(self, queue: TransferQueue, staging: StagingBuffer, *, store: CacheStore,
                      update: SlotUpdate, shape: tuple[int, ...]) -> None:
        if self._device.is_gpu:
            sources = (update.entries, update.slots)
            landed = [typed(buffer, 0, source.shape, source.dtype)
                      for buffer, source in zip(staging.updates, sources, strict=True)]
            for target, source in zip(landed, sources, strict=True):
                queue.copy(target, source, D2H)
            queue.flush()
            update = SlotUpdate(*landed)
        if store.host is not None:
            update.write(typed(store.host, 0, shape, self.slot_layout.dtype))
            return
        log, sequences = store.log, shape[1]
        log.entries[log.count, :, :sequences] = update.entries
        log.slots[log.count, :sequences] = update.slots
        log.count += 1


def expand_slots(buffer: torch.Tensor, before: tuple[int, ...], after: tuple[int, ...],
                 itemsize: int) -> None:
    """Move the slots of each head apart in place, so that each head has room for more.

    Parameters
    ----------
    buffer : Tensor [bytes], uint8
    before, after : tuple of int
        Shapes [kinds, sequences, kv_heads, slots, width]; `after` has no fewer slots. The
        contents of added slots are undefined.
    itemsize : int
        Bytes of an element.
    """
    heads = math.prod(after[:3])
    small, large = (buffer[: math.prod(shape) * itemsize].view(heads, -1).numpy()
                    for shape in (before, after))
    width, end = small.shape[1], heads if before != after else 1
    while end > 1:  # the first head stays in place
        # From `first` on no source is overwritten before it is moved, except that the last heads
        # come one by one: NumPy handles their overlap.
        first = min(end - 1, -(-end * width // large.shape[1]))
        large[first:end, :width] = small[first:end]
        end = first
