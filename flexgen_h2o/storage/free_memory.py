"""Memory of each tier, free or in all: GPU, host memory within the cgroup's limit, disk."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that each tier has. `gpu_bytes` None: no GPU, the tier gpu is host memory."""

    gpu_bytes: int | None
    cpu_bytes: int
    disk_bytes: int

    def free(self, tier: str) -> int | None:
        """Free bytes of a tier, or None for a GPU that is not there."""
        return getattr(self, f"{tier}_bytes")

    def within(self, cpu: int | None, gpu: int | None) -> MemoryLimits:
        """These, but at most so many bytes of host memory and of the GPU; None: no bound."""
        def bound(free: int | None, most: int | None) -> int | None:
            return free if None in (free, most) else min(free, most)

        return MemoryLimits(bound(self.gpu_bytes, gpu), bound(self.cpu_bytes, cpu),
                            self.disk_bytes)


def free_memory(offload_dir: str | os.PathLike, device_free: int | None) -> MemoryLimits:
    """Free memory: host memory within the cgroup's limit, and disk under `offload_dir`.

    Parameters
    ----------
    offload_dir : path
        Need not exist yet: the nearest folder above that does counts.
    device_free : int or None
        Free bytes of the GPU, None without one.
    """
    cgroup = cgroup_free()
    available = psutil.virtual_memory().available
    return MemoryLimits(
        gpu_bytes=device_free,
        cpu_bytes=available if cgroup is None else min(available, cgroup),
        disk_bytes=shutil.disk_usage(nearest_folder(offload_dir)).free,
    )


def whole_memory(offload_dir: str | os.PathLike, device_bytes: int | None) -> MemoryLimits:
    """Total memory, used or free; parameters as of `free_memory`."""
    limit, total = cgroup_limit(), psutil.virtual_memory().total
    return MemoryLimits(
        gpu_bytes=device_bytes,
        cpu_bytes=total if limit is None else min(total, limit),
        disk_bytes=shutil.disk_usage(nearest_folder(offload_dir)).total,
    )


def nearest_folder(path: str | os.PathLike) -> Path:
    """`path` itself if it exists, else the nearest folder above that does.

    What may not be looked at, as in another user's folder, does not exist for this process.
    """
    folder = Path(os.path.expanduser(path)).absolute()
    while not os.path.exists(folder):
        folder = folder.parent
    return folder


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return psutil.Process().memory_info().rss


def kept_heap(resident: int) -> int:
    """Bytes that this process has taken, freed, and its allocator keeps for what comes next.

    Of what it took since it had `resident` bytes; 0 where the allocator is not glibc's.
    """
    try:
        tell = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    tell.restype = _MallocInfo
    # What the allocator has given back to the system counts as freed there, too.
    return min(tell().fordblks, max(0, resident_bytes() - resident))


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_free(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the memory cgroups of this process, v1 or v2, still allow; None without a limit.

    A group's inactive page cache counts as free: the kernel drops it before it refuses memory. What
    of it is mapped does not, such as the code that runs: without that a process crawls.
    """
    return min((free for _, free in _limits(mount, membership)), default=None)


def cgroup_limit(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that the memory cgroups of this process allow in all; None without a limit."""
    return min((most for most, _ in _limits(mount, membership)), default=None)


def _limits(mount: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Bytes allowed, and bytes left, in each memory cgroup of this process that has a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Above memory.high nothing is refused, but the process is slowed until it crawls.
            root, prefix, limits = mount, "", ("memory.max", "memory.high")
            files = ("memory.current", "file_mapped")
        elif "memory" in controllers.split(","):
            root, prefix, limits = mount / "memory", "total_", ("memory.limit_in_bytes",)
            files = ("memory.usage_in_bytes", "total_mapped_file")
        else:
            continue
        folder = root / path.strip("/")
        # A limit anywhere above counts. In a container the path may be the host's: then only the
        # root of the mount is there, and it is the container's own group.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                for limit in limits:
                    yield from _group_limit(group, limit, *files, prefix=prefix)


def _group_limit(group: Path, limit: str, usage: str, mapped: str, *, prefix: str
                 ) -> Iterator[tuple[int, int]]:
    """Bytes allowed and left in one cgroup; nothing without a limit (v2: max, v1: nearly 2**63).

    `limit` and `usage` are its files of those bytes, `mapped` a line of its memory.stat, as are
    those of the page cache, which begin with `prefix`.
    """
    try:
        most = int((group / limit).read_text())
        used = int((group / usage).read_text())
        stat = {name: int(value) for name, value in (
            line.split() for line in (group / "memory.stat").read_text().splitlines())}
    except (OSError, ValueError):
        return
    if most < 1 << 60:
        inactive = stat.get(f"{prefix}inactive_file", 0)
        unmapped = inactive + stat.get(f"{prefix}active_file", 0) - stat.get(mapped, 0)
        dropped = min(inactive, max(0, unmapped))
        yield most, max(0, most - used + dropped)
