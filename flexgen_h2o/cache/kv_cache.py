"""Keys and values in fixed slots over the tiers: append, attend, write back.

The cache of a GPU batch is ``[sequences, kv_heads, slots, head_dim]`` for keys and for values, per
decoder layer, contiguous; nothing is shifted or concatenated. A percentage of the cache is a
share of each batch's sequences. A *part* is the sequences of a batch that live on one tier. Parts
in compute memory are used in place; the others are fetched into a staging buffer before
a layer needs them, and only what changed goes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flexgen_h2o.config import Placement
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.disk import AlignedRead, RunFolder
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.tiers import PAGE, Device, round_up, typed
from flexgen_h2o.storage.transfer import DOWN, UP, Handle, Lane, Transfers

TAIL = 16
"""New tokens of a sequence on disk that are held in memory before all is written back in bulk."""

STAGING = 3
"""Staging buffers: one being stored, one computed with, one being fetched."""


@dataclass(frozen=True)
class CacheShape:
    """What is the same for all parts of a cache."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, sequences: int, slots: int) -> int:
        """Bytes of keys and values of one layer."""
        return 2 * sequences * self.kv_heads * slots * self.head_dim * self.dtype.itemsize

    def total_bytes(self, sequences: int, slots: int) -> int:
        """Bytes of keys and values of all layers."""
        return self.num_layers * self.nbytes(sequences, slots)


@dataclass(frozen=True)
class Seats:
    """A batch in the cache: how many sequences, their pads, and their slots."""

    pads: tuple[int, ...]
    padded: int
    slots: int


@dataclass
class Staging:
    """A buffer pair that one (layer, batch) of a fetched part occupies; the same on a CPU."""

    device: torch.Tensor
    host: torch.Tensor
    busy: list[Handle] = field(default_factory=list)


@dataclass
class Home:
    """Where one (layer, batch) of a fetched part rests between its uses."""

    host: torch.Tensor | None = None
    extent: Extent | None = None
    tail: torch.Tensor | None = None
    tail_from: int = 0
    tail_count: int = 0
    stored: Handle | None = None


class Part:
    """Sequences first:last of every batch, on one tier."""

    def __init__(self, shape: CacheShape, first: int, last: int):
        self.shape = shape
        self.first = first
        self.last = last

    def _view(self, buffer: torch.Tensor, seats: Seats) -> torch.Tensor:
        """[2, sequences, kv_heads, slots, head_dim] at the start of `buffer`."""
        sequences = min(self.last, len(seats.pads)) - self.first
        shape = (2, sequences, self.shape.kv_heads, seats.slots, self.shape.head_dim)
        return typed(buffer, 0, shape, self.shape.dtype)

    def load(self, layer: int, batch: int, seats: Seats, token: int) -> None:
        """Start bringing (layer, batch) to compute memory; in the prefill, make room for it."""

    def get(self, layer: int, batch: int, seats: Seats) -> torch.Tensor:
        """The keys and values, ready for compute: [2, sequences, kv_heads, slots, head_dim]."""
        raise NotImplementedError

    def store(self, layer: int, batch: int, seats: Seats, token: int) -> None:
        """Start writing back what token number `token` changed."""

    def reset(self) -> None:
        """Wait for what is under way; call between blocks."""


class ResidentPart(Part):
    """A part in compute memory, used in place."""

    def __init__(self, shape: CacheShape, first: int, last: int, *, batches: int,
                 slots: int, device: Device):
        super().__init__(shape, first, last)
        self._stride = round_up(shape.nbytes(last - first, slots), PAGE)
        self._batches = batches
        self._buffer = device.empty(shape.num_layers * batches * self._stride)

    def get(self, layer, batch, seats):
        start = (layer * self._batches + batch) * self._stride
        return self._view(self._buffer[start : start + self._stride], seats)


class FetchedPart(Part):
    """A part whose home is host memory beside a GPU, or disk.

    On disk, whole homes are read and written: few large transfers. The newest tokens wait in
    memory (the tail) and are laid over what was read; every `TAIL` tokens the whole is written.
    """

    def __init__(self, shape: CacheShape, first: int, last: int, *, transfers: Transfers):
        super().__init__(shape, first, last)
        self._transfers = transfers
        self._device = transfers.device
        self._ring: list[Staging] = []
        self._next = 0
        self._homes: dict[tuple[int, int], Home] = {}
        self._live: dict[tuple[int, int], tuple[Staging, Handle]] = {}

    def allocate(self, batches: int, slots: int, run_folder: Callable[[], RunFolder] | None
                 ) -> None:
        """Make homes (on disk if there is a `run_folder`) and staging buffers."""
        shape, sequences = self.shape, self.last - self.first
        size = round_up(shape.nbytes(sequences, slots), PAGE)
        keys = [(layer, b) for layer in range(shape.num_layers) for b in range(batches)]
        if run_folder is None:
            self._homes = {key: Home(host=self._device.host_empty(size)) for key in keys}
        else:
            path = run_folder().file(f"cache-{self.first}.bin", size * len(keys))
            tail = (2, sequences, shape.kv_heads, TAIL, shape.head_dim)
            self._homes = {
                key: Home(extent=Extent(path, i * size, size),
                          tail=torch.empty(tail, dtype=shape.dtype))
                for i, key in enumerate(keys)
            }
        if self._device.separate:
            self._landing = self._device.host_empty(shape.nbytes(sequences, 1))
        for _ in range(STAGING):
            host = self._device.host_empty(size)
            device = self._device.empty(size) if self._device.separate else host
            self._ring.append(Staging(device, host))

    def load(self, layer, batch, seats, token):
        home = self._homes[layer, batch]
        staging = self._ring[self._next]
        self._next = (self._next + 1) % STAGING
        before = [*staging.busy, *([home.stored] if home.stored else [])]
        # The buffer's last compute, too, must be over before anything is put into it.
        mark = self._device.mark()
        staging.busy = busy = []

        def job(lane: Lane) -> None:
            for handle in before:
                handle.synchronize()
            if token > 0:
                busy.extend(self._fetch(lane, home, staging, seats))

        handle = self._transfers.submit("loads", job, after=(mark, *before))
        busy.append(handle)
        self._live[layer, batch] = (staging, handle)

    def _fetch(self, lane: Lane, home: Home, staging: Staging, seats: Seats) -> list[Handle]:
        """Fill the staging buffer; what else must be over before it is filled again."""
        nbytes = self._view(staging.device, seats).nbytes
        if home.host is not None:
            lane.copy(staging.device[:nbytes], home.host[:nbytes], UP)
            return []
        whole = round_up(nbytes, PAGE)
        lane.disk.read([AlignedRead(home.extent.path, home.extent.offset, whole, 0)],
                       staging.host[:whole])
        held = self._view(staging.host, seats)
        newest = slice(home.tail_from, home.tail_from + home.tail_count)
        held[:, :, :, newest] = home.tail[:, : held.shape[1], :, : home.tail_count]
        writes = []
        if home.tail_count == TAIL:
            home.tail_from, home.tail_count = newest.stop, 0
            writes.append(self._write_home(home, staging, whole))
        if self._device.separate:
            lane.copy(staging.device[:nbytes], staging.host[:nbytes], UP)
        return writes

    def _write_home(self, home: Home, staging: Staging, nbytes: int) -> Handle:
        """Write the staged bytes to disk. What compute adds meanwhile is in the tail too."""
        extent = Extent(home.extent.path, home.extent.offset, nbytes)

        def job(lane: Lane) -> None:
            lane.disk.write(extent, staging.host[:nbytes])

        return self._transfers.submit("stores", job)

    def get(self, layer, batch, seats):
        staging, handle = self._live[layer, batch]
        self._transfers.ready(handle)
        return self._view(staging.device, seats)

    def store(self, layer, batch, seats, token):
        staging, _ = self._live.pop((layer, batch))
        home = self._homes[layer, batch]
        keep = self._store_prompt if token == 0 else self._store_token
        slot = seats.padded + token - 1

        def job(lane: Lane) -> None:
            keep(lane, home, staging, seats, slot)

        home.stored = self._transfers.submit("stores", job, after=(self._device.mark(),))
        staging.busy.append(home.stored)

    def _store_prompt(self, lane: Lane, home: Home, staging: Staging, seats: Seats, slot: int
                      ) -> None:
        nbytes = self._view(staging.device, seats).nbytes
        if home.host is not None:
            lane.copy(home.host[:nbytes], staging.device[:nbytes], DOWN)
            return
        if self._device.separate:
            lane.copy(staging.host[:nbytes], staging.device[:nbytes], DOWN)
            lane.flush()
        home.tail_from, home.tail_count = seats.padded, 0
        extent = Extent(home.extent.path, home.extent.offset, round_up(nbytes, PAGE))
        lane.disk.write(extent, staging.host[: extent.nbytes])

    def _store_token(self, lane: Lane, home: Home, staging: Staging, seats: Seats, slot: int
                     ) -> None:
        token = self._view(staging.device, seats)[:, :, :, slot]
        if self._device.separate:
            landed = typed(self._landing, 0, token.shape, token.dtype)
            lane.copy(landed, token, DOWN)
            lane.flush()
            token = landed
        if home.host is not None:
            self._view(home.host, seats)[:, :, :, slot] = token
            return
        home.tail[:, : token.shape[1], :, home.tail_count] = token
        home.tail_count += 1

    def reset(self):
        for staging in self._ring:
            for handle in staging.busy:
                with contextlib.suppress(Exception):  # nobody wants what was cached any more
                    handle.synchronize()
            staging.busy = []
        for home in self._homes.values():
            home.stored = None
        self._live.clear()


class KVCache:
    """The cache of one block of GPU batches, reused by the next.

    Parameters
    ----------
    shape : CacheShape
    batch_size, batches : int
        The most sequences of a batch, and batches of a block.
    slots : int
        The most slots that a batch will ask for.
    placement : Placement
        Share of each batch's sequences on each tier.
    """

    def __init__(self, shape: CacheShape, *, batch_size: int, batches: int, slots: int,
                 placement: Placement, transfers: Transfers, run_folder: Callable[[], RunFolder]):
        self.shape = shape
        self._device = transfers.device
        self._seats: list[Seats] = []
        self._valid: list[torch.Tensor | None] = []
        gpu, cpu, disk = split(batch_size, placement)
        if not self._device.separate:
            gpu, cpu = gpu + cpu, 0
        self.parts: list[Part] = []
        if gpu:
            self.parts.append(ResidentPart(shape, 0, gpu, batches=batches, slots=slots,
                                           device=self._device))
        for first, last, folder in ((gpu, gpu + cpu, None), (gpu + cpu, batch_size, run_folder)):
            if last > first:
                part = FetchedPart(shape, first, last, transfers=transfers)
                part.allocate(batches, slots, folder)
                self.parts.append(part)

    def begin(self, batches: Sequence[Seats]) -> None:
        """Start a new block: forget what is cached."""
        for part in self.parts:
            part.reset()
        self._seats = list(batches)
        self._valid = [self._valid_slots(seats) for seats in batches]

    def _valid_slots(self, seats: Seats) -> torch.Tensor | None:
        """bool [sequences, slots], False for pads; None when there are none."""
        if not any(seats.pads):
            return None
        pads = torch.tensor(seats.pads)[:, None]
        return (torch.arange(seats.slots) >= pads).to(self._device.torch)

    def _parts(self, batch: int) -> list[Part]:
        return [part for part in self.parts if part.first < len(self._seats[batch].pads)]

    def load(self, layer: int, batch: int, token: int) -> None:
        """Start bringing what compute of (layer, batch) needs; layer counts from 0."""
        for part in self._parts(batch):
            part.load(layer, batch, self._seats[batch], token)

    def store(self, layer: int, batch: int, token: int) -> None:
        """Start writing back what compute of (layer, batch) changed."""
        for part in self._parts(batch):
            part.store(layer, batch, self._seats[batch], token)

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, first: int,
                      lengths: Sequence[int]) -> torch.Tensor:
        """Cache the prompts of sequences first, first + 1, ... and attend within each.

        q is [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], the sequences' rows
        packed one after the other; returns [rows, heads, head_dim].
        """
        seats = self._seats[batch]
        for part in self._parts(batch):
            held = part.get(layer, batch, seats)
            row = 0
            for sequence, length in enumerate(lengths, start=first):
                if part.first <= sequence < part.last:
                    pad = seats.padded - length
                    for cached, new in zip(held[:, sequence - part.first], (k, v), strict=True):
                        # A masked slot still gets multiplied (by 0): it must not hold a NaN.
                        cached[:, :pad] = 0
                        cached[:, pad : seats.padded] = new[row : row + length].transpose(0, 1)
                row += length
        return ops.prefill_attention(q, k, v, list(lengths))

    def attend_token(self, layer: int, batch: int, q, k, v, *, token: int) -> torch.Tensor:
        """Cache one new token of each sequence and attend over all that is cached.

        q is [sequences, heads, head_dim], k and v [sequences, kv_heads, head_dim]; returns
        [sequences, heads, head_dim].
        """
        seats = self._seats[batch]
        slot = seats.padded + token - 1
        outputs = []
        for part in self._parts(batch):
            held = part.get(layer, batch, seats)
            mine = slice(part.first, part.last)
            held[0, :, :, slot] = k[mine]
            held[1, :, :, slot] = v[mine]
            filled = held[:, :, :, : slot + 1]
            valid = self._valid[batch]
            if valid is not None:
                valid = valid[mine, : slot + 1]
            outputs.append(ops.decode_attention(q[mine], filled[0], filled[1], valid))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
