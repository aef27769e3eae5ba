"""Facts about this machine, for the report of `doctor`. Torch is imported inside functions."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Callable, Mapping
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
"""Bytes of the file that measures a disk."""

VARIABLES = ("FLEXGEN_H2O_ISA", "FLEXGEN_H2O_KERNELS", "FLEXGEN_H2O_NATIVE", "FLEXGEN_H2O_CACHE",
             "XDG_CACHE_HOME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
             "CUDA_VISIBLE_DEVICES")
"""Environment variables that select kernels, devices, threads or folders."""

ROWS = (*range(1, 65), 128, 256, 512, 1024, 2048, 4096)
"""Row counts for which the choice of an implementation is reported."""

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python and of libraries; empty if not installed."""
    commit = source_commit()
    return {"flexgen_h2o": f"{VERSION} ({commit})" if commit else VERSION,
            "python": platform.python_version(), "system": platform.platform(),
            **{name: package_version(name) for name in LIBRARIES}}


def environment() -> dict[str, str]:
    """Return the `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@dataclass(frozen=True)
class ProcessorFacts:
    """CPUs of the machine and of this process."""

    name: str
    # CPUs of the machine, and CPUs that this process may use.
    cpus: int
    usable: int
    quota: float | None
    """CPU time that the cgroup allows, in CPUs; None without a limit."""
    threads: int  # threads that compute
    load: float  # load average of the last minute


def processor() -> ProcessorFacts:
    """Return the facts of the processor."""
    import torch

    return ProcessorFacts(cpu_model(), os.cpu_count() or 1, len(os.sched_getaffinity(0)),
                          cpu_quota(), torch.get_num_threads(), os.getloadavg()[0])


def cpu_quota(path: Path = _CPU_MAX) -> float | None:
    """Return the CPUs' worth of time that the cgroup (v2) allows; None without a limit."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


@dataclass(frozen=True)
class KernelFacts:
    """The C++ kernels of the CPU."""

    missing: str | None  # why there are none
    available: tuple[str, ...] = ()
    """Instruction sets that the library has and this machine runs: values of `FLEXGEN_H2O_ISA`."""
    chosen: str = ""  # the instruction set in use
    refused: str | None = None  # why the instruction set of `FLEXGEN_H2O_ISA` cannot be used
    build: str = ""
    choices: Mapping[str, str] | None = None  # implementations by rows, from the dispatch table
    measured: Mapping[str, str] | None = None
    """The same from this machine's autotune table, by operation and bits; None if not measured."""
    built: tuple[str, ...] = ()  # instruction sets that the library has
    lacking: tuple[str, ...] = ()
    """Better instruction sets than those available, of this CPU, that the library lacks."""


def kernels(offload_dir: str) -> KernelFacts:
    """Return the facts of the CPU's kernels; `offload_dir` selects the calibration."""
    from flexgen_h2o.kernels.cpu import library as cpu_library

    if (missing := cpu_library.missing()) is not None:
        return KernelFacts(missing)
    available = cpu_library.available_sets()
    best = max(cpu_library.SETS.index(name) for name in available if name != cpu_library.EMULATED)
    lacking = tuple(name for name in cpu_library.cpu_sets() if name != cpu_library.EMULATED
                    and cpu_library.SETS.index(name) > best)
    facts = KernelFacts(None, available, build=cpu_library.build(), built=cpu_library.built_sets(),
                        lacking=lacking)
    try:
        return replace(facts, chosen=cpu_library.instruction_set(), choices=_choices(),
                       measured=measured_choices(offload_dir))
    except UserError as error:
        return replace(facts, refused=str(error))


def by_rows(choose: Callable[[int], str]) -> str:
    """Return the implementations by rows as text, such as ``skinny up to 16, then pytorch``."""
    parts = [(name, max(group)) for name, group in groupby(ROWS, choose)]
    ends = [f"{name} up to {last}" for name, last in parts[:-1]]
    return ", ".join([*ends, f"then {parts[-1][0]}"] if ends else [parts[-1][0]])


def _choices() -> dict[str, str]:
    """Return the dispatch table's implementations of each operation, in bfloat16."""
    import torch

    from flexgen_h2o.kernels import dispatch
    from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS

    return {operation: by_rows(partial(dispatch.select_implementation, operation,
                                       dtype=torch.bfloat16))
            for operation in IMPLEMENTATIONS}


def measured_choices(offload_dir: str) -> dict[str, str] | None:
    """Return the fastest measured implementations; None if this CPU was not measured."""
    import torch

    from flexgen_h2o.kernels import dispatch
    from flexgen_h2o.planning.calibrate import load_calibration
    from flexgen_h2o.storage.device import Device

    with contextlib.suppress(OSError, UserError):
        hardware = load_calibration(Device(), offload_dir)
        if hardware is not None:
            winners = hardware.compute.implementations
            with dispatch.use_autotune_table(winners):
                return {f"{operation}, {bits} bits": by_rows(partial(
                    dispatch.select_implementation, operation, dtype=torch.bfloat16, bits=bits))
                    for operation, by_bits in winners.items() for bits in by_bits}
    return None


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name and bytes of its memory."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs that PyTorch can use, and why there may be none.

    `built_for` is PyTorch's version of CUDA, None without CUDA.
    """

    gpus: tuple[Gpu, ...]
    built_for: str | None
    driver: bool
    triton: bool


def gpus() -> GpuFacts:
    """Return the facts of the GPUs."""
    import torch

    facts = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            facts.append(Gpu(torch.cuda.get_device_name(number), total, free))
    return GpuFacts(tuple(facts), torch.version.cuda, _DRIVER.exists(),
                    find_spec("triton") is not None)


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes of host memory, and of the cgroup's limit (None without one)."""

    total: int
    free: int
    limit: int | None
    limit_free: int | None


def memory() -> MemoryFacts:
    """Return the facts of host memory."""
    import psutil

    from flexgen_h2o.storage.free_memory import cgroup_free, cgroup_limit

    memory = psutil.virtual_memory()
    return MemoryFacts(memory.total, memory.available, cgroup_limit(), cgroup_free())


@dataclass(frozen=True)
class DiskFacts:
    """The disk of a folder."""

    folder: str
    system: str = ""  # kind of the file system
    # Bytes.
    total: int = 0
    free: int = 0
    # Bytes per second of aligned reads and writes.
    read: float = 0.0
    write: float = 0.0
    direct: bool = True
    """False if the file system refuses O_DIRECT: then the rates are of the page cache."""
    problem: str | None = None  # why nothing was measured


def disk(offload_dir: str, nbytes: int = SAMPLE) -> DiskFacts:
    """Measure the disk that runs write to, with a temporary file of `nbytes`."""
    from flexgen_h2o.storage.free_memory import nearest_folder
    from flexgen_h2o.storage.links import disk_read_rate, disk_write_rate
    from flexgen_h2o.storage.run_folder import RunFolder

    facts = DiskFacts(offload_dir)
    try:
        folder = nearest_folder(offload_dir)  # make no folder that would stay
        space = shutil.disk_usage(folder)
        facts = DiskFacts(str(folder), file_system(folder), space.total, space.free)
        if space.free < 2 * nbytes:
            return replace(facts, problem="the disk is full")
        with contextlib.closing(RunFolder(folder)) as run:
            file = run.file("doctor.bin", nbytes)
            # Write first: a read must not hit a hole in the file.
            write = disk_write_rate(file, nbytes=nbytes)
            return replace(facts, read=disk_read_rate(file, nbytes=nbytes), write=write,
                           direct=_takes_direct(file))
    except (OSError, UserError) as error:
        return replace(facts, problem=str(error))


def file_system(folder: Path) -> str:
    """Return the kind of file system of a folder; empty if unknown."""
    import psutil

    mounted = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    resolved = folder.resolve()
    return next((mounted[path] for path in (resolved, *resolved.parents) if path in mounted), "")


def _takes_direct(file: Path) -> bool:
    """Return whether a file can be opened with O_DIRECT."""
    try:
        os.close(os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)))
    except OSError:
        return False
    return hasattr(os, "O_DIRECT")
