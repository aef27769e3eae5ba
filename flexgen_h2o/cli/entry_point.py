"""Entry point of a command: user errors as one line, signals, exit status. No torch."""

from __future__ import annotations

import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from flexgen_h2o.config.parallel import CONTROL_THREAD
from flexgen_h2o.errors import UserError, lacks_memory
from flexgen_h2o.files.terminal import flush_streams, open_closed_streams, print_stderr

Options = TypeVar("Options")


class _Stop(KeyboardInterrupt):
    """KeyboardInterrupt of a signal that allows weak references."""


class _Signals:
    """Turn SIGINT, SIGTERM and SIGHUP into one KeyboardInterrupt.

    While that exception propagates, further signals are ignored, so that cleanup is not
    interrupted. If it is swallowed, as in a finalizer, the next signal raises again.
    """

    def __init__(self) -> None:
        self.over = False
        self.number = signal.SIGINT
        self._stopped = False
        self._raised: Callable[[], _Stop | None] = lambda: None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Handle the signals that are not ignored (nohup ignores SIGHUP)."""
        if threading.current_thread() is not threading.main_thread():
            return  # signals arrive in the main thread only
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._stop)

    def restore(self, *, last: bool) -> None:
        """Restore the handlers; if a signal came and the process ends, ignore further ones."""
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
            del stop  # break the cycle of exception and frame


class StopRequest:
    """Context manager that turns a first SIGINT, SIGTERM or SIGHUP into a request to stop.

    The caller stops at the next safe point. A second signal interrupts at once, with the exit
    status of Ctrl-C. It has no effect outside of the main thread.

    `requested`: True after a signal.
    """

    def __init__(self, on_request: Callable[[], None]):
        self.requested = False
        self._on_request = on_request
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._before[signal.Signals(number)](signal.SIGINT, frame)
        else:
            self.requested = True
            self._on_request()


ALL_FAILED = 3
"""Exit status of a job whose requests have all failed."""


def command(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap the `main` of a command: errors and signals become its `exit_status`.

    Without `argv`, the process ends after it.
    """
    @functools.wraps(main)
    def entry(argv: Sequence[str] | None = None) -> int:
        if argv is None:
            open_closed_streams()
        try:
            status = exit_status(lambda: main(argv), last=argv is None)
        except SystemExit as end:
            if argv is None:
                _exit_if_threads_wait(end.code)
            raise
        if argv is None:
            _exit_if_threads_wait(status)
        return status

    return entry


def entry_point(parse_args: Callable[[Sequence[str] | None], Options],
                run: Callable[[Options], int | None]) -> Callable[..., int]:
    """Return the `main` of a command: parse the flags, run, turn errors into an exit status."""
    return command(lambda argv: run(parse_args(argv)))


def _exit_if_threads_wait(status: object) -> None:
    """Flush, and end the process at once if a thread waits for a rank that is lost or hangs.

    Before 3.14, Python aborts if such a thread wakes up during shutdown.
    """
    flush_streams()
    if any(thread.name == CONTROL_THREAD for thread in threading.enumerate()):
        os._exit(status if isinstance(status, int) else 1)


def exit_status(work: Callable[[], int | None], *, last: bool = False) -> int:
    """Run the work of a command line and return its exit status.

    The status is what the work returns (None is 0), 2 after a `UserError`, and 128 plus the number
    of the first signal (130, 143 or 129) if it was stopped. Cleanup runs to its end however many
    signals come. With `last`, signals are also ignored while the process ends.
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
    except (MemoryError, RuntimeError, OSError) as error:
        if "can't start new thread" in str(error):  # Python's words, whoever starts it
            return _refused("the system lets this process start no more threads: raise its limit "
                            "(ulimit -u, or a container's limit of pids)")
        if not lacks_memory(error):
            raise
        return _refused("the system has too little memory for this: free some, or use smaller "
                        "batches or slower tiers")
    except KeyboardInterrupt as interrupt:
        print_stderr(f"interrupted {interrupt}".rstrip())
        return 128 + signals.number
    finally:
        signals.restore(last=last)


def _refused(message: object) -> int:
    """Print the line of a user error and return the exit status."""
    print_stderr(f"error: {message}")
    return 2
