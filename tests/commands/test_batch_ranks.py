"""Batch jobs on several ranks: pipelines and replicas, ranks that die or hang, and resumption."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from helpers import selection
from helpers.batch_jobs import answers, job_flags, requests, write_lines
from helpers.error_cases import command_refused, error_line, refused
from helpers.subprocesses import environment

from flexgen_h2o.commands import batch
from flexgen_h2o.config.parallel import TorchrunEnv, check_world_size, torchrun_env

# Runs job after job and imports torch once: the ranks are forked. A rank may be disturbed in a
# forward pass, or when it writes results. Prints the exit codes and the seconds of each job.
DRIVER = """
import json, os, signal, socket, sys, threading, time, torch
import torch.distributed
import flexgen_h2o.llm  # what is imported here, the ranks need not import
from transformers import AutoTokenizer
from flexgen_h2o.engine.decoder import DecoderLayers
from flexgen_h2o.commands import batch
from flexgen_h2o.requests.results import ResultsFile
from flexgen_h2o.distributed import replicas

replicas.TIMEOUT = 2.0
CALLS = {"forward": (DecoderLayers, "set_positions", 30), "results": (ResultsFile, "add", 2)}

def disturb(how):
    if how == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

def rank(number, job):
    torch.set_num_threads(1)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
    if number == job["disturbed"]:
        owner, name, left = CALLS[job["where"]]
        call = getattr(owner, name)
        def disturbed(*arguments):
            nonlocal left
            left -= 1
            if left == 0:
                disturb(job["how"])
            return call(*arguments)
        setattr(owner, name, disturbed)
    sys.argv[1:] = job["argv"]  # as a process of its own is started
    sys.exit(batch.main())

jobs = json.loads(sys.argv[1])
AutoTokenizer.from_pretrained(jobs[0]["argv"][jobs[0]["argv"].index("--model") + 1])
for job in jobs:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      WORLD_SIZE=str(job["ranks"]))
    began, children, codes = time.monotonic(), {}, {}
    for number in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            rank(number, job)
        children[child] = number
    while len(codes) < job["ranks"]:
        if job["how"] == "stop" and len(codes) == job["ranks"] - 1:  # torchrun ends the rest so
            for child, number in children.items():
                if number not in codes:
                    os.kill(child, signal.SIGKILL)
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    print(json.dumps([[codes[number] for number in sorted(codes)], time.monotonic() - began]))
"""
PIPELINE = ("--pipeline-parallel", "2", "--num-gpu-batches", "3", "--rank-timeout", "4")
REPLICAS = ("--data-parallel", "--window", "1", "--memory-limit", "200MB")
GONE = "replica 0, which keeps the queue and the results"


@dataclass
class Job:
    """A job on ranks, and what becomes of it.

    Attributes
    ----------
    flags: Flags beside those of the job on one process.
    codes: The exit status of each rank.
    error: What the one error line says; None for a job that finishes.
    disturbed, how, where: The rank that is disturbed, by what, and in which call.
    """

    flags: tuple[str, ...]
    codes: list[int]
    error: str | None = None
    disturbed: int | None = None
    how: str = ""
    where: str = "forward"


JOBS = {"rank 1 killed": Job(PIPELINE, [2, -9], "has exited", 1, "kill")}
RARE = {
    "replica 1 killed": Job(REPLICAS, [0, -9], None, 1, "kill", "results"),
    "pipeline": Job(PIPELINE, [0, 0]),
    "rank 1 stopped": Job(PIPELINE, [2, -9], "has not answered for 4 s", 1, "stop"),
    "rank 1 hangs": Job(PIPELINE, [2, 2], "has made no progress for 4 s", 1, "hang"),
    "rank 0 killed": Job(PIPELINE, [-9, 2], "has exited", 0, "kill"),
    "replica 0 killed": Job(REPLICAS, [-9, 2], GONE, 0, "kill", "results"),
    "replica 0 stopped": Job(REPLICAS, [-9, 2], GONE, 0, "stop", "results"),
    "replicas are pipelines": Job(("--data-parallel", "--pipeline-parallel", "2"), [0] * 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def whole(folder, words_model) -> dict[str, object]:
    """The answers of one process to 21 requests, one of them invalid."""
    write_lines(folder / "in.jsonl", [*requests(20), "{broken\n"])
    assert batch.main(job_flags(folder, words_model, "one.jsonl")) == 0
    return answers(folder / "one.jsonl")


@pytest.fixture(scope="module")
def ran(folder, words_model, whole) -> dict[str, list]:
    """Exit codes and seconds of all jobs that are tried."""
    jobs = JOBS | (RARE if selection.every_case else {})
    given = [asdict(job) | {"argv": job_flags(folder, words_model, f"{name}.jsonl", *job.flags),
                            "ranks": len(job.codes), "log": str(folder / f"{name}.txt")}
             for name, job in jobs.items()]
    done = subprocess.run([sys.executable, "-c", DRIVER, json.dumps(given)], text=True,
                          capture_output=True, timeout=300,
                          env=environment(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"))
    assert done.returncode == 0, done.stderr
    return dict(zip(jobs, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", [*JOBS, *selection.full(*RARE)])
def test_a_job_survives_its_ranks(folder, words_model, whole, ran, capsys, name):
    job, log = (JOBS | RARE)[name], (folder / f"{name}.txt").read_text()
    codes, seconds = ran[name]
    assert codes == job.codes and seconds < 60, log
    if job.error is None:
        assert log.count("finished; 21 of 21 requests answered, 1 of them failed") == 1
    else:
        line = error_line(log[log.index("error: "):], job.error)
        assert job.error == GONE or f"rank {job.disturbed} (" in line
        assert 0 < len(answers(folder / f"{name}.jsonl")) < 21
        assert batch.main(job_flags(folder, words_model, f"{name}.jsonl")) == 0
        assert "resuming: " in capsys.readouterr().out
    assert answers(folder / f"{name}.jsonl") == whole
    assert not list(folder.glob(f"{name}.jsonl.rank*"))


@pytest.mark.parametrize(("started", "flags", "words"), [
    (None, ["--pipeline-parallel", "2"], "torchrun --nproc-per-node 2 -m flexgen_h2o.batch"),
    (3, ["--pipeline-parallel", "2"], "needs 2 processes, and 3 were started"),
    (3, [], "add --pipeline-parallel 3"), (None, ["--rank-timeout", "9"], "--rank-timeout")])
def test_world_size_must_match_the_flags(words_model, tmp_path, monkeypatch, capsys, started,
                                         flags, words):
    (tmp_path / "in.jsonl").write_text('{"prompt": "w3"}\n')
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if started is not None:
        for name, value in {"RANK": 0, "WORLD_SIZE": started, "MASTER_ADDR": "localhost",
                            "MASTER_PORT": 29500}.items():
            monkeypatch.setenv(name, str(value))
    command_refused(batch.main, capsys, job_flags(tmp_path, words_model, "none.jsonl", *flags),
                    words)
    assert not (tmp_path / "none.jsonl").exists()


def test_rank_comes_from_torchrun_variables():
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
