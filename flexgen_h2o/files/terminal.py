"""Text on a terminal whose encoding may not hold it, or that is not there."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

from flexgen_h2o.errors import UserError


def print_stdout(text: str, end: str = "\n") -> None:
    """Print what the terminal's encoding may not hold; generated text can be anything."""
    if sys.stdout is None:  # closed by the shell: >&-
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # `| head` has just seen enough
            raise UserError(f"cannot print to stdout: {error.strerror}") from None


def print_stderr(text: str) -> None:
    """Print a line on stderr, or nothing where there is none that takes it."""
    try:
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
    except ValueError:  # it has been closed
        pass
    except OSError:
        _discard(sys.stderr)


def flush_streams() -> None:
    """Flush stdout and stderr; what they do not take goes nowhere, or Python would fail on it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except ValueError:
            pass
        except OSError:
            _discard(stream)


def open_closed_streams() -> None:
    """Open /dev/null in place of what the shell has closed of stdin, stdout and stderr.

    Else the first files to be opened would get their numbers, and with them what libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (open to the end)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _discard(stream: TextIO) -> None:
    """Let what is buffered go nowhere, or Python would fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ProgressBar(tqdm):
    """A bar on stderr that is not shown, or no longer, where stderr takes no text."""

    def __init__(self, *args: Any, disable: bool | None = False, **options: Any):
        if sys.stderr is None or sys.stderr.closed:
            disable = True
        super().__init__(*args, disable=disable, **options)

    def display(self, *args: Any, **options: Any) -> Any:
        """Show the bar."""
        try:
            return super().display(*args, **options)
        except (OSError, ValueError):
            self.disable = True

    def close(self) -> None:
        """Leave the bar as it is."""
        try:
            super().close()
        except (OSError, ValueError):
            self.disable = True
