"""What every command line here does alike: one line for a user's error, and an exit status.

A flag is a field of a dataclass with the metadata that `flag_values.flag` gives it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field
from types import FrameType
from typing import Any, NoReturn

from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import did_you_mean, flag_name

_KINDS = {"int": int, "float": float}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`, one line like all others, with no usage before."""

    def parse_args(self, args: Sequence[str] | None = None,  # type: ignore[override]
                   namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """As argparse's, but of an unknown flag it tells the nearest one."""
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                raise UserError(f"unknown flag {name}"
                                f"{did_you_mean(name, self._option_string_actions)}")
        if unknown:
            raise UserError(f"{unknown[0]!r} belongs to no flag: see --help")
        return found

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parse_bool(text: str) -> bool:
    """A flag's optional value, with the words that FlexGen takes."""
    words = {"true": True, "yes": True, "t": True, "y": True, "1": True,
             "false": False, "no": False, "f": False, "n": False, "0": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}") from None


def arguments(spec: Field[Any]) -> dict[str, Any]:
    """argparse's keywords for one field."""
    rules, kind = spec.metadata, spec.metadata["kind"]
    default: Any = spec.default
    shown = rules.get("shown", " ".join(map(str, default)) if isinstance(default, tuple)
                      else str(default).lower() if kind == "bool" else default)
    text = f"{rules['help']} (default: {shown})"
    options: dict[str, Any] = {"help": text.replace("%", "%%"), "dest": spec.name}
    if kind == "bool":
        options |= {"type": _parse_bool, "nargs": "?", "const": True, "metavar": "true|false"}
    elif kind == "texts":
        options |= {"action": "append"}
    elif kind in ("percent", "ratios", "words"):
        options |= {"nargs": "+"}
    elif kind == "numbers":
        options |= {"nargs": "+", "type": float}
    elif kind in _KINDS:
        options |= {"type": _KINDS[kind], "metavar": "N" if kind == "int" else "X"}
    if "const" in rules:
        options |= {"nargs": "?", "const": rules["const"]}
    if "choices" in rules:
        # Shown, not given to argparse: `checked` checks it, in its own words.
        options["metavar"] = "|".join(map(str, rules["choices"]))
    if "metavar" in rules:
        options["metavar"] = rules["metavar"]
    return options


def show(text: str, end: str = "\n") -> None:
    """Print what the terminal's encoding may not hold; generated text can be anything."""
    if sys.stdout is None:  # closed by the shell: >&-
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except OSError as error:
        # What is still buffered goes nowhere, or Python would fail on it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `| head` has just seen enough
            raise UserError(f"cannot print to stdout: {error.strerror}") from None


@contextmanager
def writing(name: str, path: str) -> Iterator[None]:
    """Tell in one line which flag's file could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {flag_name(name)} {path}: {error.strerror}") from None


def exit_status(work: Callable[[], None], *, last: bool = False) -> int:
    """Do the work of a command line: 0, 2 for a user's error, 128 and a signal's number if stopped.

    Ctrl-C, SIGTERM and SIGHUP end the work alike. However many of them come, what the work has to
    leave behind it tidy gets done: 130, 143 or 129 is by the first. `last`: the process does
    nothing more but end, and after one signal no other disturbs that either.
    """
    signals = _Signals()
    try:
        try:
            signals.listen()
            work()
        finally:
            signals.over = True
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        with suppress(OSError):  # the terminal may be what has gone
            print(f"interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 128 + signals.number
    finally:
        signals.restore(last=last)
    return 0


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
