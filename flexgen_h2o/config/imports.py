"""Imports from transformers while other threads import from it. No torch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Options = ParamSpec("_Options")
_Result = TypeVar("_Result")

_LOCK = threading.RLock()
_TRIES = 8


def retry_imports(function: Callable[_Options, _Result]) -> Callable[_Options, _Result]:
    """Run a function that imports from transformers in one thread at a time, and again where it
    fails by an ImportError.

    transformers puts lazy modules in place of its packages while these are imported. A thread that
    waits for the import of another one is given the empty package, and finds the lazy module only
    when it imports again. The user's threads know no lock: each package on the way may need a try.
    """
    @functools.wraps(function)
    def call(*args: _Options.args, **options: _Options.kwargs) -> _Result:
        for _ in range(_TRIES - 1):
            try:
                with _LOCK:
                    return function(*args, **options)
            except ImportError:
                pass
        with _LOCK:
            return function(*args, **options)

    return call
