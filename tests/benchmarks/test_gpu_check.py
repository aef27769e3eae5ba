"""benchmarks/gpu_check.py without a GPU: deadlines and the order of checks."""

from __future__ import annotations

import pytest
import torch
from helpers.programs import benchmark_modules

MODULES = ("gpu_check", "gpu_comparison", "comparison")


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
