"""Damaged files, flags and requests: each parser accepts them or raises a `UserError`.

FUZZ_EXAMPLES=100000 sets the number of cases for each parser, and FUZZ_CSV a file that gets a row
for each.
"""

import contextlib
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers import fuzz_cases, fuzz_services, selection
from helpers.programs import ROOT

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import append_row
from flexgen_h2o.metrics.provenance import cpu_model, origin

NAMES = ("safetensors", "index", "config", "generation config", "gguf", "gguf converted", "yaml",
         "hardware", "flags", "prompts", "tokenizer.json", "tokenizer_config.json", "requests",
         "gguf layouts", "structured outputs", "drafts", "http")
CASES = int(os.environ.get("FUZZ_EXAMPLES", 0))
COLUMNS = ("target", "drawn_by", "cases", "refused", "taken", "tracebacks", "slowest_seconds",
           "grown_mb", "files_outside", "cpu", "date", "commit")
SLOW = 10.0
"""Seconds of CPU time that no case may take, whatever else the machine does."""
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
        self.port: int | None = None  # to which connections are allowed
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        if event in _STARTS:
            if event == "socket.connect" and arguments[1] == ("127.0.0.1", self.port):
                return
            self.outside.add(f"{event} {arguments[0]}")
            return
        if event != "open" and event not in _WRITES or not isinstance(arguments[0], (str, bytes)):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if not path.startswith(self.folder) and (writes or not path.startswith(_READABLE)):
            self.outside.add(f"{event} {path}")

    @contextmanager
    def watching(self, port: int | None = None) -> Iterator[None]:
        self.on, self.outside, self.port = True, set(), port
        try:
            yield
        finally:
            self.on = False
        assert not self.outside


def refused(read, raw: bytes) -> bool:
    """Read a case; True if it was refused. AssertionError for a message of several lines."""
    began = time.process_time()
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
        assert time.process_time() - began <= SLOW


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
    with ExitStack() as stack:
        yield fuzz_cases.targets(workplace) | fuzz_services.services(
            workplace, stack, every=bool(CASES) or selection.every_case)


@pytest.fixture(scope="module")
def watch(workplace):
    return Watch(workplace)


def test_every_target_is_tried(targets):
    assert set(NAMES) == targets.keys(), "add the new one to NAMES"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_is_refused_or_parsed(targets, watch, name):
    target, rejected, slowest = targets[name], 0, 0.0
    cases = CASES or (200 if selection.every_case else 20)
    for number in range(cases):
        raw = target.draw(random.Random(f"{name} {number}"))
        began = time.process_time()
        try:
            with watch.watching(target.port):
                rejected += refused(target.read, raw)
        except BaseException:
            print(f"case {number} of {name}: {raw[:2000]!r}")
            raise
        slowest = max(slowest, time.process_time() - began)
        if number == cases // 10:
            before = resident()
    grown = resident() - before
    if path := os.environ.get("FUZZ_CSV"):
        append_row(path, COLUMNS, {
            "target": name, "drawn_by": "seeds", "cases": cases, "refused": rejected,
            "taken": cases - rejected, "tracebacks": 0, "slowest_seconds": slowest,
            "grown_mb": round(grown / 1e6, 1), "files_outside": 0, "cpu": cpu_model(),
            **{column: origin()[column] for column in ("date", "commit")}})
    assert rejected, "the mutations change nothing"
    assert rejected < max(cases, 100) or name == "gguf converted", "the valid input is not valid"
    assert grown < LEAK


def test_reads_outside_the_folder_are_found(watch):
    with pytest.raises(AssertionError), watch.watching(), contextlib.suppress(OSError):
        open("/nowhere/outside").close()
    assert watch.outside == {"open /nowhere/outside"}
