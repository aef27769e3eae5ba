"""Hidden states of the batches of a block between layers, spread over the tiers.

While one batch computes a layer, the hidden states of the others rest where the placement says.
All in compute memory: they are used in place. Otherwise a staging buffer is gathered before, and
its rows on host and disk are written back after each layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flexgen_h2o.config.limits import HIDDEN_BUFFERS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.storage.disk import AlignedRead, RunFolder
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import D2H, H2D, Handle, Lane, Transfers


@dataclass
class StagingBuffer:
    """Hidden states that compute uses, and a host buffer for the rows that go to disk."""

    device: torch.Tensor
    host: torch.Tensor | None
    busy: list[Handle] = field(default_factory=list)


@dataclass
class BackingStore:
    """The backing store of a batch's hidden states: host rows and an extent for disk rows."""

    gpu: torch.Tensor
    cpu: torch.Tensor | None = None
    disk: Extent | None = None
    stored: Handle | None = None


class HiddenStates:
    """The residual streams of one block: [rows, hidden] per batch.

    Parameters
    ----------
    rows, hidden : int
        The most rows of a batch, and their width.
    dtype : torch.dtype
    batches : int
        Batches of a block.
    placement : Placement
        Share of each batch's rows on each tier.
    """

    def __init__(self, rows: int, hidden: int, dtype: torch.dtype, *, batches: int,
                 placement: Placement, transfers: Transfers, run_folder: Callable[[], RunFolder]):
        self._transfers = transfers
        self._device = transfers.device
        self._placement = placement
        self._width = hidden
        self._dtype = dtype
        self._row_bytes = hidden * dtype.itemsize
        away = placement.disk > 0 or (self._device.separate and placement.cpu > 0)
        size = rows * self._row_bytes
        gpu, cpu, _ = (min(size, self._row_bytes + int(size * f)) for f in placement.fractions())
        self._stores = [BackingStore(gpu=self._device.empty(gpu if away else size))
                        for _ in range(batches)]
        self._live: dict[int, tuple[StagingBuffer, Handle | None]] = {}
        self._staging: list[StagingBuffer] = []
        self._next = 0
        if not away:
            return
        disk_bytes = round_up(size, PAGE) if placement.disk > 0 else 0
        path = run_folder().file("hidden.bin", disk_bytes * batches) if disk_bytes else None
        for index, store in enumerate(self._stores):
            if placement.cpu > 0:
                store.cpu = self._device.host_empty(cpu)
            if path:
                store.disk = Extent(path, index * disk_bytes, disk_bytes)
        for _ in range(HIDDEN_BUFFERS):
            host = self._device.host_empty(size) if path else None
            self._staging.append(StagingBuffer(self._device.empty(size), host))

    def _view(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        return typed(buffer, 0, (rows, self._width), self._dtype)

    def _take(self) -> StagingBuffer:
        staging = self._staging[self._next]
        self._next = (self._next + 1) % HIDDEN_BUFFERS
        return staging

    def load(self, batch: int, rows: int) -> None:
        """Start gathering a batch's hidden states for compute."""
        if not self._staging:
            return
        store, staging = self._stores[batch], self._take()
        before = [*staging.busy, *([store.stored] if store.stored else [])]

        def job(lane: Lane) -> None:
            for handle in before:
                handle.synchronize()
            self._gather(lane, store, staging, rows)

        handle = self._transfers.submit("loads", job, after=(self._device.mark(),))
        staging.busy = [handle]
        self._live[batch] = (staging, handle)

    def get(self, batch: int, rows: int, *, fresh: bool = False) -> torch.Tensor:
        """[rows, hidden] for compute to read and overwrite. fresh: the contents do not matter."""
        if not self._staging:
            return self._view(self._stores[batch].gpu, rows)
        if fresh:
            staging = self._take()
            for handle in staging.busy:
                self._transfers.ready(handle)
            staging.busy = []
            self._live[batch] = (staging, None)
        staging, handle = self._live[batch]
        if handle is not None:
            self._transfers.ready(handle)
        return self._view(staging.device, rows)

    def store(self, batch: int, rows: int) -> None:
        """Start putting a batch's hidden states to rest."""
        if not self._staging:
            return
        store, (staging, _) = self._stores[batch], self._live.pop(batch)

        def job(lane: Lane) -> None:
            self._scatter(lane, store, staging, rows)

        store.stored = self._transfers.submit("stores", job, after=(self._device.mark(),))
        staging.busy.append(store.stored)

    def drop(self, batch: int) -> None:
        """Compute is done with a batch's hidden states and nothing of them is kept."""
        self._live.pop(batch, None)

    def reset(self) -> None:
        """Wait for what is under way; call between blocks."""
        for staging in self._staging:
            for handle in staging.busy:
                with contextlib.suppress(Exception):  # they are not used again
                    handle.synchronize()
            staging.busy = []
        for store in self._stores:
            store.stored = None
        self._live.clear()

    def _spans(self, rows: int) -> tuple[slice, slice, slice]:
        """Byte ranges of the staging buffer that rest on (gpu, cpu, disk)."""
        gpu, cpu, disk = split(rows, self._placement)
        first, second, third = (n * self._row_bytes for n in (gpu, gpu + cpu, gpu + cpu + disk))
        return slice(0, first), slice(first, second), slice(second, third)

    def _gather(self, lane: Lane, store: BackingStore, staging: StagingBuffer, rows: int) -> None:
        gpu, cpu, disk = self._spans(rows)
        lane.stream.copy(staging.device[gpu], store.gpu[gpu])
        if cpu.stop > cpu.start:
            self._move(lane, staging.device[cpu], store.cpu[: cpu.stop - cpu.start], H2D)
        nbytes = disk.stop - disk.start
        if nbytes:
            whole = round_up(nbytes, PAGE)
            lane.disk.read([AlignedRead(store.disk.path, store.disk.offset, whole, 0)],
                           staging.host[:whole])
            self._move(lane, staging.device[disk], staging.host[:nbytes], H2D)

    def _scatter(self, lane: Lane, store: BackingStore, staging: StagingBuffer, rows: int) -> None:
        gpu, cpu, disk = self._spans(rows)
        lane.stream.copy(store.gpu[gpu], staging.device[gpu])
        if cpu.stop > cpu.start:
            self._move(lane, store.cpu[: cpu.stop - cpu.start], staging.device[cpu], D2H)
        nbytes = disk.stop - disk.start
        if nbytes:
            whole = round_up(nbytes, PAGE)
            self._move(lane, staging.host[:nbytes], staging.device[disk], D2H)
            lane.flush()
            lane.disk.write(Extent(store.disk.path, store.disk.offset, whole), staging.host[:whole])

    def _move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, link: str) -> None:
        """Between host and compute memory: counted only where they are separate."""
        if self._device.separate:
            lane.copy(target, source, link)
        else:
            target.copy_(source)
