"""Transfers that overlap compute: queues of jobs, handles to wait for, and a record of transfers.

Jobs read the disk, copy between host and device, and write the disk, after other jobs that they
depend on. Jobs depend only on earlier jobs, and queues are first in, first out: there are no
deadlocks. Jobs of one kind alternate between queues, so that the disk starts on the next job while
the last chunks of one arrive; order needs a dependency. A `BufferRing` has staging buffers that
are filled ahead of compute and stored behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flexgen_h2o.metrics.trace import COMPUTE, WAITING, LinkStats, Trace
from flexgen_h2o.storage.device import Device, Event, typed
from flexgen_h2o.storage.disk import WORKERS, Disk, Extent

H2D, D2H = "cpu->gpu", "gpu->cpu"
ATTENTION, EXPERTS, RECALLS = "attention", "host experts", "recalls"
QUEUES_OF = {kind: (f"{kind} 0", f"{kind} 1") for kind in ("weights", "loads", "stores")} | {
    ATTENTION: (ATTENTION,), EXPERTS: (EXPERTS,), RECALLS: (RECALLS,),
    "experts": tuple(f"experts {number}" for number in range(4))}
"""The queues of each kind of job, used in turn. Attention and experts on the host run one job at a
time, and recalls run in order. Loads of experts are small: four at once keep the disk busy."""

QUEUES = tuple(chain.from_iterable(QUEUES_OF.values()))


class Handle:
    """A submitted job."""

    def __init__(self, future: Future):
        self._future = future

    def event(self) -> Event:
        """Wait until the host has run the job; return the event after its copies.

        Raises the exception of the job, if it failed.
        """
        return self._future.result()

    @property
    def done(self) -> bool:
        """True if the host has run the job; its copies may still run."""
        return self._future.done()

    def synchronize(self) -> None:
        """Wait until the job and its copies are done."""
        self.event().synchronize()


class TransferQueue:
    """A thread and a stream that run jobs one after the other.

    Attributes
    ----------
    disk : Disk
        Its reads and writes block the thread.
    """

    def __init__(self, name: str, transfers: Transfers):
        self.disk = transfers.disk
        self._transfers = transfers
        self._stream = transfers.device.stream()
        self._host_buffers: dict[int, torch.Tensor] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def host_like(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return uninitialized host tensors like these. The queue's next job reuses their memory.
        """
        for number, x in enumerate(tensors):
            if number not in self._host_buffers or self._host_buffers[number].nbytes < x.nbytes:
                self.flush()  # copies may still use the smaller buffer
                self._host_buffers[number] = self._transfers.device.host_empty(x.nbytes)
        return [typed(self._host_buffers[number], 0, x.shape, x.dtype)
                for number, x in enumerate(tensors)]

    def copy(self, target: torch.Tensor, source: torch.Tensor, link: str | None) -> None:
        """Start a copy on the stream, and record it for a link; None: within one memory."""
        began = self._stream.record_timestamp()
        self._stream.copy(target, source)
        if link is not None:
            self._transfers.moved(link, target.nbytes, began, self._stream.record_timestamp())

    def flush(self) -> None:
        """Wait on the host until the copies so far are done."""
        self._stream.record_event().synchronize()

    def submit(self, job: Callable[[TransferQueue], None], after: Iterable[Handle | Event]
               ) -> Handle:
        """Add a job, whose copies start after `after`."""
        before = tuple(after)

        def run() -> Event:
            for item in before:
                self._stream.wait_event(item.event() if isinstance(item, Handle) else item)
            # Inference mode is per thread, and buffers may have been allocated in it.
            with torch.inference_mode():
                job(self)
            return self._stream.record_event()

        return Handle(self._pool.submit(run))

    def finish(self) -> None:
        """Wait until the host has run all jobs that have been submitted."""
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Cancel jobs that have not started, and wait for the running one."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Transfers:
    """The queues of one engine, its disk, and its record of transfers and spans.

    Weights, other loads and stores have separate queues, so that a write never blocks a read.

    Parameters
    ----------
    device : Device
    links : LinkStats
        Gets the bytes and times of transfers.
    trace : Trace
        Gets the spans of transfers and compute.
    disks : int
        Number of disks to keep busy: offload files may be striped over several.
    """

    def __init__(self, device: Device, *, links: LinkStats, trace: Trace, disks: int = 1):
        self.device = device
        self.links = links
        self.trace = trace
        self._pending: deque[tuple] = deque()
        self.disk = Disk(disks * WORKERS, record=self._record)
        self._latest: dict[str, Handle] = {}
        self._lock = threading.Lock()
        self._queues = {name: TransferQueue(name, self) for name in QUEUES}
        self._next_queues = {kind: cycle(names) for kind, names in QUEUES_OF.items()}

    def submit(self, kind: str, job, *, after: Iterable[Handle | Event] = ()) -> Handle:
        """Run ``job(queue)`` on the next queue of a kind, with its copies after `after`."""
        with self._lock:  # a job may submit another
            name = next(self._next_queues[kind])
            handle = self._latest[name] = self._queues[name].submit(job, after)
        return handle

    def drain(self) -> None:
        """Wait until all submitted jobs are done."""
        for handle in self._latest_jobs():
            handle.synchronize()

    def _latest_jobs(self) -> Iterator[Handle]:
        """Yield the latest job of each queue, for the caller to wait for, until there is none.

        Jobs may submit others in the meantime: `_latest` is accessed under the lock only.
        """
        while True:
            with self._lock:
                latest = next(iter(self._latest.items()), None)
            if latest is None:
                return
            name, handle = latest
            yield handle
            with self._lock:
                if self._latest.get(name) is handle:
                    del self._latest[name]

    def ready(self, handle: Handle) -> None:
        """Order compute after a job; the host waits only for the host's part (disk reads)."""
        with self.compute_span("wait", track=WAITING):
            self.device.wait_event(handle.event())

    def moved(self, link: str, nbytes: int, began, ended) -> None:
        """Record a copy between two timestamps that may not be done yet."""
        self._pending.append((link, link, nbytes, began, ended))

    def compute_span(self, name: str, *, track: str = COMPUTE) -> AbstractContextManager[None]:
        """Return a context manager that records its body as a span of compute in the trace."""
        return self._stamped(name, track) if self.trace.enabled else nullcontext()

    @contextmanager
    def _stamped(self, name: str, track: str) -> Iterator[None]:
        began = self.device.record_timestamp()
        yield
        self._pending.append((name, track, None, began, self.device.record_timestamp()))

    def record_finished(self) -> None:
        """Record the copies and spans whose timestamps are done; the others stay pending."""
        for _ in range(len(self._pending)):
            name, track, nbytes, began, ended = entry = self._pending.popleft()
            if not self.device.is_done(ended):
                self._pending.append(entry)
                continue
            start, end = self.device.seconds(began), self.device.seconds(ended)
            if nbytes is None:
                self.trace.add(name, track, start, end)
            else:
                self._record(track, nbytes, start, end)

    def abandon(self) -> None:
        """Wait for all jobs and copies and ignore errors, before buffers are freed."""
        for queue in self._queues.values():  # also jobs without a handle, after an interrupt
            with suppress(Exception):
                queue.finish()
        for handle in self._latest_jobs():
            with suppress(Exception):
                handle.synchronize()
        for queue in self._queues.values():  # copies of failed jobs
            with suppress(Exception):
                queue.flush()
        with suppress(Exception):  # zero-copy access to host memory
            self.device.record_event().synchronize()
        self._pending.clear()

    def close(self) -> None:
        """Stop the queues, then the disk."""
        for queue in self._queues.values():
            queue.close()
        self.disk.close()

    def _record(self, link: str, nbytes: int, start: float, end: float) -> None:
        self.links.add(link, nbytes, start, end)
        if self.trace.enabled:
            self.trace.add(link, link, start, end, nbytes)


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
    """Memory for data that compute uses next, with the state of its transfers.

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

    def fill(self, transfers: Transfers, kind: str, fill: Fill | None, *,
             after: Iterable[Handle] = (), ignore_errors: bool = False) -> None:
        """Start to fill the buffer, after all jobs on it.

        Parameters
        ----------
        kind : str
            Kind of the queue.
        fill : callable (queue, buffer), optional
            Compute may still use the buffer, but is done before copies of the queue. Returns jobs
            on the buffer that it has submitted itself. None: only wait.
        after : iterable of Handle
            Jobs to wait for first.
        ignore_errors : bool
            Ignore the errors of the earlier jobs. False: `loaded` fails with them.
        """
        free = transfers.device.record_event() if self.free is None else self.free
        after, before = tuple(after), self.busy
        busy: list[Handle] = []

        def job(queue: TransferQueue) -> None:
            # Iterate over `before` itself: its first job may still append its own jobs.
            for handle in chain(before, after):
                with suppress(Exception) if ignore_errors else nullcontext():
                    handle.synchronize()
            if fill is not None:
                busy.extend(fill(queue, self) or ())

        self.loaded = transfers.submit(kind, job, after=(free,))
        busy.append(self.loaded)
        self.busy = busy


Fill = Callable[[TransferQueue, StagingBuffer], Iterable[Handle] | None]
"""Fills a buffer; see `StagingBuffer.fill`."""


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

    def load(self, key: Key, fill: Fill | None, *, after: Iterable[Handle] = ()) -> None:
        """Start to fill the next buffer for a key: see `StagingBuffer.fill`."""
        buffer = self._next(key)
        buffer.fill(self._transfers, self._kind, fill, after=after)
        buffer.free = None

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
