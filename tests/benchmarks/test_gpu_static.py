"""Compiled GPU kernels, without a GPU: every variant is listed and fits."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from helpers.programs import ROOT
from helpers.read_back import read_csv
from helpers.subprocesses import environment

RESULTS = ROOT / "benchmarks" / "results" / "gpu_static.csv"
pytest.importorskip("triton")


def check(path, *options) -> subprocess.CompletedProcess:
    """In a process of its own: this one's kernels are the interpreter's."""
    return subprocess.run(
        [sys.executable, "benchmarks/studies/gpu_static.py", "--check", "--csv", str(path),
         *options], cwd=ROOT, env=environment(), capture_output=True, text=True)


@pytest.mark.full
def test_every_compiled_variant_is_listed():
    done = check(RESULTS, "--sample", "9")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_missing_and_wrong_rows_are_found(tmp_path):
    """Left out, spilling, beyond the card's shared memory, and with products under way."""
    changed = read_csv(RESULTS)
    changed[1]["spill_stores"], changed[2]["shared"] = "8", "300000"
    changed[3]["left_under_way"] = "3"
    path = tmp_path / "gpu_static.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(changed[0]))
        writer.writeheader()
        writer.writerows(changed[1:])
    done = check(path, "--sample", "0")
    assert done.returncode == 1
    lines = sorted(done.stdout.splitlines())
    assert [line.startswith("missing:") for line in lines].count(True) == 1
    assert sum("spills 8 + 0 bytes" in line for line in lines) == 1
    assert sum("takes 300000 of " in line for line in lines) == 1
    assert sum("may write registers" in line for line in lines) == 1 and len(lines) == 4
