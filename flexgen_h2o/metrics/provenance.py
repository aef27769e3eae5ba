"""When, with which code and on which machine a figure was measured."""

from __future__ import annotations

import contextlib
import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from flexgen_h2o.config.version import VERSION


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; of an ARM, for which Linux has none, the numbers of its maker and of
    its part."""
    numbers: dict[str, str] = {}
    with contextlib.suppress(OSError), open(info, encoding="utf-8") as file:
        for line in file:
            name, _, value = map(str.strip, line.partition(":"))
            if name == "model name":
                return value
            if name in ("CPU implementer", "CPU part"):
                numbers.setdefault(name, value)
    name = platform.processor() or platform.machine()
    return ", ".join((name, *(f"{key} {value}" for key, value in numbers.items())))


def installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def source_commit() -> str:
    """Short hash of the checkout that runs, ``-dirty`` when it is changed; empty outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


ORIGIN = ("date", "version", "commit", "host")
"""Columns of `origin`."""


def origin() -> dict[str, str]:
    """When, with which code and on which machine a row was measured."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "version": VERSION, "commit": source_commit(),
            "host": platform.node()}
