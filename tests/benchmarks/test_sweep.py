"""benchmarks/sweep.py: the grid, failed cells, resumption."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.error_cases import refused
from helpers.programs import ROOT, benchmark_modules
from helpers.read_back import read_csv

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.cli.run_config import RunConfig

MODULES = ("sweep", "processes")
FIGURES = ("prefill_seconds", "decode_seconds", "total_tokens_per_second", "peak_process_bytes",
           "kv_cache_bytes", "generated_tokens", "load_seconds", "weight_bytes")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by their names."""
    with benchmark_modules(*MODULES) as found:
        yield found


def written(folder: Path, values: dict, name: str = "s") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def load(bench, folder: Path, values: dict, name: str = "s"):
    return bench.sweep.load(written(folder, values, name), models=folder)


BASE = {"model": "m", "prompt_len": 8, "gen_len": 4}
GRID = {"place": {"memory": {}, "disk": {"percent": [0, 0, 100, 0], "num_gpu_batches": 2}},
        "hh_ratio": [0.5, 1]}


# The grid


@pytest.mark.parametrize("change, words", [
    ({"grid": {"gpu_batch": [1]}}, "cell gpu_batch=1: unknown key 'gpu_batch': did you mean"),
    ({"grid": {"seed": [1], "a": {"b": {"seed": 2}}}}, "seed and a both set seed"),
])
def test_invalid_sweeps_are_errors(bench, tmp_path, change, words):
    refused(lambda: load(bench, tmp_path, {"base": BASE, "grid": GRID} | change), match=words)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("sweep_*.yaml")),
                         ids=lambda path: path.stem)
def test_shipped_sweeps_load(bench, path):
    assert len(bench.sweep.load(path, models=Path(".")).cells) > 1


# The runs


class Fake:
    """Answers as `run_engine`: a row of made-up figures, or what `failing` says of the ratio."""

    def __init__(self, bench, failing: dict | None = None, most: int = 1 << 20):
        self._bench, self._failing, self._most, self.runs = bench, failing or {}, most, []

    def __call__(self, config: RunConfig, *, timeout: float | None = None):
        if len(self.runs) == self._most:
            raise KeyboardInterrupt
        self.runs.append((config.percent[0], config.hh_ratio))
        if config.hh_ratio in self._failing:
            return self._bench.processes.Outcome(*self._failing[config.hh_ratio])
        row = dict.fromkeys(CSV_COLUMNS, "") | dict.fromkeys(FIGURES, str(len(self.runs))) | {
            "hh_ratio": f"{config.hh_ratio:g}", "decode_tokens_per_second": "", "commit": "abc",
            "projected": "false"}
        return self._bench.processes.Outcome("ok", row=row)


def swept(bench, tmp_path, monkeypatch, fake: Fake, *flags: str, **change) -> list[dict]:
    """Rows of the file after a command with such a runner."""
    monkeypatch.setattr(bench.sweep, "run_engine", fake)
    path = written(tmp_path, {"base": BASE, "grid": GRID, "repeats": 2} | change)
    bench.sweep.main(["--config", str(path), "--out", str(tmp_path / "o.csv"), *flags])
    return read_csv(tmp_path / "o.csv")


ALL = [(100, 0.5), (100, 1), (0, 0.5), (0, 1)]


def test_cells_run_once_per_repeat(bench, tmp_path, monkeypatch, capsys):
    fake = Fake(bench)
    rows = swept(bench, tmp_path, monkeypatch, fake)
    assert fake.runs == ALL * 2
    assert list(rows[0]) == ["sweep", "flags", "repeat", "place", *CSV_COLUMNS, "status", "reason"]
    assert [(row["place"], row["hh_ratio"], row["repeat"]) for row in rows[2:5]] == [
        ("disk", "0.5", "1"), ("disk", "1", "1"), ("memory", "0.5", "2")]
    assert {(row["sweep"], row["status"], row["reason"], row["commit"]) for row in rows} == {
        ("s", "ok", "", "abc")}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "s" and lines[1].split()[:4] == ["place", "hh_ratio", "runs", "tokens/s"]
    assert lines[2].split() == ["memory", "0.5", "2", "3", "3", "3", "3e-09"], "medians of 1 and 5"


def test_failed_cells_are_rows_without_figures(bench, tmp_path, monkeypatch, capsys):
    fake = Fake(bench, {1: ("does not fit", "the run does not fit. Really")})
    rows = swept(bench, tmp_path, monkeypatch, fake)
    assert fake.runs == ALL + [(100, 0.5), (0, 0.5)], "what failed is not repeated"
    failed = [row for row in rows if row["status"] != "ok"]
    assert [(row["place"], row["hh_ratio"], row["prompt_len"], row["status"], row["reason"])
            for row in failed] == [(place, "1", "8", "does not fit", "the run does not fit. Really")
                                   for place in ("memory", "disk")]
    assert all(row[name] == "" for row in failed for name in FIGURES)
    assert all(row["date"] and row["version"] and row["host"] for row in failed)
    captured = capsys.readouterr()
    assert captured.out.splitlines()[3].split() == ["memory", "1", "0", "does", "not", "fit"]
    assert "place=disk hh_ratio=1, repeat 1: does not fit: the run does not fit" in captured.err


def test_interrupted_sweep_is_resumed(bench, tmp_path, monkeypatch, capsys):
    """Its last row is torn."""
    path = written(tmp_path, {"base": BASE, "grid": GRID, "repeats": 2})
    argv = ["--config", str(path), "--out", str(tmp_path / "o.csv")]
    monkeypatch.setattr(bench.sweep, "run_engine", Fake(bench, most=5))
    assert exit_status(partial(bench.sweep.main, argv)) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"interrupted (rows measured before that: {tmp_path / 'o.csv.partial'})"
    assert len(read_csv(tmp_path / "o.csv.partial")) == 5
    with open(tmp_path / "o.csv.partial", "a", encoding="utf-8") as file:
        file.write("s,--model m --pro")
    fake = Fake(bench)
    rows = swept(bench, tmp_path, monkeypatch, fake)
    assert fake.runs == ALL[1:], "the rest of the second time"
    assert [row["repeat"] for row in rows] == ["1"] * 4 + ["2"] * 4
    again = Fake(bench)
    assert swept(bench, tmp_path, monkeypatch, again) == rows and again.runs == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["o.csv", "s.yaml"]


# The processes


@pytest.mark.full
def test_a_sweep_runs_the_engine(bench, tiny_model, tmp_path):
    """A run that has figures and one that does not fit, as a user starts them."""
    (tmp_path / "tiny").symlink_to(tiny_model("opt").folder)
    path = written(tmp_path, {"base": {"model": "tiny", "dtype": "float32", "device": "cpu",
                                       "prompt_len": 6, "gen_len": 3, "hh_ratio": 0.5},
                              "grid": {"memory_limit": [None, "10KB"]}})
    bench.sweep.main(["--config", str(path), "--out", str(tmp_path / "o.csv"), "--models",
                      str(tmp_path)])
    good, bad = read_csv(tmp_path / "o.csv")
    assert (good["status"], good["memory_limit"], good["model"]) == ("ok", "", "tiny")
    assert (good["generated_tokens"], good["prompt_len"], good["hh_ratio"]) == ("12", "6", "0.5")
    assert float(good["total_tokens_per_second"]) > 0
    assert (bad["status"], bad["memory_limit"], bad["hh_ratio"]) == ("does not fit", "10000", "0.5")
    assert "10KB" not in bad["reason"] and bad["reason"].startswith("the run does not fit. host")
    assert all(bad[name] == "" for name in FIGURES)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["o.csv", "s.yaml", "tiny"]
