"""Inspect this machine: ``flexgen-h2o doctor``.

It reports the hardware, which kernels run on it, and slow parts with the reason. A part
that cannot be inspected says so, and the others are still reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.parser import Parser, build_parser, check_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.commands.doctor import inspection
from flexgen_h2o.commands.doctor.inspection import (
    DiskFacts,
    GpuFacts,
    KernelFacts,
    MemoryFacts,
    ProcessorFacts,
)
from flexgen_h2o.files.disk_cache import cache_dir, entries
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.metrics.report import fit_rows
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


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        fields(DoctorOptions), command="doctor", usage="%(prog)s [--offload-dir DIR]",
        description="What this machine has, which kernels run on it, and what would be slow and "
        "why. The disk is measured with a file of 256 MB, which is gone afterwards.")


def parse_args(argv: Sequence[str] | None = None) -> DoctorOptions:
    """Parse flags into checked `DoctorOptions`. Raises `UserError`."""
    return DoctorOptions(**vars(parser().parse_args(argv)))


@dataclass(frozen=True)
class Section:
    """A part of the report: rows of a name and a text, and warnings about slow parts."""

    title: str
    rows: tuple[Row, ...]
    slow: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the section as lines, without the warnings."""
        rows = [f"  {name:<24} {text}" for name, text in self.rows]
        return fit_rows("\n".join([self.title, *rows]), 27)


def guarded_section(title: str, look: Callable[[], Section]) -> Section:
    """Return the section of `look`, or one that reports its failure."""
    try:
        return look()
    except Exception as error:  # a broken installation can raise anything
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Section(title, (("cannot be inspected", text),))


def versions(facts: Mapping[str, str]) -> Section:
    """Return the section of installed packages."""
    return Section("versions", tuple((name, text or "not installed")
                                     for name, text in facts.items()))


def environment(facts: Mapping[str, str]) -> Section:
    """Return the section of environment variables that are set."""
    slow = []
    if facts.get("FLEXGEN_H2O_ISA"):
        slow.append(f"FLEXGEN_H2O_ISA={facts['FLEXGEN_H2O_ISA']} forces this instruction "
                    "set, although the CPU may have a faster one")
    if facts.get("FLEXGEN_H2O_KERNELS") == "reference":
        slow.append("FLEXGEN_H2O_KERNELS=reference: plain PyTorch runs in place of the kernels")
    slow += [f"{name} is set: idle threads spin or sleep as it says, which can slow down this and "
             "other processes" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
             if name in facts]
    rows = tuple(facts.items()) or (("variables", "none that matter is set"),)
    return Section("environment", rows, tuple(slow))


def processor(facts: ProcessorFacts) -> Section:
    """Return the section of CPUs and threads."""
    slow = []
    allowed = min(facts.usable, facts.quota or facts.usable)
    if facts.threads > allowed:
        slow.append(f"{facts.threads} threads on {allowed:g} CPUs wait for each other: set "
                    f"OMP_NUM_THREADS={max(1, int(allowed))}")
    elif 2 * facts.threads < int(allowed):
        slow.append(f"only {facts.threads} of {allowed:g} CPUs are used: see OMP_NUM_THREADS")
    if facts.load > max(0.5, allowed / 4):
        slow.append(f"other processes use the CPUs (load {facts.load:.2g}): measure when they "
                    "are idle")
    quota = "" if facts.quota is None else f", the cgroup allows {facts.quota:g} CPUs' time"
    return Section("processor", (
        ("name", facts.name),
        ("CPUs", f"{facts.usable} of {facts.cpus} for this process{quota}"),
        ("threads", f"{facts.threads} that compute; load {facts.load:.2f}"),
    ), tuple(slow))


def kernels(facts: KernelFacts) -> Section:
    """Return the section of the instruction set and of the implementation of each operation."""
    if facts.missing is not None:
        return Section("kernels", (("C++", f"none: {facts.missing}"),
                                   ("all operations", "plain PyTorch")),
                       ("plain PyTorch runs attention, eviction and quantized matmuls on the "
                        f"CPU: {facts.missing}",))
    rows = [("C++", f"build {facts.build}, with {' '.join(facts.built)}"),
            ("FLEXGEN_H2O_ISA takes", " ".join(facts.available))]
    slow = []
    if facts.lacking:
        slow.append(f"the CPU has {' '.join(facts.lacking)}, but the kernels were built for "
                    "another one: reinstall the package (FLEXGEN_H2O_BUILD=all builds it for both)")
    if facts.refused is not None:
        return Section("kernels", (*rows, ("instruction set", f"none: {facts.refused}")),
                       tuple(slow))
    rows += [("instruction set", facts.chosen),
             *((operation, f"{text} (by the table, in bfloat16)")
               for operation, text in (facts.choices or {}).items()),
             ("all other operations", "C++")]
    if facts.measured is None:
        rows.append(("measured", "not yet: flexgen-h2o plan measures this machine"))
    else:
        rows += [(name, f"{text} (as measured, with --percent auto)")
                 for name, text in facts.measured.items()]
    if facts.chosen in NO_BFLOAT16:
        slow.append(f"{facts.chosen} has no bfloat16 matmuls, the default on a CPU (AVX512_BF16 "
                    "and AMX have): PyTorch emulates them; compare with --dtype float32, or with "
                    "--weight-bits 4 --activation-bits 8, which uses integer matmuls")
    if facts.chosen == "portable":
        slow.append("the kernels use plain vectors: AVX2 or AVX-512 would be several times as fast")
    return Section("kernels", tuple(rows), tuple(slow))


def gpus(facts: GpuFacts) -> Section:
    """Return the section of GPUs, or why there is none."""
    triton = ("Triton", "installed" if facts.triton else "not installed")
    if not facts.gpus:
        why = "PyTorch finds none"
        if facts.built_for is None:
            why = "this PyTorch is built without CUDA"
            if facts.driver:
                why += ", although there is an NVIDIA driver: install a build with CUDA"
        return Section("GPU", (("none", why), triton), (f"the CPU computes: {why}",))
    rows = tuple((f"cuda:{number}", f"{gpu.name}, {gpu.free / GB:.1f} of {gpu.total / GB:.1f} GB "
                  "free") for number, gpu in enumerate(facts.gpus))
    slow = () if facts.triton else ("Triton is not installed: plain PyTorch runs attention and "
                                    "eviction on the GPU",)
    return Section("GPU", (*rows, triton), slow)


def memory(facts: MemoryFacts) -> Section:
    """Return the section of host memory and its limit."""
    free = facts.free if facts.limit_free is None else min(facts.free, facts.limit_free)
    limit = "none" if facts.limit is None else (
        f"{facts.limit / GB:.1f} GB, {(facts.limit_free or 0) / GB:.1f} GB of it free")
    slow = []
    if free < LITTLE_MEMORY * GB:
        slow.append(f"{free / GB:.1f} GB of host memory are free: weights and cache beyond that "
                    "are read from disk at every step")
    return Section("memory", (
        ("host", f"{facts.total / GB:.1f} GB, {facts.free / GB:.1f} GB free"),
        ("cgroup's limit", limit), ("free for a run", f"{free / GB:.1f} GB")), tuple(slow))


def disk(facts: DiskFacts) -> Section:
    """Return the section of the disk and its speed class."""
    if facts.problem is not None:
        return Section("disk", (("folder", facts.folder), ("cannot be used", facts.problem)),
                       ("nothing can be kept on disk: choose another --offload-dir",))
    rate = facts.read / GB
    kind = next(name for max_rate, name in SPEEDS if rate < max_rate)
    how = "past the page cache" if facts.direct else "through the page cache"
    slow = []
    if facts.system in IN_MEMORY:
        kind = "that of memory"
        slow.append(f"{facts.folder} is host memory ({facts.system}): the disk tier takes "
                    "memory there; choose another --offload-dir")
    elif not facts.direct:
        slow.append("the file system refuses O_DIRECT: the disk tier goes through the page "
                    "cache, which takes memory")
    elif rate < SLOW_DISK:
        slow.append(f"the disk reads {rate:.2g} GB/s: weights of 10 GB on it take "
                    f"{10 / rate:.0f} s a step; more sequences in a block share them")
    return Section("disk", (
        ("folder", f"{facts.folder} ({facts.system or 'a file system of unknown kind'})"),
        ("space", f"{facts.free / GB:.1f} of {facts.total / GB:.1f} GB free"),
        ("reads", f"{rate:.2f} GB/s {how}" + (f", {kind}" if facts.direct else "")),
        ("writes", f"{facts.write / GB:.2f} GB/s"),
    ), tuple(slow))


def cache() -> Section:
    """Return the section of converted models on disk."""
    converted = entries()
    nbytes = sum(entry.nbytes for entry in converted)
    return Section("cache", (("folder", str(cache_dir())), (
        "holds", f"{nbytes / GB:.2f} GB in {len(converted)} entries: see flexgen-h2o cache")))


def verdict(sections: Sequence[Section]) -> Iterator[str]:
    """Yield the warnings of all sections."""
    slow = [line for section in sections for line in section.slow]
    yield "slow here" if slow else "nothing here is known to be slow"
    yield from (fit_rows(f"  - {line}", 4) for line in slow)


def parts(options: DoctorOptions) -> dict[str, Callable[[], Section]]:
    """Return the functions that inspect each part of the machine, by section title."""
    folder = options.offload_dir
    return {
        "versions": lambda: versions(inspection.versions()),
        "environment": lambda: environment(inspection.environment()),
        "processor": lambda: processor(inspection.processor()),
        "kernels": lambda: kernels(inspection.kernels(folder)),
        "GPU": lambda: gpus(inspection.gpus()),
        "memory": lambda: memory(inspection.memory()),
        "disk": lambda: disk(inspection.disk(folder)),
        "cache": cache,
    }


def run(options: DoctorOptions) -> None:
    """Inspect one part after the other, and print each as soon as it is known."""
    sections = []
    for title, look in parts(options).items():
        sections.append(guarded_section(title, look))
        print_stdout(sections[-1].text())
    print_stdout("\n".join(verdict(sections)))


main = entry_point(parse_args, run)
