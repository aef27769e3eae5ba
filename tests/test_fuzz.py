"""Damaged files, flags and requests: each parser accepts them or raises a `UserError`.

FUZZ_EXAMPLES=20000 sets the number of cases for each parser.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import fuzz_cases, selection
from helpers.programs import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen_h2o.errors import UserError

NAMES = ("safetensors", "index", "config", "generation config", "gguf", "gguf converted", "yaml",
         "hardware", "flags", "prompts", "tokenizer.json", "tokenizer_config.json", "requests")
CASES = int(os.environ.get("FUZZ_EXAMPLES", 200 if selection.every_case else 20))
EXPENSIVE = {"tokenizer.json": 5, "tokenizer_config.json": 5, "gguf converted": 10}
"""Parsers that get this fraction of the cases."""
SLOW = 10.0
"""Seconds that no case may take."""
LEAK = 64 << 20
"""Bytes by which resident memory may grow after the first tenth of the cases."""
_READABLE = tuple(str(path) for path in (ROOT, sys.prefix, sys.base_prefix, "/usr", "/lib", "/proc",
                                         "/sys", "/dev", "/etc/ld.so"))
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")


class Watch:
    """Audit hook that records files touched outside a folder, new programs and connections."""

    def __init__(self, folder: Path):
        self.folder, self.on, self.outside = str(folder), False, set()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in _STARTS:
            self.outside.add(f"{event} {arguments[0]}")
            return
        if event != "open" and event not in _WRITES or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if not path.startswith(self.folder) and (writes or not path.startswith(_READABLE)):
            self.outside.add(f"{event} {path}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.on, self.outside = True, set()
        try:
            yield
        finally:
            self.on = False
        assert not self.outside


def refused(read, raw: bytes) -> bool:
    """Read a case; True if it was refused. AssertionError for a message of several lines."""
    began = time.perf_counter()
    try:
        read(raw)
        return False
    except UserError as error:
        message = str(error)
        assert message and message.isprintable() and len(message) <= 5000, message[:300]
        return True
    except SystemExit as error:  # --help and --version
        assert error.code in (0, None)
        return False
    finally:
        assert time.perf_counter() - began <= SLOW


def resident() -> int:
    """Return the bytes of this process in memory, without garbage."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def workplace():
    """An empty folder that is the home, the cache and the working directory."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        for variable in ("HOME", "FLEXGEN_H2O_CACHE", "HF_HOME", "TMPDIR"):
            patch.setenv(variable, name)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(tempfile, "tempdir", None)
        patch.chdir(name)
        yield Path(name)


@pytest.fixture(scope="module")
def targets(workplace):
    return fuzz_cases.targets(workplace)


@pytest.fixture(scope="module")
def watch(workplace):
    return Watch(workplace)


def test_every_target_is_tried(targets):
    assert set(NAMES) == targets.keys(), "add the new one to NAMES"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_is_refused_or_parsed(targets, watch, name):
    target, outcomes, cases = targets[name], [], max(20, CASES // EXPENSIVE.get(name, 1))
    sizes: list[int] = []

    @settings(max_examples=cases, suppress_health_check=list(HealthCheck), deadline=None)
    @given(rng=st.randoms(use_true_random=True))
    def hold(rng: random.Random) -> None:
        raw = target.draw(rng)
        with watch.watching():
            outcomes.append(refused(target.read, raw))
        if len(outcomes) == max(1, cases // 10):
            sizes.append(resident())

    hold()
    assert any(outcomes), "the mutations change nothing"
    assert not all(outcomes) or name == "gguf converted", "the valid input is not valid"
    assert resident() - sizes[0] < LEAK


def test_reads_outside_the_folder_are_found(watch):
    with pytest.raises(AssertionError), watch.watching(), contextlib.suppress(OSError):
        open("/nowhere/outside").close()
    assert watch.outside == {"open /nowhere/outside"}
