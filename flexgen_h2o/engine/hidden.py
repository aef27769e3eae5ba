"""Hidden states of the batches of a block between layers, spread over the tiers.

While one batch computes a layer, the hidden states of the others rest where the placement says.
All in compute memory: they are used in place. Otherwise a staging buffer is gathered before, and
its rows on host and disk are written back after each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from flexgen_h2o.config.limits import HIDDEN_BUFFERS
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.storage.buffer_ring import BackingStore, BufferRing, StagingBuffer
from flexgen_h2o.storage.disk import AlignedRead, RunFolder
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import D2H, H2D, Lane, Transfers


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
        self._away = placement.disk > 0 or (self._device.separate and placement.cpu > 0)
        size = rows * self._row_bytes
        gpu, cpu, _ = (min(size, self._row_bytes + int(size * f)) for f in placement.fractions())
        self._stores = [BackingStore(self._device.empty(gpu if self._away else size))
                        for _ in range(batches)]
        disk_bytes = round_up(size, PAGE) if placement.disk > 0 else 0
        path = run_folder().file("hidden.bin", disk_bytes * batches) if disk_bytes else None
        for index, store in enumerate(self._stores if self._away else ()):
            if placement.cpu > 0:
                store.host = self._device.host_empty(cpu)
            if path:
                store.extent = Extent(path, index * disk_bytes, disk_bytes)
        self._ring: BufferRing[int] = BufferRing(transfers, [
            StagingBuffer(self._device.empty(size), self._device.host_empty(size) if path else None)
            for _ in range(HIDDEN_BUFFERS if self._away else 0)])

    @property
    def stays(self) -> bool:
        """True if hidden states are computed where they rest."""
        return not self._away

    def _view(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        return typed(buffer, 0, (rows, self._width), self._dtype)

    def load(self, batch: int, rows: int) -> None:
        """Start gathering a batch's hidden states for compute."""
        if self._away:
            store = self._stores[batch]
            self._ring.load(batch, partial(self._gather, store=store, rows=rows), after=store.busy)

    def get(self, batch: int, rows: int, *, fresh: bool = False) -> torch.Tensor:
        """[rows, hidden] for compute to read and overwrite. fresh: the contents do not matter."""
        if not self._away:
            return self._view(self._stores[batch].gpu, rows)
        buffer = self._ring.take(batch) if fresh else self._ring.get(batch)
        return self._view(buffer.device, rows)

    def store(self, batch: int, rows: int) -> None:
        """Start putting a batch's hidden states to rest."""
        if self._away:
            store = self._stores[batch]
            store.busy = [self._ring.store(batch, partial(self._scatter, store=store, rows=rows))]

    def drop(self, batch: int) -> None:
        """Compute is done with a batch's hidden states and nothing of them is kept."""
        self._ring.release(batch)

    def reset(self) -> None:
        """Wait for what is under way; call between blocks."""
        self._ring.reset()
        for store in self._stores:
            store.busy = []

    def _spans(self, rows: int) -> tuple[slice, slice, slice]:
        """Byte ranges of the staging buffer that rest on (gpu, cpu, disk)."""
        gpu, cpu, disk = split(rows, self._placement)
        first, second, third = (n * self._row_bytes for n in (gpu, gpu + cpu, gpu + cpu + disk))
        return slice(0, first), slice(first, second), slice(second, third)

    def _gather(self, lane: Lane, staging: StagingBuffer, *, store: BackingStore, rows: int
                ) -> None:
        gpu, cpu, disk = self._spans(rows)
        lane.stream.copy(staging.device[gpu], store.gpu[gpu])
        if cpu.stop > cpu.start:
            self._move(lane, staging.device[cpu], store.host[: cpu.stop - cpu.start], H2D)
        nbytes = disk.stop - disk.start
        if nbytes:
            whole = round_up(nbytes, PAGE)
            lane.disk.read([AlignedRead(store.extent.path, store.extent.offset, whole, 0)],
                           staging.host[:whole])
            self._move(lane, staging.device[disk], staging.host[:nbytes], H2D)

    def _scatter(self, lane: Lane, staging: StagingBuffer, *, store: BackingStore, rows: int
                 ) -> None:
        gpu, cpu, disk = self._spans(rows)
        lane.stream.copy(store.gpu[gpu], staging.device[gpu])
        if cpu.stop > cpu.start:
            self._move(lane, store.host[: cpu.stop - cpu.start], staging.device[cpu], D2H)
        nbytes = disk.stop - disk.start
        if nbytes:
            extent = Extent(store.extent.path, store.extent.offset, round_up(nbytes, PAGE))
            self._move(lane, staging.host[:nbytes], staging.device[disk], D2H)
            lane.flush()
            lane.disk.write(extent, staging.host[: extent.nbytes])

    def _move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, link: str) -> None:
        """Between host and compute memory: counted only where they are separate."""
        if self._device.separate:
            lane.copy(target, source, link)
        else:
            target.copy_(source)
