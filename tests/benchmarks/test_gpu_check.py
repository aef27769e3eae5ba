"""benchmarks/gpu_check.py without a GPU: what it leaves out, what it compares, where it writes."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.programs import benchmark_modules

from flexgen_h2o.errors import UserError

MODULES = ("gpu_check", "gpu_comparison", "comparison")
RATES = {"status": "ok", "page_cache": "as it was", "cpu": "a CPU", "device": "a GPU",
         "disk": 1e9, "memory": 1e10, "gemm": 1e13, "link": 1e10}
RUN = {"status": "ok", "page_cache": "as it was", "prefill": 2.0, "steps": [0.5, 0.5], "load": 1.0,
       "peak_rss": 10**9, "peak_device": 10**9, "read": None, "settings": "as ever",
       "versions": "1", "tokens": [[1, 2, 3]]}


@pytest.fixture(scope="module")
def bench():
    with benchmark_modules(*MODULES) as found:
        yield found


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rows(bench, monkeypatch):
    """Rows as of a card, of which there is none."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    return bench.gpu_check.GpuRows()


@pytest.fixture
def checkpoint(bench, tmp_path):
    """The folder of OPT-6.7B's shape, as if its weights had been written."""
    folder = tmp_path / "models" / "opt-6.7b"
    folder.mkdir(parents=True)
    with benchmark_modules("make_checkpoint") as made:
        module = made.make_checkpoint
        config = module.hf_config(module.published("facebook/opt-6.7b"), "float16")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return bench.gpu_comparison.WrittenModel(folder.parent, "opt-6.7b", "float16")


def test_steps_that_the_time_does_not_suffice_for_are_left_out(bench, clock):
    deadline = bench.gpu_comparison.Deadline(10, clock)
    done, left_out = [], []

    def step(name, seconds, reserve=0.0):
        def call():
            done.append(name)
            clock.now += seconds

        return bench.gpu_comparison.CheckStep("check", name, call, reserve)

    bench.gpu_comparison.run_steps(
        [step("a", 4), step("b", 3, 5), step("c", 1, 5), step("d", 3), step("e", 1)], deadline,
        lambda step: left_out.append(step.name))
    assert (done, left_out) == (["a", "b", "d"], ["c", "e"])


def test_a_check_that_is_left_out_has_failed_and_a_timing_has_not(bench, rows):
    for kind in ("check", "time"):
        rows.skip(bench.gpu_comparison.CheckStep(kind, "decode", None))
    check, timing = rows.rows
    assert check["passed"] is False and timing["passed"] == ""
    assert math.isnan(check["measured"]) and check["unit"] == timing["unit"] == "no time left"


@pytest.mark.parametrize("most", [1, 3])
def test_a_check_whose_process_dies_fails_alone(bench, most):
    """Each raises a signal; of 0 and SIGCHLD nothing comes."""
    found, ended = bench.gpu_comparison.run_side_by_side(
        signal.raise_signal, [0, signal.SIGKILL, signal.SIGTERM, signal.SIGCHLD],
        bench.gpu_comparison.Deadline(120), most)
    assert found == {0: None, signal.SIGCHLD: None}
    assert ended == {signal.SIGKILL: "its process ended with signal 9 (Killed)",
                     signal.SIGTERM: "its process ended with signal 15 (Terminated)"}


def test_checks_give_their_results_or_the_status_of_their_process(bench):
    run, within = bench.gpu_comparison.run_side_by_side, bench.gpu_comparison.Deadline
    assert run(chr, [97, 98, -1], within(120), 3) == (
        {97: "a", 98: "b"}, {-1: "its process ended with exit status 1"})
    assert run(chr, [97], within(0), 1) == ({}, {})
    assert run(time.sleep, [1000, 1001, 1002], within(0.1), 2) == ({}, {})
    assert not multiprocessing.active_children()


def test_a_check_whose_process_has_died_says_so(bench, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.gpu_check, "has_brain", lambda: True)
    monkeypatch.setattr(bench.gpu_check, "processes", lambda: 5)

    def run_side_by_side(call, numbers, deadline, most):
        assert (call, most) == (bench.gpu_check.checked, 5)
        done, died, _ = numbers
        return {done: [{"kind": "check", "passed": True}]}, {died: "its process ended with x"}

    monkeypatch.setattr(bench.gpu_check, "run_side_by_side", run_side_by_side)
    steps = [step for step in bench.gpu_check.steps(rows, True) if step.name == "decode"][:3]
    monkeypatch.setattr(bench.gpu_check, "steps", lambda *_: steps)
    bench.gpu_check.run_all(rows, bench.gpu_comparison.Deadline(60), tmp_path, 0, None)
    done, died, left_out = rows.rows
    assert done["passed"] and not died["passed"] and not left_out["passed"]
    assert (died["unit"], left_out["unit"]) == ("its process ended with x", "no time left")


@pytest.mark.parametrize("brain", [True, False])
def test_every_kernel_is_checked_before_any_is_timed(bench, rows, brain):
    steps = bench.gpu_check.steps(rows, brain)
    kinds = [step.kind for step in steps]
    assert kinds == sorted(kinds)  # checks, then times
    checked = {step.name for step in steps if step.kind == "check"}
    assert checked == {"groups", "select", "decode", "prefill", "product", "unpack",
                       "recall", "fast set"}
    assert all(step.reserve == 0 for step in steps if step.kind == "check")
    assert all(step.reserve == bench.gpu_check.COMPARISON for step in steps if step.kind == "time")
    every = [*bench.gpu_check.DECODES, *bench.gpu_check.PREFILLS, *bench.gpu_check.SELECTIONS,
             *bench.gpu_check.MATRICES, *bench.gpu_check.RECALLS]
    kept = [case for case in every if brain or case[0] != torch.bfloat16]
    assert kinds.count("check") == len(kept) + 3


def test_a_card_has_its_folder(bench):
    assert bench.gpu_check.card_folder("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert bench.gpu_check.card_folder("Tesla T4") == "tesla-t4"


def compared(bench, tmp_path, checkpoint, clock, *, seconds, takes):
    """Jobs as they were run, with their limits of time, and the file's rows; a job `takes` some."""
    jobs = []

    def do(job, *, threads, timeout, memory, scratch):
        jobs.append(SimpleNamespace(**job | {"timeout": timeout, "memory": memory}))
        clock.now += takes
        if job["kind"] == "rates":
            return dict(RATES)
        return RUN | {"steps": [0.5] * (job["generate"] - 1)}

    path = tmp_path / "card" / "compare.csv"
    found = bench.gpu_comparison.compare(
        path, checkpoint, bench.gpu_comparison.Deadline(seconds, clock), do)
    with path.open(newline="") as file:
        assert [row["system"] for row in csv.DictReader(file)] == [row["system"] for row in found]
    return jobs, {row["system"]: row for row in found}


def test_systems_are_compared_within_the_card_of_16_gb(bench, tmp_path, checkpoint, clock):
    jobs, rows = compared(bench, tmp_path, checkpoint, clock, seconds=400, takes=10)
    runs = [job for job in jobs if job.kind == "run"]
    assert {job.baseline for job in runs} == {"accelerate_offload", "deepspeed_zero", "ours"}
    assert all(0 < job.settings["device_memory"] < 16e9 for job in runs)
    assert all(len(job.prompts) == 16 and len(job.prompts[0]) >= 512 for job in runs)
    assert [job.kind for job in jobs].count("rates") == 1
    assert {row["status"] for row in rows.values()} == {"ok"} and len(rows) == 4
    assert all(float(row["tokens_per_s"]) > 0 for row in rows.values())


def test_no_system_is_started_without_time(bench, tmp_path, checkpoint, clock):
    jobs, rows = compared(bench, tmp_path, checkpoint, clock, seconds=100, takes=30)
    assert [job.kind for job in jobs] == ["rates", "ready", "run"]
    assert [job.timeout for job in jobs] == [100, 70, 40]
    assert [row["status"] for row in rows.values()] == ["ok"] + 3 * ["timed out"]
    assert [row["reason"] for row in rows.values()][1:] == 3 * ["no time was left"]


def test_a_model_that_cannot_be_written_is_said(bench, tmp_path, clock):
    maker = bench.gpu_comparison.WrittenModel(tmp_path / "models", "opt-6.7c", "float16")
    with pytest.raises(UserError, match="could not be written: .*no published shape is called"):
        bench.gpu_comparison.compare(tmp_path / "compare.csv", maker,
                                     bench.gpu_comparison.Deadline(1e3, clock), None)
    assert not (tmp_path / "compare.csv").exists()


def test_the_writing_of_a_model_ends_with_the_time(bench, tmp_path):
    maker = bench.gpu_comparison.WrittenModel(tmp_path / "models", "opt-6.7b", "float16")
    with pytest.raises(UserError, match="could not be written in time"):
        maker.ready(0)
    maker.stop()
    assert not list((tmp_path / "models").iterdir())
