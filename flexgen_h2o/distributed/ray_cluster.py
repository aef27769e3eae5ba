"""Ends what a cluster of one command has left behind, if the command is killed before it can.

    python -m flexgen_h2o.distributed.ray_cluster FOLDER

waits until its standard input ends, as it does with the process at the other end. Ray's larger
processes end with the one that has started them; its agents wait for a minute, and its files stay.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.free_memory import free_memory

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


# Ray, where it is installed: a cluster to join, or one of this machine alone for a while.
#
# Nothing of it is imported before it is asked for.


_STORE_BYTES = 128 << 20
"""Of Ray's object store on a cluster of our own: windows of lines pass through it. What does not
fit is spilled to disk."""

"""How long a cluster's head may take to answer."""

_DEATHS = 3
"""Restarts of a replica, and tries of a window, before the job ends: Ray's own number is without
end, and what kills a replica each time, such as too little memory, would never be told."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a note on what Ray will change itself
}


def ray_module() -> Any:
    """The module ``ray`` with ``ray.data`` in it. Raises `UserError` where it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(f"this needs Ray Data ({error}): pip install 'flexgen_h2o[ray]'") from None
    return ray


@contextmanager
def ray_cluster(address: str | None, *, cpus: int | None = None) -> Iterator[Any]:
    """Ray, connected for as long as the block lasts; the module is what it yields.

    Where this process is connected already, that cluster is used and stays. A cluster of this
    machine alone has no dashboard and sends no reports; its processes and files go at the end, even
    if this process is killed.

    Parameters
    ----------
    address : str or None
        A cluster's ``HOST:PORT``, or ``auto`` for the one that this machine is part of; None: start
        one.
    cpus : int, optional
        CPUs of a cluster that is started; default: those that this process may use.

    Raises
    ------
    UserError
        Ray is not installed, there is no cluster, or none can be started.
    """
    with ExitStack() as opened:
        quiet = dict(_QUIET)
        if address is None:
            quiet["RAY_AUTH_TOKEN"] = _token()
        opened.enter_context(_environment(quiet))
        ray = ray_module()
        if not ray.is_initialized():
            _connect(ray, address, cpus, opened)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield ray


@functools.cache
def _token() -> str:
    """The token without which nobody on the machine runs code in a cluster of this process.

    Ray would leave one in the home folder. It reads a process's only once.
    """
    return secrets.token_hex(32)


def _connect(ray: Any, address: str | None, cpus: int | None, opened: ExitStack) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is not None:
            _check_there(address)
            opened.callback(ray.shutdown)
            with _stderr_unheard(), _own_signals():
                ray.init(address=address, **quiet)
            return
        # They go in the opposite order. This process, too, has files open in the folder: the guard
        # must find none.
        folder = tempfile.mkdtemp(prefix="ray-", dir=_short_folder())
        opened.enter_context(guarded(folder))
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        opened.callback(ray.shutdown)
        with _stderr_unheard(), _own_signals():
            ray.init(address="local", num_cpus=cpus or len(os.sched_getaffinity(0)),
                     include_dashboard=False, object_store_memory=_STORE_BYTES,
                     _memory=free_memory(folder, None).cpu_bytes, _temp_dir=folder,
                     _plasma_directory=None if _has_shared_memory() else folder, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = (f"no Ray cluster answers at {address}" if address is not None
                 else "Ray cannot be started here")
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"{where}: {reason}") from error


def _check_there(address: str) -> None:
    """Raise `OSError` if nothing answers at an address: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        try:
            socket.create_connection((host, int(port)), timeout=_SECONDS).close()
        except ValueError:
            raise OSError("it is no HOST:PORT") from None


def _short_folder() -> str:
    """A folder for temporary files. Ray's sockets in it have names of at most 107 characters."""
    found = tempfile.gettempdir()
    return found if len(found) <= 24 else "/tmp"


def _has_shared_memory() -> bool:
    """True if the object store fits in /dev/shm, of which containers have 64 MiB."""
    try:
        return psutil.disk_usage("/dev/shm").free > 2 * _STORE_BYTES
    except OSError:
        return False


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's answer to SIGTERM, in place of which Ray puts one that exits at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _stderr_unheard() -> Iterator[None]:
    """Keep what libraries in C++ write on stderr from the terminal: Ray's tells the level of its
    own log there, whatever that is."""
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for Ray and the processes that it starts; what is set stays so."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            if name.startswith("RAY_"):  # Ray sets some, too
                del os.environ[name]


def machines(ray: Any) -> list[dict[str, float]]:
    """The resources of each machine that is part of the cluster now, by Ray's names."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def pool(ray: Any, replicas: int | tuple[int, int]) -> dict[str, Any]:
    """Keywords of ``map_batches`` for so many replicas, or from so many to so many.

    A replica that dies is started again, and its batch is done again, some times.
    """
    few, many = (replicas, replicas) if isinstance(replicas, int) else replicas
    again = {}
    if _takes(ray, "ray_remote_args"):  # announced to go with Ray 2.64
        again = {"max_restarts": _DEATHS, "max_task_retries": _DEATHS}
    strategy = getattr(ray.data, "ActorPoolStrategy", None)
    if strategy is None or not _takes(ray, "compute"):
        return {"concurrency": few if few == many else (few, many), **again}
    sized: dict[str, Any] = {"size": few} if few == many else {"min_size": few, "max_size": many}
    if "max_tasks_in_flight_per_actor" in inspect.signature(strategy).parameters:
        # One is run and the next is there; more would wait for a slow replica while others idle.
        sized["max_tasks_in_flight_per_actor"] = 2
    return {"compute": strategy(**sized), **again}


def one_reader_here(ray: Any) -> dict[str, Any]:
    """Keywords of ``map_batches`` for tasks on this machine, one at a time: each is a process.

    They take no CPU: with all CPUs taken by replicas, a task that wants one would never run.
    """
    node = ray.get_runtime_context().get_node_id()
    strategy = getattr(ray.data, "TaskPoolStrategy", None)
    found: dict[str, Any] = {"num_cpus": 0}
    if strategy is not None and _takes(ray, "compute"):
        found["compute"] = strategy(size=1)
    else:
        found["concurrency"] = 1
    if _takes(ray, "label_selector"):
        return found | {"label_selector": {"ray.io/node-id": node}}
    strategies = ray.util.scheduling_strategies
    return found | {"scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(
        node, soft=False)}


def map_batches(dataset: Any, function: Callable[..., Any], **keywords: Any) -> Any:
    """``dataset.map_batches`` without notes on what Ray will change itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
        return dataset.map_batches(function, **keywords)


def _takes(ray: Any, name: str) -> bool:
    """True if ``map_batches`` of this version of Ray has such a parameter."""
    return name in inspect.signature(ray.data.Dataset.map_batches).parameters
