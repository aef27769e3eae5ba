"""Flags of benchmarks that could give no figures are refused before a run."""

from __future__ import annotations

import sys

import pytest
from helpers.programs import BENCHMARKS, program

from flexgen_h2o.cli.command import exit_status

FULL = "--caches needs 'full"


@pytest.mark.parametrize(("name", "flags", "words"), [
    ("plan_sweep.py", ["--model", "m"],
     "no policy of the grid fits --memory-limit 700MB: raise it"),
    ("throughput.py", ["--model", "m", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("studies/cache.py", ["--caches", "h2o 20 %"], f"{FULL}', which others are compared with"),
    ("studies/cache.py", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("studies/spinning.py", ["--gen-len", "1"], "--gen-len must be at least 2, got 1"),
    ("studies/machines.py", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("studies/quality_by_position.py", ["--input-path", "a", "--max-tokens", "7"],
     "--max-tokens must be at least 8, got 7"),
    ("studies/rounding_quality.py", ["--input-path", "a", "--min-tokens", "1"],
     "--min-tokens must be at least 2, got 1"),
    ("studies/policies.py", ["--input-path", "no", "--model", "no"], "no such folder or model"),
])
def test_flags_are_refused(monkeypatch, capsys, name, flags, words):
    monkeypatch.setattr(sys, "argv", [name, *flags])
    for folder in (BENCHMARKS / "studies", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))
    module = program(f"benchmarks/{name}")
    if name == "plan_sweep.py":
        from processes import TOO_LARGE, Outcome

        monkeypatch.setattr(module, "run_engine", lambda config: Outcome(TOO_LARGE))
    try:
        status = exit_status(module.main)
    except SystemExit as end:  # argparse's own
        status = end.code
    assert status == 2 and words in capsys.readouterr().err
