"""benchmarks/studies/cache.py: bytes that a step reads and writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from helpers.programs import BENCHMARKS, program
from helpers.read_back import read_csv

from flexgen_h2o import LLM
from flexgen_h2o.cli.command import exit_status


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "studies"))
    return program("benchmarks/studies/cache.py")


@pytest.mark.full
@pytest.mark.parametrize("name", ["full, on disk", "h2o 20 %, on disk"])
@pytest.mark.parametrize(("gen_len", "whole"), [(4, 0), (20, 1)])
def test_a_step_has_no_part_of_what_the_prefill_writes(tiny_model, study, monkeypatch, tmp_path,
                                                       name, gen_len, whole):
    """A step reads the whole cache, which goes to disk with the prompts and after 16 steps."""
    monkeypatch.setattr(study, "LLM", lambda model, *, path, **rest: LLM(model, **rest))
    row = study.measure(SimpleNamespace(
        model=str(tiny_model("llama").folder), batch=2, prompt_len=30, gen_len=gen_len,
        offload_dir=str(tmp_path)), name)
    read, written = row["disk_read_mb_per_step"], row["disk_written_mb_per_step"]
    assert read >= row["kv_cache_mb"] > 0
    assert written * (gen_len - 1) == pytest.approx(whole * read)


@pytest.mark.parametrize(("name", "step", "size"), [
    ("recall_disk", "decode_step_s", "kv_cache_mb"), ("recall_replay", "layer_s", "cache_mb")])
def test_rows_of_recall_stay_when_a_run_is_stopped(monkeypatch, tmp_path, capsys, name, step,
                                                   size):
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
    speedups, rooflines = [[row[column] for row in (full, recalled)] for column in (
        next(each for each in module.COLUMNS if "speedup" in each),
        next(each for each in module.COLUMNS if "roofline" in each))]
    assert (speedups, rooflines) == (["1", "0.5"], ["2", "2"])
