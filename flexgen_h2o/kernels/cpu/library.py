"""The library of the CPU's kernels: found, loaded, and called through ctypes.

It is built by setup.py. ``FLEXGEN_H2O_ISA`` in the environment (`SETS`) picks another instruction
set than the best that the CPU has; ``FLEXGEN_H2O_NATIVE`` another library.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    path = Path(__file__).parents[1] / f"_cpu{EXTENSION_SUFFIXES[0]}"
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


# Operations on tensors that stay where they are, noted once and then carried out by one call.
#
# A decode step of a small model is thousands of operations of some microseconds each. Called one by
# one from Python they take longer to ask for than to do: arguments are checked, views and structs
# are
# made. A program does that once.


class Program:
    """A list of operations.

    The functions of `native` that take `steps` add themselves; `then` adds anything else. Between
    two of the latter all is one call of the C++ library. Values of tensors may change from run to
    run; the tensors are kept.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []
        self._calls: list[tuple[str, ctypes.Structure]] = []
        self._linked: list[ctypes.Structure] = []
        self._tensors: list[Tensor] = []

    def add(self, name: str, arguments: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
        """See `cpu_library.Steps`. Products in a row that share their input become one call."""
        if self._calls and joined(self._calls[-1], (name, arguments)):
            self._linked.append(arguments)
        else:
            self._calls.append((name, arguments))
        self._tensors += [x for x in tensors if x is not None]

    def then(self, function: Callable[[], object]) -> None:
        """Add a call of Python, which keeps what it needs."""
        self._end_part()
        self._parts.append(function)

    def _end_part(self) -> None:
        if self._calls:
            self._parts.append(bound(self._calls))
            self._calls = []

    def run(self) -> None:
        """Carry out everything in order.

        Raises what `cpu_library.call` raises. What the operations before wrote stays.
        """
        self._end_part()
        for part in self._parts:
            part()


# The waiting of idle OpenMP threads: spinning where the CPUs are theirs, asleep where others want
# them.
#
# Between parallel regions libgomp's threads spin for milliseconds, so that the next region starts
# at
# once. Beside other processes that is time taken from the threads they wait for, and a decode step
# takes ten times as long. How long they spin is fixed when libgomp is loaded, but for one case:
# they
# sleep almost at once while there are more OpenMP threads than CPUs (libgomp's manual,
# ``GOMP_SPINCOUNT``). So as long as other processes want the CPUs, or other threads of a run do, a
# team that does nothing is kept.


SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""In the environment, these say how threads wait, and nothing here changes it."""

WINDOW = 0.5
"""Seconds over which the use of the CPUs is measured: it is counted in 0.01 s."""

WANTED = 0.25
"""CPUs that others use beyond those that are left to them, from which on threads should sleep."""


class IdleTeam:
    """More OpenMP threads than CPUs, which do nothing, from making it to `close`."""

    def __init__(self) -> None:
        self._end, made = threading.Event(), threading.Event()

        def keep() -> None:
            try:
                idle_team(len(os.sched_getaffinity(0)) + 1)
            finally:
                made.set()
            self._end.wait()  # the team ends with its thread

        self._thread = threading.Thread(target=keep, name="idle-team", daemon=True)
        self._thread.start()
        made.wait()

    def close(self) -> None:
        self._end.set()
        self._thread.join()


def busy_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds that the CPUs of this process have worked, for all processes; None where none says
    so."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        # user, nice, system; past idle and iowait, irq, softirq, steal
        ticks = [sum(map(int, values[:3] + values[5:8])) for name, *values in lines
                 if name in mine]
    except (OSError, AttributeError, ValueError):
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if len(ticks) == len(mine) else None


class Spinning:
    """Has idle OpenMP threads sleep during runs while other processes want the CPUs.

    It does nothing where the environment says how threads wait (`SETTINGS`), without the C++
    kernels, with one thread, and where the system does not say how busy the CPUs are. No result
    depends on it.
    """

    def __init__(self) -> None:
        self._team: IdleTeam | None = None
        self._asleep = False
        self._left_alone = (any(name in os.environ for name in SETTINGS)
                            or missing() is not None)
        self._before = None if self._left_alone else self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds by the clock, of the CPUs for all processes, and for this one."""
        busy = busy_seconds()
        return None if busy is None else (time.monotonic(), busy, time.process_time())

    @contextmanager
    def watched(self, *, asleep: bool = False) -> Iterator[None]:
        """Look at once, and end with threads waiting as they did before. `asleep`: threads of this
        process want the CPUs between parallel regions, and so the others sleep all the time."""
        try:
            self._asleep = asleep
            self.look()
            yield
        finally:
            if self._team is not None:
                self._team.close()
                self._team = None

    def look(self) -> None:
        """See who has used the CPUs since the last look, unless that was just now."""
        if self._before is None:
            return
        if self._asleep:
            if self._team is None and torch.get_num_threads() > 1:
                self._team = IdleTeam()
            return
        if time.monotonic() < self._before[0] + WINDOW:
            return
        now = self._now()
        if now is None:
            return
        clock, busy, own = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        threads = torch.get_num_threads()
        left = max(len(os.sched_getaffinity(0)) - threads, 0)
        wanted = threads > 1 and (busy - own) / clock > left + WANTED
        if wanted and self._team is None:
            self._team = IdleTeam()
        elif not wanted and self._team is not None:
            self._team.close()
            self._team = None
