"""Ctrl-C, SIGTERM and SIGHUP: one interrupt that clean-up outlasts, or a request to end soon."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


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
