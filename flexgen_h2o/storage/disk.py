"""Disk I/O: page-aligned O_DIRECT reads and writes in worker threads.

Transfers are split into chunks of up to 8 MiB, which the workers take in order; reads far ahead of
their use come last. A thread in ``preadv`` holds neither a core nor the interpreter lock, so that
reads overlap compute on all cores. Hundreds of small reads at once are done by a kernel
(`ops.fetch_tokens`), which gets an open file from here.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from xxhash import xxh3_64_intdigest

from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.device import HUGE_PAGE, PAGE, round_up
from flexgen_h2o.storage.offload_dirs import StripedFile
from flexgen_h2o.storage.run_folder import offload_error

log = logging.getLogger(__name__)

CHUNK = 8 << 20  # bytes
WORKERS = 4
READ, WRITE = "disk->cpu", "cpu->disk"

_Chunk = tuple[Future[None], Callable[[], None]]
"""The work on a chunk, and the future of its end."""
_Range = tuple[Callable[..., None], Path | StripedFile, int, memoryview, int, int]
"""Work on (path, offset, buffer, place in the buffer, bytes)."""


@dataclass(frozen=True)
class Extent:
    """A range of bytes in a file: the row-major, little-endian elements of one tensor.

    Attributes
    ----------
    path : Path or StripedFile
    offset : int
        Bytes from the start of the file, with any alignment.
    nbytes : int
    """

    path: Path | StripedFile
    offset: int
    nbytes: int


@dataclass(frozen=True)
class AlignedRead:
    """A read of a page-aligned file range into a page-aligned range of a buffer.

    Attributes
    ----------
    path : Path or StripedFile
    offset, nbytes : int
        Range of the file.
    buffer_offset : int
    end : int
        Byte that the file must reach: its last page may be incomplete.
    """

    path: Path | StripedFile
    offset: int
    nbytes: int
    buffer_offset: int
    end: int = 0


def plan_reads(extents: Iterable[Extent], *, gap: int = 64 << 10
               ) -> tuple[list[AlignedRead], dict[Extent, int], int]:
    """Merge extents into few large aligned reads into one buffer.

    Extents of one file that are at most `gap` bytes apart become one read. Bytes keep their offset
    within a page, so that O_DIRECT reads them in place.

    Returns
    -------
    list of AlignedRead
    dict of Extent to int
        Offset of each extent in the buffer.
    int
        Bytes of the buffer.
    """
    reads: list[AlignedRead] = []
    offsets: dict[Extent, int] = {}
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
        offsets[extent] = reads[-1].buffer_offset + extent.offset - start
        size = reads[-1].buffer_offset + reads[-1].nbytes
    return reads, offsets, size


class Checksums:
    """Checksums (XXH3, 64 bits) of extents, computed when they are first read or written.

    They detect accidents, such as a failing disk or an overwritten file, but no manipulation: the
    hash is not cryptographic. Thread-safe; large buffers are hashed without the interpreter lock.
    """

    def __init__(self) -> None:
        self._known: dict[Extent, int] = {}

    def written(self, extent: Extent, data: torch.Tensor) -> None:
        """Keep the checksum of data that is written to an extent: uint8, on the host."""
        self._known[extent] = _checksum(data)

    def expect(self, extent: Extent, checksum: int) -> None:
        """Keep the checksum of an extent that its file contains."""
        self._known[extent] = checksum

    def read(self, extent: Extent, data: torch.Tensor) -> None:
        """Compare data that was read from an extent (uint8, on the host) with the known checksum.

        Raises
        ------
        UserError
            The data has changed; the message names file and offset.
        """
        checksum = _checksum(data)
        if self._known.setdefault(extent, checksum) != checksum:
            raise UserError(f"{extent.path} has changed: the {extent.nbytes} bytes at byte "
                            f"{extent.offset} are not those that were first read or written; "
                            "check the disk, and get or make the file again")


def _checksum(data: torch.Tensor) -> int:
    return xxh3_64_intdigest(data.numpy().data)


class Disk:
    """Worker threads that read and write aligned ranges of files.

    Parameters
    ----------
    workers : int
        Number of threads, and of requests in flight.
    record : callable, optional
        Is called with (link, nbytes, start, end) for each chunk; times in seconds of perf_counter.
    """

    def __init__(self, workers: int = WORKERS, record: Callable[..., None] | None = None):
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="disk")
        self._chunks: deque[_Chunk] = deque()  # that no worker has taken
        self._ahead_chunks: deque[_Chunk] = deque()  # of reads far ahead of their use
        self._record = record or (lambda *_: None)
        self._files: dict[tuple[Path, bool, bool], int] = {}
        self._lock = threading.Lock()
        self._warned = False

    def read(self, reads: Iterable[AlignedRead], buffer: torch.Tensor, *, ahead: bool = False
             ) -> None:
        """Read into a buffer, and wait until all bytes are there.

        Parameters
        ----------
        reads : iterable of AlignedRead
        ahead : bool
            The bytes are used much later: other reads and writes come first, even later ones.

        Raises
        ------
        UserError
            The file is missing or too short, or the disk reports an error.
        """
        view = buffer.numpy().data
        self._each_chunk(((partial(self._read_chunk, r.end), r.path, r.offset, view,
                           r.buffer_offset, r.nbytes) for r in reads), ahead=ahead)

    def read_by(self, path: Path, kernel: Callable[..., tuple[int, int]]) -> int:
        """Let ``kernel(file=, direct=) -> (done, nbytes)`` read a file, and return `done`.

        `direct` says that the file descriptor bypasses the page cache; `done` is the amount of work
        that is done. After an error, use `read` for the rest: it reports errors.
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
        """Write a buffer (uint8, page-aligned) to a page-aligned extent of the same length."""
        self.write_each([extent], buffer)

    def write_each(self, extents: Sequence[Extent], buffer: torch.Tensor) -> None:
        """Write consecutive parts of a buffer (uint8, page-aligned) to page-aligned extents."""
        view = buffer.numpy().data
        starts = accumulate((extent.nbytes for extent in extents), initial=0)
        self._each_chunk([(self._write_chunk, extent.path, extent.offset, view, start,
                           extent.nbytes)
                          for extent, start in zip(extents, starts, strict=False)])

    def forget(self, folder: Path) -> None:
        """Close the files in a folder, before it is removed."""
        with self._lock:
            for key in [key for key in self._files if folder in key[0].parents]:
                os.close(self._files.pop(key))

    def close(self) -> None:
        """Finish running chunks, stop the workers and close all files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()

    def _each_chunk(self, ranges: Iterable[_Range], *, ahead: bool = False) -> None:
        futures: list[Future] = []
        chunks = self._ahead_chunks if ahead else self._chunks
        ranges = list(ranges)
        # At least one chunk for each worker: then all workers reach the next transfer together.
        share = round_up(sum(nbytes for *_, nbytes in ranges) // self._workers, HUGE_PAGE)
        size = min(max(share, HUGE_PAGE), CHUNK)
        for work, path, offset, view, start, nbytes in ranges:
            for chunk in _chunks(path, offset, view[start : start + nbytes], size):
                future: Future[None] = Future()
                with self._lock:
                    chunks.append((future, partial(work, *chunk)))
                self._pool.submit(self._next)
                futures.append(future)
        # The buffer must outlive its chunks: wait for all of them before raising an error.
        wait(futures)
        for future in futures:
            future.result()

    def _next(self) -> None:
        """Process chunks until none is left.

        One chunk per call is not enough: an interrupt between queuing a chunk and submitting its
        call would leave a chunk behind.
        """
        while True:
            with self._lock:
                chunks = self._chunks or self._ahead_chunks
                if not chunks:
                    return
                future, work = chunks.popleft()
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _read_chunk(self, end: int, path: Path, offset: int, chunk: Sequence[memoryview]) -> None:
        began = time.perf_counter()
        done = self._fill(end, path, offset, chunk)
        self._record(READ, done, began, time.perf_counter())

    def _fill(self, end: int, path: Path, offset: int, chunk: Sequence[memoryview]) -> int:
        """Read into a chunk. Return the bytes read: all, except at the end of the file."""
        done, size = 0, sum(map(len, chunk))
        try:
            descriptor = self._open(path, writing=False)
            while done < size:
                got = os.preadv(descriptor, _after(done, chunk), offset + done)
                done += got
                # A read of the last page is short if the file does not end on a page boundary.
                if got == 0 or done % PAGE and offset + done >= os.fstat(descriptor).st_size:
                    break
                if done % PAGE:
                    descriptor = self._open(path, writing=False, direct=False)
            if done < size and offset + done < os.fstat(descriptor).st_size:
                raise OSError(errno.EIO, "short read")
        except OSError as error:
            raise UserError(f"reading {path} failed: {error.strerror}; check the disk") from error
        if size - done >= PAGE or done < min(size, end - offset):
            raise UserError(f"{path} ends at byte {offset + done}: it was cut short during the run")
        return done

    def _write_chunk(self, path: Path, offset: int, chunk: Sequence[memoryview]) -> None:
        began = time.perf_counter()
        done, size = 0, sum(map(len, chunk))
        try:
            descriptor = self._open(path, writing=True)
            while done < size:
                done += os.pwritev(descriptor, _after(done, chunk), offset + done)
                if done % PAGE:
                    descriptor = self._open(path, writing=True, direct=False)
        except OSError as error:
            raise offload_error(error, path) from error
        self._record(WRITE, size, began, time.perf_counter())

    def _open(self, path: Path, *, writing: bool, direct: bool = True) -> int:
        """Return the descriptor of an open file.

        Without `direct`, transfers use the page cache and need no alignment. Network file systems
        and FUSE may transfer less than whole pages, after which O_DIRECT cannot continue.
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


def _chunks(path: Path | StripedFile, offset: int, view: memoryview, size: int
            ) -> Iterator[tuple[Path, int, list[memoryview]]]:
    """Split a transfer between a file and memory into chunks of about `size` bytes.

    Yield the file, the offset in it, and the consecutive parts of the chunk in memory. A chunk of a
    striped file has many parts, because short requests are slow.
    """
    if not isinstance(path, StripedFile):
        for done in range(0, len(view), size):
            yield path, offset + done, [view[done : done + size]]
        return
    started: dict[Path, tuple[int, list[memoryview]]] = {}
    for file, file_offset, nbytes in path.ranges(offset, len(view)):
        first, parts = started.setdefault(file, (file_offset, []))
        parts.append(view[:nbytes])
        view = view[nbytes:]
        if file_offset + nbytes - first >= size:
            yield file, *started.pop(file)
    for file, (first, parts) in started.items():
        yield file, first, parts


def _after(done: int, parts: Iterable[memoryview]) -> list[memoryview]:
    """Return the rest of the parts of a chunk after its first `done` bytes."""
    rest = []
    for part in parts:
        rest.append(part[done:])
        done = max(0, done - len(part))
    return [part for part in rest if part]
