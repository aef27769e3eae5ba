"""Concurrent threads, and random delays at their synchronization points, drawn by seed."""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from helpers.selection import full

SEEDS = [0, 1, *full(*range(2, 30))]
"""Seeds of a stress test: more with --all."""
_LONGEST = 4e-4  # seconds


@contextmanager
def random_delays(seed: int) -> Iterator[None]:
    """Delay jobs of thread pools, reads and writes of files, events and locks of conditions.

    Python also switches between threads a hundred times as often as usual.
    """
    draw, lock = random.Random(seed), threading.Lock()

    def delay() -> None:
        with lock:
            seconds = draw.random() * _LONGEST if draw.random() < 0.3 else 0
        if seconds:
            time.sleep(seconds)

    def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            delay()
            try:
                return function(*arguments, **options)
            finally:
                delay()

        return call

    submit, interval = ThreadPoolExecutor.submit, sys.getswitchinterval()

    def submit_delayed(pool, function, /, *arguments, **options):
        return submit(pool, delayed(function), *arguments, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", submit_delayed))
        for owner, name in ((os, "preadv"), (os, "pwritev"), (os, "fsync"),
                            (threading.Event, "set"), (threading.Event, "wait")):
            stack.enter_context(mock.patch.object(owner, name, delayed(getattr(owner, name))))
        sys.setswitchinterval(interval / 100)
        stack.callback(sys.setswitchinterval, interval)
        yield


def run_together(*works: Callable[[], None]) -> None:
    """Run functions in threads at once, and raise the first error of one."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
