"""Movement beside compute: lanes of jobs, handles to wait for, and the record of what moved.

A lane is a thread with a stream. A job on it may read the disk, copy between host and device, and
write the disk; it runs after the jobs that it names, while compute goes on. Jobs name only jobs
that were submitted before them and every lane is first in, first out: there can be no deadlock.
Jobs of one kind go to two lanes in turn, so that the disk has chunks of the next one at hand while
the last ones of a job come in; what has to be in order must name what it follows.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain, cycle

import torch

from flexgen_h2o.metrics.trace import COMPUTE, WAITING, LinkStats, Trace
from flexgen_h2o.storage.disk import Disk
from flexgen_h2o.storage.tiers import Device, Event

H2D, D2H = "cpu->gpu", "gpu->cpu"
ATTENTION, EXPERTS, RECALLS = "attention", "host experts", "recalls"
LANES_OF = {kind: (f"{kind} 0", f"{kind} 1") for kind in ("weights", "loads", "stores")} | {
    ATTENTION: (ATTENTION,), EXPERTS: (EXPERTS,), RECALLS: (RECALLS,),
    "experts": tuple(f"experts {lane}" for lane in range(4))}
"""The lanes of each kind of job, which take turns; the host attends to one thing, and computes the
experts of one layer, at a time. What is recalled comes in the order in which it is wanted. An
expert that comes is small: several do at once, so that the disk has enough to do."""

LANES = tuple(chain.from_iterable(LANES_OF.values()))


class Handle:
    """A job under way."""

    def __init__(self, future: Future):
        self._future = future

    def event(self) -> Event:
        """Wait until the job has been carried out by the host; the event after its copies.

        Raises whatever the job raised.
        """
        return self._future.result()

    @property
    def done(self) -> bool:
        """True if the host has carried the job out; its copies may be under way."""
        return self._future.done()

    def synchronize(self) -> None:
        """Wait until every byte that the job moves is in place."""
        self.event().synchronize()


class Lane:
    """A thread and its stream; jobs get it to move bytes with."""

    def __init__(self, name: str, transfers: Transfers):
        self._transfers = transfers
        self.stream = transfers.device.stream()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def disk(self) -> Disk:
        """The disk, for reads and writes that this lane waits for."""
        return self._transfers.disk

    def copy(self, target: torch.Tensor, source: torch.Tensor, link: str) -> None:
        """Queue a copy on the stream and record it under `link`."""
        began = self.stream.stamp()
        self.stream.copy(target, source)
        self._transfers.moved(link, target.nbytes, began, self.stream.stamp())

    def flush(self) -> None:
        """Wait on the host until the queued copies are done."""
        self.stream.mark().synchronize()

    def submit(self, job: Callable[[Lane], None], after: Iterable[Handle | Event]) -> Handle:
        """Queue `job`; the stream starts its copies after `after`."""
        before = tuple(after)

        def run() -> Event:
            for item in before:
                self.stream.wait(item.event() if isinstance(item, Handle) else item)
            # The mode is the thread's own, and a caller's may have made the buffers.
            with torch.inference_mode():
                job(self)
            return self.stream.mark()

        return Handle(self._pool.submit(run))

    def finish(self) -> None:
        """Wait until all jobs that have been submitted so far have been carried out by the host."""
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Drop what has not started and wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Transfers:
    """The lanes of one engine, its disk, and the record of bytes, times and spans.

    Weights, other loads and stores have lanes of their own, so that a write never stalls a read.
    """

    def __init__(self, device: Device, *, links: LinkStats, trace: Trace):
        self.device = device
        self._links = links
        self._trace = trace
        self._unsettled: deque[tuple] = deque()
        self.disk = Disk(record=self._record)
        self._latest: dict[str, Handle] = {}
        self._lock = threading.Lock()
        self._lanes = {name: Lane(name, self) for name in LANES}
        self._next_lanes = {kind: cycle(names) for kind, names in LANES_OF.items()}

    def submit(self, kind: str, job, *, after: Iterable[Handle | Event] = ()) -> Handle:
        """Run ``job(lane)`` on the next lane of a kind of `KINDS`, its copies after `after`."""
        with self._lock:  # a job may submit another
            lane = next(self._next_lanes[kind])
            handle = self._latest[lane] = self._lanes[lane].submit(job, after)
        return handle

    def drain(self) -> None:
        """Wait until all that was submitted is done (a lane's newest job is its last)."""
        for handle in self._under_way():
            handle.synchronize()

    def _under_way(self) -> Iterator[Handle]:
        """The newest job of each lane, until there is none; each must be waited for.

        What is waited for may submit more meanwhile, so `_latest` is walked through under the lock.
        """
        while True:
            with self._lock:
                found = next(iter(self._latest.items()), None)
            if found is None:
                return
            lane, handle = found
            yield handle
            with self._lock:
                if self._latest.get(lane) is handle:
                    del self._latest[lane]

    def ready(self, handle: Handle) -> None:
        """Order compute after `handle`; the host waits only for its own share (disk reads)."""
        with self.compute_span("wait", lane=WAITING):
            self.device.wait(handle.event())

    def moved(self, link: str, nbytes: int, began, ended) -> None:
        """Record a copy between two stamps, whose times may not be known yet."""
        self._unsettled.append((link, link, nbytes, began, ended))

    def compute_span(self, name: str, *, lane: str = COMPUTE) -> AbstractContextManager[None]:
        """Record the body of a ``with`` statement as a span in compute's own queue."""
        return self._stamped(name, lane) if self._trace.enabled else contextlib.nullcontext()

    @contextlib.contextmanager
    def _stamped(self, name: str, lane: str) -> Iterator[None]:
        began = self.device.stamp()
        yield
        self._unsettled.append((name, lane, None, began, self.device.stamp()))

    def host_span(self, name: str, lane: str) -> AbstractContextManager[None]:
        """Record the body of a ``with`` statement as a span of the host's own work."""
        return self._trace.span(name, lane)

    def settle(self) -> None:
        """Turn the stamps that have been reached into times; the others wait for the next call."""
        for _ in range(len(self._unsettled)):
            name, lane, nbytes, began, ended = entry = self._unsettled.popleft()
            if not self.device.reached(ended):
                self._unsettled.append(entry)
                continue
            start, end = self.device.seconds(began), self.device.seconds(ended)
            if nbytes is None:
                self._trace.add(name, lane, start, end)
            else:
                self._record(lane, nbytes, start, end)

    def abandon(self) -> None:
        """Let nothing be under way any more, whatever became of it: before buffers go."""
        for lane in self._lanes.values():  # an interrupt may come before `submit` has the handle
            with contextlib.suppress(Exception):
                lane.finish()
        for handle in self._under_way():
            with contextlib.suppress(Exception):
                handle.synchronize()
        for lane in self._lanes.values():  # copies before a job that failed
            with contextlib.suppress(Exception):
                lane.flush()
        with contextlib.suppress(Exception):  # a GPU may read and write host memory in place
            self.device.mark().synchronize()
        self._unsettled.clear()

    def close(self) -> None:
        """Stop the lanes, then the disk under them."""
        for lane in self._lanes.values():
            lane.close()
        self.disk.close()

    def _record(self, link: str, nbytes: int, start: float, end: float) -> None:
        self._links.add(link, nbytes, start, end)
        if self._trace.enabled:
            self._trace.add(link, link, start, end, nbytes)
