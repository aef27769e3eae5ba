"""A store that processes share, asked for no longer than one has patience. No torch.

Calls of torch.distributed's stores wait without end where the store's host does not answer, as it
is stopped or cut off, whatever their timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from flexgen_h2o.config.launch import MESSAGES

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
