"""Disturbances of a `soak.Soak`: kills, memory pressure, a full and a slow disk, clock jumps."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

DISK_BYTES = 400 << 20
SLOW_DISK = (1 << 20, 4 << 20, 16 << 20)
"""Bytes a second that a slow disk reads, and writes."""
HOG = """
import random, sys, time
draw = random.Random(int(sys.argv[2]))
while True:
    taken = b"\\1" * draw.randrange(1, int(sys.argv[1]))
    time.sleep(draw.random() * 20)
    del taken
    time.sleep(draw.random() * 10)
"""


def kills(soak, draw: random.Random) -> None:
    """Kill or end the server, and start it again, until half of the time is over."""
    while not soak.stop.wait(draw.uniform(0.5, 1.5) * max(20.0, soak.seconds / 40)):
        if time.monotonic() - soak.began > soak.seconds / 2:
            return
        soak.server.end(draw.choice((signal.SIGKILL, signal.SIGTERM)))
        soak.count("server_kills")
        soak.server.start()


def pressure(soak, draw: random.Random) -> None:
    """Let a neighbour take memory and free it."""
    most = min(4 << 30, psutil.virtual_memory().available // 4)
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(most), str(draw.random())[2:9]])
    try:
        while not soak.stop.wait(1):
            if hog.poll() is not None:
                soak.wrong.append(f"the neighbour ended with status {hog.returncode}")
                return
    finally:
        hog.kill()
        hog.wait()


def full_disk(soak, draw: random.Random) -> None:
    """Fill the small disk for some seconds, again and again."""
    if soak.fills is None:
        return
    filler = soak.fills / "filler"
    while not soak.stop.wait(draw.uniform(20, 60)):
        left = draw.choice((0, 0, 1 << 16, 8 << 20))
        with open(filler, "wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(soak.fills).free - left)
        soak.count("disk_fills")
        soak.stop.wait(draw.uniform(2, 15))
        filler.unlink()


def slow_disk(soak, draw: random.Random) -> None:
    """Bound the rate of the small disk for some seconds, again and again."""
    while soak.fills is not None and not soak.stop.wait(draw.uniform(30, 90)):
        if bound_rate(soak.fills, draw.choice(SLOW_DISK)):
            soak.count("disk_slowdowns")
            soak.stop.wait(draw.uniform(5, 30))
            bound_rate(soak.fills, None)


def clock_jumps(soak, draw: random.Random) -> None:
    """Let the wall clock of all processes jump."""
    while soak.clock.exists() and not soak.stop.wait(draw.uniform(10, 60)):
        temporary = soak.clock.with_suffix(".new")
        temporary.write_text(f"{draw.randrange(-36000, 36000):+d}")
        temporary.replace(soak.clock)
        soak.count("clock_jumps")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a file system of `DISK_BYTES` in a file; None without the right to."""
    folder.mkdir()
    image = folder.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    commands = (["mkfs.ext4", "-q", "-m", "0", str(image)],
                ["mount", "-o", "loop", str(image), str(folder)])
    if os.geteuid() or any(subprocess.run(command, capture_output=True).returncode
                           for command in commands):
        yield None
        return
    try:
        yield folder
    finally:
        bound_rate(folder, None)
        subprocess.run(["umount", "-l", str(folder)], check=True)


def bound_rate(disk: Path, rate: int | None) -> bool:
    """Bound the bytes a second of a mounted disk; None lifts the bound.

    Return False if this user or this kernel cannot.
    """
    number = os.stat(disk).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    if (blkio := Path("/sys/fs/cgroup/blkio")).exists():  # cgroup version 1
        lines = {blkio / f"blkio.throttle.{way}_bps_device": f"{device} {rate or 0}"
                 for way in ("read", "write")}
    else:
        group = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        limit = rate or "max"
        lines = {Path("/sys/fs/cgroup", group, "io.max"): f"{device} rbps={limit} wbps={limit}"}
    try:
        for path, line in lines.items():
            path.write_text(line)
    except OSError:
        return False
    return True
