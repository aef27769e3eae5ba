"""A ring of staging buffers that are filled ahead of compute and stored behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Generic, TypeVar

from torch import Tensor

from flexgen_h2o.storage.device import Event
from flexgen_h2o.storage.disk import Extent
from flexgen_h2o.storage.transfer import Handle, TransferQueue, Transfers

Key = TypeVar("Key", bound=Hashable)


@dataclass
class BackingStore:
    """Memory of any tier where data rests while it is not used.

    Attributes
    ----------
    gpu, host : uint8 Tensor or None
    extent : Extent or None
    busy : list of Handle
        Jobs that still write to it.
    """

    gpu: Tensor | None = None
    host: Tensor | None = None
    extent: Extent | None = None
    busy: list[Handle] = field(default_factory=list)


@dataclass
class StagingBuffer:
    """Memory for data that compute uses next, with what transfers of it need.

    Attributes
    ----------
    device : uint8 Tensor
        In compute memory.
    host : uint8 Tensor or None
        In host memory, on the way between disk and GPU; the same tensor as `device` if compute
        memory is host memory.
    updates : tuple of uint8 Tensor
        In host memory, for single slots that are copied from the GPU.
    loaded : Handle or None
        The job that fills the buffer; None if compute fills it.
    busy : list of Handle
        Jobs that may still read or write the buffer.
    free : Event or None
        The end of compute's last use; None until that use is queued.
    """

    device: Tensor
    host: Tensor | None = None
    updates: tuple[Tensor, ...] = ()
    loaded: Handle | None = None
    busy: list[Handle] = field(default_factory=list)
    free: Event | None = None


class BufferRing(Generic[Key]):
    """Staging buffers that are used in turn, each for one key at a time.

    A buffer is reused when the compute and the jobs on it are done; its old key is dropped. An
    exception of a job is raised where the job is waited for: in `get`, `take` and `synchronize`.

    Parameters
    ----------
    transfers : Transfers
    buffers : sequence of StagingBuffer
        May be empty if nothing is ever loaded or taken.
    kind : str
        Kind of the queues of loads; stores have their own.
    """

    def __init__(self, transfers: Transfers, buffers: Sequence[StagingBuffer], *,
                 kind: str = "loads"):
        self.buffers = tuple(buffers)
        self._transfers = transfers
        self._kind = kind
        self._order = cycle(self.buffers)
        self._buffers: dict[Key, StagingBuffer] = {}

    def load(self, key: Key,
             fill: Callable[[TransferQueue, StagingBuffer], Iterable[Handle] | None] | None, *,
             after: Iterable[Handle] = ()) -> None:
        """Start to fill the next buffer for a key.

        Parameters
        ----------
        fill : callable (queue, buffer), optional
            Runs after all jobs on the buffer. Compute may still use the buffer, but is done before
            copies of the queue. Returns jobs on the buffer that it has submitted itself. None: only
            assign a buffer.
        after : iterable of Handle
            Jobs to wait for first.
        """
        buffer = self._next(key)
        free = self._transfers.device.record_event() if buffer.free is None else buffer.free
        after, before = tuple(after), buffer.busy
        busy: list[Handle] = []

        def job(queue: TransferQueue) -> None:
            # Iterate over `before` itself: its first job may still append its own jobs.
            for handle in chain(before, after):
                handle.synchronize()
            if fill is not None:
                busy.extend(fill(queue, buffer) or ())

        buffer.loaded = self._transfers.submit(self._kind, job, after=(free,))
        busy.append(buffer.loaded)
        buffer.busy, buffer.free = busy, None

    def take(self, key: Key) -> StagingBuffer:
        """Return the next buffer for a key, ready for compute to overwrite."""
        buffer = self._next(key)
        for handle in buffer.busy:
            self._transfers.ready(handle)
        # Compute waits for these jobs, not the host: keep them in `busy` for the next load.
        buffer.loaded, buffer.free = None, None
        return buffer

    def get(self, key: Key) -> StagingBuffer:
        """Return the buffer of a key, ready for compute until `store` or `release`.

        Raises
        ------
        KeyError
            The key has no buffer.
        """
        buffer = self._buffers[key]
        if buffer.loaded is not None:
            self._transfers.ready(buffer.loaded)
        return buffer

    def store(self, key: Key, empty: Callable[[TransferQueue, StagingBuffer], None]) -> Handle:
        """Release the buffer of a key, and run ``empty(queue, buffer)`` after all work on it."""
        buffer = self._buffers[key]
        self.release(key)
        before = buffer.busy

        def job(queue: TransferQueue) -> None:
            for handle in before:
                handle.synchronize()
            empty(queue, buffer)

        handle = self._transfers.submit("stores", job, after=(buffer.free,))
        buffer.busy = [handle]
        return handle

    def release(self, key: Key) -> None:
        """Release the buffer of a key, if it has one, after the compute that is queued so far."""
        buffer = self._buffers.pop(key, None)
        if buffer is not None:
            buffer.free = self._transfers.device.record_event()

    def synchronize(self) -> None:
        """Wait for all jobs, and drop all keys."""
        self._buffers.clear()
        for buffer in self.buffers:
            for handle in buffer.busy:
                handle.synchronize()

    def reset(self) -> None:
        """Wait for all jobs, ignore their errors, and drop all keys."""
        self._buffers.clear()
        for buffer in self.buffers:
            for handle in buffer.busy:
                with suppress(Exception):
                    handle.synchronize()
            buffer.busy = []

    def _next(self, key: Key) -> StagingBuffer:
        """Assign the next buffer of the ring to a key."""
        buffer = next(self._order)
        self._buffers = {old_key: old for old_key, old in self._buffers.items()
                         if old is not buffer}
        self._buffers[key] = buffer
        return buffer
