"""The library of the CPU's kernels: found, loaded, and called through ctypes.

It is built by setup.py. ``FLEXGEN_H2O_ISA`` in the environment (`SETS`) picks another instruction
set than the best that the CPU has; ``FLEXGEN_H2O_NATIVE`` another library.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import abi

EMULATED = "amx_emulated"
SETS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", EMULATED)
"""Instruction sets, each with what the one before it has (but for avxvnni, which many CPUs with
AVX-512 lack), and last the kernels of AMX and AVX-VNNI with both in plain C++ (cpu/amx.h,
cpu/simd.h), which any CPU with AVX2 runs, slowly: to test them. A CPU with AMX whose system does
not let the process use it counts as avx512bf16."""
_EMULATED_BIT = 1 << SETS.index(EMULATED)

STRUCTS = abi.structs()
"""Ctypes' mirrors of abi.STRUCTS, by name."""


def _file() -> Path | None:
    if chosen := os.environ.get("FLEXGEN_H2O_NATIVE"):
        return Path(chosen)
    # Not sysconfig's: a second thread that asks while the first one has it read finds nothing.
    path = Path(__file__).with_name(f"_cpu{EXTENSION_SUFFIXES[0]}")
    return path if path.exists() else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = _file()
    if path is None:
        return "the C++ kernels were not built (pip install found no g++ 11 or newer that works)"
    try:
        # PyTorch's OpenMP is loaded by now and is the one that this library finds: one pool of
        # threads, of the size that torch.set_num_threads says.
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
    """Why the kernels cannot be used; None if they can."""
    library = _library()
    return library if isinstance(library, str) else None


def build() -> str:
    """Tells builds of the kernels apart: a digest of sources and flags, and the compiler."""
    return _library().h2o_build().decode()


def available_sets() -> tuple[str, ...]:
    """The instruction sets of `SETS` that this machine can run."""
    found = _library().h2o_isa_available()
    return tuple(name for number, name in enumerate(SETS) if found >> number & 1)


def instruction_set() -> str:
    """The one of `SETS` that is used.

    Raises
    ------
    UserError
        `FLEXGEN_H2O_ISA` names one that the kernels or the CPU do not have.
    """
    chosen = os.environ.get("FLEXGEN_H2O_ISA")
    if not chosen:
        return SETS[(_library().h2o_isa_available() & ~_EMULATED_BIT).bit_length() - 1]
    if chosen not in (available := available_sets()):
        raise UserError(f"FLEXGEN_H2O_ISA={chosen}: this machine has {', '.join(available)}")
    return chosen


def has_tiles() -> bool:
    """True if the one that is used has AMX tiles, or their twin."""
    return instruction_set() in ("amx", EMULATED)


class Steps(Protocol):
    """Takes calls that are to be made later."""

    def add(self, name: str, arguments: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        """Note a call of an operation; the tensors are those that its arguments point to."""


def call(name: str, struct: str, *, steps: Steps | None = None,
          tensors: Sequence[Tensor | None] = (), **fields: object) -> None:
    """Call a function of the library with the fields of its struct, which the caller has checked,
    by PyTorch's number of `threads` unless these are told.

    With `steps`, one of abi.OPERATIONS is noted there in place of the call; `tensors` are those
    that the fields point to.

    Raises
    ------
    MemoryError
        There is none for the function's workspace.
    ValueError
        A tensor of indices points outside of what it indexes.
    """
    arguments = STRUCTS[struct](**{"threads": torch.get_num_threads()} | fields)
    if steps is not None:
        steps.add(name, arguments, tensors)
        return
    function = getattr(_library(), f"h2o_{name}")
    _check(name, function(SETS.index(instruction_set()), ctypes.byref(arguments)))


def bound(calls: Sequence[tuple[str, ctypes.Structure]]) -> Callable[[], None]:
    """A function that makes these calls of abi.OPERATIONS in order, on the instruction set of now.

    The caller keeps what the arguments point to. What the function raises: see `call`.
    """
    numbers = {name: number for number, name in enumerate(abi.OPERATIONS)}
    steps = (STRUCTS["Step"] * len(calls))(*(
        (numbers[name], ctypes.addressof(arguments)) for name, arguments in calls))
    program = ctypes.byref(STRUCTS["Program"](ctypes.addressof(steps), len(calls)))
    function, chosen = _library().h2o_program, SETS.index(instruction_set())
    held = steps, list(calls)  # the structs live as long as the function

    def run() -> None:
        status = function(chosen, program)
        if status:
            _check(f"one of {', '.join(dict(held[1]))}", status)

    return run


_SHARED = {"linear_skinny": ("x", "rows", "inputs", "x_row", "threads"),
           "linear_tiled": ("x", "rows", "inputs", "x_row", "threads"),
           "linear_float32": ("x", "rows", "inputs", "x_row", "dtype", "threads"),
           "linear_quantized": ("x", "rows", "x_row", "dtype", "threads")}
"""Products that may be joined, and the fields that are alike then."""
_SHARED_MATRIX = ("inputs", "bits", "group")


def joined(first: tuple[str, ctypes.Structure], second: tuple[str, ctypes.Structure]) -> bool:
    """Have a product's call do another one too, if both have the same input; False if not.

    It goes to the end of what the first one does. The caller keeps both structs.
    """
    (name, mine), (other, more) = first, second
    if name != other or name not in _SHARED or any(
            getattr(mine, field) != getattr(more, field) for field in _SHARED[name]):
        return False
    if name == "linear_quantized" and any(
            getattr(mine.matrix, field) != getattr(more.matrix, field)
            for field in _SHARED_MATRIX):
        return False
    while mine.next:
        mine = type(mine).from_address(mine.next)
    mine.next = ctypes.addressof(more)
    return True


def _check(name: str, status: int) -> None:
    """Raise what a status other than 0 says (Status of cpu/kernels.h)."""
    if status == 1:
        raise MemoryError(f"no memory for the workspace of {name}")
    if status:
        raise ValueError(f"{name}: a tensor of indices points outside of what it indexes")


def idle_team(threads: int) -> None:
    """Give the calling thread a team of OpenMP threads that do nothing. It ends with the thread."""
    _library().h2o_idle_team(ctypes.c_int64(threads))
