"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_name(path: str | os.PathLike) -> Path:
    """The name of a new file until it takes the place of `path`."""
    target = Path(path)
    # Drawn, and not the number of the process, which two containers with one folder may share.
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def open_atomic(path: str | os.PathLike) -> Iterator[io.TextIOBase]:
    """Open a text file that appears under `path` whole, or not at all. OSError if it cannot."""
    # A lone surrogate, as a prompt may hold, becomes the JSON escape that it came from.
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8",
                                            errors="backslashreplace") as file:
        yield file


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place at the end of the ``with`` statement.

    If that ends with an error the new file goes and `path` stays. OSError if it cannot be made.
    """
    target, temporary = Path(path), temporary_name(path)
    temporary.touch(exist_ok=False)  # what is there already is another's, and not removed
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
