"""A store that processes share, asked for no longer than one has patience. No torch.

Calls of torch.distributed's stores wait without end where the store's host does not answer, as it
is stopped or cut off, whatever their timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import msgspec

from flexgen_h2o.config.launch import MESSAGES
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.terminal import tell

_T = TypeVar("_T")
_PARTS = 8


class NoAnswer(RuntimeError):
    """A call has not come back in time."""


def answered(call: Callable[..., _T], *arguments: object, seconds: float) -> _T:
    """The result of a call, which is made in a thread of its own.

    Raises `NoAnswer` if it takes longer than `seconds`, and whatever the call raises.
    """
    answer: Future[_T] = Future()

    def ask() -> None:
        try:
            answer.set_result(call(*arguments))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name=MESSAGES, daemon=True).start()
    # In parts, as it may be this process that is stopped: one of them is over then, no more.
    for _ in range(_PARTS):
        if wait([answer], seconds / _PARTS).done:
            return answer.result()
    raise NoAnswer(f"no answer for {seconds:g} s")


class PatientStore:
    """A store of torch.distributed whose calls raise `NoAnswer` after some time.

    Once one has done so, all do at once.

    Parameters
    ----------
    store : torch.distributed.Store
    patience : float
        Seconds.
    """

    def __init__(self, store: Any, patience: float):
        self._store, self._patience = store, patience
        self._silent = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask(self._store.get, key)

    def add(self, key: str, amount: int) -> int:
        """Count up, and get the sum."""
        return self._ask(self._store.add, key, amount)

    def check(self, keys: list[str]) -> bool:
        """True if all of these keys are there."""
        return self._ask(self._store.check, keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if it is the expected one; returns the value from then on."""
        return self._ask(self._store.compare_set, key, expected, desired)

    def _ask(self, call: Callable[..., Any], *arguments: object) -> Any:
        if self._silent:
            raise NoAnswer("no answer")
        try:
            return answered(call, *arguments, seconds=self._patience)
        except NoAnswer:
            self._silent = True
            raise


# The watch over the ranks of a pipeline: who is alive, who gets on, and what has gone wrong.
#
# Each rank's thread writes a heartbeat into the store that all share, with how far its work is, and
# reads those of the others. What it finds is raised in the main thread where that waits for a rank;
# where it does not come to that, the process is ended.


IDLE, WORKING, WAITING, FAILED, LEFT = "idle", "working", "waiting", "failed", "left"
_MOST_BEATS = 4  # within the time after which a rank counts as gone
_SLOWEST = 1.0  # seconds from beat to beat at most


class PipelineFailure(UserError):
    """Another rank has failed or gone: the line says which, and why."""


class Beat(msgspec.Struct):
    """A heartbeat: its number, how far the work is, the state, and the words that belong to it: of
    `WAITING` for whom, of `FAILED` why."""

    number: int
    progress: int
    state: str
    words: str = ""


class Board(Protocol):
    """A place to leave words for other ranks: a store of torch.distributed."""

    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """A value that is there."""

    def add(self, key: str, amount: int) -> int:
        """Count up, and get the sum."""


class Watch:
    """Writes this rank's heartbeat and reads the others'.

    Parameters
    ----------
    board : Board
        This watch's own connection to the store. Its calls must come to an end, as those of a
        `PatientStore` do.
    rank : int
    names : sequence of str
        What to call each rank.
    patience : float
        Seconds without a heartbeat after which a rank counts as gone.
    limit : float
        Seconds in which some rank has to get on while the pipeline works.
    clock : callable
        Seconds that never go backwards.
    """

    def __init__(self, board: Board, rank: int, names: Sequence[str], *, patience: float,
                 limit: float, clock: Callable[[], float] = time.monotonic):
        self.rank, self.names = rank, names
        self.patience, self.limit = patience, limit
        self.interval = min(_SLOWEST, patience / _MOST_BEATS)
        self._board, self._clock = board, clock
        self._mine = Beat(0, 0, IDLE)
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._moved = clock()
        self._failure: str | None = None
        self._found = threading.Condition()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat, and to look; every rank has to, before any other looks."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Note that the work gets on."""
        self._mine.progress += 1

    @contextmanager
    def state(self, state: str, words: str = "") -> Iterator[None]:
        """Note what the main thread is about during a ``with`` statement."""
        before = self._mine.state, self._mine.words
        self._mine.state, self._mine.words = state, words
        try:
            yield
        finally:
            if self._mine.state != FAILED:
                self._mine.state, self._mine.words = before

    def waiting(self, rank: int) -> AbstractContextManager[None]:
        """Note that the main thread waits for a rank, if there is work that has to get on: before
        that, another may be loading for as long as it takes."""
        if self._mine.state == IDLE:
            return nullcontext()
        return self.state(WAITING, f"for {self.names[rank]}")

    def check(self) -> None:
        """Raise `PipelineFailure` if something has gone wrong elsewhere."""
        if self._failure is not None:
            raise PipelineFailure(self._failure)

    def lost(self, rank: int) -> PipelineFailure:
        """The error for a connection that has closed: that of the watch, which may know why, or is
        about to."""
        with self._found:
            # It may take a beat until its reason is there, and one until it is read.
            self._found.wait_for(lambda: self._failure is not None, 2.5 * self.interval)
            return PipelineFailure(self._failure or f"{self.names[rank]} has gone: its connection "
                                   "has closed")

    def fail(self, words: str) -> None:
        """Let the others know that this rank ends, and why."""
        if self._mine.state != FAILED:
            self._mine = Beat(self._mine.number + 1, self._mine.progress, FAILED, words)
            with suppress(RuntimeError):
                self._write()

    def tells(self) -> bool:
        """True for one of the ranks only: who is to tell the user what has gone wrong."""
        try:
            return self._board.add("told", 1) == 1
        except RuntimeError:  # nobody can be asked any more
            return True

    def close(self) -> None:
        """Beat no more: it is over, for good reasons unless `fail` has been called."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(self.patience)
        if self._mine.state != FAILED:
            self._mine = Beat(self._mine.number + 1, self._mine.progress, LEFT)
            with suppress(RuntimeError):
                self._write()
        elif self.rank == 0:
            # The store may go with this rank: the others get the time to read why.
            time.sleep(2.5 * self.interval)

    def _write(self) -> None:
        self._board.set(f"beat/{self.rank}", msgspec.json.encode(self._mine))

    def _run(self) -> None:
        while not self._over.wait(self.interval):
            try:
                self._mine.number += 1
                self._write()
                self.look()
            except NoAnswer:
                self._note(f"{self.names[0]}, which keeps the ranks' store, has not answered for "
                           f"{self.patience:g} s: it has died or stopped, or can't be reached")
            except RuntimeError:  # the store is that of rank 0, or of torchrun there
                self._note(f"{self.names[0]} has gone: it does not keep the ranks' store any more")
            if self._failure is not None:
                break
        self._end_if_nobody_else_does()

    def look(self) -> None:
        """Read the others' beats, and judge. Called by the watch's own thread."""
        now = self._clock()
        for rank in range(len(self.names)):
            beat = self._mine if rank == self.rank else msgspec.json.decode(
                self._board.get(f"beat/{rank}"), type=Beat)
            before, since = self._seen.get(rank, (None, now))
            if before is None or beat.progress != before.progress or beat.state == IDLE and (
                    rank == 0):
                self._moved = now
            if before is None or beat.number != before.number:
                since = now
            self._seen[rank] = (Beat(beat.number, beat.progress, beat.state, beat.words), since)
            if rank == self.rank:
                continue
            if beat.state == FAILED:
                self._note(beat.words)
            elif beat.state != LEFT and now - since > self.patience:
                self._note(f"{self.names[rank]} has not answered for {self.patience:g} s: it has "
                           "died or stopped, or can't be reached")
        if now - self._moved > self.limit:
            self._note(self._who_hangs())

    def _who_hangs(self) -> str:
        """A rank that computes and does not get on; without one, a rank that waits for another."""
        states = {rank: beat for rank, (beat, _) in self._seen.items()}
        working = [rank for rank, beat in states.items() if beat.state == WORKING]
        if working:
            return f"{self.names[working[0]]} has not got on for {self.limit:g} s"
        waiting = [rank for rank, beat in states.items() if beat.state == WAITING]
        rank = waiting[0] if waiting else 0
        return (f"{self.names[rank]} has waited {states[rank].words} for {self.limit:g} s".replace(
            "  ", " "))

    def _note(self, words: str) -> None:
        with self._found:
            self._failure = self._failure or words
            self._found.notify_all()

    def _end_if_nobody_else_does(self) -> None:
        """End the process if the main thread does not come to it, as one that hangs."""
        if self._failure is None or self._over.wait(max(self.patience, 2 * self.interval)):
            return
        # Of one that hangs the others tell, who find the same.
        if not self._failure.startswith(self.names[self.rank]) and self.tells():
            tell(f"error: {self._failure}")
        os._exit(2)
