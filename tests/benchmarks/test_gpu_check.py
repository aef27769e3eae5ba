"""benchmarks/gpu_check.py without a GPU: the order of checks."""

from __future__ import annotations

import pytest
import torch
from helpers.programs import benchmark_modules


@pytest.fixture(scope="module")
def gpu_check():
    with benchmark_modules("gpu_check") as found:
        yield found.gpu_check


@pytest.mark.parametrize("bfloat16", [True, False])
def test_every_kernel_is_checked_before_any_is_timed(gpu_check, monkeypatch, bfloat16):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    steps = gpu_check.steps(gpu_check.GpuRows(), bfloat16)
    kinds = [step.kind for step in steps]
    assert kinds == sorted(kinds)  # checks, then times
    checked = {step.name for step in steps if step.kind == "check"}
    assert checked == {"groups", "select", "decode", "prefill", "product", "unpack",
                       "recall", "fast set"}
    assert all(step.reserve == 0 for step in steps if step.kind == "check")
    assert all(step.reserve == gpu_check.COMPARISON for step in steps if step.kind == "time")
    every = [*gpu_check.DECODES, *gpu_check.PREFILLS, *gpu_check.SELECTIONS,
             *gpu_check.MATRICES, *gpu_check.RECALLS]
    kept = [case for case in every if bfloat16 or case[0] != torch.bfloat16]
    assert kinds.count("check") == len(kept) + 3
