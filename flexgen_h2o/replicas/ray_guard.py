"""Ends what a cluster of one command has left behind, if the command is killed before it can.

    python -m flexgen_h2o.replicas.ray_guard FOLDER

waits until its standard input ends, as it does with the process at the other end. Ray's larger
processes end with the one that has started them; its agents wait for a minute, and its files stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_SECONDS = 10.0  # for the processes to go


@contextmanager
def guarded(folder: str) -> Iterator[None]:
    """Have the processes that keep files open in a folder end with this process, and the folder."""
    # In a session of its own, so that Ctrl-C in the terminal does not end it first.
    guard = subprocess.Popen([sys.executable, "-m", __name__, folder], stdin=subprocess.PIPE,
                             start_new_session=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def clear(folder: str) -> None:
    """End the processes of this user that keep files open in a folder, and remove it."""
    until = time.monotonic() + _SECONDS
    while os.path.isdir(folder) and (left := _users(folder)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)
    shutil.rmtree(folder, ignore_errors=True)


def _users(folder: str) -> list[psutil.Process]:
    """The processes that keep files open in a folder, but this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(
                    file.path.startswith(folder + os.sep) for file in process.open_files()):
                found.append(process)
    return found


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clear(sys.argv[1])
