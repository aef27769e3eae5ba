"""Flags of benchmarks of which no figures would come: told in a line, before anything is run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers.programs import BENCHMARKS, program

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.errors import UserError

FULL = "--caches needs 'full"


@pytest.mark.parametrize(("name", "flags", "words"), [
    ("plan_sweep.py", ["--model", "m", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("plan_sweep.py", ["--model", "m"],
     "no policy of the grid fits --memory-limit 700MB: raise it"),
    ("throughput.py", ["--model", "m", "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("throughput.py", ["--model", "m", "--gen-len", "1"], "--gen-len must be at least 2, got 1"),
    ("kernels.py", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("kernels.py", ["--rows", "4", "0"], "--rows must be at least 1, got 0"),
    ("throughput.py", ["--model", "m", "--batches", "0"], "--batches must be at least 1, got 0"),
    ("throughput.py", ["--model", "m", "--csv", "/dev/null/a.csv"], "cannot write --csv into"),
    ("studies/cache.py", ["--caches", "h2o 20 %"], f"{FULL}', which others are compared with"),
    ("studies/cache.py", ["--caches", "full", "h2o 20 %, on disk"], f"{FULL}, on disk', which"),
    ("studies/cache.py", ["--gen-len", "1"], "--gen-len must be at least 2, got 1"),
    ("studies/cache.py", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("studies/cache.py", ["--csv", "/dev/null/a.csv"], "cannot write --csv into the folder"),
    ("studies/recall_disk.py", ["--gen-len", "1"], "--gen-len must be at least 2, got 1"),
    ("studies/recall_replay.py", ["--batch", "0"], "--batch must be at least 1, got 0"),
    ("studies/spinning.py", ["--gen-len", "1"], "--gen-len must be at least 2, got 1"),
    ("studies/spinning.py", ["--busy", "-1"], "--busy must be at least 0, got -1"),
    ("studies/machines.py", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("studies/prefill_memory.py", ["--lengths", "0"], "--lengths must be at least 1, got 0"),
    ("studies/quality_by_position.py", ["--input-path", "a", "--max-tokens", "7"],
     "--max-tokens must be at least 8, got 7"),
    ("studies/rounding_quality.py", ["--input-path", "a", "--min-tokens", "1"],
     "--min-tokens must be at least 2, got 1"),
    ("studies/policies.py", ["--input-path", "no", "--model", "no"], "no such folder or model")])
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


def test_a_system_that_fails_is_told_in_a_line_after_its_rows(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = program("benchmarks/throughput.py")
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "opt", "hidden_size": 8, "num_attention_heads": 1, "ffn_dim": 8,
        "num_hidden_layers": 1}), encoding="utf-8")
    ended = {"prefill": 1.0, "step": 1.0, "read": 0, "rss": 1, "load": 1.0}
    ends = [subprocess.CompletedProcess([], 0, json.dumps([ended]), ""),
            subprocess.CompletedProcess([], 1, "", "Traceback\nOSError: gone\n")]
    monkeypatch.setattr(module.subprocess, "run", lambda *given, **options: ends.pop(0))
    monkeypatch.setattr(module, "measure_rates", lambda path, dtype: {
        "gemm": 1.0, "memory": 1.0, "disk": 1.0})
    monkeypatch.setattr(sys, "argv", [
        "throughput.py", "--model", str(tmp_path), "--batches", "1", "2", "--repeats", "1",
        "--systems", "engine", "--csv", str(tmp_path / "rows.csv")])
    assert exit_status(module.main) == 2
    assert "error: no safetensors file in --model" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(module, "describe", lambda args: {})
    assert exit_status(module.main) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: engine at batch 2 failed, status 1: Traceback OSError: gone (")
    assert (tmp_path / "rows.csv.partial").read_text(encoding="utf-8").count(",engine,") == 1


def test_rows_of_other_columns_are_not_mixed_with_those_of_machines(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = program("benchmarks/studies/machines.py")
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(UserError, match="has other columns"):
        module.main(["--only", "measured", "--out", str(path)])
