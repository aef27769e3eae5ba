"""A fake GPU: memory that compute can't share with the host, and copies as late as allowed."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

import torch

from flexgen_h2o.kernels.dispatch import GPU
from flexgen_h2o.storage.device import CopyStream, Device, Event

T4, A100 = GPU(architecture=75, multiprocessors=40), GPU(architecture=80, multiprocessors=108)
"""What `assume_gpu` takes: their choices run in Triton's interpreter, on the host."""

_lock = threading.RLock()


class LazyEvent(Event):
    """After the first `position` items of a stream's queue."""

    def __init__(self, stream: LazyStream, position: int):
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        with _lock:
            self.stream.run_to(self.position)


class LazyStream(CopyStream):
    """Does nothing until it is waited for: code that forgets to wait sees old bytes."""

    def __init__(self):
        self.queue, self.done = [], 0

    def run_to(self, position: int) -> None:
        while self.done < position:
            work = self.queue[self.done]
            self.done += 1
            work()

    def wait_event(self, event: Event) -> None:
        with _lock:
            self.queue.append(event.synchronize)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        with _lock:
            self.queue.append(lambda: target.copy_(source))

    def record_event(self) -> Event:
        with _lock:
            return LazyEvent(self, len(self.queue))


class LazyDevice(Device):
    """Separate memory, poisoned when allocated; compute itself runs at once."""

    is_gpu = True
    zero_copy = True

    def __init__(self):
        super().__init__("cpu")

    def empty(self, nbytes: int) -> torch.Tensor:
        return super().host_empty(nbytes).fill_(255)  # NaN in every float format

    def host_empty(self, nbytes: int, *, pinned: bool = True, touch: bool = False) -> torch.Tensor:
        return super().host_empty(nbytes).fill_(255)

    def stream(self) -> CopyStream:
        return LazyStream()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def free_bytes(self) -> int | None:
        return 16 << 30

    def total_bytes(self) -> int | None:
        return 16 << 30


class LazyComputeDevice(LazyDevice):
    """Compute, too, does nothing until it is waited for; give it work with `compute`."""

    def __init__(self):
        super().__init__()
        self.stream_of_compute = LazyStream()

    def compute(self, work) -> None:
        """Queue a call."""
        with _lock:
            self.stream_of_compute.queue.append(work)

    def record_event(self) -> Event:
        return self.stream_of_compute.record_event()

    def wait_event(self, event: Event) -> None:
        self.stream_of_compute.wait_event(event)


class LazyPool:
    """A queue's thread that runs a job when its result is read, after the earlier jobs."""

    def __init__(self):
        self.jobs = deque()

    def submit(self, job) -> Future:
        future = LazyFuture(self)
        self.jobs.append((future, job))
        return future

    def run_one(self) -> None:
        """Run the job that has waited longest."""
        future, job = self.jobs.popleft()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        self.jobs.clear()


class LazyFuture(Future):
    def __init__(self, pool: LazyPool):
        super().__init__()
        self.pool = pool

    def result(self, timeout=None):
        while not self.done():
            self.pool.run_one()
        return super().result(timeout)


class PoisonedDevice(Device):
    """The host alone, with every fresh buffer full of NaN."""

    def host_empty(self, nbytes: int, *, pinned: bool = True, touch: bool = False) -> torch.Tensor:
        return super().host_empty(nbytes).fill_(255)
