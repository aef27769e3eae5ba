"""Identity of source files: a key from samples of them, and a digest of all bytes. No torch.

The key is cheap, so it finds candidates. The digest is exact: samples alone could confuse a
fine-tune that changes a few rows with its base model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import pread_all

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
