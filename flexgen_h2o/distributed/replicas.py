"""Replicas of a model that share a queue of windows (groups of requests) on a distributed store.

Each replica takes the next window. If a replica dies, another one repeats its window. The store is
torch.distributed's ``TCPStore``, served by replica 0 or by the launcher. No torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from flexgen_h2o.config.parallel import TorchrunEnv, torchrun_env
from flexgen_h2o.distributed.heartbeat import TimeoutStore, call_with_timeout
from flexgen_h2o.errors import UserError

TIMEOUT = 20.0
"""Seconds without a heartbeat after which a replica's window goes to another one: less than the 30
seconds after which torchrun kills the others when one has died."""

_START_TIMEOUT = timedelta(seconds=300)  # from the launcher's first process to its last
_DONE, _LEFT = b"done", b"left"
_BEATS_PER_TIMEOUT = 8
_POLL = 0.1  # seconds between checks of the windows of other replicas
_WINDOWS_PER_REPLICA = 4  # at least, so that no replica waits long for the last window
_LOST = ("replica 0, which keeps the queue and the results, has stopped or can't be reached: "
         "answered requests are kept; run the same command to resume")


def window_size(requests: int, replicas: int, *, block: int, limit: int) -> int:
    """Return the requests of a window: at most `limit`, and several windows for each replica, but
    no less than a `block`."""
    return min(limit, max(block, -(-requests // (_WINDOWS_PER_REPLICA * replicas))))


@dataclass(frozen=True)
class ReplicaRank:
    """The replica that this process belongs to.

    Attributes
    ----------
    replica, replicas : int
        Number of the replica, and how many there are.
    local : int
        Rank of the process on its host.
    leads : bool
        True for the first rank of the replica, which takes the windows.
    """

    replica: int
    replicas: int
    local: int
    leads: bool = True

    @classmethod
    def from_env(cls, launch: TorchrunEnv, ranks_per_replica: int = 1) -> ReplicaRank:
        """Return the replica of a rank; the ranks of a replica are consecutive."""
        ranks = launch.within_replica(ranks_per_replica)
        return cls(launch.rank // ranks_per_replica, launch.ranks // ranks_per_replica,
                   launch.local_rank, ranks.rank == 0)

    @classmethod
    def of_this_process(cls, ranks_per_replica: int) -> ReplicaRank:
        """Return the replica of this process. Raises `UserError` without a launcher."""
        if "RANK" not in os.environ:
            raise UserError("--data-parallel is for several processes, and a launcher has to start "
                            "them: torchrun --nproc-per-node 2 -m flexgen_h2o.batch "
                            "--data-parallel ... (any that sets RANK, WORLD_SIZE, MASTER_ADDR and "
                            "MASTER_PORT)")
        return cls.from_env(torchrun_env(), ranks_per_replica)


class QueueLost(UserError):
    """Replica 0 or the store is gone."""


class WindowQueue:
    """Queue of a job's windows, numbered from 0, that all replicas share.

    A replica is one process, or several that share a model; then only the leading one takes
    windows.

    Parameters
    ----------
    replica, replicas : int
        Number of this replica, and how many there are.
    timeout : float
        Seconds without a heartbeat after which a replica counts as dead.
    clock : callable
        Monotonic clock in seconds.
    wait : callable
        Waits for a number of seconds.

    Attributes
    ----------
    lost : bool
        True once the store fails, or replica 0 has left or is dead.
    """

    def __init__(self, store: TimeoutStore, replica: int, replicas: int, *,
                 timeout: float = TIMEOUT, clock: Callable[[], float] = time.monotonic,
                 wait: Callable[[float], object] = time.sleep):
        self._store, self.replica, self.replicas = store, replica, replicas
        self._timeout, self._clock, self._wait = timeout, clock, wait
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._began = clock()
        self.lost = False

    @classmethod
    @contextmanager
    def joined(cls, rank: ReplicaRank) -> Iterator[WindowQueue]:
        """Join the queue of the processes that a launcher has started, and send heartbeats.

        Raises
        ------
        UserError
            The processes do not find each other.
        """
        # A lost store is reported in one line here, without PyTorch's own messages.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        import torch.distributed

        try:
            rendezvous = torch.distributed.rendezvous("env://", timeout=_START_TIMEOUT)
            store, _, _ = call_with_timeout(next, rendezvous,
                                            seconds=_START_TIMEOUT.total_seconds() + TIMEOUT)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError("the processes of --data-parallel cannot connect to each other at "
                            f"MASTER_ADDR {os.environ.get('MASTER_ADDR')}: "
                            f"{str(error).splitlines()[0]}") from None
        # torchrun keeps the store and its content when it restarts all processes.
        store = torch.distributed.PrefixStore(
            "start " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        queue = cls(TimeoutStore(store, TIMEOUT), rank.replica, rank.replicas, timeout=TIMEOUT)
        with queue.heartbeats():
            yield queue

    @contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send heartbeats from a thread during a ``with`` statement, then announce the end."""
        closed = threading.Event()
        thread = threading.Thread(target=self._send_heartbeats, args=(closed,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            closed.set()
            thread.join()
            with suppress(Exception):  # the store may be gone with replica 0
                self._store.set(f"beat/{self.replica}", _LEFT.decode())

    def _send_heartbeats(self, closed: threading.Event) -> None:
        number = 0
        while True:
            try:
                self._store.set(f"beat/{self.replica}", str(number))
                if self.replica and self.is_gone(0):
                    self.lost = True
            except Exception:  # torch has several classes for it
                self.lost = True
                return
            number += 1
            if closed.wait(self._timeout / _BEATS_PER_TIMEOUT):
                return

    def is_gone(self, replica: int) -> bool:
        """Return True if another replica has left, or its heartbeat has timed out."""
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
        return now - since > self._timeout

    def publish(self, job: str) -> None:
        """Publish the description of the job, as replica 0."""
        self._store.set("job", job)

    def wait_for_job(self) -> bytes:
        """Wait for the description of the job. Raises `QueueLost` if replica 0 is gone."""
        with self._checked():
            while not self._store.check(["job"]):
                self.check()
                self._wait(_POLL)
            return self._store.get("job")

    def end(self) -> None:
        """Tell all replicas to end after their current window."""
        with suppress(Exception):
            self._store.set("end", "1")

    @property
    def ended(self) -> bool:
        """True if all replicas have been told to end, or the queue is lost."""
        try:
            return self.lost or self._store.check(["end"])
        except Exception:
            self.lost = True
            return True

    def wait_for_others(self) -> None:
        """Wait until all other replicas have left or are dead."""
        with self._checked():
            while not all(self.is_gone(other) for other in range(self.replicas)
                          if other != self.replica):
                self._wait(_POLL)

    def windows(self, count: int) -> Generator[int, None, None]:
        """Yield the windows that this replica is to do, until some replica has done each of them.

        A window counts as done when the next one is taken. Windows of dead replicas are yielded
        again.

        Parameters
        ----------
        count : int
            Number of all windows.

        Raises
        ------
        QueueLost
            Replica 0 or the store is gone.
        """
        replica, postponed = str(self.replica).encode(), []
        for window in range(count):
            holder = self._claim(window, b"")
            if holder == replica:
                yield window
                self._finish(window)
            elif holder != _DONE:
                postponed.append(window)
        while postponed and not self.ended:
            for window in list(postponed):
                with self._checked():
                    holder = self._store.get(f"window/{window}")
                    orphaned = holder != _DONE and self.is_gone(int(holder))
                if orphaned and self._claim(window, holder) == replica:
                    yield window
                    self._finish(window)
                    holder = _DONE
                if holder == _DONE:
                    postponed.remove(window)
            if postponed:
                self._wait(_POLL)
        if self.lost:
            self.check()

    def _claim(self, window: int, holder: bytes) -> bytes:
        """Take a window if `holder` has it (empty: nobody). Return its holder afterwards."""
        with self._checked():
            return self._store.compare_set(f"window/{window}", holder.decode(), str(self.replica))

    def _finish(self, window: int) -> None:
        """Mark a window as done, unless another replica has taken it from this slow one."""
        with self._checked():
            self._store.compare_set(f"window/{window}", str(self.replica), _DONE.decode())

    def check(self) -> None:
        """Raise `QueueLost` if the queue is lost."""
        if self.lost:
            raise QueueLost(_LOST)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise `QueueLost` if a call of the store fails."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            self.lost = True
            raise QueueLost(_LOST) from error
