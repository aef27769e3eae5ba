"""Compile Triton kernels for GPUs that are not there, and read what ptxas reports.

Triton compiles at a launch. Every launch is intercepted here: each configuration that the autotuner
would try is compiled for the card, and none runs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from flexgen_h2o.config.cache_layout import GroupLayout
from flexgen_h2o.kernels.dispatch import GPU, assume_gpu

KIB = 1 << 10
REGISTERS = 64 * KIB
"""Registers of a multiprocessor, for all architectures here."""


@dataclass(frozen=True)
class Card:
    """Limits of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability").
    """

    name: str
    gpu: GPU
    # Bytes of shared memory of a program, and of all programs of a multiprocessor.
    shared: int
    shared_of_all: int
    reserved: int  # bytes of shared memory reserved by the system for each program
    # Maximum on a multiprocessor.
    warps: int
    programs: int

    def together(self, registers: int, shared: int, warps: int) -> int:
        """Return the number of resident programs of a kernel on a multiprocessor.

        Registers are allocated to whole warps, in units of 256.
        """
        if shared > self.shared:
            return 0
        of_a_warp = -(-32 * registers // 256) * 256
        return min(self.programs, self.warps // warps, REGISTERS // of_a_warp // warps,
                   self.shared_of_all // (shared + self.reserved or 1))


CARDS = {card.gpu.architecture: card for card in (
    Card("T4", GPU(75, 40), 64 * KIB, 64 * KIB, 0, 32, 16),
    Card("A100", GPU(80, 108), 163 * KIB, 164 * KIB, KIB, 64, 32),
    Card("H100", GPU(90, 132), 227 * KIB, 228 * KIB, KIB, 64, 32),
)}
"""By architecture."""


_PRODUCT = re.compile(r"warp_group_dot [^\n]*dot_op<\{opIdx = 0")
_WAIT = re.compile(r"warp_group_dot_wait [^\n]*pendings = (\d+)")
_LOOP = re.compile(r"^( *)(?:%[\w:]+ = )?scf\.(?:for|while) [^\n]*\n(.*?)^\1\}", re.M | re.S)


def left_under_way(code: str) -> int:
    """Return the maximum number of async matmuls from registers in flight when a loop step ends.

    A warp-group matmul of sm_90 may read its left operand from registers while the program
    continues. If a loop step ends with one in flight, some compilers (Triton 3.6) let the next step
    overwrite registers that have not been read yet (github.com/triton-lang/triton/issues/9433).
    Results are then wrong occasionally, which a check of one call does not find.

    `code`: a kernel in Triton's GPU dialect (``asm["ttgir"]``).
    """
    max_pending = 0
    for _, body in _LOOP.findall(code):
        waits = _WAIT.findall(body)
        if _PRODUCT.search(body) and waits:
            max_pending = max(max_pending, int(waits[-1]))
        max_pending = max(max_pending, left_under_way(body))
    return max_pending


_REGISTERS_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


class _AbsentGPU:
    """A Triton driver for compilation only."""

    def __init__(self, architecture: int):
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


class Variant(NamedTuple):
    """A call and its identity; `size` is the head size or the rows of a matmul."""

    operation: str
    dtype: torch.dtype
    size: int
    bits: int
    call: Callable[[], None]


class KernelLaunch(NamedTuple):
    """A kernel with everything that determines its code."""

    kernel: str
    variant: Variant
    constants: dict[str, object]
    compile: Callable[[], Any]
    source: str


def constants_text(constants: dict[str, object]) -> str:
    """Return constants as text for the file."""
    return " ".join(f"{name}={value}" for name, value in constants.items())


@contextmanager
def _caught(architecture: int, take: Callable[[JITFunction, tuple, dict], None]) -> Iterator[None]:
    """Context in which `take` gets the function and arguments of every launch."""

    def launched(self, *args, grid, warmup, **options):
        take(self, args, options)

    def tuned(self, *args, **options):
        named = dict(zip(self.arg_names, args, strict=False))
        prune = self.early_config_prune
        for config in prune(self.configs, named, **options) if prune else self.configs:
            self.fn.run(*args, **options, **config.all_kwargs())

    run, tune = JITFunction.run, Autotuner.run
    driver.set_active(_AbsentGPU(architecture))
    JITFunction.run, Autotuner.run = launched, tuned
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune


def launches(card: Card, variants: Iterable[Variant]) -> list[KernelLaunch]:
    """Return the launches of the variants on a card, without duplicates."""
    by_key: dict[tuple, KernelLaunch] = {}
    run = JITFunction.run
    variant = None

    def take(function: JITFunction, args: tuple, options: dict) -> None:
        named = dict(zip(function.arg_names, args, strict=False)) | options
        constants = {param.name: named[param.name] for param in function.params
                     if param.is_constexpr or named[param.name] is None}
        constants |= {name: options[name] for name in _OPTIONS if name in options}
        key = (function.fn.__name__, constants_text(constants), *(
            _kind(named[param.name]) for param in function.params
            if not (param.is_constexpr or param.do_not_specialize)))
        if key not in by_key:
            by_key[key] = KernelLaunch(function.fn.__name__, variant, constants,
                                       functools.partial(_fresh, run, function, args, options),
                                       _digest(function))

    with _caught(card.gpu.architecture, take), assume_gpu(card.gpu):
        for variant in variants:  # noqa: B007 (take reads it)
            variant.call()
    names = [(*identity(card, launch).values(),) for launch in by_key.values()]
    assert len(names) == len(set(names)), "the file has one row for two launches"
    return list(by_key.values())


@functools.cache
def _digest(function: JITFunction) -> str:
    """Return a digest of a kernel's code, the functions that it calls and the constants it reads.

    Triton's own key depends on the lines above it and on Triton's version. Comments and docstrings
    do not count.
    """
    parts: dict[str, str] = {}

    def visit(function: JITFunction) -> None:
        code = ast.parse(function.src).body[0]
        if ast.get_docstring(code) is not None:
            del code.body[0]
        parts[function.fn.__qualname__] = ast.unparse(code)
        for name in function.fn.__code__.co_names:
            value = function.fn.__globals__.get(name)
            if isinstance(value, JITFunction) and value.fn.__qualname__ not in parts:
                visit(value)
            elif isinstance(value, tl.constexpr):
                parts[name] = repr(value.value)

    visit(function)
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:12]


def _fresh(run: Callable[..., Any], function: JITFunction, args: tuple, options: dict) -> Any:
    """Compile the kernel of a launch; clear the cache, which may hold another card's."""
    function.device_caches.clear()
    return run(function, *args, grid=(1,), warmup=True, **options)


def _kind(value: object) -> object:
    """Return the specialization key of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int):
        return "1" if value == 1 else value % 16 == 0
    return None if value is None else type(value)


def compiled(card: Card, launch: KernelLaunch) -> dict[str, object]:
    """Return the row of a launch: ptxas' report, and the occupancy on the card.

    Raises Triton's exception if the kernel does not compile.
    """
    driver.set_active(_AbsentGPU(card.gpu.architecture))
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = cache, True
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = launch.compile()
    report = log.getvalue()
    registers = int(_REGISTERS_USED.search(report)[1])
    stores, loads = map(int, _SPILLS.search(report).groups())
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    together = card.together(registers, shared, warps)
    return identity(card, launch) | {
        "registers": registers, "spill_stores": stores, "spill_loads": loads, "shared": shared,
        "shared_limit": card.shared, "programs": together,
        "occupancy": together * warps / card.warps, "bytes_per_flop": bytes_per_flop(launch),
        "left_under_way": left_under_way(kernel.asm["ttgir"])}


def identity(card: Card, launch: KernelLaunch) -> dict[str, object]:
    """Return the columns that identify a row and its kernel version."""
    variant = launch.variant
    return {"architecture": f"sm_{card.gpu.architecture}", "card": card.name,
            "kernel": launch.kernel, "operation": variant.operation,
            "dtype": str(variant.dtype).removeprefix("torch."), "size": variant.size,
            "bits": variant.bits, "constants": constants_text(launch.constants),
            "triton": triton.__version__, "source": launch.source}


def bytes_per_flop(launch: KernelLaunch) -> float | None:
    """Return the bytes that the kernel's loop reads per FLOP of its matmuls; None without matmuls.

    They come from GPU memory or its caches: each row block of `_forward` reads all keys and values.
    """
    constants, item, bits = launch.constants, launch.variant.dtype.itemsize, launch.variant.bits
    size = launch.variant.size
    if launch.kernel in ("_read", "read_codes"):
        vector = size * item if bits == 16 else GroupLayout(size, bits).nbytes
        return 2 * vector / (4 * size * constants.get("HEADS", 1))
    if launch.kernel == "_forward":
        return item / (2 * constants["BLOCK_M"])
    if launch.kernel == "_sum_columns":
        return (size * item + 8) / (2 * constants["BLOCK_N"] * size)
    group = constants.get("WORDS", 0) * 32 // bits
    if launch.kernel in ("_skinny", "_multiply_floats"):
        head = 4 if launch.kernel == "_skinny" else 1
        return (bits / 8 + head / group) / (2 * constants["ROWS"])
    if launch.kernel in ("_narrow", "_wide"):
        rows, outputs = (8, 32) if launch.kernel == "_narrow" else (constants["ROWS"], 128)
        return (bits / 8 + 4 / group + rows * item / outputs) / (2 * rows)
    return None
