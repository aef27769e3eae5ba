"""Inspect this machine: ``flexgen-h2o doctor``.

It reports what the machine has, which kernels run on it, and what would be slow and why. A part
that cannot be inspected says so, and the others are still reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from flexgen_h2o.cli import parser as flag_parser
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.parser import check_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.commands.doctor import facts
from flexgen_h2o.commands.doctor.facts import (
    DiskFacts,
    GpuFacts,
    KernelFacts,
    MemoryFacts,
    ProcessorFacts,
)
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.metrics.trace import GB

Row = tuple[str, str]

SPEEDS = ((0.25, "that of a hard disk or a network's"), (0.7, "that of a SATA SSD"),
          (2.0, "that of a slow NVMe SSD"), (float("inf"), "that of an NVMe SSD"))
"""Classes of disks, by an upper bound of their read rate in GB/s."""

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems in host memory."""

SLOW_DISK = 1.0
"""GB/s of reading below which a disk is called slow."""

LITTLE_MEMORY = 4.0
"""GB of free host memory below which a warning is given."""

NO_BFLOAT16 = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni")
"""Instruction sets without bfloat16 matmuls."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The checked flags."""

    offload_dir: str = flag(
        "path", RunConfig.offload_dir, metavar="DIR", group="policy",
        help="folder whose disk is measured: the one that the disk tier would write to",
    )

    def __post_init__(self) -> None:
        check_flags(self)


def parser() -> flag_parser.Parser:
    """Return the parser of the flags."""
    return flag_parser.build_parser(
        fields(DoctorOptions), command="doctor", usage="%(prog)s [--offload-dir DIR]",
        description="What this machine has, which kernels run on it, and what would be slow and "
        "why. The disk is measured with a file of 256 MB, which is gone afterwards.")


def parse_args(argv: Sequence[str] | None = None) -> DoctorOptions:
    """Parse flags into checked `DoctorOptions`. Raises `UserError`."""
    return DoctorOptions(**vars(parser().parse_args(argv)))


@dataclass(frozen=True)
class Section:
    """A part of the report: rows of a name and a text, and warnings about what would be slow."""

    title: str
    rows: tuple[Row, ...]
    slow: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the section as lines, without the warnings."""
        return "\n".join([self.title, *(f"  {name:<24} {text}" for name, text in self.rows)])


def guarded_section(title: str, look: Callable[[], Section]) -> Section:
    """Return the section of `look`, or one that reports its failure."""
    try:
        return look()
    except Exception as error:  # a broken installation can raise anything
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Section(title, (("cannot be inspected", text),))


def versions(found: Mapping[str, str]) -> Section:
    """Return the section of installed packages."""
    return Section("versions", tuple((name, text or "not installed")
                                     for name, text in found.items()))


def environment(found: Mapping[str, str]) -> Section:
    """Return the section of environment variables that are set."""
    slow = []
    if found.get("FLEXGEN_H2O_ISA"):
        slow.append(f"FLEXGEN_H2O_ISA={found['FLEXGEN_H2O_ISA']} forces this instruction "
                    "set, although the CPU may have a faster one")
    if found.get("FLEXGEN_H2O_KERNELS") == "reference":
        slow.append("FLEXGEN_H2O_KERNELS=reference: plain PyTorch runs in place of the kernels")
    slow += [f"{name} is set: idle threads spin or sleep as it says, which can slow down this and "
             "other processes" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
             if name in found]
    rows = tuple(found.items()) or (("variables", "none that matter is set"),)
    return Section("environment", rows, tuple(slow))


def processor(found: ProcessorFacts) -> Section:
    """Return the section of CPUs and threads."""
    slow = []
    allowed = min(found.usable, found.quota or found.usable)
    if found.threads > allowed:
        slow.append(f"{found.threads} threads on {allowed:g} CPUs wait for each other: set "
                    f"OMP_NUM_THREADS={max(1, int(allowed))}")
    elif 2 * found.threads < int(allowed):
        slow.append(f"only {found.threads} of {allowed:g} CPUs are used: see OMP_NUM_THREADS")
    if found.load > max(0.5, allowed / 4):
        slow.append(f"other processes use the CPUs (load {found.load:.2g}): measure when they "
                    "are idle")
    quota = "" if found.quota is None else f", the cgroup allows {found.quota:g} CPUs' time"
    return Section("processor", (
        ("name", found.name),
        ("CPUs", f"{found.usable} of {found.cpus} for this process{quota}"),
        ("threads", f"{found.threads} that compute; load {found.load:.2f}"),
    ), tuple(slow))


def kernels(found: KernelFacts) -> Section:
    """Return the section of the instruction set and of the implementation of each operation."""
    if found.missing is not None:
        return Section("kernels", (("C++", f"none: {found.missing}"),
                                   ("all operations", "plain PyTorch")),
                       ("plain PyTorch runs attention, eviction and quantized matmuls on the "
                        f"CPU: {found.missing}",))
    rows = [("C++", f"build {found.build}"), ("FLEXGEN_H2O_ISA takes", " ".join(found.available))]
    if found.refused is not None:
        return Section("kernels", (*rows, ("instruction set", f"none: {found.refused}")))
    rows += [("instruction set", found.chosen),
             *((operation, f"{text} (by the table, in bfloat16)")
               for operation, text in (found.choices or {}).items()),
             ("all other operations", "C++")]
    if found.measured is None:
        rows.append(("measured", "not yet: flexgen-h2o plan measures this machine"))
    else:
        rows += [(name, f"{text} (as measured, with --percent auto)")
                 for name, text in found.measured.items()]
    slow = []
    if found.chosen in NO_BFLOAT16:
        slow.append(f"{found.chosen} has no bfloat16 matmuls, the default on a CPU (AVX512_BF16 "
                    "and AMX have): PyTorch emulates them; compare with --dtype float32, or with "
                    "--weight-bits 4 --activation-bits 8, which uses integer matmuls")
    if found.chosen == "portable":
        slow.append("the kernels use plain vectors: AVX2 or AVX-512 would be several times as fast")
    return Section("kernels", tuple(rows), tuple(slow))


def gpus(found: GpuFacts) -> Section:
    """Return the section of GPUs, or why there is none."""
    triton = ("Triton", "installed" if found.triton else "not installed")
    if not found.found:
        why = "PyTorch finds none"
        if found.built_for is None:
            why = "this PyTorch is built without CUDA"
            if found.driver:
                why += ", although there is an NVIDIA driver: install a build with CUDA"
        return Section("GPU", (("none", why), triton), (f"the CPU computes: {why}",))
    rows = tuple((f"cuda:{number}", f"{gpu.name}, {gpu.free / GB:.1f} of {gpu.total / GB:.1f} GB "
                  "free") for number, gpu in enumerate(found.found))
    slow = () if found.triton else ("Triton is not installed: plain PyTorch runs attention and "
                                    "eviction on the GPU",)
    return Section("GPU", (*rows, triton), slow)


def memory(found: MemoryFacts) -> Section:
    """Return the section of host memory and its limit."""
    free = found.free if found.limit_free is None else min(found.free, found.limit_free)
    limit = "none" if found.limit is None else (
        f"{found.limit / GB:.1f} GB, {(found.limit_free or 0) / GB:.1f} GB of it free")
    slow = []
    if free < LITTLE_MEMORY * GB:
        slow.append(f"{free / GB:.1f} GB of host memory are free: weights and cache beyond that "
                    "are read from disk at every step")
    return Section("memory", (
        ("host", f"{found.total / GB:.1f} GB, {found.free / GB:.1f} GB free"),
        ("cgroup's limit", limit), ("free for a run", f"{free / GB:.1f} GB")), tuple(slow))


def disk(found: DiskFacts) -> Section:
    """Return the section of the disk and its speed class."""
    if found.problem is not None:
        return Section("disk", (("folder", found.folder), ("cannot be used", found.problem)),
                       ("nothing can be kept on disk: choose another --offload-dir",))
    rate = found.read / GB
    kind = next(name for most, name in SPEEDS if rate < most)
    how = "past the page cache" if found.direct else "through the page cache"
    slow = []
    if found.system in IN_MEMORY:
        kind = "that of memory"
        slow.append(f"{found.folder} is host memory ({found.system}): the disk tier takes "
                    "memory there; choose another --offload-dir")
    elif not found.direct:
        slow.append("the file system refuses O_DIRECT: the disk tier goes through the page "
                    "cache, which takes memory")
    elif rate < SLOW_DISK:
        slow.append(f"the disk reads {rate:.2g} GB/s: weights of 10 GB on it take "
                    f"{10 / rate:.0f} s a step; more sequences in a block share them")
    return Section("disk", (
        ("folder", f"{found.folder} ({found.system or 'a file system of unknown kind'})"),
        ("space", f"{found.free / GB:.1f} of {found.total / GB:.1f} GB free"),
        ("reads", f"{rate:.2f} GB/s {how}" + (f", {kind}" if found.direct else "")),
        ("writes", f"{found.write / GB:.2f} GB/s"),
    ), tuple(slow))


def verdict(found: Sequence[Section]) -> Iterator[str]:
    """Yield the warnings of all sections."""
    slow = [line for each in found for line in each.slow]
    yield "slow here" if slow else "nothing here is known to be slow"
    yield from (f"  - {line}" for line in slow)


def parts(options: DoctorOptions) -> dict[str, Callable[[], Section]]:
    """Return the functions that inspect each part of the machine, by section title."""
    folder = options.offload_dir
    return {
        "versions": lambda: versions(facts.versions()),
        "environment": lambda: environment(facts.environment()),
        "processor": lambda: processor(facts.processor()),
        "kernels": lambda: kernels(facts.kernels(folder)),
        "GPU": lambda: gpus(facts.gpus()),
        "memory": lambda: memory(facts.memory()),
        "disk": lambda: disk(facts.disk(folder)),
    }


def run(options: DoctorOptions) -> None:
    """Inspect one part after the other, and print each as soon as it is known."""
    found = []
    for title, look in parts(options).items():
        found.append(guarded_section(title, look))
        print_stdout(found[-1].text())
    print_stdout("\n".join(verdict(found)))


main = entry_point(parse_args, run)
