"""Disk I/O: aligned O_DIRECT reads and writes in worker threads; errors come back to the caller.

Transfers are cut into chunks of some MB which the workers take in order, and those of reads far
ahead of their use after all others. A thread in ``preadv`` holds neither a core nor the interpreter
lock, so that reads go on while all cores multiply. Hundreds of small reads at once are a kernel's
(`ops.fetch_tokens`), which gets an open file here. benchmarks/links.py holds the rates beside the
disk's own.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from xxhash import xxh3_64_intdigest

from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.tiers import HUGE_PAGE, PAGE, round_up

log = logging.getLogger(__name__)

CHUNK = 8 << 20
WORKERS = 4
READ, WRITE = "disk->cpu", "cpu->disk"
RUN_PREFIX = "flexgen_h2o-run-"


_Chunk = tuple[Future[None], Callable[[], None]]
"""What a worker does, and what then comes to who waits for it."""


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a file: the raw, row-major, little-endian elements of one tensor.

    Attributes
    ----------
    path : Path
        The file.
    offset : int
        Where the bytes start, in bytes from the start of the file. Any value: the safetensors
        format promises no alignment.
    nbytes : int
        How many bytes.
    """

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class AlignedRead:
    """A page-aligned file range and the page-aligned place in a buffer that it fills.

    The file must reach to byte `end`, where one is given: its last page may be a part of a page.
    """

    path: Path
    offset: int
    nbytes: int
    buffer_offset: int
    end: int = 0


def plan_reads(extents: Iterable[Extent], *, gap: int = 64 << 10):
    """Merge byte ranges into few large aligned reads into one buffer.

    Ranges of one file that lie within `gap` bytes of each other become one read. The bytes keep
    their phase within a page, so that O_DIRECT puts them where they are used and nothing is copied.

    Returns
    -------
    (list of AlignedRead, dict of Extent to buffer offset, buffer size in bytes)
    """
    reads: list[AlignedRead] = []
    places: dict[Extent, int] = {}
    size = 0
    for extent in sorted(set(extents), key=lambda e: (str(e.path), e.offset)):
        end = extent.offset + extent.nbytes
        last = reads[-1] if reads else None
        if last and last.path == extent.path and extent.offset <= last.offset + last.nbytes + gap:
            start = last.offset
            nbytes = max(last.nbytes, round_up(end, PAGE) - start)
            reads[-1] = AlignedRead(last.path, start, nbytes, last.buffer_offset,
                                    max(last.end, end))
        else:
            start = extent.offset // PAGE * PAGE
            reads.append(AlignedRead(extent.path, start, round_up(end, PAGE) - start, size, end))
        places[extent] = reads[-1].buffer_offset + extent.offset - start
        size = reads[-1].buffer_offset + reads[-1].nbytes
    return reads, places, size


class Checksums:
    """XXH3 (64 bits) of extents of files, each made when its bytes were first read or written.

    It finds what changes by accident: a failing disk, a file that is copied over. Somebody who
    writes to the files on purpose can make other bytes of the same checksum. Threads may share it:
    large buffers are hashed without the interpreter lock.
    """

    def __init__(self) -> None:
        self._known: dict[Extent, int] = {}

    def written(self, extent: Extent, data: torch.Tensor) -> None:
        """Note what is written to an extent: uint8 on the host."""
        self._known[extent] = _checksum(data)

    def expect(self, extent: Extent, checksum: int) -> None:
        """Hold an extent against a checksum that its file keeps."""
        self._known[extent] = checksum

    def read(self, extent: Extent, data: torch.Tensor) -> None:
        """Check what was read of an extent (uint8 on the host); the first time, note it.

        Raises `UserError`, which names file and offset, where it is not what it was.
        """
        found = _checksum(data)
        if self._known.setdefault(extent, found) != found:
            raise UserError(f"{extent.path} has changed: the {extent.nbytes} bytes at byte "
                            f"{extent.offset} are not those that were first read or written; "
                            "check the disk, and get or make the file again")


def _checksum(data: torch.Tensor) -> int:
    return xxh3_64_intdigest(memoryview(data.numpy()))


class Disk:
    """Worker threads that read and write aligned ranges of files.

    Parameters
    ----------
    workers : int
        Threads, that is, requests in flight.
    record : callable, optional
        ``record(link, nbytes, start, end)`` for every chunk moved; seconds of perf_counter.
    """

    def __init__(self, workers: int = WORKERS, record: Callable[..., None] | None = None):
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="disk")
        self._soon: deque[_Chunk] = deque()  # chunks that no worker has taken
        self._ahead: deque[_Chunk] = deque()  # the same, of reads far ahead of their use
        self._record = record or (lambda *_: None)
        self._files: dict[tuple[Path, bool, bool], int] = {}
        self._lock = threading.Lock()
        self._warned = False

    def read(self, reads: Iterable[AlignedRead], buffer: torch.Tensor, *, ahead: bool = False
             ) -> None:
        """Fill `buffer` (uint8, page-aligned, on the host) and return when all bytes are there.

        Parameters
        ----------
        ahead : bool
            It is long until these bytes are used: other reads and writes, begun later too, come
            first.

        Raises
        ------
        UserError
            The file is gone, too short, or the disk reports an error.
        """
        view = memoryview(buffer.numpy())
        self._each_chunk(((partial(self._read_chunk, r.end), r.path, r.offset, view,
                           r.buffer_offset, r.nbytes) for r in reads), ahead=ahead)

    def read_by(self, path: Path, kernel: Callable[..., tuple[int, int]]) -> int:
        """Have a kernel read a file.

        ``kernel(file=descriptor, direct=whether reads pass the page cache by)`` returns how much of
        its work is done and the bytes that it read. Returns the first; what is left is for `read`,
        which tells what is wrong with it.
        """
        try:
            descriptor = self._open(path, writing=False)
        except OSError:
            return 0
        began = time.perf_counter()
        done, nbytes = kernel(file=descriptor, direct=not self._warned)
        self._record(READ, nbytes, began, time.perf_counter())
        return done

    def write(self, extent: Extent, buffer: torch.Tensor) -> None:
        """Write `buffer` (uint8, page-aligned) to a page-aligned extent of the same length."""
        self.write_each([extent], buffer)

    def write_each(self, extents: Sequence[Extent], buffer: torch.Tensor) -> None:
        """Write `buffer` (uint8, page-aligned), one part after the other, to page-aligned
        extents."""
        view = memoryview(buffer.numpy())
        starts = accumulate((extent.nbytes for extent in extents), initial=0)
        self._each_chunk([(self._write_chunk, extent.path, extent.offset, view, start,
                           extent.nbytes)
                          for extent, start in zip(extents, starts, strict=False)])

    def forget(self, folder: Path) -> None:
        """Close the files under `folder`, which is about to go."""
        with self._lock:
            for key in [key for key in self._files if folder in key[0].parents]:
                os.close(self._files.pop(key))

    def close(self) -> None:
        """Finish what is under way, stop the workers and close the files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def _each_chunk(self, ranges, *, ahead: bool = False) -> None:
        futures: list[Future] = []
        chunks = self._ahead if ahead else self._soon
        ranges = list(ranges)
        # One for each worker at least, so that the next transfer's are taken up as these end.
        share = round_up(sum(nbytes for *_, nbytes in ranges) // self._workers, HUGE_PAGE)
        size = min(max(share, HUGE_PAGE), CHUNK)
        for work, path, offset, view, start, nbytes in ranges:
            for done in range(0, nbytes, size):
                chunk = view[start + done : start + min(done + size, nbytes)]
                future: Future[None] = Future()
                with self._lock:
                    chunks.append((future, partial(work, path, offset + done, chunk)))
                self._pool.submit(self._next)
                futures.append(future)
        # The buffer must outlive every chunk, so wait for all of them before an error is raised.
        wait(futures)
        for future in futures:
            future.result()

    def _next(self) -> None:
        """Do the chunks whose turn it is, until none is left.

        Not one a call: an interrupt may have come between a chunk and its call, and later ones
        would wait for ever.
        """
        while True:
            with self._lock:
                chunks = self._soon or self._ahead
                if not chunks:
                    return
                future, work = chunks.popleft()
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _read_chunk(self, end: int, path: Path, offset: int, chunk: memoryview) -> None:
        began = time.perf_counter()
        done = self._fill(end, path, offset, chunk)
        self._record(READ, done, began, time.perf_counter())

    def _fill(self, end: int, path: Path, offset: int, chunk: memoryview) -> int:
        """Bytes that were read into the chunk: all of it, but for the last page of a file."""
        done = 0
        try:
            descriptor = self._open(path, writing=False)
            while done < len(chunk):
                got = os.preadv(descriptor, [chunk[done:]], offset + done)
                done += got
                # The last page of a file that does not end on a page boundary comes back short.
                if got == 0 or done % PAGE and offset + done >= os.fstat(descriptor).st_size:
                    break
                if done % PAGE:
                    descriptor = self._open(path, writing=False, direct=False)
            if done < len(chunk) and offset + done < os.fstat(descriptor).st_size:
                raise OSError(errno.EIO, "short read")
        except OSError as error:
            raise UserError(f"reading {path} failed: {error.strerror}; check the disk") from error
        if len(chunk) - done >= PAGE or done < min(len(chunk), end - offset):
            raise UserError(f"{path} ends at byte {offset + done}: it was cut short during the run")
        return done

    def _write_chunk(self, path: Path, offset: int, chunk: memoryview) -> None:
        began = time.perf_counter()
        done = 0
        try:
            descriptor = self._open(path, writing=True)
            while done < len(chunk):
                done += os.pwritev(descriptor, [chunk[done:]], offset + done)
                if done % PAGE:
                    descriptor = self._open(path, writing=True, direct=False)
        except OSError as error:
            raise _offload_error(error, path) from error
        self._record(WRITE, len(chunk), began, time.perf_counter())

    def _open(self, path: Path, *, writing: bool, direct: bool = True) -> int:
        """An open file. Not direct: through the page cache, from and to any byte.

        Network file systems and FUSE may move fewer bytes than asked for, and not whole pages;
        O_DIRECT cannot go on from there.
        """
        with self._lock:
            key = (path, writing, direct)
            if key not in self._files:
                flags = (os.O_RDWR if writing else os.O_RDONLY) | os.O_CLOEXEC
                self._files[key] = (self._open_direct(path, flags) if direct
                                    else os.open(path, flags))
            return self._files[key]

    def _open_direct(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if not self._warned:
            self._warned = True
            log.warning("the file system of %s refuses O_DIRECT: reading through the page cache",
                        path.parent)
        return os.open(path, flags)


def _offload_error(error: OSError, path: Path) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"the disk of {path.parent} is full: free some space, offload less to "
                         "disk, or choose another --offload-dir")
    return UserError(f"writing {path} failed: {error.strerror}; check --offload-dir")


def _remove_folder(path: Path, owner: int | None = None) -> None:
    try:
        shutil.rmtree(path, ignore_errors=True)
    except BaseException:  # an interrupt, which must not leave the rest behind
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if owner is not None:
            os.close(owner)


def _remove_own(path: Path, owner: int, process: int) -> None:
    if os.getpid() == process:  # a forked child has the finalizer, too
        _remove_folder(path, owner)


class RunFolder:
    """A private (0700) folder for one run's offload files, gone when the run is.

    A lock held on the folder tells a living run from one that was killed; whatever a killed run
    left behind in the same place is removed by the next. The kernel drops the lock with the
    process, however it ends.

    Raises
    ------
    UserError
        The place can't be created or written.
    """

    def __init__(self, offload_dir: str | os.PathLike):
        self._parent = Path(os.path.expanduser(offload_dir))
        for place in (self._parent, *self._parent.parents):
            if os.path.lexists(place) and not os.path.isdir(place):
                kind = "a file" if os.path.isfile(place) else "no folder"
                raise UserError(f"--offload-dir {self._parent} can't be used: {place} is {kind}; "
                                "give a folder, or a name that is not taken yet")
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            # Creating and cleaning exclude each other: a new folder is never seen unlocked.
            guard = os.open(self._parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(guard, fcntl.LOCK_EX)
                self._remove_stale()
                self._make()
            finally:
                os.close(guard)
        except OSError as error:
            raise UserError(f"offload folder {self._parent} can't be used: {error.strerror}; "
                            "choose a writable folder with --offload-dir") from error

    def _make(self) -> None:
        # The name is known before the folder is there: an interrupt finds what it has to remove.
        self.path = self._parent / f"{RUN_PREFIX}{uuid.uuid4().hex}"
        try:
            self.path.mkdir(mode=0o700)
            self._owner = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._owner, fcntl.LOCK_EX)
            # Also when the interpreter exits and it was not closed.
            self._remove = weakref.finalize(self, _remove_own, self.path, self._owner, os.getpid())
        except BaseException:
            _remove_folder(self.path)
            raise

    def file(self, name: str, nbytes: int) -> Path:
        """Create the file `name` with `nbytes` reserved on disk (so that a full disk shows now)."""
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(round_up(nbytes, PAGE), PAGE))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _offload_error(error, path) from error
        return path

    def close(self) -> None:
        """Remove the folder with all that is in it; a second call does nothing."""
        self._remove()

    def _remove_stale(self) -> None:
        for folder in self._parent.glob(f"{RUN_PREFIX}*"):
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            else:
                log.info("removing %s, left behind by a killed run", folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
