"""What every command line here does alike: one line for a user's error, and an exit status.

A flag is a field of a dataclass with the metadata that `flag_values.flag` gives it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field
from types import FrameType
from typing import Any, NoReturn

from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import flag_name

_KINDS = {"int": int, "float": float}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`, one line like all others, with no usage before."""

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


def exit_status(work: Callable[[], None]) -> int:
    """Do the work of a command line: 0, 2 for a user's error, 130 for Ctrl-C, 143 for SIGTERM.

    SIGTERM ends the work as Ctrl-C does, so that a run that is stopped leaves nothing behind.
    """
    stopped = 128 + signal.SIGINT

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal stopped
        stopped = 128 + number
        raise KeyboardInterrupt

    # Elsewhere than in the main thread signals can't be had, nor do they come.
    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if mine else None
    try:
        work()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"interrupted {interrupt}".rstrip(), file=sys.stderr)
        return stopped
    finally:
        if mine:
            signal.signal(signal.SIGTERM, before)
    return 0
