"""Options of the test run, and fixtures that many tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable

import hypothesis
import pytest
import torch
from helpers import selection
from helpers.error_cases import command_refused
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.tiny_models import TinyModel, make_tiny

from flexgen_h2o.storage.tiers import Device

# The GPU kernels run under Triton's interpreter. Triton looks once, when it is first imported, and
# torch.compile imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup hang-ups are ignored, and in the background of a script Ctrl-C is. What is ignored
# stays so in every program that is started.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true",
                     help="run every case of every test, with every instruction set")


def pytest_configure(config):
    selection.every_case = config.getoption("--all")
    # A slow machine is no failure, and a failure is the same one every time.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True,
                                         max_examples=100 if selection.every_case else 50)
    hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(config, items):
    if not selection.every_case:
        kept = selection.selected(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish():
    """Keep what was imported out of garbage collections, which take half a second with torch."""
    gc.freeze()


def pytest_generate_tests(metafunc):
    """Run a test with the fixture `isa` with the best instruction set of this CPU.

    With ``--all``, run it with each set that can be forced here. For a test that is marked with a
    source of the kernels, only the sets that the source is compiled for count.
    """
    if "isa" in metafunc.fixturenames:
        from helpers.kernel_cases import SETS, sets_of

        marker = metafunc.definition.get_closest_marker("source")
        sets = sets_of(*marker.args) if marker else SETS
        metafunc.parametrize("isa", sets or [None], indirect=True)


@pytest.fixture
def isa(request):
    """An instruction set's kernels and choices; None where no kernels were built."""
    from helpers.kernel_cases import using

    with using(request.param):
        yield request.param


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    """Tiny products gain nothing from a second thread, and wait for it when the core is taken."""
    torch.set_num_threads(1)


@pytest.fixture
def refuses_flags(tmp_path, monkeypatch, capsys) -> Callable[..., None]:
    """A function that holds a command to refusing flags in a line, without engine and files."""
    def hold(main, flags: list[str], *words: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", None)  # importing the engine fails
        command_refused(main, capsys, flags, *words)
        assert list(tmp_path.iterdir()) == []

    return hold


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    """Each `LLM` computes on the CPU, beside a GPU too: for what is done there alone."""

    from helpers import internals  # only now: it loads the engine
    internals.open_devices(monkeypatch, Device)


@pytest.fixture(params=["poisoned", "lazy"])
def device(request, monkeypatch) -> str:
    """Each of two devices in place of the machine's, whose fresh memory is full of NaN."""

    kind = {"poisoned": PoisonedDevice, "lazy": LazyDevice}[request.param]
    from helpers import internals  # only now: it loads the engine
    internals.open_devices(monkeypatch, kind)
    return request.param


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[[str], TinyModel]:
    """A function from a key of `TINY` to its model, made once per session and saved to disk."""
    made: dict[str, TinyModel] = {}

    def get(key: str) -> TinyModel:
        if key not in made:
            made[key] = make_tiny(key, tmp_path_factory.mktemp("tiny") / key)
        return made[key]

    return get
