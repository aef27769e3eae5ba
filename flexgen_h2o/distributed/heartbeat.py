"""Heartbeats of the ranks of a pipeline, and store calls that time out. No torch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import msgspec

from flexgen_h2o.config.parallel import CONTROL_THREAD
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.terminal import print_stderr

IDLE, WORKING, WAITING, FAILED, LEFT = "idle", "working", "waiting", "failed", "left"
_BEATS_PER_TIMEOUT = 4
_MAX_INTERVAL = 1.0  # seconds between heartbeats
_WAIT_PARTS = 8

_T = TypeVar("_T")


class StoreTimeout(RuntimeError):
    """A call of the store did not return in time."""


def call_with_timeout(call: Callable[..., _T], *arguments: object, seconds: float) -> _T:
    """Return the result of a call, which runs in its own thread.

    Raises
    ------
    StoreTimeout
        The call takes longer than `seconds`.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=CONTROL_THREAD, daemon=True).start()
    # This process may itself be stopped for a while: then only one of several short waits expires.
    for _ in range(_WAIT_PARTS):
        if wait([result], seconds / _WAIT_PARTS).done:
            return result.result()
    raise StoreTimeout(f"no answer for {seconds:g} s")


class TimeoutStore:
    """Distributed key-value store whose calls raise `StoreTimeout`.

    Calls of torch.distributed's stores block without end when the host of the store is stopped or
    cut off, in spite of their own timeout. After one timeout all further calls fail at once.

    Parameters
    ----------
    store : torch.distributed.Store
    timeout : float
        Seconds that a call may take.
    """

    def __init__(self, store: Any, timeout: float):
        self._store, self._timeout = store, timeout
        self._timed_out = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._call(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        return self._call(self._store.get, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._call(self._store.add, key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return self._call(self._store.check, keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key to `desired` if its value is `expected`; return its value afterwards."""
        return self._call(self._store.compare_set, key, expected, desired)

    def _call(self, call: Callable[..., Any], *arguments: object) -> Any:
        if self._timed_out:
            raise StoreTimeout("no answer")
        try:
            return call_with_timeout(call, *arguments, seconds=self._timeout)
        except StoreTimeout:
            self._timed_out = True
            raise


class PipelineFailure(UserError):
    """Another rank failed or disappeared; the message says which one and why."""


class Heartbeat(msgspec.Struct):
    """Latest sign of life of a rank.

    Attributes
    ----------
    number : int
        Sequence number of the heartbeat.
    progress : int
        Number of work units that the rank has finished.
    state : str
    detail : str
        For `WAITING` the rank waited for, for `FAILED` the reason.
    """

    number: int
    progress: int
    state: str
    detail: str = ""


class HeartbeatMonitor:
    """Publishes the heartbeat of this rank and checks the heartbeats of the others.

    A thread writes and reads heartbeats. The main thread raises a failure where it waits for
    another rank (`check`). If the main thread does not get there in time, the process exits.

    Parameters
    ----------
    store : TimeoutStore
        A connection that only this monitor uses.
    names : sequence of str
        Name of each rank in messages.
    timeout : float
        Seconds without a heartbeat after which a rank counts as dead.
    progress_timeout : float
        Seconds in which some rank must make progress while the pipeline works.
    clock : callable
        Monotonic clock in seconds.
    """

    def __init__(self, store: TimeoutStore, rank: int, names: Sequence[str], *, timeout: float,
                 progress_timeout: float, clock: Callable[[], float] = time.monotonic):
        self.rank, self.names = rank, names
        self.timeout, self.progress_timeout = timeout, progress_timeout
        self.interval = min(_MAX_INTERVAL, timeout / _BEATS_PER_TIMEOUT)
        self._store, self._clock = store, clock
        self._beat = Heartbeat(0, 0, IDLE)
        self._seen: dict[int, tuple[Heartbeat, float]] = {}
        self._last_progress = clock()
        self._failure: str | None = None
        self._failure_found = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Every rank must have written a first heartbeat before any starts."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Count a finished unit of work."""
        self._beat.progress += 1

    @contextmanager
    def state(self, state: str, detail: str = "") -> Iterator[None]:
        """Set the published state during a ``with`` statement."""
        before = self._beat.state, self._beat.detail
        self._beat.state, self._beat.detail = state, detail
        try:
            yield
        finally:
            if self._beat.state != FAILED:
                self._beat.state, self._beat.detail = before

    def waiting(self, rank: int) -> AbstractContextManager[None]:
        """Return a context manager that publishes that this rank waits for another one.

        While this rank is idle it is a no-op: the other rank may load its weights without limit.
        """
        if self._beat.state == IDLE:
            return nullcontext()
        return self.state(WAITING, f"for {self.names[rank]}")

    def check(self) -> None:
        """Raise `PipelineFailure` if another rank failed."""
        if self._failure is not None:
            raise PipelineFailure(self._failure)

    def connection_lost(self, rank: int) -> PipelineFailure:
        """Return the error for a closed connection: the failure of the rank, if it is known soon.
        """
        with self._failure_found:
            # The rank needs up to an interval to publish its failure, and this one to read it.
            self._failure_found.wait_for(lambda: self._failure is not None, 2.5 * self.interval)
            return PipelineFailure(self._failure or f"{self.names[rank]} has exited: its "
                                   "connection is closed")

    def fail(self, reason: str) -> None:
        """Publish that this rank ends with an error."""
        if self._beat.state != FAILED:
            self._beat = Heartbeat(self._beat.number + 1, self._beat.progress, FAILED, reason)
            with suppress(RuntimeError):
                self._write()

    def claim_report(self) -> bool:
        """Return True on exactly one rank: the one that reports the failure to the user."""
        try:
            return self._store.add("told", 1) == 1
        except RuntimeError:  # the store is gone
            return True

    def close(self) -> None:
        """Stop the thread and publish that this rank has left, unless `fail` was called."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(self.timeout)
        if self._beat.state != FAILED:
            self._beat = Heartbeat(self._beat.number + 1, self._beat.progress, LEFT)
            with suppress(RuntimeError):
                self._write()
        elif self.rank == 0:
            # The store may end with this rank: leave the others time to read the reason.
            time.sleep(2.5 * self.interval)

    def _write(self) -> None:
        self._store.set(f"beat/{self.rank}", msgspec.json.encode(self._beat))

    def _run(self) -> None:
        while not self._closed.wait(self.interval):
            try:
                self._beat.number += 1
                self._write()
                self.poll()
            except StoreTimeout:
                self._set_failure(f"{self.names[0]}, which keeps the ranks' store, has not "
                                  f"answered for {self.timeout:g} s: it has died or stopped, or "
                                  "can't be reached")
            except RuntimeError:  # rank 0, or torchrun on its host, serves the store
                self._set_failure(f"{self.names[0]} has exited: it served the ranks' store")
            if self._failure is not None:
                break
        self._exit_if_stuck()

    def poll(self) -> None:
        """Read all heartbeats and detect failures; the monitor's thread calls it."""
        now = self._clock()
        for rank in range(len(self.names)):
            beat = self._beat if rank == self.rank else msgspec.json.decode(
                self._store.get(f"beat/{rank}"), type=Heartbeat)
            before, since = self._seen.get(rank, (None, now))
            if before is None or beat.progress != before.progress or beat.state == IDLE and (
                    rank == 0):
                self._last_progress = now
            if before is None or beat.number != before.number:
                since = now
            self._seen[rank] = (Heartbeat(beat.number, beat.progress, beat.state, beat.detail),
                                since)
            if rank == self.rank:
                continue
            if beat.state == FAILED:
                self._set_failure(beat.detail)
            elif beat.state != LEFT and now - since > self.timeout:
                self._set_failure(f"{self.names[rank]} has not answered for {self.timeout:g} s: it "
                                  "has died or stopped, or can't be reached")
        if now - self._last_progress > self.progress_timeout:
            self._set_failure(self._hang_reason())

    def _hang_reason(self) -> str:
        """Name a rank that works without progress, or else one that waits for another rank."""
        states = {rank: beat for rank, (beat, _) in self._seen.items()}
        working = [rank for rank, beat in states.items() if beat.state == WORKING]
        seconds = f"for {self.progress_timeout:g} s"
        if working:
            return f"{self.names[working[0]]} has made no progress {seconds}"
        rank = next((rank for rank, beat in states.items() if beat.state == WAITING), 0)
        awaited = states[rank].detail
        return " ".join(filter(None, (self.names[rank], "has waited", awaited, seconds)))

    def _set_failure(self, reason: str) -> None:
        with self._failure_found:
            self._failure = self._failure or reason
            self._failure_found.notify_all()

    def _exit_if_stuck(self) -> None:
        """Exit the process if the main thread does not act on a failure, because it hangs."""
        if self._failure is None or self._closed.wait(max(self.timeout, 2 * self.interval)):
            return
        # The other ranks report a hang of this one themselves.
        if not self._failure.startswith(self.names[self.rank]) and self.claim_report():
            print_stderr(f"error: {self._failure}")
        os._exit(2)
