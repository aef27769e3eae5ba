"""An LLM among threads, unreferenced, in forked subprocesses, and without a stderr."""

import io
import os
import subprocess
import sys
import threading

import pytest
from helpers.error_cases import refused
from helpers.subprocesses import environment

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.models.registry import retry_imports

DISK = Placement(0, 0, 100)


def open_files() -> list[str]:
    return [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{name}")]


def test_an_unreferenced_llm_is_closed(words_model, tmp_path):
    weights = f"{words_model}/model.safetensors"
    before, opened = {*threading.enumerate()}, open_files()
    llm = LLM(words_model, device="cpu", offload_dir=tmp_path,
              policy=Policy(weights=DISK, cache=DISK, activations=DISK))
    llm.generate(["w3 w4"], max_new_tokens=2)
    assert any(str(tmp_path) in path for path in open_files()) and list(tmp_path.iterdir())
    del llm
    assert list(tmp_path.iterdir()) == []
    assert not [path for path in open_files() if str(tmp_path) in path]
    assert open_files().count(weights) == opened.count(weights)
    assert not [thread for thread in {*threading.enumerate()} - before
                if "tqdm" not in repr(thread)]


def test_a_stream_and_an_iterator_keep_their_llm_open(words_model):
    llm = LLM(words_model, device="cpu", dtype="float32")
    whole = llm.generate(["w3 w4", "w5"], max_new_tokens=2)
    stream, blocks = llm.stream(max_tokens=9), llm.generate_in_blocks(["w3 w4", "w5"],
                                                                      max_new_tokens=2)
    del llm
    assert stream.generate("w3 w4", max_new_tokens=2).token_ids == whole[0].token_ids
    assert {key: out.token_ids for block in blocks for key, out in block.items()} == {
        key: out.token_ids for key, out in enumerate(whole)}


def test_calls_in_a_forked_child_are_errors(words_model, tmp_path, monkeypatch):
    """Without a fork: a child sees another process id."""
    llm = LLM(words_model, device="cpu", offload_dir=tmp_path,
              policy=Policy(weights=DISK, cache=DISK, activations=DISK))
    stream = llm.stream(max_tokens=9)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        for call in (lambda: llm.generate(["w3"]), lambda: llm.score([("w3", "w4")]), llm.close,
                     llm.follow, lambda: stream.generate("w3"), lambda: LLM(words_model)):
            assert "forked" in refused(call, "spawn")
        llm.__exit__()
        stream.__exit__()
        llm._finalizer()
    assert llm.generate(["w3"], max_new_tokens=1) and stream.generate("w3", max_new_tokens=1)
    llm.close()
    assert list(tmp_path.iterdir()) == []


THREADS = """
import sys, threading

def generate():
    from flexgen_h2o import LLM
    with LLM(sys.argv[1], device="cpu") as llm:
        done.append(llm.generate(["w3"], max_new_tokens=1, do_sample=True, repetition_penalty=2.0))

done = []
threads = [threading.Thread(target=generate) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done))
"""


@pytest.mark.full  # retry_imports is tested below
def test_two_threads_import_and_generate_at_once(words_model):
    done = subprocess.run([sys.executable, "-c", THREADS, words_model], capture_output=True,
                          text=True, env=environment())
    assert done.stdout == "2\n", done.stderr


def test_failed_imports_are_retried():
    calls = []

    @retry_imports
    def disturbed(times: int) -> str:
        calls.append(times)
        if len(calls) <= times:
            raise ImportError("cannot import name")
        return "found"

    assert disturbed(3) == "found" and len(calls) == 4
    calls.clear()
    with pytest.raises(ImportError, match="cannot import name"):
        disturbed(10**6)
    assert len(calls) < 20


class Full(io.StringIO):
    """A stderr on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [lambda: None, closed, Full])
def test_a_stderr_that_fails_stops_no_run(words_model, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr())
    with LLM(words_model, device="cpu", progress=True) as llm:
        assert llm.generate(["w3"], max_new_tokens=1)
    with ProgressBar(total=3, disable=False) as bar:
        bar.update(3)
    assert bar.disable


@pytest.mark.parametrize("redirection", [
    "<&- >&- 2>&-", pytest.param("2>/dev/full", marks=pytest.mark.full)])
def test_commands_return_their_status_without_streams(redirection):
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m flexgen_h2o generate --no-such-flag {redirection}',
         sys.executable], env=environment(), stdout=subprocess.DEVNULL)
    assert done.returncode == 2


def test_files_do_not_reuse_numbers_of_closed_streams():
    code = ("from flexgen_h2o.files.terminal import open_closed_streams as fill; import os, sys; "
            "fill(); fill(); sys.stderr.write('x'); sys.exit(os.open('/dev/null', 0) + 10)")
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" 0<&- 2>&-', sys.executable, code],
                          env=environment())
    assert done.returncode >= 13
