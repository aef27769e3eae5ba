"""Ray, if it is installed: a cluster to join or to start, and replicas of a model on it.

    python -m flexgen_h2o.distributed.ray_cluster FOLDER

cleans up after a cluster that a killed command has started: it waits for the end of its standard
input, which comes with the end of its parent. Ray's larger processes end with the process that has
started them, but its agents wait for a minute, and its files stay.
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

_TIMEOUT = 10.0  # seconds for a cluster to answer, and for its processes to end

_OBJECT_STORE_BYTES = 128 << 20  # of a cluster that we start; objects that do not fit go to disk

_MAX_RETRIES = 3
"""Restarts of a replica and retries of a batch. Ray's default is unlimited, so that a replica that
dies each time, for example for lack of memory, is never reported."""

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send nothing to anybody
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences a note on a future change of Ray
}


def ray_module() -> Any:
    """Import and return ``ray`` with ``ray.data``. Raises `UserError` if it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(f"this needs Ray Data ({error}): pip install 'flexgen_h2o[ray]'") from None
    return ray


@contextmanager
def ray_cluster(address: str | None, *, cpus: int | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster during a ``with`` statement; yields the module ``ray``.

    If this process is connected already, that cluster is used and stays. A cluster that is started
    consists of this machine only, without a dashboard. Its processes and files are removed at the
    end, even if this process is killed.

    Parameters
    ----------
    address : str or None
        ``HOST:PORT`` of a cluster, or ``auto`` for the one of this machine; None: start one.
    cpus : int, optional
        CPUs of a cluster that is started; default: those that this process may use.

    Raises
    ------
    UserError
        Ray is not installed, no cluster answers, or none can be started.
    """
    with ExitStack() as opened:
        environment = dict(_ENVIRONMENT)
        if address is None:
            environment["RAY_AUTH_TOKEN"] = _token()
        opened.enter_context(_environment(environment))
        ray = ray_module()
        if not ray.is_initialized():
            _connect(ray, address, cpus, opened)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield ray


@functools.cache
def _token() -> str:
    """Return the token that protects a cluster of this process from other users of the machine.

    Otherwise Ray writes one to the home folder. Ray reads the token of a process once.
    """
    return secrets.token_hex(32)


def _connect(ray: Any, address: str | None, cpus: int | None, opened: ExitStack) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is not None:
            _check_address(address)
            opened.callback(ray.shutdown)
            with _muted_stderr(), _own_signals():
                ray.init(address=address, **quiet)
            return
        # Closed in reverse order: this process has files open in the folder, too, so that Ray must
        # be shut down before the guard looks for processes to end.
        folder = tempfile.mkdtemp(prefix="ray-", dir=_short_folder())
        opened.enter_context(_guarded(folder))
        opened.callback(shutil.rmtree, folder, ignore_errors=True)
        opened.callback(ray.shutdown)
        with _muted_stderr(), _own_signals():
            ray.init(address="local", num_cpus=cpus or len(os.sched_getaffinity(0)),
                     include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES,
                     _memory=free_memory(folder, None).cpu_bytes, _temp_dir=folder,
                     _plasma_directory=None if _has_shared_memory() else folder, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = (f"no Ray cluster answers at {address}" if address is not None
                 else "Ray cannot be started here")
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"{where}: {reason}") from error


def _check_address(address: str) -> None:
    """Raise `OSError` if nothing answers at an address: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host:
        try:
            socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
        except ValueError:
            raise OSError("it is no HOST:PORT") from None


def _short_folder() -> str:
    """Return a folder for temporary files; names of Ray's sockets are limited to 107 characters."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 24 else "/tmp"


def _has_shared_memory() -> bool:
    """Return True if the object store fits in /dev/shm; containers have 64 MiB there."""
    try:
        return psutil.disk_usage("/dev/shm").free > 2 * _OBJECT_STORE_BYTES
    except OSError:
        return False


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by one that exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """Discard what C++ libraries write to stderr: Ray's prints its log level unconditionally."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, and remove Ray's own at the end."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in {*os.environ} - {*before}:
            if name.startswith("RAY_"):
                del os.environ[name]


@contextmanager
def _guarded(folder: str) -> Iterator[None]:
    """End the processes that keep files open in a folder, and remove it, when this process ends."""
    # In its own session, so that Ctrl-C in the terminal does not end it first.
    guard = subprocess.Popen([sys.executable, "-m", __name__, folder], stdin=subprocess.PIPE,
                             start_new_session=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _remove_cluster(folder: str) -> None:
    """End the processes of this user that keep files open in a folder, and remove it."""
    deadline = time.monotonic() + _TIMEOUT
    while (os.path.isdir(folder) and (users := _processes_using(folder))
           and time.monotonic() < deadline):
        for process in users:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(users, timeout=1)
    shutil.rmtree(folder, ignore_errors=True)


def _processes_using(folder: str) -> list[psutil.Process]:
    """Return the other processes that keep files open in a folder."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(
                    file.path.startswith(folder + os.sep) for file in process.open_files()):
                processes.append(process)
    return processes


def machines(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each machine of the cluster, by Ray's names."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class Replica:
    """Base of the classes whose instances Ray Data runs as replicas of a model.

    Ray restarts a replica whose constructor fails, without end. An error of `load` is therefore
    raised by the first use of `model`, in a batch.

    Parameters
    ----------
    load : callable
        Returns the model.
    threads : int, optional
        Threads that compute; default: PyTorch's. Ray gives a replica as many as its `num_cpus`.
    """

    def __init__(self, load: Callable[[], Any], threads: int | None):
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        self._load_error: UserError | None = None
        try:
            self._model = load()
        except UserError as error:
            self._load_error = error

    @property
    def model(self) -> Any:
        """The model. Raises `UserError` if it could not be loaded."""
        if self._load_error is not None:
            raise self._load_error
        return self._model


def map_replicas(ray: Any, dataset: Any, replica: type[Replica], count: int | tuple[int, int],
                 **keywords: Any) -> Any:
    """Return the dataset of the results of replicas of a class for a dataset's batches.

    A replica that dies is restarted, and its batch is repeated, a limited number of times.

    Parameters
    ----------
    count : int or (int, int)
        Number of replicas, or its lower and upper limit.
    **keywords
        Arguments of ``map_batches``.
    """
    return _map_batches(dataset, replica, **_replica_pool(ray, count), **keywords)


def _replica_pool(ray: Any, count: int | tuple[int, int]) -> dict[str, Any]:
    """Return keywords of ``map_batches`` for a number of replicas."""
    min_size, max_size = (count, count) if isinstance(count, int) else count
    # One task runs and the next waits. More would wait for a slow replica while others idle.
    pool = {"compute": ray.data.ActorPoolStrategy(
        min_size=min_size, max_size=max_size, max_tasks_in_flight_per_actor=2)}
    if _has_parameter(ray, "ray_remote_args"):  # to be removed in Ray 2.64
        pool |= {"max_restarts": _MAX_RETRIES, "max_task_retries": _MAX_RETRIES}
    return pool


def map_here(ray: Any, dataset: Any, function: Callable[..., Any], **keywords: Any) -> Any:
    """Return the dataset of a function's results for batches, on this machine, one by one.

    The tasks reserve no CPU: if replicas have all CPUs, a task that needs one never runs.

    Parameters
    ----------
    **keywords
        Arguments of ``map_batches``.
    """
    node = ray.get_runtime_context().get_node_id()
    strategy = getattr(ray.data, "TaskPoolStrategy", None)
    keywords |= {"concurrency": 1} if strategy is None else {"compute": strategy(size=1)}
    if _has_parameter(ray, "label_selector"):
        keywords["label_selector"] = {"ray.io/node-id": node}
    else:
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        keywords["scheduling_strategy"] = affinity(node, soft=False)
    return _map_batches(dataset, function, num_cpus=0, **keywords)


def _map_batches(dataset: Any, function: Callable[..., Any], **keywords: Any) -> Any:
    """Call ``dataset.map_batches`` without its warnings about future changes of Ray."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*ray_remote_args.*")
        return dataset.map_batches(function, **keywords)


def _has_parameter(ray: Any, name: str) -> bool:
    """Return True if ``map_batches`` of this version of Ray has a parameter."""
    return name in inspect.signature(ray.data.Dataset.map_batches).parameters


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _remove_cluster(sys.argv[1])
