"""Programs outside the package loaded as modules: benchmarks, examples and tools."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def program(path: str) -> ModuleType:
    """Return a program by its path in the repository, like ``examples/chat.py``."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_program", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def benchmark_modules(*names: str, called: Callable[[str], str] = lambda name: name.split(".")[-1]
                      ) -> Iterator[SimpleNamespace]:
    """Modules of benchmarks/, each under the last part of its name or what `called` makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{called(name): importlib.import_module(name) for name in names})
