"""Calls on one model, one at a time: whichever thread, stream or LLM method they come from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from flexgen_h2o.errors import UserError

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")


class Calls:
    """Whose turn it is: held by the call that is under way."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.under_way = False


class _Called(Protocol):
    @property
    def calls(self) -> Calls:
        """The lock that calls on one model share."""


_Self = TypeVar("_Self", bound=_Called)


def one_at_a_time(method: Callable[Concatenate[_Self, _Options], _Result]
                  ) -> Callable[Concatenate[_Self, _Options], _Result]:
    """A method whose calls wait for those of other threads on the same `calls`.

    From within another call, in its own thread, there is nothing to wait for: `UserError`.
    """
    @functools.wraps(method)
    def call(self: _Self, *args: _Options.args, **options: _Options.kwargs) -> _Result:
        calls = self.calls
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
