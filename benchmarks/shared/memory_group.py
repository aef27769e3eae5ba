"""A memory cgroup for a child process: a limit that counts the page cache too."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.trace import GB

MOUNT = Path("/sys/fs/cgroup")
_LIMITS = ("memory.limit_in_bytes", "memory.max")  # of version 1, of version 2


class MemoryGroup:
    """A cgroup (v1 or v2) with a limit of its own, gone when the context ends.

    Parameters
    ----------
    limit : int
        Bytes of memory, page cache included.

    Raises
    ------
    UserError
        There is no memory controller, or it may not be used: it takes root.
    """

    def __init__(self, limit: int):
        self._limit = limit

    def __enter__(self) -> MemoryGroup:
        v1 = (MOUNT / "memory").is_dir()
        parent = MOUNT / "memory" if v1 else MOUNT
        files = (_LIMITS[0], "memory.max_usage_in_bytes", "memory.oom_control"
                 ) if v1 else (_LIMITS[1], "memory.peak", "memory.events")
        self._folder = parent / f"flexgen_h2o-{os.getpid()}"
        self._peak, self._events = self._folder / files[1], self._folder / files[2]
        try:
            self._folder.mkdir()
            (self._folder / files[0]).write_text(str(self._limit))
        except OSError as error:
            self.__exit__()
            raise UserError(f"no memory cgroup can be made in {parent} ({error.strerror}): run as "
                            "root where there is a memory controller, or leave the limit out"
                            ) from error
        return self

    @property
    def door(self) -> Path:
        """The file that `enter_loaded` takes, for a process that goes in when it is ready."""
        return self._folder / "cgroup.procs"

    def enter(self) -> None:
        """Put the calling process into the group: for a child before it becomes its program."""
        enter(self.door)

    def peak(self) -> int:
        """Most bytes that were in use at once, page cache included."""
        return int(self._peak.read_text())

    def kills(self) -> int:
        """Processes that the kernel has killed here for want of memory."""
        lines = (line.split() for line in self._events.read_text().splitlines())
        return sum(int(count) for name, count in lines if name == "oom_kill")

    def __exit__(self, *exception) -> None:
        for _ in range(20):  # a group is busy until the kernel has buried its last process
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.1)


def enter(door: Path) -> None:
    """Put the calling process into a group: what it takes from now on counts there."""
    door.write_text(str(os.getpid()))


def enter_loaded(door: Path) -> int:
    """Put the calling process, which holds memory by now, into a group; the bytes that it holds.

    They stay charged where they were taken, so that the group's limit falls by them. Raises
    `MemoryError` if nothing is left of it.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # as far as there is a glibc
        ctypes.CDLL(None).malloc_trim(0)
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {words[0]: int(words[1]) << 10 for words in lines if words[0].startswith("Rss")}
    held = sizes["RssAnon:"] + sizes["RssShmem:"]
    file = next(path for path in map(door.with_name, _LIMITS) if path.exists())
    limit = int(file.read_text())
    if held >= limit:
        raise MemoryError(f"it holds {held / GB:.2f} GB when it has loaded")
    file.write_text(str(limit - held))
    enter(door)
    return held


def drop_page_cache() -> bool:
    """So that whatever a group reads is charged to it; False where that is not allowed."""
    with contextlib.suppress(OSError):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return True
    return False
