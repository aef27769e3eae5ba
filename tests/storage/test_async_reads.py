"""Asynchronous reads: what comes, what does not, and a kernel that has no room."""

from __future__ import annotations

import ctypes
import errno
import os
import random

import numpy as np
import pytest

from flexgen_h2o.storage import async_reads
from flexgen_h2o.storage.async_reads import AsyncReads
from flexgen_h2o.storage.tiers import PAGE, Device

PAGES = 40


@pytest.fixture
def reads(monkeypatch):
    monkeypatch.setattr(async_reads, "DEPTH", 7)
    made = AsyncReads.made()
    if made is None:
        pytest.skip("this system has no asynchronous I/O")
    yield made
    made.close()


@pytest.fixture
def file(tmp_path):
    """A file's bytes and its descriptor. Whether reads pass the page cache by makes no difference
    to what comes."""
    content = random.Random(3).randbytes(PAGES * PAGE)
    (tmp_path / "a").write_bytes(content)
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    yield content, descriptor
    os.close(descriptor)


def shuffled() -> np.ndarray:
    """Each page of the file, to another place."""
    rng = np.random.default_rng(5)
    offsets, places = (rng.permutation(PAGES) * PAGE for _ in range(2))
    return np.stack((offsets, np.full(PAGES, PAGE), places), axis=1)


def check(content, ranges, buffer, came) -> None:
    got = bytes(buffer.numpy())
    for (offset, nbytes, place), whole in zip(ranges.tolist(), came.tolist(), strict=True):
        if whole:
            assert got[place : place + nbytes] == content[offset : offset + nbytes]


def test_all_come_and_what_the_file_does_not_have_is_told(reads, file):
    content, descriptor = file
    buffer, ranges = Device().host_empty(PAGES * PAGE), shuffled()
    came = reads.read(descriptor, ranges, buffer.data_ptr())
    assert came.all()
    check(content, ranges, buffer, came)
    ranges[11, 0], ranges[12, 0] = (PAGES - 1) * PAGE + 512, PAGES * PAGE
    came = reads.read(descriptor, ranges, buffer.data_ptr())
    assert np.flatnonzero(~came).tolist() == [11, 12]
    check(content, ranges, buffer, came)
    assert not reads.read(10_000, ranges, buffer.data_ptr()).any()


def test_a_kernel_without_room_and_one_that_refuses_leave_nothing_under_way(
        reads, file, monkeypatch):
    content, descriptor = file
    kernel, calls, under_way = reads._syscall, [], []

    def syscall(number, *arguments):
        """Takes two requests of a call, then none, is interrupted, and at last refuses."""
        if number.value == reads._submit:
            calls.append(number)
            if len(calls) % 3 == 0 or len(calls) > 9:
                ctypes.set_errno(errno.EAGAIN if len(calls) <= 9 else errno.EINVAL)
                return -1
            taken = kernel(number, arguments[0], ctypes.c_long(min(2, arguments[1].value)),
                           *arguments[2:])
            under_way.append(taken)
            return taken
        if len(calls) % 4 == 0 and calls and calls[-1] is not None:
            calls[-1] = None
            ctypes.set_errno(errno.EINTR)
            return -1
        ended = kernel(number, *arguments)
        under_way.append(-ended)
        return ended

    buffer, ranges = Device().host_empty(PAGES * PAGE), shuffled()
    with monkeypatch.context() as patch:
        patch.setattr(reads, "_syscall", syscall)
        came = reads.read(descriptor, ranges, buffer.data_ptr())
    assert sum(under_way) == 0 and 0 < came.sum() < PAGES
    check(content, ranges, buffer, came)


def test_another_system_has_none(monkeypatch):
    monkeypatch.setattr(async_reads.platform, "machine", lambda: "riscv64")
    assert AsyncReads.made() is None
    monkeypatch.undo()

    def refuse(self, calls):
        raise OSError(errno.EAGAIN, "too many contexts")

    monkeypatch.setattr(AsyncReads, "__init__", refuse)
    assert AsyncReads.made() is None
