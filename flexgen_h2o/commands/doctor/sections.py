"""The facts about a machine in words: sections of rows, and what would be slow and why. No torch.

Nothing here looks at the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexgen_h2o.commands.doctor.facts import (
    DiskFacts,
    GpuFacts,
    KernelFacts,
    MemoryFacts,
    ProcessorFacts,
)
from flexgen_h2o.metrics.trace import GB

Row = tuple[str, str]

SPEEDS = ((0.25, "that of a hard disk or a network's"), (0.7, "that of a SATA SSD"),
          (2.0, "that of a slow NVMe SSD"), (float("inf"), "that of an NVMe SSD"))
"""Classes of disks: below so many GB/s of reading."""

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems without a disk."""

SLOW_DISK = 1.0
"""GB/s below which reading weights from disk is called slow."""

LITTLE_MEMORY = 4.0
"""GB of free host memory below which it is called little."""

NO_BFLOAT16 = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni")
"""Instruction sets without products of bfloat16."""


@dataclass(frozen=True)
class Section:
    """A part of the report: rows of a name and a text, and lines on what would be slow and why."""

    title: str
    rows: tuple[Row, ...]
    slow: tuple[str, ...] = ()

    def text(self) -> str:
        """The section in lines, without what is slow."""
        return "\n".join([self.title, *(f"  {name:<24} {text}" for name, text in self.rows)])


def section(title: str, look: Callable[[], Section]) -> Section:
    """The section that `look` makes; a failure makes one too, so that the others are still made.
    """
    try:
        return look()
    except Exception as error:  # whatever a broken machine does
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Section(title, (("cannot be looked at", text),))


def versions(found: Mapping[str, str]) -> Section:
    """The packages that are installed."""
    return Section("versions", tuple((name, text or "not installed")
                                     for name, text in found.items()))


def environment(found: Mapping[str, str]) -> Section:
    """Variables that are set."""
    slow = []
    if found.get("FLEXGEN_H2O_ISA"):
        slow.append(f"FLEXGEN_H2O_ISA={found['FLEXGEN_H2O_ISA']} sets the instruction set, "
                    "whatever more the CPU has")
    if found.get("FLEXGEN_H2O_KERNELS") == "reference":
        slow.append("FLEXGEN_H2O_KERNELS=reference: plain PyTorch does what kernels are there for")
    slow += [f"{name} is set: idle threads wait as it says, and slow other processes down or are "
             "slowed down by them" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
             if name in found]
    rows = tuple(found.items()) or (("variables", "none that matter is set"),)
    return Section("environment", rows, tuple(slow))


def processor(found: ProcessorFacts) -> Section:
    """CPUs and threads."""
    slow = []
    allowed = min(found.usable, found.quota or found.usable)
    if found.threads > allowed:
        slow.append(f"{found.threads} threads on {allowed:g} CPUs wait for each other: set "
                    f"OMP_NUM_THREADS={max(1, int(allowed))}")
    elif 2 * found.threads < int(allowed):
        slow.append(f"only {found.threads} of {allowed:g} CPUs are used: see OMP_NUM_THREADS")
    if found.load > max(0.5, allowed / 4):
        slow.append(f"other processes use the CPUs (load {found.load:.2g}): measure when they rest")
    quota = "" if found.quota is None else f", the cgroup allows {found.quota:g} CPUs' time"
    return Section("processor", (
        ("name", found.name),
        ("CPUs", f"{found.usable} of {found.cpus} for this process{quota}"),
        ("threads", f"{found.threads} that compute; load {found.load:.2f}"),
    ), tuple(slow))


def kernels(found: KernelFacts) -> Section:
    """The instruction set, and which implementation does what."""
    if found.missing is not None:
        return Section("kernels", (("C++", f"none: {found.missing}"),
                                   ("all operations", "plain PyTorch")),
                       ("plain PyTorch does attention, eviction and quantized products on the "
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
        slow.append(f"{found.chosen} has no products of bfloat16, the default on a CPU (AVX512_BF16"
                    " and AMX have): PyTorch emulates them; compare with --dtype float32, or with "
                    "--weight-bits 4 --activation-bits 8, which multiplies whole numbers")
    if found.chosen == "portable":
        slow.append("the kernels use plain vectors: AVX2 or AVX-512 would be several times as fast")
    return Section("kernels", tuple(rows), tuple(slow))


def gpus(found: GpuFacts) -> Section:
    """The GPUs, or why there is none."""
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
    slow = () if found.triton else ("Triton is not installed: plain PyTorch does attention and "
                                    "eviction on the GPU",)
    return Section("GPU", (*rows, triton), slow)


def memory(found: MemoryFacts) -> Section:
    """Host memory and its limit."""
    free = found.free if found.limit_free is None else min(found.free, found.limit_free)
    limit = "none" if found.limit is None else (
        f"{found.limit / GB:.1f} GB, {(found.limit_free or 0) / GB:.1f} GB of it free")
    slow = []
    if free < LITTLE_MEMORY * GB:
        slow.append(f"{free / GB:.1f} GB of host memory are free: what exceeds them is read from "
                    "disk at every step")
    return Section("memory", (
        ("host", f"{found.total / GB:.1f} GB, {found.free / GB:.1f} GB free"),
        ("cgroup's limit", limit), ("free for a run", f"{free / GB:.1f} GB")), tuple(slow))


def disk(found: DiskFacts) -> Section:
    """The disk, and its class by speed."""
    if found.problem is not None:
        return Section("disk", (("folder", found.folder), ("cannot be used", found.problem)),
                       ("nothing can be kept on disk: choose another --offload-dir",))
    rate = found.read / GB
    kind = next(name for most, name in SPEEDS if rate < most)
    how = "past the page cache" if found.direct else "through the page cache"
    slow = []
    if found.system in IN_MEMORY:
        kind = "that of memory"
        slow.append(f"{found.folder} is host memory ({found.system}): what is put on disk takes "
                    "memory; choose another --offload-dir")
    elif not found.direct:
        slow.append("the file system refuses O_DIRECT: what is on disk passes, and takes, memory "
                    "of the page cache")
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
    """The lines on what would be slow, of all sections."""
    slow = [line for each in found for line in each.slow]
    yield "slow here" if slow else "nothing here is known to be slow"
    yield from (f"  - {line}" for line in slow)
