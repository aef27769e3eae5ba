"""What is free on each tier: on the GPU, in host memory within the cgroup's limit, on disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class MemoryLimits:
    """Free bytes of each tier. `gpu_bytes` None: no GPU, the tier gpu is host memory."""

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
    """What is free now: host memory within the cgroup's limit, and disk under `offload_dir`.

    Parameters
    ----------
    offload_dir : path
        Need not exist yet: the nearest folder above that does counts.
    device_free : int or None
        Free bytes of the GPU, None without one.
    """
    cgroup = cgroup_free()
    available = psutil.virtual_memory().available
    folder = Path(offload_dir).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return MemoryLimits(
        gpu_bytes=device_free,
        cpu_bytes=available if cgroup is None else min(available, cgroup),
        disk_bytes=shutil.disk_usage(folder).free,
    )


def cgroup_free(
    mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes that the memory cgroups of this process, v1 or v2, still allow; None without a limit.

    A group's inactive page cache counts as free: the kernel drops it before it refuses memory.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.strip("/")
        # A limit anywhere above counts. In a container the path may be the host's: then only the
        # root of the mount is there, and it is the container's own group.
        for group in (folder, *folder.parents):
            if group.is_relative_to(root):
                found.append(_group_free(group, *files))
    return min((free for free in found if free is not None), default=None)


def _group_free(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes left in one cgroup; None when it has no limit (v2 says max, v1 nearly 2**63).

    `limit` and `usage` are its files of those bytes, `reclaimable` a line of its memory.stat.
    """
    try:
        most = int((group / limit).read_text())
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most >= 1 << 60:
        return None
    return max(0, most - used + int(stat.get(reclaimable, 0)))
