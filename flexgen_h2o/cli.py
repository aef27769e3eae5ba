"""What every command line here does alike: one line for a user's error, and an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from flexgen_h2o.errors import UserError
from flexgen_h2o.flag_values import flag_name


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`, one line like all others, with no usage before."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


@contextmanager
def writing(name: str, path: str) -> Iterator[None]:
    """Tell in one line which flag's file could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {flag_name(name)} {path}: {error.strerror}") from None


def exit_status(work: Callable[[], None]) -> int:
    """Do the work of a command line: 0, 2 for a user's error, 130 for Ctrl-C."""
    try:
        work()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130
    return 0
