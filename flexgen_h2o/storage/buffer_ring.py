"""Staging buffers that are filled ahead of compute and emptied behind it, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Generic, TypeVar

from torch import Tensor

from flexgen_h2o.storage.disk import Extent
from flexgen_h2o.storage.tiers import Event
from flexgen_h2o.storage.transfer import Handle, Lane, Transfers

Key = TypeVar("Key", bound=Hashable)


@dataclass
class BackingStore:
    """The place where a thing rests while it is not used: bytes on any of the three tiers.

    `busy` are the jobs that still put something there.
    """

    gpu: Tensor | None = None
    host: Tensor | None = None
    extent: Extent | None = None
    busy: list[Handle] = field(default_factory=list)


@dataclass
class StagingBuffer:
    """Memory that compute uses, and what its contents pass on their way: uint8 tensors.

    Attributes
    ----------
    device : Tensor
        In compute memory.
    host : Tensor or None
        In host memory, and the same tensor where that is compute memory; None where nothing
        passes it.
    landing : tuple of Tensor
        In host memory, for results of compute that come down apart from the buffer.
    loaded : Handle or None
        The job that fills the buffer; None where compute does.
    busy : list of Handle
        Jobs that may still read or write the buffer.
    free : Event or None
        The end of compute's last use; None before that has been given to compute.
    """

    device: Tensor
    host: Tensor | None = None
    landing: tuple[Tensor, ...] = ()
    loaded: Handle | None = None
    busy: list[Handle] = field(default_factory=list)
    free: Event | None = None


class BufferRing(Generic[Key]):
    """Staging buffers that are taken in turn, each for one key at a time.

    A buffer is taken again only when the compute and the jobs that used it are over; no other
    buffer's are waited for. The key that had it has none then. What a job raises comes out where
    the job is waited for: in `get`, `take` and `settle`.

    Parameters
    ----------
    transfers : Transfers
    buffers : sequence of StagingBuffer
        Of any number, but without one nothing can be loaded or taken.
    kind : str
        The lanes of loads; stores have their own.
    """

    def __init__(self, transfers: Transfers, buffers: Sequence[StagingBuffer], *,
                 kind: str = "loads"):
        self.buffers = tuple(buffers)
        self._transfers = transfers
        self._kind = kind
        self._turns = cycle(self.buffers)
        self._held: dict[Key, StagingBuffer] = {}

    def load(self, key: Key, fill: Callable[[Lane, StagingBuffer], Iterable[Handle] | None], *,
             after: Iterable[Handle] = ()) -> None:
        """Start ``fill(lane, buffer)`` once the jobs `after` and all that used the buffer are over.

        Compute may still use it then, but is over before what `fill` queues on the lane's stream.
        `fill` returns the jobs that it has submitted and that use the buffer, too.
        """
        buffer = self._next(key)
        free = self._transfers.device.mark() if buffer.free is None else buffer.free
        after, before = tuple(after), buffer.busy
        busy: list[Handle] = []

        def job(lane: Lane) -> None:
            # Not a copy of `before`: the first of these jobs may yet add those that it submits.
            for handle in chain(before, after):
                handle.synchronize()
            busy.extend(fill(lane, buffer) or ())

        buffer.loaded = self._transfers.submit(self._kind, job, after=(free,))
        busy.append(buffer.loaded)
        buffer.busy, buffer.free = busy, None

    def take(self, key: Key) -> StagingBuffer:
        """The next buffer, ready for compute to overwrite."""
        buffer = self._next(key)
        for handle in buffer.busy:
            self._transfers.ready(handle)
        # Compute waits for these jobs, but the host does not: who fills the buffer next waits, too.
        buffer.loaded, buffer.free = None, None
        return buffer

    def get(self, key: Key) -> StagingBuffer:
        """The key's buffer, ready for compute to use until `store` or `release`.

        Raises
        ------
        KeyError
            The key has none.
        """
        buffer = self._held[key]
        if buffer.loaded is not None:
            self._transfers.ready(buffer.loaded)
        return buffer

    def store(self, key: Key, empty: Callable[[Lane, StagingBuffer], None]) -> Handle:
        """Start ``empty(lane, buffer)`` behind what compute has been given; the key gives it up.

        It comes after the buffer's other jobs, too, which may be writing what was loaded elsewhere.
        """
        buffer = self._held[key]
        self.release(key)
        before = buffer.busy

        def job(lane: Lane) -> None:
            for handle in before:
                handle.synchronize()
            empty(lane, buffer)

        handle = self._transfers.submit("stores", job, after=(buffer.free,))
        buffer.busy = [handle]
        return handle

    def release(self, key: Key) -> None:
        """Give a key's buffer up, if it has one: compute has been given its last use of it."""
        buffer = self._held.pop(key, None)
        if buffer is not None:
            buffer.free = self._transfers.device.mark()

    def settle(self) -> None:
        """Wait for all jobs, and take all buffers from their keys."""
        self._held.clear()
        for buffer in self.buffers:
            for handle in buffer.busy:
                handle.synchronize()

    def reset(self) -> None:
        """Do as `settle` does, but drop errors: what was loaded and stored is not used again."""
        self._held.clear()
        for buffer in self.buffers:
            for handle in buffer.busy:
                with suppress(Exception):
                    handle.synchronize()
            buffer.busy = []

    def _next(self, key: Key) -> StagingBuffer:
        """The buffer whose turn it is, as the key's."""
        buffer = next(self._turns)
        self._held = {other: held for other, held in self._held.items() if held is not buffer}
        self._held[key] = buffer
        return buffer
