"""Calls on one model, one at a time: whichever thread, stream or LLM method they come from."""

from __future__ import annotations

import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from flexgen_h2o.errors import UserError

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="Session")


class Calls:
    """Whose turn it is: held by the call that is under way, in the process that made it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.under_way = False
        self.process = os.getpid()

    def check_process(self) -> None:
        """Raise `UserError` in a forked child: the threads that do the work are its parent's."""
        _check_process(self.process)


_first_process: int | None = None


def check_not_forked() -> None:
    """Raise `UserError` in a child of a process that has made an LLM: torch's threads, which the
    child waits for, are its parent's."""
    global _first_process
    _first_process = _first_process or os.getpid()
    _check_process(_first_process)


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise UserError("an LLM cannot be used in a process forked from the one that made it, "
                        "whose threads it needs: start the child with multiprocessing's \"spawn\","
                        " and make an LLM there")


class Session(ABC):
    """A model or a text while it is open, as a context manager.

    Attributes
    ----------
    calls : Calls
        What all that runs on one model shares: see `one_at_a_time`.
    """

    calls: Calls

    def __enter__(self: _Self) -> _Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.calls.process == os.getpid():  # what a forked child leaves is its parent's
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds; a second call does nothing."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `UserError` if it has been closed."""


def one_at_a_time(method: Callable[Concatenate[_Self, _Options], _Result]
                  ) -> Callable[Concatenate[_Self, _Options], _Result]:
    """A method whose calls wait for those of other threads on the same `calls`.

    From within another call, in its own thread, there is nothing to wait for: `UserError`.
    """
    @functools.wraps(method)
    def call(self: _Self, *args: _Options.args, **options: _Options.kwargs) -> _Result:
        calls = self.calls
        calls.check_process()
        # An RLock and a plain `with`, so that an interrupt finds the lock taken and let go as one.
        with calls.lock:
            if calls.under_way:
                raise UserError(f"{method.__name__} is called from within another call on the "
                                "same LLM: call it when that one has returned")
            try:
                calls.under_way = True
                return method(self, *args, **options)
            finally:
                calls.under_way = False

    return call
