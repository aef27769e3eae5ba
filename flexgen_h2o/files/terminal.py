"""Output to terminals with limited encodings, and to closed streams. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from flexgen_h2o.errors import UserError

ByteProgress = Callable[[int, int], None]
"""Called with the bytes done and all bytes."""


def print_stdout(text: str, end: str = "\n") -> None:
    """Print text, and escape characters that the terminal's encoding does not have."""
    if sys.stdout is None:  # closed by the shell: >&-
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # such as `| head`
            raise UserError(f"cannot print to stdout: {error.strerror}") from None


def print_stderr(text: str) -> None:
    """Print a line to stderr, or nothing if it is closed."""
    try:
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
    except ValueError:  # closed
        pass
    except OSError:
        _discard(sys.stderr)


def flush_streams() -> None:
    """Flush stdout and stderr; discard output that cannot be written, or Python fails at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except ValueError:
            pass
        except OSError:
            _discard(stream)


def open_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that the shell has closed.

    Otherwise the first opened files would get these descriptors, and libraries print into them.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (open to the end)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, or Python would fail on its buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ProgressBar(tqdm):
    """A progress bar on stderr that disables itself if stderr cannot be written."""

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
        """Close the bar."""
        try:
            super().close()
        except (OSError, ValueError):
            self.disable = True


@contextmanager
def byte_bar(description: str, *, progress: bool | None) -> Iterator[ByteProgress]:
    """Show a bar of bytes. Yields its update. progress=None: show it on a terminal only."""
    with ProgressBar(desc=description, unit="B", unit_scale=True,
                     disable=None if progress is None else not progress) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
