"""Batch jobs over two pipeline ranks: ranks that die, stop or hang, and resumption."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers import selection
from helpers.error_cases import error_line, refused
from helpers.read_back import read_jsonl
from helpers.subprocesses import environment
from helpers.tiny_tokenizers import with_words

from flexgen_h2o.commands import batch
from flexgen_h2o.config.parallel import TorchrunEnv, check_world_size, torchrun_env

# Forks the ranks of one job after the other, with torch imported once. Each job is a rank that is
# disturbed (or none), how, and the flags; its line tells the exit codes of all ranks.
DRIVER = """
import json, os, signal, socket, sys, threading, time, torch
import torch.distributed
import flexgen_h2o.llm  # what is imported here, the ranks need not import
from flexgen_h2o.engine.decoder import DecoderLayers
from flexgen_h2o.commands import batch

def disturb(how):
    if how == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

def rank(number, disturbed, how, argv, told):
    torch.set_num_threads(1)
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    if number == disturbed:
        left = [60]
        begin = DecoderLayers.set_positions  # with each batch's forward pass
        def disturbed(self, step, positions):
            left[0] -= 1
            if left[0] == 0:
                disturb(how)
            begin(self, step, positions)
        DecoderLayers.set_positions = disturbed
    sys.argv[1:] = argv  # as a process of its own is started
    sys.exit(batch.main())

for disturbed, how, argv, told in json.loads(sys.argv[1]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    began, children = time.monotonic(), {}
    for number in range(2):
        child = os.fork()
        if child == 0:
            rank(number, disturbed, how, argv, told)
        children[child] = number
    codes = {}
    while len(codes) < 2:
        if how == "stop" and len(codes) == 1:  # torchrun ends what is left so
            for child, number in children.items():
                if number not in codes:
                    os.kill(child, signal.SIGKILL)
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    print(json.dumps([codes[0], codes[1], time.monotonic() - began]), flush=True)
"""
LIMIT = 4  # seconds
JOBS = [(None, "", 0), (1, "kill", -9)]
if selection.every_case:
    JOBS += [(1, "stop", -9), (1, "hang", 2), (0, "kill", -9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def words(tiny_model, folder) -> str:
    """A tiny model with a tokenizer."""
    return with_words(tiny_model("llama").folder, folder / "words")


def argv(folder, words, name, *flags):
    return ["-i", str(folder / "in.jsonl"), "-o", str(folder / f"{name}.jsonl"), "--model", words,
            "--dtype", "float32", "--device", "cpu", "--gpu-batch-size", "2", *flags]


def on_ranks(folder, words, name):
    return argv(folder, words, name, "--pipeline-parallel", "2", "--num-gpu-batches", "3",
                "--rank-timeout", str(LIMIT))


def texts(path):
    found = {line["custom_id"]: line["response"]["body"]["choices"] for line in read_jsonl(path)}
    assert len(found) == len(read_jsonl(path))
    return found


def run(jobs):
    """Exit codes and seconds of each job."""
    done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(jobs)], text=True,
                          capture_output=True, timeout=300,
                          env=environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_a_rank_that_dies_or_hangs_ends_all_and_the_job_goes_on(folder, words, capsys):
    requests = [{"id": f"r{number}", "prompt": " ".join(f"w{3 + (number * 7 + i) % 90}"
                                                        for i in range(2 + number * 5 % 11)),
                 "max_tokens": 5 + number % 9, "temperature": (0, 1)[number % 2]}
                for number in range(30)]
    (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    assert batch.main(argv(folder, words, "one")) == 0
    whole = texts(folder / "one.jsonl")
    assert len(whole) == 30

    names = [f"{how}{rank}" for rank, how, _ in JOBS]
    jobs = [(rank, how, on_ranks(folder, words, name), str(folder / f"{name}.txt"))
            for name, (rank, how, _) in zip(names, JOBS, strict=True)]
    found = run(jobs)
    for name, (rank, how, status), (*codes, seconds) in zip(names, JOBS, found, strict=True):
        told = (folder / f"{name}.txt").read_text()
        if rank is None:
            assert codes == [0, 0] and texts(folder / f"{name}.jsonl") == whole
            continue
        assert codes[rank] == status and codes[1 - rank] == 2, told
        line = error_line(told[told.index("error: "):], f"rank {rank} (")
        assert {"kill": "has gone", "stop": "has not answered for 4 s",
                "hang": "has made no progress for 4 s"}[how] in line
        assert seconds < 60
        answered = texts(folder / f"{name}.jsonl")
        assert 0 < len(answered) < 30

    # Two ranks go on with it, or one process alone.
    rest = [(None, "", *job[2:]) for job in jobs[2:4]]
    assert not rest or [codes for *codes, _ in run(rest)] == [[0, 0]] * 2
    assert batch.main(argv(folder, words, names[1])) == 0
    for name in names[1:4]:
        assert texts(folder / f"{name}.jsonl") == whole
    assert "going on: " in capsys.readouterr().out


def test_ranks_that_were_not_started_so_are_refused(folder, words, monkeypatch, capsys):
    (folder / "in.jsonl").write_text('{"prompt": "w3"}\n')
    for started, flags, message in (
            (None, ["--pipeline-parallel", "2"],
             "--pipeline-parallel 2 is of 2 processes, and 1 has been started: torchrun "
             "--nproc-per-node 2 -m flexgen_h2o.batch --pipeline-parallel 2 ..."),
            (3, ["--pipeline-parallel", "2"], "of 2 processes, and 3 have been started"),
            (3, [], "3 processes have been started to do the same: add --pipeline-parallel 3"),
            (None, ["--rank-timeout", "9"], "--rank-timeout has no effect on one rank")):
        if started is not None:
            for name, value in {"RANK": 0, "WORLD_SIZE": started, "MASTER_ADDR": "localhost",
                                "MASTER_PORT": 29500}.items():
                monkeypatch.setenv(name, str(value))
        else:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        assert batch.main(argv(folder, words, "none", *flags)) == 2
        assert message in error_line(capsys.readouterr().err)
    assert not (folder / "none.jsonl").exists()


def test_the_rank_is_what_the_variables_say():
    given = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "host",
             "MASTER_PORT": "29500"}
    assert torchrun_env(given) == TorchrunEnv(1, 3, 1, 2)
    assert torchrun_env(given | {"LOCAL_WORLD_SIZE": "3"}) == TorchrunEnv(1, 3, 1, 3)
    assert torchrun_env({}) == torchrun_env({"MASTER_PORT": "1"}) == TorchrunEnv()
    assert torchrun_env({"RANK": "0", "WORLD_SIZE": "1"}) == TorchrunEnv()
    for wrong in ({"RANK": "3"}, {"RANK": "x"}, {"MASTER_PORT": "0"}, {"MASTER_ADDR": ""},
                  {"LOCAL_RANK": "-1"}, {"LOCAL_WORLD_SIZE": "1"}):
        refused(lambda wrong=wrong: torchrun_env(given | wrong), "start it with torchrun")
    check_world_size(2, 2, "any")
