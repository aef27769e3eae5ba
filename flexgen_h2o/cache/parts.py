"""The bytes of a cache on its tiers: fixed slots of records, fetched before use and written back.

A *record* is one cached key or value at rest: a vector in the run's dtype, or codes with their
scales in bytes. A *part* is the sequences of every GPU batch that live on one tier. What is in a
slot is none of a part's business; it moves whole slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from flexgen_h2o.storage.disk import AlignedRead
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.tiers import PAGE, Device, round_up, typed
from flexgen_h2o.storage.transfer import DOWN, UP, Handle, Lane, Transfers

TAIL = 16
"""Tokens whose changes to a cache on disk wait in memory before the whole is written in bulk."""

STAGING = 3
"""Staging buffers: one computed with, one fetched, and one being stored and then fetched into."""


@dataclass(frozen=True)
class Records:
    """What a slot holds: for keys and for values, `width` elements of `dtype` per KV head."""

    kv_heads: int
    width: int
    dtype: torch.dtype

    def shape(self, sequences: int, slots: int) -> tuple[int, ...]:
        """[keys and values, sequences, kv_heads, slots, width]"""
        return 2, sequences, self.kv_heads, slots, self.width

    def nbytes(self, sequences: int, slots: int) -> int:
        """Bytes of keys and values of one layer."""
        return 2 * sequences * self.kv_heads * slots * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Grid:
    """The most that parts hold: batches of a block, and slots of a sequence in each layer."""

    batches: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Changed:
    """What a decode step wrote: [2, sequences, kv_heads, width] into slots [sequences, kv_heads]"""

    fresh: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def read(cls, held: torch.Tensor, slots: torch.Tensor) -> Changed:
        """What is in some slots of `held` [2, sequences, kv_heads, slots, width]."""
        place = slots[None, ..., None, None].expand(2, -1, -1, 1, held.shape[-1])
        return cls(held.gather(3, place).squeeze(3), slots)

    def write(self, held: torch.Tensor) -> None:
        """Put the records into their slots of `held` [2, sequences, kv_heads, slots, width]."""
        _, sequences, heads, slots, width = held.shape
        lines = torch.arange(2 * sequences * heads, device=held.device).view(2, sequences, heads)
        flat = (lines * slots + self.slots).view(-1)
        held.view(-1, width).index_copy_(0, flat, self.fresh.reshape(-1, width))


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


class Part:
    """Sequences first:last of every batch, on one tier."""

    on_host = False
    """Whether attention over this part runs on the host although compute is elsewhere."""

    moves = False
    """Whether what compute changes has to be written back."""

    lends_values = False
    """Whether keys can be fetched alone, and `lend` then gives single values."""

    def __init__(self, records: Records, first: int, last: int):
        self.records = records
        self.first = first
        self.last = last
        self._sequences: list[int] = []
        self._slots: list[Sequence[int]] = []

    def begin(self, sizes: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Start a block: sequences of each batch, and slots of each in every layer."""
        self._sequences = [max(0, min(self.last, count) - self.first) for count, _ in sizes]
        self._slots = [slots for _, slots in sizes]

    def settle(self) -> None:
        """Wait for all that is under way and keep what is cached. Raises what went wrong in it."""

    def sequences(self, batch: int) -> slice:
        """Which sequences of a batch live here."""
        return slice(self.first, self.first + self._sequences[batch])

    def _shape(self, layer: int, batch: int) -> tuple[int, ...]:
        return self.records.shape(self._sequences[batch], self._slots[batch][layer])

    def _view(self, buffer: torch.Tensor, layer: int, batch: int) -> torch.Tensor:
        return typed(buffer, 0, self._shape(layer, batch), self.records.dtype)

    def load(self, layer: int, batch: int, *, fetch: bool, keys_only: bool = False) -> None:
        """Start bringing (layer, batch) to where attention runs; not `fetch`: only make room.

        keys_only: values are left where they are if the part lends them.
        """

    def get(self, layer: int, batch: int) -> torch.Tensor:
        """The records, ready for compute: [2, sequences, kv_heads, slots, width], contiguous."""
        raise NotImplementedError

    def lend(self, layer: int, batch: int, index: torch.Tensor) -> torch.Tensor:
        """The values in some slots, as `picked` has them, on the host until the buffer moves on."""
        raise NotImplementedError

    def store(self, layer: int, batch: int, changed: Changed | None) -> None:
        """Start writing back what compute changed; None: everything."""


class ResidentPart(Part):
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
        return self._view(self._buffer[start : start + self._strides[layer]], layer, batch)


@dataclass
class Staging:
    """A buffer pair that one (layer, batch) of a fetched part occupies; the same on a CPU.

    `landing` is where the records and slots arrive that a decode step changed on a GPU.
    """

    device: torch.Tensor
    host: torch.Tensor
    landing: tuple[torch.Tensor, ...] = ()
    busy: list[Handle] = field(default_factory=list)


@dataclass
class Tail:
    """The newest changes of a home on disk: `TAIL` times records and slots, the first `count`."""

    fresh: torch.Tensor
    slots: torch.Tensor
    count: int = 0


@dataclass
class Home:
    """Where one (layer, batch) of a fetched part rests between its uses."""

    host: torch.Tensor | None = None
    extent: Extent | None = None
    tail: Tail | None = None
    stored: Handle | None = None
    written: Handle | None = None


class FetchedPart(Part):
    """A part whose home is host memory beside a GPU, or disk.

    What a decode step changes goes back alone. Host memory lends single values. On disk, where they
    are too small to be read one by one, whole homes are read and written: few large transfers. The
    newest changes wait in memory (the tail) and are laid over what was read; every `TAIL` tokens
    the whole is written.
    """

    moves = True

    def __init__(self, records: Records, first: int, last: int, *, grid: Grid,
                 transfers: Transfers, path: str | None):
        super().__init__(records, first, last)
        self._transfers = transfers
        self._device = transfers.device
        self.lends_values = path is None
        self._next = 0
        self._live: dict[tuple[int, int], tuple[Staging, Handle]] = {}
        sequences = last - first
        sizes = [round_up(records.nbytes(sequences, slots), PAGE) for slots in grid.slots]
        keys = [(layer, b) for layer in range(len(sizes)) for b in range(grid.batches)]
        if path is None:
            self._homes = {key: Home(host=self._device.host_empty(sizes[key[0]])) for key in keys}
        else:
            starts = accumulate((sizes[layer] for layer, _ in keys), initial=0)
            self._homes = {
                key: Home(extent=Extent(path, start, sizes[key[0]]), tail=self._tail(sequences))
                for key, start in zip(keys, starts, strict=False)
            }
        self._ring = [self._staging(max(sizes), sequences) for _ in range(STAGING)]

    @staticmethod
    def file_bytes(records: Records, sequences: int, grid: Grid) -> int:
        """Bytes of the file that a part of so many sequences takes on disk."""
        return grid.batches * sum(round_up(records.nbytes(sequences, slots), PAGE)
                                  for slots in grid.slots)

    def _staging(self, nbytes: int, sequences: int) -> Staging:
        host = self._device.host_empty(nbytes)
        if not self._device.separate:
            return Staging(host, host)
        records = self.records
        landing = (records.nbytes(sequences, 1), sequences * records.kv_heads * 8)
        return Staging(self._device.empty(nbytes), host,
                       tuple(map(self._device.host_empty, landing)))

    def _tail(self, sequences: int) -> Tail:
        records = self.records
        fresh = torch.empty((TAIL, 2, sequences, records.kv_heads, records.width),
                            dtype=records.dtype)
        return Tail(fresh, torch.empty((TAIL, sequences, records.kv_heads), dtype=torch.int64))

    def begin(self, sizes):
        for staging in self._ring:
            for handle in staging.busy:
                with contextlib.suppress(Exception):  # nobody wants what was cached any more
                    handle.synchronize()
            staging.busy = []
        for home in self._homes.values():
            home.stored = home.written = None
        self._live.clear()
        super().begin(sizes)

    def settle(self):
        for staging in self._ring:
            for handle in staging.busy:
                handle.synchronize()
        self._live.clear()

    def load(self, layer, batch, *, fetch, keys_only=False):
        home = self._homes[layer, batch]
        staging = self._ring[self._next]
        self._next = (self._next + 1) % STAGING
        before = [*staging.busy, *filter(None, (home.stored, home.written))]
        # The buffer's last compute, too, must be over before anything is put into it.
        mark = self._device.mark()
        staging.busy = busy = []

        shape = self._shape(layer, batch)

        def job(lane: Lane) -> None:
            for handle in before:
                handle.synchronize()
            if fetch:
                busy.extend(self._fetch(lane, home, staging, shape, keys_only=keys_only))

        handle = self._transfers.submit("loads", job, after=(mark, *before))
        busy.append(handle)
        self._live[layer, batch] = (staging, handle)

    def _fetch(self, lane: Lane, home: Home, staging: Staging, shape: tuple[int, ...], *,
               keys_only: bool) -> list[Handle]:
        """Fill the staging buffer; what else must be over before it is filled again."""
        device, host = (typed(buffer, 0, shape, self.records.dtype)
                        for buffer in (staging.device, staging.host))
        if home.host is not None:
            kinds = 1 if keys_only else 2
            source = typed(home.host, 0, shape, self.records.dtype)
            lane.copy(device[:kinds], source[:kinds], UP)
            return []
        staged = staging.host[: round_up(host.nbytes, PAGE)]
        lane.disk.read([AlignedRead(home.extent.path, home.extent.offset, staged.nbytes, 0)],
                       staged)
        tail, writes = home.tail, []
        for fresh, slots in zip(tail.fresh[: tail.count], tail.slots[: tail.count], strict=True):
            # In the order in which they came: a later token may have taken the same slot.
            Changed(fresh[:, : shape[1]], slots[: shape[1]]).write(host)
        if tail.count == TAIL:
            tail.count = 0
            home.written = self._write_home(home, staged)
            writes.append(home.written)
        if self._device.separate:
            lane.copy(device, host, UP)
        return writes

    def _write_home(self, home: Home, staged: torch.Tensor) -> Handle:
        """Write the staged bytes to disk. What compute changes meanwhile is in the tail too."""
        extent = Extent(home.extent.path, home.extent.offset, staged.nbytes)

        def job(lane: Lane) -> None:
            lane.disk.write(extent, staged)

        return self._transfers.submit("stores", job)

    def get(self, layer, batch):
        staging, handle = self._live[layer, batch]
        self._transfers.ready(handle)
        return self._view(staging.device, layer, batch)

    def lend(self, layer, batch, index):
        # The buffer's host side is free, as nothing of a home in memory passes through it.
        staging, _ = self._live[layer, batch]
        values = self._view(self._homes[layer, batch].host, layer, batch)[1]
        shape = (index.numel(), self.records.width)
        return picked(values, index, typed(staging.host, 0, shape, self.records.dtype))

    def store(self, layer, batch, changed):
        staging, _ = self._live.pop((layer, batch))
        home = self._homes[layer, batch]
        shape = self._shape(layer, batch)

        def job(lane: Lane) -> None:
            if changed is None:
                self._store_all(lane, home, staging, shape)
            else:
                self._store_changed(lane, home, changed, staging=staging, shape=shape)

        home.stored = self._transfers.submit("stores", job, after=(self._device.mark(),))
        staging.busy.append(home.stored)

    def _store_all(self, lane: Lane, home: Home, staging: Staging, shape: tuple[int, ...]) -> None:
        held = typed(staging.device, 0, shape, self.records.dtype)
        if home.host is not None:
            lane.copy(typed(home.host, 0, shape, self.records.dtype), held, DOWN)
            return
        if self._device.separate:
            lane.copy(typed(staging.host, 0, shape, self.records.dtype), held, DOWN)
            lane.flush()
        home.tail.count = 0
        extent = Extent(home.extent.path, home.extent.offset, round_up(held.nbytes, PAGE))
        lane.disk.write(extent, staging.host[: extent.nbytes])

    def _store_changed(self, lane: Lane, home: Home, changed: Changed, *, staging: Staging,
                       shape: tuple[int, ...]) -> None:
        if self._device.separate:
            sources = (changed.fresh, changed.slots)
            landed = [typed(buffer, 0, source.shape, source.dtype)
                      for buffer, source in zip(staging.landing, sources, strict=True)]
            for target, source in zip(landed, sources, strict=True):
                lane.copy(target, source, DOWN)
            lane.flush()
            changed = Changed(*landed)
        if home.host is not None:
            changed.write(typed(home.host, 0, shape, self.records.dtype))
            return
        tail, sequences = home.tail, shape[1]
        tail.fresh[tail.count, :, :sequences] = changed.fresh
        tail.slots[tail.count, :sequences] = changed.slots
        tail.count += 1


def make_parts(records: Records, grid: Grid, counts: Sequence[int], *, transfers: Transfers,
               on_host: bool, file: Callable[[int], str]) -> list[Part]:
    """The parts of a cache.

    Parameters
    ----------
    counts : three ints
        Sequences of a batch on (gpu, cpu, disk).
    on_host : bool
        Attention over the sequences on cpu runs there.
    file : callable (bytes) -> path
        Makes a file for them on disk.
    """
    device = transfers.device
    gpu, cpu, disk = counts
    if not device.separate:
        gpu, cpu = gpu + cpu, 0
    parts: list[Part] = []
    if gpu:
        parts.append(ResidentPart(records, 0, gpu, grid=grid, device=device))
    if cpu and on_host:
        parts.append(ResidentPart(records, gpu, gpu + cpu, grid=grid, device=device, on_host=True))
    elif cpu:
        parts.append(FetchedPart(records, gpu, gpu + cpu, grid=grid, transfers=transfers,
                                 path=None))
    if disk:
        path = file(FetchedPart.file_bytes(records, disk, grid))
        parts.append(FetchedPart(records, gpu + cpu, gpu + cpu + disk, grid=grid,
                                 transfers=transfers, path=path))
    return parts
