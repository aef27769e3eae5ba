"""Nothing is lost: kills, restarts, damaged and full disks, two servers."""

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from helpers.error_cases import refused
from helpers.servers import DEADLINE, Served, flags, request, serving
from helpers.subprocesses import environment

from flexgen_h2o import LLM
from flexgen_h2o.commands import serve
from flexgen_h2o.errors import NonFiniteLogits, UserError
from flexgen_h2o.requests.results import ResultsFile
from flexgen_h2o.serving.api import Server
from flexgen_h2o.serving.scheduler import Scheduler
from flexgen_h2o.serving.store import Batch, Counts, File, Store, StoreError, new_id
from flexgen_h2o.sessions import RequestSession

KILLER = """
import json, os, random, signal, sys, threading, torch
from helpers.servers import Served, request, serving
from transformers import AutoTokenizer
from flexgen_h2o.llm import LLM
from flexgen_h2o.serving import api, store

def life(draw, argv, log):
    # A server and its client, killed at some write to the disk, before or after it.
    torch.set_num_threads(1)
    left, after, sync = draw.randrange(1, 25), draw.random() < 0.5, os.fsync
    class Database:
        def __init__(self, inner): self.inner = inner
        def __getattr__(self, name): return getattr(self.inner, name)
        def execute(self, text, *values):
            return counted(self.inner.execute, text, *values) if (
                text == "COMMIT") else self.inner.execute(text, *values)
    def counted(write, *arguments):
        nonlocal left
        left -= 1
        if left < 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = write(*arguments)
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    os.fsync = lambda file: counted(sync, file)
    opened = store.Store._open
    store.Store._open = lambda self, path: Database(opened(self, path))
    with serving(argv) as served:
        for number in range(50):
            name = f"{draw.randrange(10 ** 9)}"
            lines = [request(f"{name}-{line}", prompt=f"w{3 + line} w4", max_tokens=3 + line,
                             ignore_eos=True) for line in range(6)]
            note = {"lines": [line["custom_id"] for line in lines]}
            note["file"] = served.upload(lines)
            print(json.dumps(note), file=log, flush=True)
            note["batch"] = served.openai.batches.create(
                input_file_id=note["file"], endpoint="/v1/completions",
                completion_window="24h").id
            print(json.dumps(note), file=log, flush=True)
            if draw.random() < 0.2:
                served.http.post(f"/v1/batches/{note['batch']}/cancel").raise_for_status()
                note["cancelled"] = True
                print(json.dumps(note), file=log, flush=True)
            served.wait(note["batch"])

AutoTokenizer.from_pretrained(sys.argv[sys.argv.index("--model") + 1])  # before the forks
*argv, path, moments = sys.argv[1:]
draw, codes = random.Random(1), []
for moment in range(int(moments)):
    child = os.fork()
    if child == 0:
        with open(path, "a") as log:
            life(random.Random(draw.random()), argv, log)
        os._exit(0)
    draw.random()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("ended", *codes)
"""


@pytest.mark.full
def test_a_killed_server_loses_nothing(words_model, tmp_path):
    moments, log = 20, tmp_path / "log"
    argv = flags(words_model, tmp_path / "data")
    folder = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", KILLER, *argv, str(log), str(moments)],
                          capture_output=True, text=True,
                          env=environment(os.path.dirname(folder), folder))
    assert done.stdout.endswith(f"ended {' '.join(['-9'] * moments)}\n"), done.stdout + done.stderr
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    with serving(argv) as served:
        for note in notes:
            served.openai.files.retrieve(note["file"])
            if "batch" not in note:
                continue
            batch = served.wait(note["batch"])
            states = ("cancelled",) if note.get("cancelled") else ("completed", "cancelled")
            assert batch.status in states
            lines = [line for id in (batch.output_file_id, batch.error_file_id) if id
                     for line in served.lines(id)]
            assert sorted(line["custom_id"] for line in lines) == sorted(note["lines"])
            if batch.status == "completed":
                assert texts(lines) == undisturbed(words_model, note["lines"])


def texts(lines: list[dict]) -> dict[str, str]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


def undisturbed(words_model: str, names: list[str]) -> dict[str, str]:
    """The texts of the requests of a killed server, from a server that is not killed."""
    from flexgen_h2o.requests.request import Defaults, parse_request

    prompts, params = [], []
    for line, name in enumerate(names):
        body = {"prompt": f"w{3 + line} w4", "max_tokens": 3 + line, "ignore_eos": True}
        one = parse_request("/v1/completions", body, name, Defaults({"tiny"}, 32))
        prompts.append(one.prompts[0])
        params.append(one.choice_params(0))
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        return {name: output.text for name, output in zip(
            names, llm.generate(prompts, params), strict=True)}


def lines_of(count: int) -> list[dict]:
    return [request(f"r{number}", prompt=f"w{3 + number % 50} w4", max_tokens=8, ignore_eos=True)
            for number in range(count)]


def test_a_stopped_server_goes_on(words_model, tmp_path):
    argv = flags(words_model, tmp_path, "--max-block-seconds", "0.01")
    with serving(argv) as served:
        batch = served.batch(lines_of(80))
        until = time.monotonic() + DEADLINE
        while not served.openai.batches.retrieve(batch.id).request_counts.completed:
            assert time.monotonic() < until
    with serving(argv) as served:
        counts = served.openai.batches.retrieve(batch.id).request_counts
        assert 0 < counts.completed < counts.total == 80
        ended = served.wait(batch.id)
        lines = served.lines(ended.output_file_id)
        assert len(lines) == len({line["custom_id"] for line in lines}) == 80


def test_sigterm_ends_the_server(words_model, tmp_path, capfd, monkeypatch):
    batches, run = [], Server.run

    def use(url: str) -> None:
        try:
            with contextlib.closing(Served(url)) as served:
                batches.append(served.batch(lines_of(80)).id)
                served.wait(batches[0], "in_progress")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def run_beside_client(server: Server) -> None:
        threading.Thread(target=use, args=(server.url,)).start()
        run(server)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "run", run_beside_client)
        assert serve.main(flags(words_model, tmp_path)) == 0
    out, err = capfd.readouterr()
    assert out.startswith("serving tiny at http://127.0.0.1:")
    assert err == "stopping after the current block; a second signal stops at once\n"
    with serving(flags(words_model, tmp_path)) as served:
        assert served.wait(batches[0]).request_counts.completed == 80


def test_batches_go_on_when_the_disk_has_space_again(words_model, tmp_path, monkeypatch):
    monkeypatch.setattr("flexgen_h2o.serving.scheduler._RETRY_SECONDS", 0.05)
    add, full = ResultsFile.add, [True, True, False, True]

    def add_if_space(file, lines):
        if full and full.pop():
            raise UserError("cannot write: No space left on device")
        add(file, lines)

    monkeypatch.setattr(ResultsFile, "add", add_if_space)
    with serving(flags(words_model, tmp_path)) as served:
        batch = served.wait(served.batch(lines_of(40)).id)
        assert batch.request_counts.completed == len(served.lines(batch.output_file_id)) == 40


def test_a_full_disk_is_an_answer(served, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    for owner, name in ((shutil, "copyfileobj"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            answer = served.http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"})
        assert answer.status_code == 507 and "No space left" in answer.json()["error"]["message"]
    assert served.http.get("/health").status_code == 200
    served.upload(lines_of(1))


@pytest.mark.parametrize("error", [RuntimeError("lost"), NonFiniteLogits("prompt 3", 3)])
def test_errors_of_the_engine_do_not_end_the_server(words_model, tmp_path, monkeypatch, error):
    """A request whose logits are not finite fails alone; after other errors all run again."""
    step, errors = RequestSession.step, [error]

    def failing(session):
        if errors and len(session._requests) > 5:
            if isinstance(error, NonFiniteLogits):
                error.key = sorted(session._requests)[3]
                session.abort(error.key)
            raise errors.pop()
        return step(session)

    monkeypatch.setattr("flexgen_h2o.serving.scheduler._LONGEST_PAUSE", 0.1)
    with serving(flags(words_model, tmp_path)) as served:
        monkeypatch.setattr(RequestSession, "step", failing)
        batch = served.wait(served.batch(lines_of(20)).id)
        failed = int(isinstance(error, NonFiniteLogits))
        assert batch.request_counts.failed == failed == 20 - batch.request_counts.completed
        if failed:
            (line,) = served.lines(batch.error_file_id)
            assert line["response"]["body"]["error"]["code"] == "logits_not_finite"
        assert not errors and served.http.get("/health").status_code == 200


def test_a_stop_after_an_engine_error_fails_no_request(words_model, tmp_path, monkeypatch):
    recover, stopped = Scheduler._recover, threading.Event()

    def failing(session):
        session.end()
        raise UserError("the disk is full")

    def stopping(scheduler, error):
        scheduler.stop()
        recover(scheduler, error)
        for batch in scheduler._store.active_batches():  # opened meanwhile
            scheduler._open_batch(batch.id)
        stopped.set()

    with serving(flags(words_model, tmp_path)) as served, monkeypatch.context() as patched:
        patched.setattr(RequestSession, "step", failing)
        patched.setattr(Scheduler, "_recover", stopping)
        batch = served.batch(lines_of(4))
        assert stopped.wait(DEADLINE)
    with serving(flags(words_model, tmp_path)) as served:
        assert served.wait(batch.id).request_counts.completed == 4


# --- the data directory


def test_a_second_server_is_refused(words_model, tmp_path, capsys):
    argv = flags(words_model, tmp_path / "one")
    with serving(argv) as served:
        refused(lambda: Store(str(tmp_path / "one")), "--data-dir", "in use by another server")
        argv[argv.index("--port") + 1] = served.url.rpartition(":")[2]
        argv[argv.index("--data-dir") + 1] = str(tmp_path / "two")
        assert serve.main(argv) == 2
        assert "cannot listen on" in capsys.readouterr().err
    Store(str(tmp_path / "one")).close()


@pytest.mark.parametrize(("damage", "words"), [
    ("bytes", "restore a backup"), ("page", "restore a backup"), ("record", "restore a backup"),
    ("version", "newer release")])
def test_a_damaged_database_is_refused(tmp_path, damage, words):
    store = Store(str(tmp_path))
    for _ in range(200):
        path = store.new_upload()
        open(path, "w").close()
        store.add_upload(path, "x" * 200)
    store.close()
    path = tmp_path / "serve.db"
    statements = {"record": "UPDATE records SET data = '{}' WHERE number = 7",
                  "version": "PRAGMA user_version = 1000"}
    if damage in statements:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(statements[damage])
            database.commit()
    else:
        data = bytearray(path.read_bytes())
        start, length = (0, 100) if damage == "bytes" else (len(data) // 2, 8192)
        data[start:start + length] = random.Random(0).randbytes(length)
        path.write_bytes(data)
    refused(lambda: Store(str(tmp_path)), words)
    assert len(list((tmp_path / "files").iterdir())) == 200


def test_partial_uploads_are_removed(tmp_path):
    tmp_path = tmp_path / "new"
    store = Store(str(tmp_path))
    assert tmp_path.stat().st_mode & 0o77 == 0
    partial = store.new_upload()
    open(partial, "w").close()
    whole = store.new_upload()
    open(whole, "w").close()
    file = store.add_upload(whole, "name")
    store.close()
    store = Store(str(tmp_path))
    assert not os.path.exists(partial) and os.path.exists(store.path(file.id))
    assert store.get(File, file.id) == file
    store.close()


def test_a_full_database_changes_nothing(tmp_path):
    store = Store(str(tmp_path))
    path = store.new_upload()
    open(path, "w").close()
    file = store.add_upload(path, "name")
    pages, = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    batch = Batch(id=new_id("batch_"), endpoint="/v1/completions", model="m", input_file_id=file.id,
                  completion_window="24h", output_file_id="o", error_file_id="e", created_at=1,
                  expires_at=2, request_counts=Counts(), metadata={"a": "x" * 100_000})
    with pytest.raises(StoreError, match="full"):
        store.add_batch(batch)
    assert store.page(Batch) == ([], False) and store.get(File, file.id) == file
    store.close()
