"""Facts about this machine, for `sections` to put into words. Torch is loaded where it is asked."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from flexgen_h2o.config.version import VERSION
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.provenance import cpu_model, package_version, source_commit

LIBRARIES = ("torch", "transformers", "huggingface_hub", "safetensors", "gguf", "numpy", "scipy",
             "triton")
SAMPLE = 256 << 20
"""Bytes of the file with which a disk is measured."""

VARIABLES = ("FLEXGEN_H2O_ISA", "FLEXGEN_H2O_KERNELS", "FLEXGEN_H2O_NATIVE", "FLEXGEN_H2O_CACHE",
             "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES")
"""Variables of the environment that change what runs, or how."""

ROWS = (*range(1, 65), 128, 256, 512, 1024, 2048, 4096)
"""Rows at which the choice of an implementation is looked up."""

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Version of the package, with its commit, of Python, and of each library; empty: none."""
    commit = source_commit()
    return {"flexgen_h2o": f"{VERSION} ({commit})" if commit else VERSION,
            "python": platform.python_version(), "system": platform.platform(),
            **{name: package_version(name) for name in LIBRARIES}}


def environment() -> dict[str, str]:
    """The `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@dataclass(frozen=True)
class ProcessorFacts:
    """The CPUs of the machine, and those that this process may use.

    `quota` is CPUs' worth of time that the cgroup allows, None without a limit; `load` the mean
    number of processes that wanted a CPU in the last minute.
    """

    name: str
    cpus: int
    usable: int
    quota: float | None
    threads: int
    load: float


def processor() -> ProcessorFacts:
    """The facts of the processor."""
    import torch

    return ProcessorFacts(cpu_model(), os.cpu_count() or 1, len(os.sched_getaffinity(0)),
                          cpu_quota(), torch.get_num_threads(), os.getloadavg()[0])


def cpu_quota(path: Path = _CPU_MAX) -> float | None:
    """CPUs' worth of time that the cgroup (v2) of this process allows; None without a limit."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


@dataclass(frozen=True)
class KernelFacts:
    """The kernels of the CPU.

    Attributes
    ----------
    missing : str or None
        Why there are no C++ kernels.
    available : tuple of str
        Instruction sets that `FLEXGEN_H2O_ISA` may name here.
    chosen : str
        The one that is used.
    refused : str or None
        Why what `FLEXGEN_H2O_ISA` names cannot be used.
    build : str
    choices : mapping of operation to str
        Which implementation multiplies or attends, by rows.
    measured : mapping of str to str, or None
        The same as measured on this machine, by operation and bits; None if it was not.
    """

    missing: str | None
    available: tuple[str, ...] = ()
    chosen: str = ""
    refused: str | None = None
    build: str = ""
    choices: Mapping[str, str] | None = None
    measured: Mapping[str, str] | None = None


def kernels(offload_dir: str) -> KernelFacts:
    """The facts of the CPU's kernels; `offload_dir` is what the machine was measured with."""
    from flexgen_h2o.kernels.cpu import library as cpu_library

    if (missing := cpu_library.missing()) is not None:
        return KernelFacts(missing)
    available, build = cpu_library.available_sets(), cpu_library.build()
    try:
        return KernelFacts(None, available, cpu_library.instruction_set(), None, build, _choices(),
                           measured_choices(offload_dir))
    except UserError as error:
        return KernelFacts(None, available, refused=str(error), build=build)


def by_rows(choose: Callable[[int], str], rows: Sequence[int] = ROWS) -> str:
    """Which implementation is chosen for how many rows, such as ``skinny up to 16, then pytorch``.
    """
    parts = [(name, max(group)) for name, group in groupby(rows, choose)]
    ends = [f"{name} up to {last}" for name, last in parts[:-1]]
    return ", ".join([*ends, f"then {parts[-1][0]}"] if ends else [parts[-1][0]])


def _choices() -> dict[str, str]:
    """The implementations that the table of dispatch has for each operation, in bfloat16."""
    import torch

    from flexgen_h2o.kernels import dispatch
    from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS

    return {operation: by_rows(partial(dispatch.choice, operation, dtype=torch.bfloat16))
            for operation in IMPLEMENTATIONS}


def measured_choices(offload_dir: str) -> dict[str, str] | None:
    """The fastest implementations here, where there is a choice; None for a CPU not measured."""
    import torch

    from flexgen_h2o.kernels import dispatch
    from flexgen_h2o.planning.calibrate import load_calibration
    from flexgen_h2o.storage.tiers import Device

    with contextlib.suppress(OSError, UserError):
        hardware = load_calibration(Device(), offload_dir)
        if hardware is not None:
            winners = hardware.compute.implementations
            with dispatch.use_autotune_table(winners):
                return {f"{operation}, {bits} bits": by_rows(partial(
                    dispatch.choice, operation, dtype=torch.bfloat16, bits=bits))
                    for operation, by_bits in winners.items() for bits in by_bits}
    return None


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, and bytes of its memory."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that PyTorch can use, and why there may be none."""

    found: tuple[Gpu, ...]
    built_for: str | None
    driver: bool
    triton: bool


def gpus() -> GpuFacts:
    """The facts of the GPUs. `built_for` is PyTorch's version of CUDA, None without."""
    import torch

    found = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            found.append(Gpu(torch.cuda.get_device_name(number), total, free))
    return GpuFacts(tuple(found), torch.version.cuda, _DRIVER.exists(),
                    find_spec("triton") is not None)


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of host memory, and of the cgroup that bounds it; None: no limit."""

    total: int
    free: int
    limit: int | None
    limit_free: int | None


def memory() -> MemoryFacts:
    """The facts of host memory."""
    import psutil

    from flexgen_h2o.storage.free_memory import cgroup_free, cgroup_limit

    found = psutil.virtual_memory()
    return MemoryFacts(found.total, found.available, cgroup_limit(), cgroup_free())


@dataclass(frozen=True)
class DiskFacts:
    """The disk of a folder: bytes, and bytes per second of aligned reads and writes.

    `system` is the kind of file system. `direct` is False where it refuses O_DIRECT, so that the
    rates are the page cache's; `problem` says why nothing was measured.
    """

    folder: str
    system: str = ""
    total: int = 0
    free: int = 0
    read: float = 0.0
    write: float = 0.0
    direct: bool = True
    problem: str | None = None


def disk(offload_dir: str, nbytes: int = SAMPLE) -> DiskFacts:
    """The facts of the disk that runs write to, measured with a file that is gone afterwards."""
    from flexgen_h2o.storage.disk import RunFolder
    from flexgen_h2o.storage.free_memory import nearest_folder
    from flexgen_h2o.storage.links import disk_read_rate, disk_write_rate

    found = DiskFacts(offload_dir)
    try:
        folder = nearest_folder(offload_dir)  # no folder is made that would stay
        space = shutil.disk_usage(folder)
        found = DiskFacts(str(folder), file_system(folder), space.total, space.free)
        if space.free < 2 * nbytes:
            return replace(found, problem="the disk is full")
        with contextlib.closing(RunFolder(folder)) as run:
            file = run.file("doctor.bin", nbytes)
            # Written first: what is read must be no hole in the file.
            write = disk_write_rate(file, nbytes=nbytes)
            return replace(found, read=disk_read_rate(file, nbytes=nbytes), write=write,
                           direct=_takes_direct(file))
    except (OSError, UserError) as error:
        return replace(found, problem=str(error))


def file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on; empty where the system does not say."""
    import psutil

    mounted = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    place = folder.resolve()
    return next((mounted[each] for each in (place, *place.parents) if each in mounted), "")


def _takes_direct(file: Path) -> bool:
    """True if a file can be opened past the page cache."""
    try:
        os.close(os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)))
    except OSError:
        return False
    return hasattr(os, "O_DIRECT")
