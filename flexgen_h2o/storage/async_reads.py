"""Many small reads of a file at once, by Linux's asynchronous I/O (io_submit(2)).

One call hands the kernel hundreds of requests, and one waits for them: no thread has to be woken
for each, and the disk always has as many as it likes. Where the kernel offers none (another system,
another processor, too many contexts in use), `AsyncReads.made` returns None.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

import numpy as np

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents and io_submit (asm/unistd.h)."""
_PREAD = 0  # IOCB_CMD_PREAD
_REQUEST = np.dtype([("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"),
                     ("priority", "<i2"), ("file", "<u4"), ("buffer", "<u8"), ("nbytes", "<u8"),
                     ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event", "<u4")])
"""struct iocb of linux/aio_abi.h."""
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("second", "<i8")])
"""struct io_event of it."""
DEPTH = 256
"""Requests that the kernel has at a time, at most. Measured on a virtual disk, in reads of 4 KB a
second: 88,000 with 64, 99,000 with 256, 97,000 with 1,024."""


class AsyncReads:
    """A context of the kernel for reads, to be used by one thread at a time."""

    def __init__(self, calls: tuple[int, int, int, int]):
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        self._syscall.restype = ctypes.c_long
        self._destroy, self._events, self._submit = calls[1:]
        self._context = ctypes.c_ulong(0)
        self._call(calls[0], ctypes.c_long(DEPTH), ctypes.byref(self._context))

    @classmethod
    def made(cls) -> AsyncReads | None:
        """A new context; None where there is no asynchronous I/O."""
        calls = _CALLS.get(platform.machine())
        if not sys.platform.startswith("linux") or calls is None:
            return None
        try:
            return cls(calls)
        except OSError:
            return None

    def read(self, descriptor: int, ranges: np.ndarray, address: int) -> np.ndarray:
        """Read ranges of a file, opened with O_DIRECT (others are read one after the other).

        Parameters
        ----------
        ranges : int64 ndarray [n, 3]
            (offset, nbytes, place in the buffer), multiples of a page.
        address : int
            Of the buffer, which nobody may free or write to meanwhile.

        Returns
        -------
        bool ndarray [n]
            True where all bytes came; others are to be read in another way, which says what is
            wrong with them.
        """
        count = len(ranges)
        requests = np.zeros(count, _REQUEST)
        requests["data"] = np.arange(count)
        requests["opcode"], requests["file"] = _PREAD, descriptor
        requests["offset"], requests["nbytes"] = ranges[:, 0], ranges[:, 1]
        requests["buffer"] = address + ranges[:, 2]
        pointers = requests.ctypes.data + np.arange(count, dtype=np.uint64) * _REQUEST.itemsize
        events, came = np.empty(DEPTH, _EVENT), np.zeros(count, bool)
        submitted = ended = 0
        stop = count
        while ended < submitted or submitted < stop:
            some = min(DEPTH - (submitted - ended), stop - submitted)
            if some > 0:
                try:
                    submitted += self._call(
                        self._submit, self._context, ctypes.c_long(some),
                        ctypes.c_void_p(pointers[submitted:].ctypes.data))
                except OSError as error:
                    if error.errno != errno.EAGAIN or submitted == ended:
                        stop = submitted  # the kernel refuses: what is under way still has to end
                        continue
            # At the end for all at once, before for enough to go on: each waking costs time.
            under_way = submitted - ended
            least = under_way if submitted == stop else -(-under_way // 2)
            found = self._call(self._events, self._context, ctypes.c_long(least),
                               ctypes.c_long(DEPTH), ctypes.c_void_p(events.ctypes.data), None)
            which = events["data"][:found].astype(np.int64)
            came[which] = events["result"][:found] == ranges[which, 1]
            ended += found
        return came

    def close(self) -> None:
        """Give the context back."""
        self._call(self._destroy, self._context)

    def _call(self, number: int, *arguments) -> int:
        """A system call, again where a signal cut it short. Raises OSError."""
        while True:
            result = self._syscall(ctypes.c_long(number), *arguments)
            if result >= 0:
                return result
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
