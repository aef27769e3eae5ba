"""What tests reach inside of the kernels for: their library, its calls and its threads."""

from functools import partial

from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu import recall as native_recall

UNPACKED_MATMUL = ops._unpacked_matmul.__name__


def is_asleep(policy) -> bool:
    """Whether idle OpenMP threads sleep."""
    return policy._team is not None


def is_running(team) -> bool:
    """Whether an idle team's threads are there."""
    return team._thread.is_alive()


def calls(program) -> list[str]:
    """The captured calls of the C++ library since the last Python function."""
    return [name for name, _ in program._calls]


def forget_kernels() -> None:
    """Let the next operation load the kernel library again."""
    for cached in (cpu_library._library, ops._has_kernels):
        cached.cache_clear()


def load_library(monkeypatch, library) -> None:
    """Let ``library()`` be the library of kernels."""
    monkeypatch.setattr(cpu_library, "_library", library)


def hide_library(monkeypatch) -> None:
    """Let there be no file of kernels."""
    monkeypatch.setattr(cpu_library, "_file", lambda: None)


def refuse_calls(monkeypatch) -> None:
    """Let each call of the library of kernels fail."""
    def refuse(*args, **fields):
        raise AssertionError("the library was called")

    monkeypatch.setattr(native, "call", refuse)


def before_calls(monkeypatch, look) -> None:
    """Let ``look(call, name, kind, **fields)`` make each call of the library, by ``call``."""
    call = partial(look, cpu_library.call)
    for module in (native, native_recall, cpu_library):
        monkeypatch.setattr(module, "call", call)


def before_arrays(monkeypatch, look) -> None:
    """Call ``look(array)`` with each array of integers that is made for the library."""
    make = native.integers

    def watched(values):
        result = make(values)
        look(result)
        return result

    monkeypatch.setattr(native, "integers", watched)
