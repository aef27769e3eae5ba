"""benchmarks/studies/recall_replay.py: rows of a run that is stopped."""

from __future__ import annotations

import sys

from helpers.programs import program
from helpers.read_back import read_csv

from flexgen_h2o.cli.command import exit_status


def test_interrupted_study_keeps_its_rows(monkeypatch, tmp_path, capsys):
    module = program("benchmarks/studies/recall_replay.py")
    seen = []

    def measure(args, recording, cache):
        seen.append(cache)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return dict.fromkeys(module.COLUMNS, 0) | {"cache": cache, "layer_s": len(seen),
                                                   "cache_mb": 8}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "offload_read_rate", lambda folder: 4e6)
    monkeypatch.setattr(module, "AttentionRecording", lambda *given, **options: None)
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["recall_replay", "--csv", str(path), "--caches",
                                      "recall 5 %", "recall 20 %", "full"])
    assert exit_status(module.main) == 130
    assert f"{path}.partial" in capsys.readouterr().err
    full, recalled = read_csv(f"{path}.partial")
    assert (full["cache"], recalled["cache"]) == ("full", "recall 5 %")
