"""benchmarks/sweep.py: the grid, failed cells, resumption."""

from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.programs import ROOT, benchmark_modules
from helpers.read_back import read_csv

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.results import CSV_COLUMNS

GRID = {"place": {"memory": {}, "disk": {"percent": [0, 0, 100, 0], "num_gpu_batches": 2}},
        "hh_ratio": [0.5, 1]}



@pytest.fixture(scope="module")
def bench():
    with benchmark_modules("sweep", "processes") as modules:
        yield modules


def write_sweep(folder: Path, **values) -> Path:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({"base": {"model": "m", "prompt_len": 8, "gen_len": 4},
                                    "grid": GRID, "repeats": 2} | values,
                                   sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("sweep_*.yaml")),
                         ids=lambda path: path.stem)
def test_shipped_sweeps_load(bench, path):
    assert len(bench.sweep.load(path, models=Path(".")).cells) > 1


def test_sweep_keeps_failures_and_is_resumed(bench, tmp_path, monkeypatch):
    runs = []

    def run_engine(config, *, timeout=None):
        if len(runs) == 3:
            runs.clear()
            raise KeyboardInterrupt
        runs.append((config.percent[0], config.hh_ratio))
        if runs[-1] == (0, 1):
            return bench.processes.Outcome("does not fit", "the run does not fit")
        return bench.processes.Outcome("ok", row=dict.fromkeys(CSV_COLUMNS, "1"))

    monkeypatch.setattr(bench.sweep, "run_engine", run_engine)
    main = partial(bench.sweep.main, ["--config", str(write_sweep(tmp_path, repeats=1)),
                                      "--out", str(tmp_path / "o.csv")])
    assert exit_status(main) == 130
    main()
    assert runs == [(0, 1)], "the other cells are there"
    assert [row["status"] for row in read_csv(tmp_path / "o.csv")] == ["ok"] * 3 + ["does not fit"]


@pytest.mark.full
def test_a_sweep_runs_the_engine(bench, tiny_model, tmp_path):
    """A run that has figures and one that does not fit."""
    (tmp_path / "tiny").symlink_to(tiny_model("opt").folder)
    path = write_sweep(tmp_path, repeats=1, grid={"memory_limit": [None, "10KB"]}, base={
        "model": "tiny", "dtype": "float32", "device": "cpu", "prompt_len": 6, "gen_len": 3})
    bench.sweep.main(["--config", str(path), "--out", str(tmp_path / "o.csv"), "--models",
                      str(tmp_path)])
    good, bad = read_csv(tmp_path / "o.csv")
    assert (good["status"], good["generated_tokens"]) == ("ok", "12")
    assert (bad["status"], bad["prefill_seconds"]) == ("does not fit", "")
