"""Free and total memory of each tier: GPU, host memory within the cgroup's limit, disk."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from flexgen_h2o.storage.offload_dirs import AnyDirs, OffloadDirs


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes of each tier; `gpu_bytes` is None without a GPU."""

    gpu_bytes: int | None
    cpu_bytes: int
    disk_bytes: int

    def free(self, tier: str) -> int | None:
        """Return the bytes of a tier; None for the GPU without one."""
        return getattr(self, f"{tier}_bytes")

    def capped(self, cpu: int | None, gpu: int | None) -> MemoryLimits:
        """Return the limits with upper bounds on host memory and the GPU; None: no bound."""
        def bound(free: int | None, limit: int | None) -> int | None:
            return free if None in (free, limit) else min(free, limit)

        return MemoryLimits(bound(self.gpu_bytes, gpu), bound(self.cpu_bytes, cpu),
                            self.disk_bytes)


def free_memory(offload_dir: AnyDirs, device_free: int | None) -> MemoryLimits:
    """Return the free memory of all tiers, with the disks of `offload_dir`.

    Parameters
    ----------
    offload_dir : path, sequence of path, or OffloadDirs
        May not exist yet.
    device_free : int or None
        Free bytes of the GPU; None without one.
    """
    cgroup = cgroup_free()
    available = psutil.virtual_memory().available
    return MemoryLimits(
        gpu_bytes=device_free,
        cpu_bytes=available if cgroup is None else min(available, cgroup),
        disk_bytes=_disk_bytes(offload_dir, "free"),
    )


def whole_memory(offload_dir: AnyDirs, device_bytes: int | None) -> MemoryLimits:
    """Return the total memory of all tiers; parameters as in `free_memory`."""
    limit, total = cgroup_limit(), psutil.virtual_memory().total
    return MemoryLimits(
        gpu_bytes=device_bytes,
        cpu_bytes=total if limit is None else min(total, limit),
        disk_bytes=_disk_bytes(offload_dir, "total"),
    )


def _disk_bytes(offload_dir: AnyDirs, kind: str) -> int:
    """Return the bytes of offload files that fit until one of the disks is full."""
    dirs = OffloadDirs.parse(offload_dir)
    return min(int(getattr(shutil.disk_usage(nearest_folder(dirs.paths[folders[0]])), kind)
                   / dirs.share(folders))
               for folders in folders_by_disk(dirs))


def folders_by_disk(dirs: OffloadDirs) -> list[list[int]]:
    """Return the indices of the folders on each disk; they may not exist yet."""
    disks: dict[int, list[int]] = {}
    for index, path in enumerate(dirs.paths):
        disks.setdefault(nearest_folder(path).stat().st_dev, []).append(index)
    return list(disks.values())


def nearest_folder(path: str | os.PathLike) -> Path:
    """Return a path, or its nearest parent that exists and is accessible."""
    folder = Path(os.path.expanduser(path)).absolute()
    while not os.path.exists(folder):
        folder = folder.parent
    return folder


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return psutil.Process().memory_info().rss


def free_heap_bytes(resident: int) -> int:
    """Return the bytes that the allocator keeps for reuse, of those that this process has allocated
    since it had `resident` bytes; 0 if the allocator is not glibc's."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo.restype = _MallocInfo
    # `fordblks` includes memory that the allocator has returned to the system.
    return min(mallinfo().fordblks, max(0, resident_bytes() - resident))


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_free(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes that the memory cgroups (v1, v2) of this process still allow, or None.

    Inactive page cache counts as free: the kernel drops it before it refuses memory. Mapped pages,
    such as running code, do not count.
    """
    return min((free for _, free in _limits(mount, membership)), default=None)


def cgroup_limit(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the limit in bytes of the memory cgroups of this process, or None."""
    return min((limit for limit, _ in _limits(mount, membership)), default=None)


def _limits(mount: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free bytes of each memory cgroup of this process with a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Above memory.high the kernel throttles the process.
            root, prefix = mount, ""
            limits: tuple[str, ...] = ("memory.max", "memory.high")
            files = ("memory.current", "file_mapped")
        elif "memory" in controllers.split(","):
            root, prefix = mount / "memory", "total_"
            limits = ("memory.limit_in_bytes",)
            files = ("memory.usage_in_bytes", "total_mapped_file")
        else:
            continue
        folder = root / path.strip("/")
        # Limits of all parents count. In a container the path may be the host's: then only the root
        # of the mount exists, which is the container's group.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                for limit in limits:
                    yield from _group_limit(group, limit, *files, prefix=prefix)


def _group_limit(group: Path, limit: str, usage: str, mapped: str, *, prefix: str
                 ) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free bytes of one cgroup, if it has a limit.

    `limit` and `usage` name its files, `mapped` the line of mapped page cache in memory.stat, and
    `prefix` begins the other lines of page cache.
    """
    try:
        limit_bytes = int((group / limit).read_text())
        used = int((group / usage).read_text())
        stat = {name: int(value) for name, value in (
            line.split() for line in (group / "memory.stat").read_text().splitlines())}
    except (OSError, ValueError):
        return
    if limit_bytes < 1 << 60:  # no limit: "max" in v2, nearly 2**63 in v1
        inactive = stat.get(f"{prefix}inactive_file", 0)
        unmapped = inactive + stat.get(f"{prefix}active_file", 0) - stat.get(mapped, 0)
        dropped = min(inactive, max(0, unmapped))
        yield limit_bytes, max(0, limit_bytes - used + dropped)
