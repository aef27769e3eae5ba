"""benchmarks/studies/recall_*.py: rows of a run that is stopped."""

from __future__ import annotations

import sys

import pytest
from helpers.programs import BENCHMARKS, program
from helpers.read_back import read_csv

from flexgen_h2o.cli.command import exit_status


@pytest.mark.parametrize(("name", "step", "size"), [
    ("recall_disk", "decode_step_s", "kv_cache_mb"), ("recall_replay", "layer_s", "cache_mb")])
def test_interrupted_recall_study_keeps_its_rows(monkeypatch, tmp_path, capsys, name, step, size):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "studies"))
    module = program(f"benchmarks/studies/{name}.py")
    seen = []

    def measure(args, *rest):
        cache = next(each for each in rest if isinstance(each, str))
        seen.append(cache)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return dict.fromkeys(module.COLUMNS, 0) | {"cache": cache, step: len(seen), size: 8}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "offload_read_rate", lambda folder: 4e6)
    if name == "recall_replay":
        monkeypatch.setattr(module, "AttentionRecording", lambda *given, **options: None)
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", [name, "--csv", str(path), "--caches", "recall 5 %",
                                      "recall 20 %", "full"])
    assert exit_status(module.main) == 130
    assert f"{path}.partial" in capsys.readouterr().err
    full, recalled = read_csv(f"{path}.partial")
    assert (full["cache"], recalled["cache"]) == ("full", "recall 5 %")
