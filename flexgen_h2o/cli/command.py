"""Ctrl-C, SIGTERM and SIGHUP: one interrupt that clean-up outlasts, or a request to end soon."""

from __future__ import annotations

import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol, TypeVar

from flexgen_h2o.config.launch import MESSAGES
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.terminal import flush_streams, open_closed_streams, tell

Options = TypeVar("Options")


class _Stop(KeyboardInterrupt):
    """A signal's; unlike its base it can be referred to weakly."""


class _Signals:
    """The signals that end a program, as one KeyboardInterrupt.

    While that is on its way up, what cleans up after the work is not to be interrupted in turn. If
    it gets lost, as in a finalizer, nothing refers to it any more, and the next signal counts.
    """

    def __init__(self) -> None:
        self.over = False
        self.number = signal.SIGINT
        self._stopped = False
        self._raised: Callable[[], _Stop | None] = lambda: None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take the signals over that are not ignored (nohup ignores SIGHUP)."""
        if threading.current_thread() is not threading.main_thread():
            return  # they can't be had there, nor do they come
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._stop)

    def restore(self, *, last: bool) -> None:
        """Hand them back, or if one came before the process ends, ignore them."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if last and self._stopped else before)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.over or self._raised() is not None:
            return
        self._stopped, self.number = True, signal.Signals(number)
        stop = _Stop()
        self._raised = weakref.ref(stop)
        try:
            raise stop
        finally:
            del stop  # or this frame, which it refers to, would keep it


class Ending:
    """The signals that end a program, as a request to end at the next good place.

    A second one interrupts, as the first does elsewhere, and the exit status is Ctrl-C's. A context
    manager; in a thread that is not the main one no signal comes.

    Attributes
    ----------
    asked : bool
        True once a signal has come.
    """

    def __init__(self, tell: Callable[[], None]):
        self.asked = False
        self._tell = tell
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Ending:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._before[signal.Signals(number)](signal.SIGINT, frame)
        else:
            self.asked = True
            self._tell()


# One line for a user's error and an exit status: what every command does alike.


class Main(Protocol):
    """The entry of a command."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line `argv`, or the process's. Returns the `exit_status`."""


ALL_FAILED = 3
"""The exit status of a job that has ended, and of which every request has failed."""


def command(main: Callable[[Sequence[str] | None], int | None]) -> Main:
    """Let a command's `main` do the work alone: errors and signals become its `exit_status`.

    With no `argv` it is the process's last work.
    """
    @functools.wraps(main)
    def entry(argv: Sequence[str] | None = None) -> int:
        if argv is None:
            open_closed_streams()
        try:
            status = exit_status(lambda: main(argv), last=argv is None)
        except SystemExit as end:
            if argv is None:
                _leave_what_waits(end.code)
            raise
        if argv is None:
            _leave_what_waits(status)
        return status

    return entry


def entry_point(parse_args: Callable[[Sequence[str] | None], Options],
                run: Callable[[Options], int | None]) -> Main:
    """Return the `main` of a command: parse the flags, run, turn errors into an exit status."""
    return command(lambda argv: run(parse_args(argv)))


def _leave_what_waits(status: object) -> None:
    """Flush, and end the process now if a thread of it waits for a rank that is gone or hangs:
    before 3.14 Python aborts if such a thread wakes up while it ends."""
    flush_streams()
    if any(thread.name == MESSAGES for thread in threading.enumerate()):
        os._exit(status if isinstance(status, int) else 1)


def exit_status(work: Callable[[], int | None], *, last: bool = False) -> int:
    """Do the work of a command line: what it returns (None is 0), 2 for a user's error, 128 and a
    signal's number if stopped.

    Ctrl-C, SIGTERM and SIGHUP end the work alike. However many of them come, what the work has to
    leave behind it tidy gets done: 130, 143 or 129 is by the first. `last`: the process does
    nothing more but end, and after one signal no other disturbs that either.
    """
    signals = _Signals()
    try:
        try:
            signals.listen()
            return work() or 0
        finally:
            signals.over = True
    except UserError as error:
        return _refused(error)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):  # Python's words, whoever starts it
            raise
        return _refused("the system lets this process start no more threads: raise its limit "
                        "(ulimit -u, or a container's limit of pids)")
    except KeyboardInterrupt as interrupt:
        tell(f"interrupted {interrupt}".rstrip())
        return 128 + signals.number
    finally:
        signals.restore(last=last)


def _refused(message: object) -> int:
    """Tell a user's error in its line. Returns the exit status."""
    tell(f"error: {message}")
    return 2
