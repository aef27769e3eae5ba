"""The cache on disk: converted models, quantized weights, measured rates. No torch.

A converted copy is keyed by the content of its source files, not by their path. Its name contains
their key (`SourceFiles.key`). For files with a known path, size and modification time the key is
enough. Files at a new path are hashed completely, once, and compared with the digest that is stored
with the copy. The key is of samples of the files: it is cheap, but alone it could confuse a
fine-tune that changes a few rows with its base model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import pread_all
from flexgen_h2o.files.writing import open_atomic, sync

_FORMAT = 5  # raise it when the files of a copy change, which invalidates older copies
# This many chunks of each source file are sampled, from its beginning to its end. Files of up to a
# megabyte are sampled completely. 100 MB take 1 ms, 35 ms without page cache.
_SAMPLES, _SAMPLE_BYTES = 256, 4 << 10
_PART_BYTES, _BLOCK_BYTES = 64 << 20, 1 << 20  # hashed by a thread at a time; read at a time

HASH_THREADS = min(16, os.cpu_count() or 1)
"""Threads that hash files. Use fewer while other work runs."""


class SourceFiles:
    """The source files of a converted copy, identified by their content.

    Parameters
    ----------
    form : str
        The target format of the copy.
    ends : mapping of Path to int, optional
        Bytes at the beginning of a file that matter. Default: all.

    Attributes
    ----------
    key : str
        Hash of the target format, and of sizes and samples of the files.
    """

    _digests: dict[str, str] = {}  # by key and files

    def __init__(self, paths: Sequence[Path], form: str, ends: Mapping[Path, int] | None = None):
        self.paths, self.form, self._end_limits = paths, form, ends
        self.files: list[list] = []
        self._ends: list[tuple[Path, int]] = []
        parts: list[object] = [_FORMAT, form]
        for path in paths:
            with _reading(path) as fd:
                status = os.fstat(fd)
                end = min(status.st_size, (ends or {}).get(path, status.st_size))
                digest = _sampled(fd, end, path.suffix == ".safetensors")
            # The name of a single file means nothing.
            parts.append([path.name if len(paths) > 1 else path.suffix, end, digest])
            self.files.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
            self._ends.append((path, end))
        self.key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def location(self) -> dict[str, object]:
        """The files, and their folder for users to read, as the cache stores them."""
        first = self.paths[0].absolute()
        return {"from": str(first if len(self.paths) == 1 else first.parent), "files": self.files}

    @contextlib.contextmanager
    def hashing(self, threads: int) -> Iterator[Callable[[], str]]:
        """Hash all bytes in other threads. Yield a function that waits for the digest."""
        name = json.dumps([self.key, self.files])
        parts = [] if name in self._digests else [
            (path, start, min(end, start + _PART_BYTES))
            for path, end in self._ends for start in range(0, end, _PART_BYTES)]
        hashes, waiting = [b""] * len(parts), iter(enumerate(parts))

        def hash_parts() -> None:
            for number, part in waiting:
                hashes[number] = _hashed(*part)

        pool = ThreadPoolExecutor(threads, thread_name_prefix="hashing sources")
        try:
            workers = [pool.submit(hash_parts) for _ in parts[:threads]]

            def digest() -> str:
                for worker in workers:
                    worker.result()
                if name not in self._digests:
                    self._digests[name] = hashlib.sha256(b"".join(hashes)).hexdigest()
                return self._digests[name]

            yield digest
        finally:
            for _ in waiting:
                pass  # the workers stop after the parts that they are at
            pool.shutdown()

    def check_unchanged(self) -> None:
        """Raise `UserError` if the files have changed: a copy would mix both versions."""
        again = SourceFiles(self.paths, self.form, self._end_limits)
        if (again.key, again.files) != (self.key, self.files):
            raise UserError(f"{self.paths[0].parent} has changed while it was converted: run it "
                            "again when its files are complete")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _sampled(fd: int, size: int, has_header: bool) -> str:
    """Return the hash of samples of a file, and of its safetensors header if it has one."""
    digest = hashlib.sha256()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # or 32 times as much is read ahead
    if has_header:
        length = int.from_bytes(pread_all(fd, 8, 0), "little")
        digest.update(pread_all(fd, min(length, size), 8))
    last = max(0, size - _SAMPLE_BYTES)
    step = max(_SAMPLE_BYTES, -(-last // (_SAMPLES - 1)))
    for start in (*range(0, last, step), last):
        digest.update(pread_all(fd, min(_SAMPLE_BYTES, size - start), start))
    return digest.hexdigest()


def _hashed(path: Path, start: int, end: int) -> bytes:
    """Return the hash of a part of a file."""
    digest = hashlib.sha256()
    with _reading(path) as fd:
        for offset in range(start, end, _BLOCK_BYTES):
            digest.update(pread_all(fd, min(_BLOCK_BYTES, end - offset), offset))
    return digest.digest()


KINDS = ("converted", "weights", "hardware", "experts")
"""Folders of the cache: converted models, quantized weights, measured rates of machines, counts of
chosen experts."""

_MAX_PLACES = 32  # of sources that a copy remembers
_SOURCE, _USED = ".source", ".used"
"""Files of an entry: the source files; the time of its last use, and the lock of its users."""

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return `$FLEXGEN_H2O_CACHE`, or flexgen_h2o in `$XDG_CACHE_HOME` or in ``~/.cache``."""
    if folder := os.environ.get("FLEXGEN_H2O_CACHE"):
        return Path(os.path.expanduser(folder))
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "flexgen_h2o"


@dataclass(frozen=True)
class CacheFolder:
    """A cache folder of converted copies."""

    root: Path
    advice: str
    """The remedy if it cannot be written, for error messages: continues "free some or ..."."""


def build_once(
    sources: Sequence[Path], form: str, title: str, build: Callable[[Path], None], *,
    cache: CacheFolder, ends: Mapping[Path, int] | None = None,
) -> Path:
    """Return the cached folder for these sources, which is built if it is missing.

    It is built under a temporary name and renamed, so a folder with the final name is complete.
    Other processes and threads that need the same folder wait. Leftovers of killed processes are
    removed by the next build.

    Raises `UserError` if the folder cannot be written, or the sources change meanwhile.

    Parameters
    ----------
    sources : sequence of Path
        The source files. Equal content has one folder, wherever the files are.
    form : str
        The target format; part of the key.
    title : str
        Readable part of the folder's name; not part of the key.
    build : callable
        Fills an empty folder.
    cache : CacheFolder
        The cache.
    ends : mapping of Path to int, optional
        Bytes at the beginning of a source file that matter. Default: all.
    """
    source = SourceFiles(sources, form, ends)
    if (copy := _find(source, cache.root)) is not None:
        return copy
    try:
        cache.root.mkdir(parents=True, exist_ok=True)
        temporary = cache.root / f".{form}-{source.key}.tmp"
        with locked(temporary.with_suffix(".lock")):
            return _find(source, cache.root) or _build(temporary, source, title, build)
    except OSError as error:
        raise UserError(
            f"cannot write a converted copy to {cache.root} ({error.strerror or error}); "
            f"free space there or {cache.advice}"
        ) from error


def find_copy(sources: Sequence[Path], form: str, cache: CacheFolder) -> Path | None:
    """Return the folder of `build_once`; None if it is missing."""
    return _find(SourceFiles(sources, form), cache.root)


def model_title(folder: Path) -> str:
    """Return the name of a model's folder, or the repository of a snapshot of the hub."""
    hub = folder.parent.name == "snapshots"
    return folder.parent.parent.name.removeprefix("models--") if hub else folder.name


def _find(source: SourceFiles, root: Path) -> Path | None:
    """Return the copy of these files in a folder of the cache, and mark it as used."""
    entries = [(folder, _read_source(folder)) for folder in _folders(root)
               if f"-{source.key}-" in folder.name]
    for folder, about in entries:
        if any(location["files"] == source.files for location in about["places"]) and use(folder):
            return folder
    if entries:
        _log.info("comparing %s with the source of a copy", source.location["from"])
        with source.hashing(HASH_THREADS) as digest:
            equal = [entry for entry in entries if entry[1]["digest"] == digest()]
        for folder, about in equal:
            if use(folder):
                about["places"] = [*about["places"], source.location][-_MAX_PLACES:]
                with contextlib.suppress(OSError):  # a cache that is only readable
                    _write_source(folder, about)
                return folder
    return None


def _build(temporary: Path, source: SourceFiles, title: str, build: Callable[[Path], None]) -> Path:
    """Build and rename. The caller holds the lock of `temporary`, so its contents are leftovers."""
    remove_leftovers(temporary.parent)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with source.hashing(max(1, HASH_THREADS // 4)) as digest:  # while the copy is built
            build(temporary)
            source.check_unchanged()
            about = {"model": title, "form": source.form, "digest": digest(),
                     "places": [source.location]}
        _write_source(temporary, about)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", title)[:60]
        target = temporary.with_name(f"{name}-{source.form}-{source.key}-{digest()[:16]}")
        if target.is_dir():  # its description is damaged
            _write_source(target, about)
        else:
            # After a power loss, too, a folder with the final name is complete.
            for path in (*temporary.iterdir(), temporary):
                sync(path)
            temporary.rename(target)
            sync(target.parent)
        use(target)
        return target
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, for which other processes and threads wait."""
    lock = FileLock(path)  # released when the process ends, so never stale
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("waiting for another process that makes %s", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove_leftovers(root: Path) -> None:
    """Remove temporary folders that no process has locked."""
    for temporary in root.glob(".*.tmp"):
        with contextlib.suppress(Timeout), FileLock(temporary.with_suffix(".lock"), timeout=0):
            shutil.rmtree(temporary, ignore_errors=True)


def _write_source(folder: Path, about: Mapping[str, object]) -> None:
    with open_atomic(folder / _SOURCE) as file:
        json.dump(about, file)


def _read_source(folder: Path) -> dict[str, Any]:
    """Return the description of a copy's sources; without places if the copy has none."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        about = json.loads((folder / _SOURCE).read_text("utf-8"))
        if (isinstance(about, dict) and {"model", "form", "digest", "places"} <= about.keys()
                and all({"from", "files"} <= location.keys() for location in about["places"])):
            return about
    return {"model": re.sub(r"-[0-9a-f]{16}(\.yaml|\.json)?$", "", folder.name), "form": "",
            "digest": "", "places": []}


def _folders(root: Path) -> list[Path]:
    """Return the visible files and folders of a folder, which may be missing."""
    try:
        return [root / name for name in sorted(os.listdir(root)) if not name.startswith(".")]
    except OSError:
        return []


# Use, and removal

_in_use: dict[Path, int] = {}
"""Open lock files of the entries that this process uses."""
_in_use_lock = threading.Lock()
_MAX_IN_USE = 64  # a process that opens model after model must not run out of descriptors


def use(entry: Path) -> bool:
    """Mark a folder of the cache as used, and lock it against removal until this process ends.

    Returns False if it has been removed.
    """
    try:
        with _in_use_lock:
            if (fd := _in_use.pop(entry, None)) is not None and not os.fstat(fd).st_nlink:
                os.close(fd)  # of a folder that was removed by hand and made again
                fd = None
            if fd is None:
                fd = os.open(entry / _USED, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                _in_use[entry] = fd
                fcntl.flock(fd, fcntl.LOCK_SH)  # waits for a removal
                if not os.fstat(fd).st_nlink:
                    os.close(_in_use.pop(entry))
                    return False
            _in_use[entry] = fd
            os.utime(fd)
            while len(_in_use) > _MAX_IN_USE:
                os.close(_in_use.pop(next(iter(_in_use))))
    except FileNotFoundError:
        return False
    except OSError:  # a cache that is only readable, or a file system without locks
        pass
    return True


@dataclass(frozen=True)
class Entry:
    """A copy, measured rates, or counts of experts, in the cache."""

    path: Path
    kind: str  # one of `KINDS`
    # The model, and the format that it was converted to.
    model: str
    form: str
    sources: tuple[str, ...]
    """Files or folders that it was made from. Empty: it does not say."""
    nbytes: int  # disk space
    used: float  # time of the last use, in seconds since the epoch

    @property
    def in_use(self) -> bool:
        """True if a running process uses it."""
        with contextlib.suppress(OSError), _exclusive(self.path, os.O_RDWR) as alone:
            return not alone
        return False

    def remove(self) -> bool:
        """Remove it. Returns False if a running process uses it. Raises OSError."""
        if not self.path.is_dir():
            self.path.unlink(missing_ok=True)
            return True
        with _exclusive(self.path, os.O_RDWR | os.O_CREAT) as alone:
            if alone:
                # Under its own name there are only whole folders.
                trash = self.path.rename(self.path.with_name(f".{self.path.name}.tmp"))
                shutil.rmtree(trash)
            return alone


@contextlib.contextmanager
def _exclusive(folder: Path, flags: int) -> Iterator[bool]:
    """Lock a folder against use. Yields False if a process uses it."""
    fd = os.open(folder / _USED, flags | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def entries() -> list[Entry]:
    """Return the entries of the cache, the latest used first."""
    listed = []
    for kind in KINDS:
        for path in _folders(cache_dir() / kind):
            about = _read_source(path)
            sources = [location["from"] for location in about["places"]]
            if (path / "weights.bin").exists():
                sources = ["random weights"]
            inside = [path, *path.rglob("*")]
            with contextlib.suppress(OSError):  # removed meanwhile
                mark = path / _USED
                used = (mark if mark.exists() else path).stat().st_mtime
                listed.append(Entry(path, kind, about["model"], about["form"],
                                    tuple(dict.fromkeys(sources)),
                                    sum(512 * file.lstat().st_blocks for file in inside), used))
    return sorted(listed, key=lambda entry: -entry.used)
