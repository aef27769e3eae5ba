"""Operations on tensors that stay where they are, noted once and then carried out by one call.

A decode step of a small model is thousands of operations of some microseconds each. Called one by
one from Python they take longer to ask for than to do: arguments are checked, views and structs are
made. A program does that once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from torch import Tensor

from flexgen_h2o.kernels import cpu_library


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
        if self._calls and cpu_library.joined(self._calls[-1], (name, arguments)):
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
            self._parts.append(cpu_library.bound(self._calls))
            self._calls = []

    def run(self) -> None:
        """Carry out everything in order.

        Raises what `cpu_library.call` raises. What the operations before wrote stays.
        """
        self._end_part()
        for part in self._parts:
            part()
