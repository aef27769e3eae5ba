"""A queue of windows on a store that replicas share: one does each, another if that one dies.

The store is torch.distributed's ``TCPStore``: replica 0's, or the launcher's. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from flexgen_h2o.errors import UserError

_DONE, _LEFT = b"done", b"left"
_BEATS = 8  # within the time after which a replica counts as gone
_POLL = 0.1  # seconds between looks at what others hold
_LOST = ("replica 0, which keeps the queue and the results, has stopped or can't be reached: what "
         "is answered stays, and the same command goes on")


class SharedStore(Protocol):
    """Keys and values that all replicas see: torch.distributed's ``Store``."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """True if all of these keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if it is the expected one, or if there is none and none is expected.

        Returns the value from then on.
        """


class QueueLost(UserError):
    """Replica 0 or the store has gone."""


class WindowQueue:
    """Windows of a job, by numbers from 0, of which each replica takes the next.

    A replica is one process, or several that share a model; then the leading one takes windows.

    Parameters
    ----------
    store : SharedStore
        Its calls must come to an end, as those of a `TimeoutStore` do.
    replica, replicas : int
        Its number, and how many there are.
    patience : float
        Seconds without a heartbeat after which a replica counts as gone.
    clock, wait : callable
        Seconds that never go backwards; waits for so many.

    Attributes
    ----------
    lost : bool
        True once the store does not answer, or replica 0 has left or is gone.
    """

    def __init__(self, store: SharedStore, replica: int, replicas: int, *, patience: float = 30.0,
                 clock: Callable[[], float] = time.monotonic,
                 wait: Callable[[float], object] = time.sleep):
        self._store, self.replica, self.replicas = store, replica, replicas
        self._patience, self._clock, self._wait = patience, clock, wait
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._began = clock()
        self.lost = False

    # --- heartbeats

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Give signs of life from a thread, until the end of the block, which tells the others."""
        over = threading.Event()
        thread = threading.Thread(target=self._beat, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            with suppress(Exception):  # the store may be gone with replica 0
                self._store.set(f"beat/{self.replica}", _LEFT.decode())

    def _beat(self, over: threading.Event) -> None:
        number = 0
        while True:
            try:
                self._store.set(f"beat/{self.replica}", str(number))
                if self.replica and self.gone(0):
                    self.lost = True
            except Exception:  # torch names it in several ways
                self.lost = True
                return
            number += 1
            if over.wait(self._patience / _BEATS):
                return

    def gone(self, replica: int) -> bool:
        """True if a replica has left, or has given no sign of life for too long."""
        if replica == self.replica:
            return False
        key, now = f"beat/{replica}", self._clock()
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat == _LEFT:
            return True
        before, since = self._seen.get(replica, (b"", self._began))
        if beat != before:
            self._seen[replica] = beat, now
            return False
        return now - since > self._patience

    # --- the beginning and the end

    def publish(self, words: str) -> None:
        """Say what the job is, as replica 0."""
        self._store.set("job", words)

    def job(self) -> bytes:
        """The words of replica 0, when they come. Raises `QueueLost` if it goes before."""
        with self._answering():
            while not self._store.check(["job"]):
                self.check()
                self._wait(_POLL)
            return self._store.get("job")

    def end(self) -> None:
        """Have all replicas end when it suits them."""
        with suppress(Exception):
            self._store.set("end", "1")

    @property
    def ended(self) -> bool:
        """True if all are to end, or there is no queue any more."""
        try:
            return self.lost or self._store.check(["end"])
        except Exception:
            self.lost = True
            return True

    def wait_for_others(self) -> None:
        """Return when all other replicas have left or are gone."""
        with self._answering():
            while not all(self.gone(other) for other in range(self.replicas)
                          if other != self.replica):
                self._wait(_POLL)

    # --- windows

    def windows(self, count: int) -> Generator[int, None, None]:
        """The windows of `count` that this replica is to do, until all are done by some replica.

        One is done when the next is asked for. Those of a replica that is gone come again. Raises
        `QueueLost`.
        """
        mine, others = str(self.replica).encode(), []
        for window in range(count):
            holder = self._claim(window, b"")
            if holder == mine:
                yield window
                self._finish(window)
            elif holder != _DONE:
                others.append(window)
        while others and not self.ended:
            for window in list(others):
                with self._answering():
                    holder = self._store.get(f"window/{window}")
                    orphan = holder != _DONE and self.gone(int(holder))
                if orphan and self._claim(window, holder) == mine:
                    yield window
                    self._finish(window)
                    holder = _DONE
                if holder == _DONE:
                    others.remove(window)
            if others:
                self._wait(_POLL)
        if self.lost:
            self.check()

    def _claim(self, window: int, holder: bytes) -> bytes:
        """Take a window that nobody or `holder` has; returns who has it now."""
        with self._answering():
            return self._store.compare_set(f"window/{window}", holder.decode(), str(self.replica))

    def _finish(self, window: int) -> None:
        """Say that a window is done, unless this replica was slow and another has it now."""
        with self._answering():
            self._store.compare_set(f"window/{window}", str(self.replica), _DONE.decode())

    def check(self) -> None:
        """Raise `QueueLost` if there is no queue any more."""
        if self.lost:
            raise QueueLost(_LOST)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Raise `QueueLost` where the store does not answer."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self.lost = True
            raise QueueLost(_LOST) from error
