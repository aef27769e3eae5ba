"""Writing files: atomically, and checks before anything is computed. No torch."""

from __future__ import annotations

import errno
import io
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flexgen_h2o.errors import UserError


def temporary_path(path: str | os.PathLike) -> Path:
    """Return the name of a new file that will replace `path`."""
    target = Path(path)
    # Random instead of the process id, which containers with a common folder may share.
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def open_atomic(path: str | os.PathLike, *, durable: bool = True) -> Iterator[io.TextIOBase]:
    """Open a text file that replaces `path` when it is complete: see `atomic_path`."""
    # A lone surrogate, from a JSON escape in a prompt, is escaped again.
    with atomic_path(path, durable=durable) as temporary, open(
            temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        yield file


@contextmanager
def atomic_path(path: str | os.PathLike, *, durable: bool = True) -> Iterator[Path]:
    """Yield a new, empty file that replaces `path` at the end of the ``with`` statement.

    After an error the new file is removed and `path` is unchanged. Raises OSError.

    `durable`: after the ``with`` statement the file is on disk. False: a power loss may leave an
    empty file under the name, which costs less.
    """
    target, temporary = Path(path), temporary_path(path)
    temporary.touch(exist_ok=False)  # never remove a file of another process
    try:
        yield temporary
        if durable:
            sync(temporary)  # a file system may write the new name before the bytes
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(target.parent)


def sync(path: str | os.PathLike) -> None:
    """Write the bytes of a file, or the names in a folder, to disk. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some network file systems cannot synchronize folders, and some folders cannot be read.
        if not os.path.isdir(path) or error.errno not in (errno.EINVAL, errno.ENOTSUP,
                                                          errno.EACCES):
            raise


def make_folder(path: Path, mode: int) -> None:
    """Create a folder and its parents, on disk, unless they exist. Raises OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def is_stream(path: str) -> bool:
    """Return whether a path names an open stream, such as /dev/stdout."""
    whole = os.path.abspath(path)
    return whole.startswith(("/dev/std", "/dev/fd/", "/proc/"))


def check_writable(flag: str, path: str, *, beside: Iterable[str] = (), hint: str = "") -> None:
    """Raise `UserError` for a file that cannot be written, before anything is computed.

    Files `beside` it are checked too; `hint` is appended to the message.
    """
    targets = (path, *beside)
    for target in targets:
        if is_stream(target) or os.path.lexists(target) and not os.path.isfile(target):
            raise UserError(f"{flag} {target} is not a regular file{hint}")
        if os.path.exists(target) and not os.access(target, os.W_OK):
            raise UserError(f"{flag} {target} is not writable{hint}")
    folder = os.path.dirname(path) or "."
    try:
        # os.access is true for root on a read-only file system.
        tempfile.TemporaryFile(dir=folder).close()
        with suppress(FileNotFoundError):  # raises for a name that is too long
            os.lstat(temporary_path(max(targets, key=len)))
    except OSError as error:
        raise UserError(f"cannot write {flag} into the folder {folder}: {error.strerror}{hint}"
                        ) from None


@contextmanager
def catch_write_errors(flag: str, path: str) -> Iterator[None]:
    """Turn the OSError of a file that cannot be written into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {flag} {path}: {error.strerror}") from None


def check_folder(flag: str, folder: str, paths: Iterable[str]) -> None:
    """Raise `UserError` if these files cannot be written into a folder, which may not exist yet."""
    if os.path.isdir(folder):
        for path in paths:
            check_writable(flag, path)
        return
    parent = folder
    while not os.path.lexists(parent):  # the nearest existing folder
        parent = os.path.dirname(parent.rstrip(os.sep)) or "."
    if not os.path.isdir(parent):
        raise UserError(f"{flag} {folder} cannot be a folder: {parent} is a file")
    check_writable(flag, os.path.join(parent, "file"))
