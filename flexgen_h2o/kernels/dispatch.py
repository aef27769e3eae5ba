"""Dispatch tables: which implementation of an operation runs on which CPU or GPU.

Nothing else depends on a CPU's instruction set, except cache hints (cpu/prefetch.h), which affect
no result. ``FLEXGEN_H2O_ISA`` in the environment selects the rules and the C++ kernels of another
instruction set, for tests. An autotune table, if calibration has timed the implementations on this
machine, overrides the table of CPUs. Within `batch_invariant`, neither of them counts: there is one
implementation whatever the number of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexgen_h2o.config.limits import SKINNY_ROWS
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS, AutotuneTable


@dataclass(frozen=True)
class DispatchRule:
    """Dispatch rule: the implementation for some instruction sets and a range of rows.

    Attributes
    ----------
    operation : str
    targets : tuple of str
        Instruction sets of `cpu_library.SETS`, or of `ARCHITECTURES`.
    implementation : str
    why : str
        Measurement or estimate behind the rule.
    min_rows, max_rows : float
        Range of rows, inclusive.
    dtype : torch.dtype
        dtype of inputs and 16-bit weights; ignored in `GPU_TABLE`.
    """

    operation: str
    targets: tuple[str, ...]
    implementation: str
    why: str
    min_rows: int = 1
    max_rows: float = math.inf
    dtype: torch.dtype = torch.bfloat16


CPU_TABLE = (
    DispatchRule("linear", ("avx2", "avxvnni"), "skinny", max_rows=20,
         why="EPYC without AVX-512, 4096 x 16384: PyTorch takes 1.7, 3.1, 3.8 and 3.7 times "
             "as long at 1, 2, 4 and 8 rows, float32 1.5, 1.1, 0.93 and 0.71 times at 8, 20, "
             "24 and 48 (benchmarks/results/epyc-avx2)."),
    DispatchRule("linear", ("avx512", "avx512vnni"), "skinny", max_rows=48,
         why="Xeon, 4096 x 16384: PyTorch takes 1.8, 4.7, 4.5 and 4.1 times as long at 1, 4, "
             "16 and 32 rows (benchmarks/results/xeon-avx512). On a busy machine float32 "
             "takes 1.1 times as long at 32 rows, and as long at 64."),
    DispatchRule("linear", ("avx2", "avxvnni", "avx512", "avx512vnni"), "float32", min_rows=21,
         why="PyTorch's matmuls in bfloat16 run at 0.06 TFLOP/s where the CPU has no "
             "instruction for them: on the same Xeon they take 3.0, 4.0 and 4.7 times as long "
             "at 64, 256 and 1,024 rows, where this is at 0.5, 0.7 and 0.86 of PyTorch's "
             "rate in float32."),
    DispatchRule("linear", ("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16"), "float32",
         min_rows=4, dtype=torch.float16,
         why="PyTorch's matmuls in float16 run at 0.03 TFLOP/s without AVX512_FP16. On "
             "a busy Xeon, 4096 x 16384, they take 0.4, 1.1 and 3.6 times as "
             "long at 1, 4 and 16 rows."),
    DispatchRule("linear", ("avx512bf16",), "skinny", max_rows=32,
         why="EPYC (Zen 5), 4096 x 16384: PyTorch takes 1.2, 1.2, 1.3 and 1.1 times as long "
             "at 4, 8, 16 and 32 rows, and 0.95 at 48."),
    DispatchRule("linear", ("amx",), "skinny", max_rows=SKINNY_ROWS,
         why="Xeon with AMX, 4096 x 16384: PyTorch takes 1.2, 1.2, 1.3, 1.3, 1.8 and 1.7 "
             "times as long at 1, 4, 16, 32, 64 and 128 rows; ours uses AMX from 3 rows on "
             "(benchmarks/results/xeon-amx)."),
    DispatchRule("linear", ("amx",), "tiled", min_rows=SKINNY_ROWS + 1,
         why="Xeon with AMX, 4096 x 16384: PyTorch takes 1.0, 1.1, 1.2, 1.1 and 1.1 times as "
             "long at 192, 256, 512, 1,024 and 2,048 rows, and adds biases and residuals "
             "in separate passes (benchmarks/results/xeon-amx)."),
)
"""The first rule that matches decides. Times are for bfloat16 on two cores, unless a rule says
otherwise."""

ARCHITECTURES = ("float32", "sm_75", "sm_80", "sm_90")
"""Values of `targets` in `GPU_TABLE`: the first architecture of a range, or float32 on any GPU."""
_NO_TENSOR_CORES = ("float32", "sm_75")
_TENSOR_CORES = ("sm_80", "sm_90")
GPU_TABLE = (
    # Causal attention of prompts with scores: a blockwise kernel, or torch.matmul.
    DispatchRule("scored_prefill", _NO_TENSOR_CORES, "matmul",
         why="Triton uses no tensor cores there: its blocks run as fused multiply-adds (a "
             "T4's 8.1 TFLOP/s, by its data sheet), and spill from 64 x 32 on. cuBLAS uses "
             "them (65 TFLOP/s); the logits between two matmuls cost some 24 bytes each."),
    DispatchRule("scored_prefill", _TENSOR_CORES, "blocks",
         why="Logits stay in registers, and no block spills (benchmarks/results/"
             "gpu_static.csv). H200, 32 heads of 128, 4,096 tokens: 0.36 ms, and 0.21 for "
             "the scores; PyTorch without scores 0.27 by cuDNN, which costs 50 ms for each "
             "new length, and 0.50 by FlashAttention."),
    # The query heads of a KV head in a decode step: together on tensor cores, or one by one.
    DispatchRule("decode_attention", _NO_TENSOR_CORES, "vectors",
         why="A block of 16 rows would be multiplied for each group of heads, by fused "
             "multiply-adds; vectors multiply existing heads only. The cache comes from the "
             "second-level cache after the first head."),
    DispatchRule("decode_attention", _TENSOR_CORES, "matrix units",
         why="The cache is read once for all heads of a group (bytes_per_flop of "
             "benchmarks/results/gpu_static.csv)."),
    # Matmul with a quantized weight: kernels with and without tensor cores, or cuBLAS with slices
    # of the weight that are dequantized. Then the same for MXFP4 and 12-bit weights.
    DispatchRule("linear_quantized", _NO_TENSOR_CORES, "vectors", max_rows=8,
         why="A weight costs about 3 instructions and one a row: 8 rows of 4096 x 16384 in 4 "
             "bits 0.18 ms of a T4's arithmetic and 0.12 ms of its bandwidth, unpacked 1.0 ms "
             "(data sheet)."),
    DispatchRule("linear_quantized", _NO_TENSOR_CORES, "unpacked",
         why="Blocks of quantized values spill without tensor cores, which cuBLAS uses on "
             "sm_75."),
    DispatchRule("linear_quantized", _TENSOR_CORES, "matrix units", max_rows=64,
         why="H200, 4096 x 16384: in 4 bits 18, 19, 22, 28 and 47 us at 1, 8, 16, 32 and 64 "
             "rows, in 8 bits 26, 27, 26, 32 and 51; cuBLAS in float16 36, 36, 37, 37 and 41, "
             "and the vectors of 4 bits 25 and 34 at 1 and 2."),
    DispatchRule("linear_quantized", _TENSOR_CORES, "unpacked",
         why="Weights would be dequantized for each block of rows; cuBLAS reads them once."),
    DispatchRule("linear_short_floats", ARCHITECTURES, "vectors", max_rows=8,
         why="H200, 4096 x 16384 in 12 bits: 38 and 57 us at 1 and 4 rows, each row about 6, "
             "unpacked 107 at 16; cuBLAS in float16 36."),
    DispatchRule("linear_short_floats", ARCHITECTURES, "unpacked",
         why="Sums of more rows do not stay in registers; cuBLAS has tensor cores."),
)
"""Rules of GPUs: the first rule that matches decides. Rules that name no GPU are estimates."""

_autotune_table: ContextVar[AutotuneTable | None] = ContextVar("autotune_table", default=None)


@contextmanager
def use_autotune_table(table: AutotuneTable | None) -> Iterator[None]:
    """Let an autotune table override `CPU_TABLE` within the context; None: do not override it."""
    token = _autotune_table.set(table)
    try:
        yield
    finally:
        _autotune_table.reset(token)


_batch_invariant: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Compute each row on a CPU in the same way whatever the other rows, within the context."""
    token = _batch_invariant.set(enabled)
    try:
        yield
    finally:
        _batch_invariant.reset(token)


def is_batch_invariant() -> bool:
    """Return True within `batch_invariant`."""
    return _batch_invariant.get()


def _invariant_implementation(operation: str, dtype: torch.dtype) -> str:
    """Return the implementation of an operation within `batch_invariant`, for any dtype and rows.

    The order of a row's sums does not depend on the number of rows.
    """
    if operation != "linear":
        return IMPLEMENTATIONS[operation][0]
    if dtype == torch.bfloat16 and cpu_library.has_tiles():
        return "tiled"
    # Where the CPU multiplies bfloat16 itself, "skinny" does too.
    multiplies = dtype == torch.bfloat16 and cpu_library.instruction_set() == "avx512bf16"
    return "skinny" if multiplies else "float32"


def available(operation: str, rows: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the `IMPLEMENTATIONS` of an operation that support this machine, rows and dtype.

    Raises
    ------
    UserError
        See `cpu_library.instruction_set`.
    """
    names = IMPLEMENTATIONS[operation]
    if cpu_library.missing():
        return names[:1]
    if operation == "linear":
        # Float32 arithmetic gains nothing where the CPU multiplies bfloat16 itself.
        sets = cpu_library.SETS
        widens = sets.index(cpu_library.instruction_set()) < sets.index("avx512bf16")
        short = dtype == torch.bfloat16
        can = {"pytorch": True, "skinny": short and rows <= SKINNY_ROWS,
               "tiled": short and rows > SKINNY_ROWS and cpu_library.has_tiles(),
               "float32": dtype == torch.float16 or dtype == torch.bfloat16 and widens}
        return tuple(name for name in names if can[name])
    return names if dtype == torch.bfloat16 else names[:1]  # other dtypes were not timed


def select_implementation(operation: str, rows: int, dtype: torch.dtype, bits: int = 16) -> str:
    """Return the implementation of an operation to use, one of `available`.

    `rows` are of a matmul, or tokens of prefill attention; `dtype` is of the inputs, and `bits` are
    of the weights: 16, 12, 8 or 4.
    """
    if is_batch_invariant():
        return _invariant_implementation(operation, dtype)
    possible = available(operation, rows, dtype)
    if len(possible) == 1:
        return possible[0]
    table = (_autotune_table.get() or {}).get(operation, {}).get(bits)
    if table:
        # The entry for the next larger row count that was timed, or else for the largest.
        fastest = table[min((count for count in table if count >= rows), default=max(table))]
        if fastest in possible:
            return fastest
    isa = cpu_library.instruction_set().removesuffix("_emulated")
    return next((rule.implementation for rule in CPU_TABLE
                 if rule.operation == operation and isa in rule.targets and rule.dtype == dtype
                 and rule.min_rows <= rows <= rule.max_rows), possible[0])


class GPU(NamedTuple):
    """The properties of a GPU that the rules depend on.

    Attributes
    ----------
    architecture : int
        Compute capability without its point: 75 for a T4, 80 for an A100, 90 for an H100.
    multiprocessors : int
    """

    architecture: int
    multiprocessors: int


_assumed_gpu: ContextVar[GPU | None] = ContextVar("assumed_gpu", default=None)


@contextmanager
def assume_gpu(gpu: GPU | None) -> Iterator[None]:
    """Treat every device as this GPU within the context, to test its implementations without one.

    None: use the actual devices.
    """
    token = _assumed_gpu.set(gpu)
    try:
        yield
    finally:
        _assumed_gpu.reset(token)


def gpu_of(device: torch.device) -> GPU | None:
    """Return the GPU of a device; None for other devices."""
    return _assumed_gpu.get() or (_properties(device) if device.type == "cuda" else None)


@functools.lru_cache(maxsize=16)
def _properties(device: torch.device) -> GPU:
    properties = torch.cuda.get_device_properties(device)
    return GPU(10 * properties.major + properties.minor, properties.multi_processor_count)


def has_tensor_cores(gpu: GPU | None, dtype: torch.dtype) -> bool:
    """Return True if Triton multiplies blocks of `dtype` on tensor cores; None: its interpreter.

    It does not for float32, whose full precision the kernels need, nor before Ampere.
    """
    return dtype.itemsize == 2 and (gpu is None or gpu.architecture >= 80)


@functools.lru_cache(maxsize=1024)
def select_gpu_implementation(operation: str, rows: int, dtype: torch.dtype, gpu: GPU | None
                              ) -> str:
    """Return the implementation of an operation to use on a GPU, by `GPU_TABLE`.

    `rows` are of a matmul, `dtype` is of the inputs. A GPU of None (Triton's interpreter) counts as
    the newest architecture.
    """
    newest = gpu is None or gpu.architecture >= 90
    gpu_set = "float32" if dtype == torch.float32 else (
        "sm_75" if not has_tensor_cores(gpu, dtype) else "sm_90" if newest else "sm_80")
    return next(rule.implementation for rule in GPU_TABLE
                if rule.operation == operation and gpu_set in rule.targets
                and rule.min_rows <= rows <= rule.max_rows)
