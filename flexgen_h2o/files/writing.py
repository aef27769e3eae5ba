"""Files that appear under their name whole, or not at all."""

from __future__ import annotations

import io
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexgen_h2o.errors import UserError


def temporary_path(path: str | os.PathLike) -> Path:
    """The name of a new file until it takes the place of `path`."""
    target = Path(path)
    # Drawn, and not the number of the process, which two containers with one folder may share.
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def open_atomic(path: str | os.PathLike) -> Iterator[io.TextIOBase]:
    """Open a text file that appears under `path` whole, or not at all. OSError if it cannot."""
    # A lone surrogate, as a prompt may hold, becomes the JSON escape that it came from.
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8",
                                            errors="backslashreplace") as file:
        yield file


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """A new, empty file beside `path`, which takes its place at the end of the ``with`` statement.

    If that ends with an error the new file goes and `path` stays. OSError if it cannot be made.
    """
    target, temporary = Path(path), temporary_path(path)
    temporary.touch(exist_ok=False)  # what is there already is another's, and not removed
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# True if results can be written: tried before anything is computed, and told when it fails.


def is_stream(path: str) -> bool:
    """True for a name of an open stream, such as /dev/stdout, whatever that is redirected to."""
    whole = os.path.abspath(path)
    return whole.startswith(("/dev/std", "/dev/fd/", "/proc/"))


def check_writable(flag: str, path: str, *, beside: Iterable[str] = (), hint: str = "") -> None:
    """Raise `UserError` for a result that could not be written, before anything is computed.

    Files `beside` it are looked at, too; `hint` ends the message.
    """
    targets = (path, *beside)
    for target in targets:
        if is_stream(target) or os.path.lexists(target) and not os.path.isfile(target):
            raise UserError(f"{flag} {target} is not a regular file{hint}")
        if os.path.exists(target) and not os.access(target, os.W_OK):
            raise UserError(f"{flag} {target} is not writable{hint}")
    folder = os.path.dirname(path) or "."
    try:
        # Only trying tells: root passes os.access on a read-only file system.
        tempfile.TemporaryFile(dir=folder).close()
        with suppress(FileNotFoundError):  # but not a name that is too long
            os.lstat(temporary_path(max(targets, key=len)))
    except OSError as error:
        raise UserError(f"cannot write {flag} into the folder {folder}: {error.strerror}{hint}"
                        ) from None


@contextmanager
def catch_write_errors(flag: str, path: str) -> Iterator[None]:
    """Raise `UserError` in place of the OSError of a file that could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {flag} {path}: {error.strerror}") from None


def check_folder(flag: str, folder: str, paths: Iterable[str]) -> None:
    """Raise `UserError` for a folder in which these files could not be written; it may be absent.
    """
    if os.path.isdir(folder):
        for path in paths:
            check_writable(flag, path)
        return
    above = folder
    while not os.path.lexists(above):  # the first that is there will hold the new ones
        above = os.path.dirname(above.rstrip(os.sep)) or "."
    if not os.path.isdir(above):
        raise UserError(f"{flag} {folder} cannot be a folder: {above} is a file")
    check_writable(flag, os.path.join(above, "file"))
