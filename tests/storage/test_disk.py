"""Disk I/O: aligned chunks of any extents, errors that come back, folders that go away."""

import contextlib
import errno
import fcntl
import os
import queue
import random
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.error_cases import refused
from helpers.internals import keep_latest_in, under_lock
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.storage import disk as disk_module
from flexgen_h2o.storage import offload_dirs
from flexgen_h2o.storage.device import PAGE, Device, round_up
from flexgen_h2o.storage.disk import READ, AlignedRead, Disk, Extent, plan_reads
from flexgen_h2o.storage.offload_dirs import OffloadDirs
from flexgen_h2o.storage.run_folder import RUN_PREFIX, RunFolder
from flexgen_h2o.storage.transfer import ATTENTION, Transfers


@pytest.fixture
def disk():
    moved = []
    with_record = Disk(record=lambda *chunk: moved.append(chunk))
    with_record.moved = moved
    yield with_record
    with_record.close()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(25))
def test_extents_equal_the_file(tmp_path_factory, seed):
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("reads")
    contents = {folder / f"{i}.bin": rng.randbytes(rng.randrange(1, 300_000)) for i in range(2)}
    for path, content in contents.items():
        path.write_bytes(content)
    extents = []
    for _ in range(rng.randrange(1, 12)):
        path = rng.choice(list(contents))
        start = rng.randrange(len(contents[path]))
        extents.append(Extent(path, start, rng.randrange(1, len(contents[path]) - start + 1)))
    reads, places, size = plan_reads(extents, gap=rng.choice([0, PAGE, 64 << 10]))
    buffer = Device().host_empty(size).fill_(255)
    reader = Disk()
    reader.read(reads, buffer)
    reader.close()
    for extent in extents:
        got = bytes(buffer[places[extent] : places[extent] + extent.nbytes].numpy())
        assert got == contents[extent.path][extent.offset : extent.offset + extent.nbytes]


def test_neighbours_become_one_read(tmp_path):
    path = tmp_path / "a"
    near = [Extent(path, 1000 + i * 5000, 4000) for i in range(10)]
    far = Extent(path, 10 << 20, 100)
    reads, _, size = plan_reads([*near, far])
    assert [r.offset for r in reads] == [0, 10 << 20]
    assert size == sum(r.nbytes for r in reads)


def test_reads_by_kernels_are_recorded(tmp_path):
    path, moved, seen = tmp_path / "a", [], []
    path.write_bytes(b"x" * PAGE)

    def kernel(*, file, direct):
        seen.append((os.fstat(file).st_size, type(direct)))
        return 3, PAGE

    with contextlib.closing(Disk(record=lambda *chunk: moved.append(chunk))) as disk:
        assert disk.read_by(path, kernel) == 3
        assert disk.read_by(tmp_path / "gone", kernel) == 0
    (link, nbytes, began, ended), = moved
    assert (link, nbytes) == (READ, PAGE) and began < ended
    assert seen == [(PAGE, bool)]


def test_large_transfers_are_cut_into_chunks_and_counted(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(disk_module, "CHUNK", 2 * PAGE)
    content = torch.randint(0, 256, (9 * PAGE,), dtype=torch.uint8)
    source = Device().host_empty(9 * PAGE).copy_(content)
    path = tmp_path / "a"
    path.write_bytes(bytes(9 * PAGE))
    disk.write(Extent(path, 0, 9 * PAGE), source)
    target = Device().host_empty(9 * PAGE).fill_(255)
    disk.read([AlignedRead(path, 0, 9 * PAGE, 0)], target)
    assert torch.equal(target, content)
    assert sum(n for link, n, *_ in disk.moved if link == "cpu->disk") == 9 * PAGE
    assert len([1 for link, *_ in disk.moved if link == "disk->cpu"]) == 5


def test_scattered_writes(tmp_path, disk):
    source = Device().host_empty(6 * PAGE).random_(0, 256)
    one, two = tmp_path / "a", tmp_path / "b"
    for path in (one, two):
        path.write_bytes(bytes(8 * PAGE))
    disk.write_each([Extent(one, 5 * PAGE, PAGE), Extent(two, 0, 3 * PAGE),
                     Extent(one, PAGE, 2 * PAGE)], source)
    parts, empty = [bytes(page.numpy()) for page in source.split(PAGE)], bytes(PAGE)
    assert one.read_bytes() == b"".join(
        (empty, *parts[4:6], empty, empty, parts[0], empty, empty))
    assert two.read_bytes() == b"".join((*parts[1:4], *[empty] * 5))


@given(order=st.permutations([True, True, False, False]))
@settings(max_examples=examples(12))
def test_demand_reads_go_before_read_ahead(tmp_path_factory, order):
    path, moved, submitted = tmp_path_factory.mktemp("disk") / "a", [], queue.SimpleQueue()
    path.write_bytes(bytes(len(order) * PAGE))
    disk = Disk(record=lambda *chunk: moved.append(chunk))
    buffers = [Device().host_empty(place * PAGE + PAGE).fill_(255) for place in range(len(order))]
    with contextlib.closing(disk), ThreadPoolExecutor(len(order)) as readers:
        workers, disk._pool = disk._pool, SimpleNamespace(submit=submitted.put)
        reads, calls = [], []
        for place, ahead in enumerate(order):
            # Of its own length, by which its turn is seen.
            whole = [AlignedRead(path, 0, place * PAGE + PAGE, 0)]
            reads.append(readers.submit(disk.read, whole, buffers[place], ahead=ahead))
            calls.append(submitted.get())
        for call in calls:
            call()
        disk._pool = workers
        for read in reads:
            read.result()
    turns = [nbytes // PAGE - 1 for _, nbytes, *_ in moved]
    assert turns == sorted(range(len(order)), key=lambda place: order[place])
    assert not any(buffer.any() for buffer in buffers)


def test_interrupted_read_does_not_block_later_reads(tmp_path, disk, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    path = tmp_path / "a"
    path.write_bytes(bytes(PAGE))
    reads, buffer = [AlignedRead(path, 0, PAGE, 0)], Device().host_empty(PAGE).fill_(255)
    with monkeypatch.context() as patched:
        patched.setattr(disk._pool, "submit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            disk.read(reads, Device().host_empty(PAGE))
    later = threading.Thread(target=disk.read, args=(reads, buffer), daemon=True)
    later.start()
    later.join(10)
    assert not later.is_alive() and not buffer.any()


def test_missing_direct_io_is_logged_once(tmp_path, disk, monkeypatch, caplog):
    real_open = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    for name in "ab":
        (tmp_path / name).write_bytes(b"x" * 100)
        buffer = Device().host_empty(PAGE)
        disk.read([AlignedRead(tmp_path / name, 0, PAGE, 0)], buffer)
        assert bytes(buffer[:100].numpy()) == b"x" * 100
    assert len([r for r in caplog.records if "refuses O_DIRECT" in r.message]) == 1


@pytest.mark.parametrize("most", [1, 511, PAGE + 1, 3 * PAGE - 1])
def test_short_reads_and_writes_continue(tmp_path, disk, monkeypatch, most):
    """Network file systems and FUSE do; O_DIRECT goes on from the middle of a page nowhere."""
    def short(call):
        def move(descriptor, views, offset):
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and offset % PAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            (view,) = views
            moved = min(call(descriptor, views, offset), most + (offset % PAGE and 5000))
            if call is real_read:
                view[moved:] = b"?" * (len(view) - moved)
            return moved

        return move

    real_read, content = os.preadv, random.Random(1).randbytes(5 * PAGE + 100)
    path = tmp_path / "a"
    path.write_bytes(content)
    source, target = (Device().host_empty(6 * PAGE) for _ in range(2))
    source[: len(content)] = torch.frombuffer(bytearray(content[::-1]), dtype=torch.uint8)
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    disk.read([AlignedRead(path, 0, 6 * PAGE, 0, end=len(content))], target)
    assert bytes(target[: len(content)].numpy()) == content
    disk.write(Extent(path, 0, 6 * PAGE), source)
    assert path.read_bytes() == bytes(source.numpy())
    disk.forget(tmp_path)
    assert not [file for file in Path("/proc/self/fd").iterdir() if file.resolve() == path]


def test_jobs_submit_jobs_during_a_drain(monkeypatch):
    class Changing(dict):
        """Gets another job as soon as it is walked through without the lock that guards it."""

        def items(self):
            items = iter(super().items())
            if not under_lock(transfers):
                transfers.submit(ATTENTION, done.append)
            return items

    transfers, done = Transfers(Device(), links=LinkStats(), trace=Trace(enabled=False)), []
    with contextlib.closing(transfers):
        for wait in (transfers.drain, transfers.abandon):
            keep_latest_in(monkeypatch, transfers, Changing())
            transfers.submit("stores", lambda queue: transfers.submit("loads", done.append))
            wait()
    assert len(done) == 2


def test_truncated_and_missing_files_are_errors(tmp_path, disk):
    path = tmp_path / "a"
    path.write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="cut short"):
        disk.read([AlignedRead(path, 0, 4 * PAGE, 0)], Device().host_empty(4 * PAGE))
    with pytest.raises(UserError, match="No such file"):
        disk.read([AlignedRead(tmp_path / "b", 0, PAGE, 0)], Device().host_empty(PAGE))


def test_run_folder_is_private_and_removed(tmp_path):
    folder = RunFolder(tmp_path / "deep" / "offload")
    assert not folder.paths and not list(tmp_path.iterdir())
    assert folder.file("a.bin", 5000).stat().st_size == round_up(5000, PAGE)
    private, = folder.paths
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    folder.close()
    folder.close()
    assert list((tmp_path / "deep" / "offload").iterdir()) == []


def test_files_of_killed_runs_are_removed(tmp_path):
    if (process := os.fork()) == 0:
        folder = RunFolder(tmp_path)  # one that nothing refers to is removed
        folder.file("a.bin", 9)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    left, = tmp_path.glob(f"{RUN_PREFIX}*")
    living, other = RunFolder(tmp_path), RunFolder(tmp_path)
    living.create()
    assert not left.exists()
    other.create()
    assert living.paths[0].exists()
    living.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_unclosed_run_folder_is_removed_at_exit(tmp_path):
    code = ("from flexgen_h2o.storage.run_folder import RunFolder;"
            f"folder = RunFolder({str(tmp_path)!r}); folder.file('a.bin', 9)")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("place", "words"), [
    ("file", "file is a file"), ("file/below", "file is a file"), ("gone", "gone is no folder")])
def test_invalid_offload_folder_is_an_error(tmp_path, place, words):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "gone").symlink_to("nowhere")
    refused(RunFolder(tmp_path / place).create, match=f"--offload-dir .*{words}")


@pytest.mark.parametrize("rates", [(1, 1), (3, 1), (1, 2, 5), (1, 999)])
def test_files_are_striped_over_offload_folders(tmp_path, disk, monkeypatch, rates):
    monkeypatch.setattr(offload_dirs, "STRIPE", PAGE)
    parents = [tmp_path / str(number) for number in range(len(rates))]
    dirs = OffloadDirs.parse(parents).by_rates(rates)
    pages, rng = 70, random.Random(0)
    with contextlib.closing(RunFolder(dirs)) as folder:
        file = folder.striped_file("a.bin", pages * PAGE - 5)
        sizes = [path.stat().st_size // PAGE for path in file.files]
        assert sum(sizes) == pages and [path.parent.parent for path in file.files] == parents
        for size, rate in zip(sizes, rates, strict=True):
            assert abs(size - pages * rate / sum(rates)) <= 5
        content = Device().host_empty(pages * PAGE).random_(0, 256)
        disk.write(Extent(file, 0, 40 * PAGE), content[: 40 * PAGE])
        disk.write(Extent(file, 40 * PAGE, 30 * PAGE), content[40 * PAGE :])
        assert sorted(b"".join(path.read_bytes() for path in file.files)) == sorted(
            bytes(content.numpy()))
        for _ in range(20):
            start = rng.randrange(pages * PAGE)
            extent = Extent(file, start, rng.randrange(1, pages * PAGE - start + 1))
            reads, places, size = plan_reads([extent])
            target = Device().host_empty(size).fill_(255)
            disk.read(reads, target)
            assert torch.equal(target[places[extent] :][: extent.nbytes],
                               content[start : start + extent.nbytes])
    assert not any(os.listdir(parent) for parent in parents)


def test_file_for_kernels_is_on_the_fastest_disk(tmp_path):
    dirs = OffloadDirs.parse([tmp_path / "slow", tmp_path / "fast"]).by_rates([1, 2])
    with contextlib.closing(RunFolder(dirs)) as folder:
        path = folder.file("recall.bin", PAGE)
        assert path.parent.parent == tmp_path / "fast"


def test_unusable_one_of_offload_folders_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    refused(RunFolder([tmp_path / "good", tmp_path / "file"]).create, match="file is a file")
    assert os.listdir(tmp_path / "good") == []
    refused(lambda: RunFolder([]), match="offload_dir is empty")
    refused(lambda: RunFolder([tmp_path / "good", ""]), match="offload_dir must be")
    allocate = os.posix_fallocate

    def fail(descriptor, *sizes):
        if "full" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, *sizes)

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with contextlib.closing(RunFolder([tmp_path / "good", tmp_path / "full"])) as folder:
        refused(lambda: folder.striped_file("a.bin", 9), match="the disk of .*/full/.* is full")
