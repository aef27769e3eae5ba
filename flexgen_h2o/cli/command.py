"""One line for a user's error and an exit status: what every command does alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from flexgen_h2o.cli.signals import _Signals
from flexgen_h2o.errors import UserError


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
