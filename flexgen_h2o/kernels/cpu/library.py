"""The shared library of the CPU kernels: loading it, and calling or capturing its functions.

setup.py builds it for some of the instruction sets. Environment variables: ``FLEXGEN_H2O_ISA``
selects an instruction set of `SETS` (default: the best that both the library and the CPU have),
``FLEXGEN_H2O_NATIVE`` the path of another library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import abi

EMULATED = "amx_emulated"
SETS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", EMULATED)
"""Instruction sets in ascending order. Each includes the one before it, except that many CPUs with
AVX-512 lack AVX-VNNI. The last one emulates AMX and AVX-VNNI in plain C++ (cpu/amx.h, cpu/simd.h):
it runs, slowly, on any CPU with AVX2, for tests. A CPU with AMX that the operating system does not
let the process use counts as avx512bf16."""
_EMULATED_BIT = 1 << SETS.index(EMULATED)

STRUCTS = abi.structs()
"""ctypes structures of abi.STRUCTS, by name."""


def _file() -> Path | None:
    if path := os.environ.get("FLEXGEN_H2O_NATIVE"):
        return Path(path)
    file = Path(__file__).parents[1] / "_cpu.so"
    return file if file.exists() else None


@functools.cache
def _library() -> Any:
    """Return the library (CDLL), or the reason why there is none (str)."""
    path = _file()
    if path is None:
        return "the C++ kernels were not built (pip install found no g++ 11 or newer that works)"
    try:
        # The library is linked to no OpenMP library. It finds the symbols of the one that PyTorch
        # has loaded globally: there is one thread pool, of the size that torch.set_num_threads
        # sets.
        library = ctypes.CDLL(str(path))
        for text in (library.h2o_abi, library.h2o_build):
            text.restype = ctypes.c_char_p
        library.h2o_idle_team.restype = None
    except (OSError, AttributeError) as error:
        return f"the C++ kernels cannot be loaded: {error}"
    if library.h2o_abi() != abi.FINGERPRINT.encode():
        return f"{path.name} was built from other sources: install again"
    return library


def missing() -> str | None:
    """Return why the kernels cannot be used; None if they can."""
    library = _library()
    return library if isinstance(library, str) else None


def build() -> str:
    """Return an identifier of the build: a digest of sources and flags, and the compiler."""
    return _library().h2o_build().decode()


def _names(mask: int) -> tuple[str, ...]:
    return tuple(name for number, name in enumerate(SETS) if mask >> number & 1)


def available_sets() -> tuple[str, ...]:
    """Return the instruction sets of `SETS` that the library has and this machine can run."""
    return _names(_library().h2o_isa_available())


def built_sets() -> tuple[str, ...]:
    """Return the instruction sets of `SETS` that the library has."""
    return _names(_library().h2o_isa_built())


def cpu_sets() -> tuple[str, ...]:
    """Return the instruction sets of `SETS` that this machine can run."""
    return _names(_library().h2o_isa_cpu())


def instruction_set() -> str:
    """Return the instruction set of `SETS` that the kernels use.

    Raises
    ------
    UserError
        `FLEXGEN_H2O_ISA` names one that the library or the CPU does not have.
    """
    name = os.environ.get("FLEXGEN_H2O_ISA")
    if not name:
        return SETS[(_library().h2o_isa_available() & ~_EMULATED_BIT).bit_length() - 1]
    if name in available_sets():
        return name
    if name in (supported := cpu_sets()):
        raise UserError(f"FLEXGEN_H2O_ISA={name}: the kernels were built for "
                        f"{', '.join(built_sets())}; reinstall with FLEXGEN_H2O_BUILD=all")
    raise UserError(f"FLEXGEN_H2O_ISA={name}: this machine has {', '.join(supported)}")


def has_tiles() -> bool:
    """Return True if the kernels use AMX tiles, real or emulated."""
    return instruction_set() in ("amx", EMULATED)


def call(name: str, struct: str, *, capture: CapturedCalls | None = None,
         tensors: Sequence[Tensor | None] = (), **fields: object) -> None:
    """Call a function of the library, or capture the call.

    Parameters
    ----------
    name : str
        The function, without its prefix ``h2o_``.
    struct : str
        The key of `STRUCTS` of its argument.
    capture : CapturedCalls, optional
        The call is added to it instead of being made; `name` is then a key of abi.OPERATIONS.
    tensors : sequence of Tensor or None
        The tensors that the fields point to. A capture keeps them alive.
    **fields
        Fields of the struct, which the caller has checked. `threads` defaults to PyTorch's number.

    Raises
    ------
    MemoryError
        The function's workspace cannot be allocated.
    ValueError
        A tensor of indices is out of range.
    """
    arguments = STRUCTS[struct](**{"threads": torch.get_num_threads()} | fields)
    if capture is not None:
        capture.add(name, arguments, tensors)
        return
    function = getattr(_library(), f"h2o_{name}")
    _check_status(name, function(SETS.index(instruction_set()), ctypes.byref(arguments)))


def _check_status(name: str, status: int) -> None:
    """Raise the exception of a status other than 0 (Status of cpu/kernels.h)."""
    if status == 1:
        raise MemoryError(f"no memory for the workspace of {name}")
    if status:
        raise ValueError(f"{name}: an index is out of range")


def idle_team(threads: int) -> None:
    """Start a team of idle OpenMP threads for the calling thread. It ends with that thread."""
    _library().h2o_idle_team(ctypes.c_int64(threads))


_SHARED_FIELDS = {"linear_skinny": ("x", "rows", "inputs", "x_row", "threads"),
                  "linear_tiled": ("x", "rows", "inputs", "x_row", "threads"),
                  "linear_float32": ("x", "rows", "inputs", "x_row", "dtype", "threads"),
                  "linear_quantized": ("x", "rows", "x_row", "dtype", "threads")}
"""Matmuls that can be fused into one call, and the fields that must be equal."""
_SHARED_MATRIX_FIELDS = ("inputs", "bits", "group")

_Call = tuple[str, ctypes.Structure]


class CapturedCalls:
    """Kernel calls that are captured once and then replayed, as a CUDA graph does on a GPU.

    A decode step of a small model has thousands of operations of a few microseconds. The checks and
    argument structs of a call take longer than that in Python; a capture makes them once. The
    functions of `native` with a `capture` argument add themselves; `append` adds a Python function.
    Between two Python functions everything is one call of the library. Replays read and write the
    tensors of the capture, which are kept alive; their values may change between replays.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []
        self._calls: list[_Call] = []
        self._fused: list[ctypes.Structure] = []
        self._tensors: list[Tensor] = []

    def add(self, name: str, arguments: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        """Add a call of an operation. Consecutive matmuls of the same input become one call."""
        if self._calls and _fuse(self._calls[-1], (name, arguments)):
            self._fused.append(arguments)
        else:
            self._calls.append((name, arguments))
        self._tensors += [x for x in tensors if x is not None]

    def append(self, function: Callable[[], object]) -> None:
        """Add a Python function."""
        self._end_part()
        self._parts.append(function)

    def _end_part(self) -> None:
        if self._calls:
            self._parts.append(_replay_function(self._calls))
            self._calls = []

    def replay(self) -> None:
        """Run everything in order.

        Raises the errors of `call`. Results of the operations before the error remain.
        """
        self._end_part()
        for part in self._parts:
            part()


def _fuse(first: _Call, second: _Call) -> bool:
    """Append a matmul to the call of another one if both have the same input; return if it did.

    The caller keeps both structs alive.
    """
    (name, arguments), (other_name, other_arguments) = first, second
    if name != other_name or name not in _SHARED_FIELDS or any(
            getattr(arguments, field) != getattr(other_arguments, field)
            for field in _SHARED_FIELDS[name]):
        return False
    if name == "linear_quantized" and any(
            getattr(arguments.matrix, field) != getattr(other_arguments.matrix, field)
            for field in _SHARED_MATRIX_FIELDS):
        return False
    while arguments.next:
        arguments = type(arguments).from_address(arguments.next)
    arguments.next = ctypes.addressof(other_arguments)
    return True


def _replay_function(calls: Sequence[_Call]) -> Callable[[], None]:
    """Return a function that makes the calls in order, on the current instruction set.

    The caller keeps the memory that the arguments point to.
    """
    numbers = {name: number for number, name in enumerate(abi.OPERATIONS)}
    captured_call = STRUCTS["CapturedCall"]
    array = (captured_call * len(calls))(*(
        captured_call(numbers[name], ctypes.addressof(arguments)) for name, arguments in calls))
    argument = ctypes.byref(STRUCTS["Replay"](ctypes.addressof(array), len(calls)))
    function, isa = _library().h2o_replay, SETS.index(instruction_set())
    keep_alive = array, list(calls)  # the structs live as long as the function

    def replay() -> None:
        status = function(isa, argument)
        if status:
            _check_status(f"one of {', '.join(dict(keep_alive[1]))}", status)

    return replay
