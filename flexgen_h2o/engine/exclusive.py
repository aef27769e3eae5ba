"""Exclusive use of a model: one call at a time, in the process that made it."""

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
_Self = TypeVar("_Self", bound="ExclusiveResource")
_first_process: int | None = None


class CallLock:
    """The lock that the current call on a model holds, and the process that owns the model."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held = False
        self.process = os.getpid()

    def check_process(self) -> None:
        """Raise `UserError` in a forked child, which lacks the threads of its parent."""
        _check_process(self.process)


def check_not_forked() -> None:
    """Raise `UserError` in a child of a process that has made an LLM.

    The child would wait for torch's threads, which only its parent has.
    """
    global _first_process
    _first_process = _first_process or os.getpid()
    _check_process(_first_process)


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise UserError("an LLM cannot be used in a process forked from the one that made it, "
                        "whose threads it needs: start the child with multiprocessing's \"spawn\","
                        " and make an LLM there")


class ExclusiveResource(ABC):
    """A context manager of which one call at a time runs, such as a model or a stream.

    Attributes
    ----------
    call_lock : CallLock
        One lock for a model and all its streams.
    """

    call_lock: CallLock

    def __enter__(self: _Self) -> _Self:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.call_lock.process == os.getpid():  # a forked child leaves it to its parent
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Free the resources; a second call is a no-op."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `UserError` after `close`."""


def exclusive(method: Callable[Concatenate[_Self, _Options], _Result]
              ) -> Callable[Concatenate[_Self, _Options], _Result]:
    """Decorate a method so that calls from several threads on one model take turns.

    A nested call raises `UserError`, because it would wait forever.
    """
    @functools.wraps(method)
    def call(self: _Self, *args: _Options.args, **options: _Options.kwargs) -> _Result:
        lock = self.call_lock
        lock.check_process()
        # An RLock in a plain `with`: an interrupt cannot come between taking and releasing it.
        with lock.lock:
            if lock.held:
                raise UserError(f"{method.__name__} is called from within another call on the "
                                "same LLM: call it when that one has returned")
            try:
                lock.held = True
                return method(self, *args, **options)
            finally:
                lock.held = False

    return call
