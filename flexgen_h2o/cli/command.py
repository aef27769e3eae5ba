"""One line for a user's error and an exit status: what every command does alike."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from flexgen_h2o.cli.signals import _Signals
from flexgen_h2o.config.launch import MESSAGES
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.terminal import flush_streams, open_closed_streams, tell


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
