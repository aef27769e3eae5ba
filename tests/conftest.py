"""Options of the test run, and fixtures that many tests share."""

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
from helpers.tiny_tokenizers import with_words

from flexgen_h2o.storage.device import Device

# The GPU kernels run under Triton's interpreter. Triton looks once, when it is first imported, and
# torch.compile imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

# nohup ignores SIGHUP, and a script's background jobs ignore SIGINT. Subprocesses inherit that.
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
    """Exclude imported modules from garbage collections, which take half a second with torch."""
    gc.freeze()


def pytest_sessionfinish():
    """Let libraries free their objects at exit; nanobind's would report leaks."""
    gc.unfreeze()


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
    """Use one thread: tiny matmuls gain nothing from a second one, and wait for it.

    TEST_THREADS sets another number, for `make test-tsan`.
    """
    torch.set_num_threads(int(os.environ.get("TEST_THREADS", 1)))


@pytest.fixture(scope="session", autouse=True)
def _chats_in_this_process():
    """Render chats in this process, except in tests with `chat_process`: others take seconds."""
    from helpers import internals  # only now: it loads the engine
    with pytest.MonkeyPatch.context() as patch:
        internals.render_chats(patch, subprocess=False)
        yield


@pytest.fixture
def chat_process(monkeypatch) -> None:
    """Render chats in a subprocess, as in a run of a user."""
    from helpers import internals
    internals.render_chats(monkeypatch, subprocess=True)


@pytest.fixture
def refuses_flags(tmp_path, monkeypatch, capsys) -> Callable[..., None]:
    """Return a function that checks that a command rejects flags, without engine and files."""
    def check(main, flags: list[str], *words: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", None)  # importing the engine fails
        command_refused(main, capsys, flags, *words)
        assert list(tmp_path.iterdir()) == []

    return check


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    """Let each `LLM` compute on the CPU, also on a machine with a GPU."""
    from helpers import internals  # only now: it loads the engine
    internals.open_devices(monkeypatch, Device)


@pytest.fixture(params=["poisoned", "lazy"])
def device(request, monkeypatch) -> str:
    """Let each `LLM` compute on a fake device, whose fresh memory is full of NaN."""
    kind = {"poisoned": PoisonedDevice, "lazy": LazyDevice}[request.param]
    from helpers import internals  # only now: it loads the engine
    internals.open_devices(monkeypatch, kind)
    return request.param


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[[str], TinyModel]:
    """Return a function from a key of `TINY` to its model, saved to disk once per session."""
    models: dict[str, TinyModel] = {}

    def get(key: str) -> TinyModel:
        if key not in models:
            models[key] = make_tiny(key, tmp_path_factory.mktemp("tiny") / key)
        return models[key]

    return get


@pytest.fixture(scope="session")
def words_model(tiny_model, tmp_path_factory) -> str:
    """The folder of a tiny LLaMA with a tokenizer of words and a chat template."""
    return with_words(tiny_model("llama").folder, tmp_path_factory.mktemp("words"),
                      chat_template="{% for m in messages %}w1 {{ m.content }} {% endfor %}w2")
