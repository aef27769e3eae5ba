"""Text on a terminal whose encoding may not hold it."""

from __future__ import annotations

import os
import sys

from flexgen_h2o.errors import UserError


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
