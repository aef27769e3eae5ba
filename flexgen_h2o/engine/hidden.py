"""Hidden states of the batches of a block between layers, spread over the tiers.

While one batch computes a layer, the hidden states of the others rest where the placement says.
All in compute memory: they are used in place. Otherwise a working buffer is gathered before, and
its rows on host and disk are written back after each layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from flexgen_h2o.config.placement import Placement
from flexgen_h2o.storage.disk import AlignedRead, RunFolder
from flexgen_h2o.storage.extent import Extent
from flexgen_h2o.storage.placement import split
from flexgen_h2o.storage.tiers import PAGE, round_up, typed
from flexgen_h2o.storage.transfer import DOWN, UP, Handle, Lane, Transfers

WORKING = 3
"""Working buffers: one being stored, one computed with, one being loaded."""


@dataclass
class Working:
    """Hidden states that compute uses, and a host buffer for the rows that go to disk."""

    device: torch.Tensor
    host: torch.Tensor | None
    busy: list[Handle] = field(default_factory=list)


@dataclass
class Rest:
    """Where a batch's hidden states rest: host rows and an extent for disk rows."""

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
        self._rests = [Rest(gpu=self._device.empty(gpu if away else size)) for _ in range(batches)]
        self._live: dict[int, tuple[Working, Handle | None]] = {}
        self._working: list[Working] = []
        self._next = 0
        if not away:
            return
        disk_bytes = round_up(size, PAGE) if placement.disk > 0 else 0
        path = run_folder().file("hidden.bin", disk_bytes * batches) if disk_bytes else None
        for index, rest in enumerate(self._rests):
            if placement.cpu > 0:
                rest.cpu = self._device.host_empty(cpu)
            if path:
                rest.disk = Extent(path, index * disk_bytes, disk_bytes)
        for _ in range(WORKING):
            host = self._device.host_empty(size) if path else None
            self._working.append(Working(self._device.empty(size), host))

    def _view(self, buffer: torch.Tensor, rows: int) -> torch.Tensor:
        return typed(buffer, 0, (rows, self._width), self._dtype)

    def _take(self) -> Working:
        working = self._working[self._next]
        self._next = (self._next + 1) % WORKING
        return working

    def load(self, batch: int, rows: int) -> None:
        """Start gathering a batch's hidden states for compute."""
        if not self._working:
            return
        rest, working = self._rests[batch], self._take()
        before = [*working.busy, *([rest.stored] if rest.stored else [])]

        def job(lane: Lane) -> None:
            for handle in before:
                handle.synchronize()
            self._gather(lane, rest, working, rows)

        handle = self._transfers.submit("loads", job, after=(self._device.mark(),))
        working.busy = [handle]
        self._live[batch] = (working, handle)

    def get(self, batch: int, rows: int, *, fresh: bool = False) -> torch.Tensor:
        """[rows, hidden] for compute to read and overwrite. fresh: the contents do not matter."""
        if not self._working:
            return self._view(self._rests[batch].gpu, rows)
        if fresh:
            working = self._take()
            for handle in working.busy:
                self._transfers.ready(handle)
            working.busy = []
            self._live[batch] = (working, None)
        working, handle = self._live[batch]
        if handle is not None:
            self._transfers.ready(handle)
        return self._view(working.device, rows)

    def store(self, batch: int, rows: int) -> None:
        """Start putting a batch's hidden states to rest."""
        if not self._working:
            return
        rest, (working, _) = self._rests[batch], self._live.pop(batch)

        def job(lane: Lane) -> None:
            self._scatter(lane, rest, working, rows)

        rest.stored = self._transfers.submit("stores", job, after=(self._device.mark(),))
        working.busy.append(rest.stored)

    def drop(self, batch: int) -> None:
        """Compute is done with a batch's hidden states and nothing of them is kept."""
        self._live.pop(batch, None)

    def reset(self) -> None:
        """Wait for what is under way; call between blocks."""
        for working in self._working:
            for handle in working.busy:
                with contextlib.suppress(Exception):  # nobody wants these any more
                    handle.synchronize()
            working.busy = []
        for rest in self._rests:
            rest.stored = None
        self._live.clear()

    def _spans(self, rows: int) -> tuple[slice, slice, slice]:
        """Byte ranges of the working buffer that rest on (gpu, cpu, disk)."""
        gpu, cpu, disk = split(rows, self._placement)
        first, second, third = (n * self._row_bytes for n in (gpu, gpu + cpu, gpu + cpu + disk))
        return slice(0, first), slice(first, second), slice(second, third)

    def _gather(self, lane: Lane, rest: Rest, working: Working, rows: int) -> None:
        gpu, cpu, disk = self._spans(rows)
        lane.stream.copy(working.device[gpu], rest.gpu[gpu])
        if cpu.stop > cpu.start:
            self._move(lane, working.device[cpu], rest.cpu[: cpu.stop - cpu.start], UP)
        nbytes = disk.stop - disk.start
        if nbytes:
            whole = round_up(nbytes, PAGE)
            lane.disk.read([AlignedRead(rest.disk.path, rest.disk.offset, whole, 0)],
                           working.host[:whole])
            self._move(lane, working.device[disk], working.host[:nbytes], UP)

    def _scatter(self, lane: Lane, rest: Rest, working: Working, rows: int) -> None:
        gpu, cpu, disk = self._spans(rows)
        lane.stream.copy(rest.gpu[gpu], working.device[gpu])
        if cpu.stop > cpu.start:
            self._move(lane, rest.cpu[: cpu.stop - cpu.start], working.device[cpu], DOWN)
        nbytes = disk.stop - disk.start
        if nbytes:
            whole = round_up(nbytes, PAGE)
            self._move(lane, working.host[:nbytes], working.device[disk], DOWN)
            lane.flush()
            lane.disk.write(Extent(rest.disk.path, rest.disk.offset, whole), working.host[:whole])

    def _move(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, link: str) -> None:
        """Between host and compute memory: counted only where they are separate."""
        if self._device.separate:
            lane.copy(target, source, link)
        else:
            target.copy_(source)
