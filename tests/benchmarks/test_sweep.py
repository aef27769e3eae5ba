"""benchmarks/sweep.py: which runs a grid comes to, what becomes of each, resumed and read back."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.programs import ROOT, benchmark_modules
from helpers.read_back import read_csv
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import parse_args
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.errors import UserError

MODULES = ("sweep", "processes", "plan_sweep", "flexgen_h2o.files.rows")
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


def test_a_grid_is_a_product_whose_last_key_is_the_fastest(bench, tmp_path):
    found = load(bench, tmp_path, {"base": BASE, "grid": GRID, "repeats": 3})
    assert (found.name, found.repeats, found.axes) == ("s", 3, ("place", "hh_ratio"))
    assert [cell.label for cell in found.cells] == [
        "place=memory hh_ratio=0.5", "place=memory hh_ratio=1",
        "place=disk hh_ratio=0.5", "place=disk hh_ratio=1"]
    first, *_, last = found.cells
    assert first.flags == "--model m --prompt-len 8 --gen-len 4 --hh-ratio 0.5"
    assert last.flags == ("--model m --prompt-len 8 --gen-len 4 --percent 0 0 100 0 100 0 "
                          "--num-gpu-batches 2 --hh-ratio 1.0")
    assert last.config == RunConfig.from_mapping(
        BASE | GRID["place"]["disk"] | {"hh_ratio": 1})


def test_names_stand_for_flags_over_the_base(bench, tmp_path):
    found = load(bench, tmp_path, {"base": BASE, "grid": {
        "what": {"short": {"prompt_len": 2}, "as it is": {}}}})
    assert [cell.config.prompt_len for cell in found.cells] == [2, 8]
    assert [cell.axes for cell in found.cells] == [{"what": "short"}, {"what": "as it is"}]


def test_a_model_below_the_folder_of_models_is_taken_from_there(bench, tmp_path):
    (tmp_path / "m").mkdir()
    (cell,) = load(bench, tmp_path, {"base": BASE, "grid": {"seed": [1]}}).cells
    assert (cell.config.model, cell.config.path) == ("m", str(tmp_path / "m"))
    assert "--path" not in cell.flags, "rows name no folder of a machine"
    (dummy,) = load(bench, tmp_path, {"base": BASE | {"path": "_DUMMY_"},
                                      "grid": {"seed": [1]}}).cells
    assert dummy.config.path == "_DUMMY_"


FLAGS = st.fixed_dictionaries({}, optional={
    "percent": st.sampled_from([[0, 100, 100, 0], "auto", "10 20 30 40 50 50", [1.5, 8, 0, 9]]),
    "overlap": st.booleans(), "seed": st.integers(-9, 9), "score": st.just("mean"),
    "hh_ratio": st.one_of(st.floats(0.01, 0.99), st.just(1), st.just([0.1, 0.25])),
    "memory_limit": st.sampled_from(["6GB", "1.5GiB", 1000, None]),
    "prefill_chunk": st.sampled_from([None, 64]),
    "prompt": st.lists(st.text("ab' \"\n-é", min_size=1).filter(
        lambda text: text.strip() and not text.startswith("-")), min_size=1, max_size=3),
    "temperature": st.floats(0.1, 2), "do_sample": st.just(True)})


@given(flags=FLAGS)
def test_the_flags_of_a_row_are_a_command_line(bench, tmp_path_factory, flags):
    folder = tmp_path_factory.mktemp("flags")
    values = {"base": {"model": "m", "do_sample": True} | flags, "grid": {"gen_len": [3]}}
    try:
        (cell,) = load(bench, folder, values).cells
    except UserError:  # such as a cache that is full, with a score
        return
    assert parse_args(shlex.split(cell.flags)) == cell.config


@pytest.mark.parametrize("change, words", [
    ({"grids": GRID}, "grids"),
    ({"grid": {}}, "length >= 1"),
    ({"base": ["model"]}, "object"),
    ({"repeats": 0}, ">= 1"),
    ({"grid": {"gpu_batch": [1]}}, "cell gpu_batch=1: unknown key 'gpu_batch': did you mean"),
    ({"base": {"modle": "m"}}, "unknown key 'modle': did you mean model"),
    ({"grid": {"gpu_batch_size": 4}}, "gpu_batch_size takes a list of values"),
    ({"grid": {"gpu_batch_size": []}}, "gpu_batch_size takes a list of values"),
    ({"grid": {"batches": 4}}, "batches takes a list if it is a flag, or names"),
    ({"grid": {"gpu_batch_size": {"a": {}}}}, "is a flag and can't be the label"),
    ({"grid": {"status": {"a": {}}}}, "status is a column and can't be the label"),
    ({"grid": {"batches": {"a": 4}}}, "batches: 'a' must be a text"),
    ({"grid": {"batches": {1: {}}}}, "batches: 1 must be a text"),
    ({"grid": {"seed": [1], "gen_len": [4]}}, "base: all of the grid's gen_len set gen_len"),
    ({"grid": {"seed": [1], "a": {"b": {"seed": 2}}}}, "seed and a both set seed"),
    ({"grid": {"seed": [1, 2, 1]}}, "cells seed=1 and seed=1 are the same"),
    ({"base": {"csv": "x.csv"}}, "base: csv has no place in a sweep"),
    ({"grid": {"output": ["x", "y"]}}, "grid: output has no place"),
    ({"grid": {"a": {"b": {"trace": "x"}}}}, "grid: a: b: trace has no place"),
    ({"grid": {"hh_ratio": [1, 2]}}, "cell hh_ratio=2: --hh-ratio must be at most 1"),
    ({"grid": {"hh_ratio": [0.5], "eviction": ["h2o", "full"]}},
     "cell hh_ratio=0.5 eviction=full: --eviction full keeps all"),
    ({"base": {"model": "m"}, "grid": {"prompts": ["absent.txt"]}},
     "cannot read --prompts absent.txt"),
])
def test_what_is_wrong_is_said_before_any_run(bench, tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        load(bench, tmp_path, {"base": BASE, "grid": GRID} | change)


@pytest.mark.parametrize("name, cells, axes", [
    ("sweep_batch", 14, ("hh_ratio", "gpu_batch_size")),
    ("sweep_budget", 7, ("hh_ratio",)),
    ("sweep_offload", 8, ("gpu_batch_size", "num_gpu_batches", "hh_ratio")),
])
def test_shipped_sweeps_are_whole(bench, name, cells, axes):
    found = bench.sweep.load(ROOT / "configs" / f"{name}.yaml", models=Path("."))
    assert (found.name, len(found.cells), found.axes) == (name, cells, axes)


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


def test_all_cells_are_run_and_then_again(bench, tmp_path, monkeypatch, capsys):
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


def test_a_cell_that_fails_is_a_row_without_figures(bench, tmp_path, monkeypatch, capsys):
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


@pytest.mark.parametrize("torn", ["", "s,--model m --pro", '"s'])
def test_a_stopped_sweep_is_gone_on_with(bench, tmp_path, monkeypatch, capsys, torn):
    path = written(tmp_path, {"base": BASE, "grid": GRID, "repeats": 2})
    argv = ["--config", str(path), "--out", str(tmp_path / "o.csv")]
    monkeypatch.setattr(bench.sweep, "run_engine", Fake(bench, most=5))
    assert exit_status(partial(bench.sweep.main, argv)) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"interrupted (rows measured before that: {tmp_path / 'o.csv.partial'})"
    assert len(read_csv(tmp_path / "o.csv.partial")) == 5
    with open(tmp_path / "o.csv.partial", "a", encoding="utf-8") as file:
        file.write(torn)
    fake = Fake(bench)
    rows = swept(bench, tmp_path, monkeypatch, fake)
    assert fake.runs == ALL[1:], "the rest of the second time"
    assert [row["repeat"] for row in rows] == ["1"] * 4 + ["2"] * 4
    again = Fake(bench)
    assert swept(bench, tmp_path, monkeypatch, again) == rows and again.runs == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["o.csv", "s.yaml"]


def test_sigterm_ends_a_sweep_as_ctrl_c_does(bench, tmp_path, monkeypatch, capsys):
    def run(config, *, timeout):
        if config.hh_ratio == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return Fake(bench)(config)

    monkeypatch.setattr(bench.sweep, "run_engine", run)
    path = written(tmp_path, {"base": BASE, "grid": GRID})
    before = signal.getsignal(signal.SIGTERM)
    status = exit_status(partial(
        bench.sweep.main, ["--config", str(path), "--out", str(tmp_path / "o.csv")]))
    assert status == 143 and "rows measured before that" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(read_csv(tmp_path / "o.csv.partial")) == 1


def test_what_failed_is_run_again_when_asked(bench, tmp_path, monkeypatch):
    swept(bench, tmp_path, monkeypatch, Fake(bench, {1: ("timed out", "stopped after 9 s")}))
    kept = Fake(bench)
    assert len(swept(bench, tmp_path, monkeypatch, kept)) == 6 and kept.runs == []
    fake = Fake(bench)
    rows = swept(bench, tmp_path, monkeypatch, fake, "--retry-failed")
    assert fake.runs == [(100, 1), (0, 1)] * 2, "once more, and then what had been left out"
    assert len(rows) == 8 and {row["status"] for row in rows} == {"ok"}
    assert [row["hh_ratio"] for row in rows[:4]] == ["0.5", "1", "0.5", "1"], "in their places"
    nothing = Fake(bench)
    swept(bench, tmp_path, monkeypatch, nothing, "--retry-failed")
    assert nothing.runs == []


def test_a_grid_may_grow_but_not_change(bench, tmp_path, monkeypatch):
    swept(bench, tmp_path, monkeypatch, Fake(bench), repeats=1)
    fake = Fake(bench)
    rows = swept(bench, tmp_path, monkeypatch, fake, repeats=1,
                 grid=GRID | {"hh_ratio": [0.25, 0.5, 1]})
    assert fake.runs == [(100, 0.25), (0, 0.25)] and len(rows) == 6
    whole = (tmp_path / "o.csv").read_bytes()
    for change in ({"grid": GRID | {"hh_ratio": [0.25, 1]}}, {"base": BASE | {"seed": 1}}):
        with pytest.raises(UserError, match="has a run that is not of this config"):
            swept(bench, tmp_path, monkeypatch, Fake(bench, most=0), **change)
    with pytest.raises(UserError, match="has other columns"):
        swept(bench, tmp_path, monkeypatch, Fake(bench, most=0), grid={"memory_limit": ["1GB"]})
    assert (tmp_path / "o.csv").read_bytes() == whole


def test_several_sweeps_share_a_file(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.sweep, "run_engine", Fake(bench))
    one = written(tmp_path, {"base": BASE, "grid": {"hh_ratio": [1]}}, "one")
    two = written(tmp_path, {"base": BASE, "grid": {"hh_ratio": [1], "place": {"a": {}}}}, "two")
    out = tmp_path / "o.csv"
    bench.sweep.main(["--config", str(one), str(two), "--out", str(out)])
    assert [(row["sweep"], row["place"]) for row in read_csv(out)] == [("one", ""), ("two", "a")]
    assert [text.splitlines()[0] for text in capsys.readouterr().out.split("\n\n")] == [
        "one", "two"]
    with pytest.raises(UserError, match="two files are called one"):
        bench.sweep.main(["--config", str(one), str(one), "--out", str(out)])


def test_a_sweep_without_any_figures_fails(bench, tmp_path, monkeypatch, capsys):
    failing = dict.fromkeys((0.5, 1), ("failed", "no model m"))
    with pytest.raises(UserError, match=r"no run came to figures, the first by this: no model m"):
        swept(bench, tmp_path, monkeypatch, Fake(bench, failing))
    assert len(read_csv(tmp_path / "o.csv")) == 4, "the rows are there"


def test_the_command_line_answers_in_one_line(bench, tmp_path, capsys):
    path = written(tmp_path, {"base": BASE, "grid": GRID})
    out = str(tmp_path / "o.csv")
    for argv, said in [
            (["--config", str(tmp_path / "no.yaml"), "--out", out], "cannot read --config"),
            (["--config", str(path)], "the following arguments are required: --out"),
            (["--config", str(path), "--out", str(tmp_path)], "--out"),
            (["--config", str(path), "--out", out, "--timeout", "0"], "--timeout must be at")]:
        assert exit_status(partial(bench.sweep.main, argv)) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {said}") and error.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["s.yaml"]


# The processes


def tiny_config(tiny_model, **others) -> RunConfig:
    return RunConfig(**{"model": "tiny", "path": str(tiny_model("opt").folder), "device": "cpu",
                        "dtype": "float32", "prompt_len": 6, "gen_len": 3, "hh_ratio": 0.5,
                        **others})


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


def test_a_run_that_takes_too_long_is_stopped(bench, tiny_model):
    found = bench.processes.run_engine(tiny_config(tiny_model), timeout=0.01)
    assert (found.status, found.reason, found.row) == ("timed out", "stopped after 0.01 s", {})


def test_an_error_of_the_run_is_its_reason(bench, tiny_model, tmp_path):
    missing = replace(tiny_config(tiny_model), path=str(tmp_path / "absent"))
    found = bench.processes.run_engine(missing)
    assert found.status == "failed" and str(tmp_path / "absent") in found.reason


@pytest.mark.parametrize("status, errors, expected", [
    (-9, "", ("does not fit", "killed, as the system does for want of memory")),
    (2, "a warning\nerror: the run does not fit. Sums\n", ("does not fit",
                                                           "the run does not fit. Sums")),
    (2, "error: no policy was found that fits: give --percent\n", (
        "does not fit", "no policy was found that fits: give --percent")),
    (2, "error: a prompt does not fit into the model's positions\n", (
        "failed", "a prompt does not fit into the model's positions")),
    (1, "Traceback ...\n  line\nValueError: odd\n", (
        "failed", "exit status 1: Traceback ... line ValueError: odd")),
    (-11, "", ("failed", "exit status -11: ")),
])
def test_how_a_process_ended_is_said(bench, status, errors, expected):
    found = bench.processes._failure(status, errors)
    assert (found.status, found.reason) == expected


@pytest.mark.parametrize("handler, status", [("signal.default_int_handler", 1),
                                             ("signal.SIG_IGN", -signal.SIGKILL)])
def test_a_run_may_clean_up_before_it_is_killed(bench, tmp_path, monkeypatch, handler, status):
    monkeypatch.setattr(bench.processes, "_GRACE", 0.2 if status < 0 else 60)
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, {handler})
try:
    print("ready", flush=True)
    while True: signal.pause()
except KeyboardInterrupt:
    open(sys.argv[1], "w").close()
    sys.exit(1)
"""
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "clean")],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n"
    bench.processes._stop(worker)
    assert worker.returncode == status
    assert (tmp_path / "clean").exists() == (status > 0)


def engine_row(seconds: float) -> dict[str, str]:
    """What the sweep of plans reads of a row of results."""
    return {"prefill_seconds": str(seconds), "decode_seconds": "0",
            "predicted_prefill_seconds": "1", "predicted_decode_seconds": "0",
            "gpu_batch_size": "4", "num_gpu_batches": "1"} | {
                f"{kind}_{tier}": "100" for kind in ("weights", "cache", "activations")
                for tier in ("gpu", "cpu")}


def plan_sweep(bench, monkeypatch, tmp_path, ends) -> list[RunConfig]:
    """Run it with three policies; `ends` are the runs' outcomes, or errors that they raise."""
    seen: list[RunConfig] = []

    def run(config):
        seen.append(config)
        end = ends[len(seen) - 1]
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(bench.plan_sweep, "grid", lambda: [
        ("--percent", "100", "0", "100", "0", "100", "0", "--gpu-batch-size", size)
        for size in ("4", "8")])
    monkeypatch.setattr(bench.plan_sweep, "run_engine", run)
    bench.plan_sweep.main(["--model", "m", "--memory-limit", "1GB", "--num-prompts", "4",
                           "--repeats", "2", "--out", str(tmp_path / "plans.csv")])
    return seen


def test_the_sweep_of_plans_keeps_the_rows_beside_a_run_that_failed(bench, monkeypatch, tmp_path,
                                                                    capsys):
    outcome = bench.processes.Outcome
    ends = [outcome("ok", row=engine_row(3)), outcome("failed", "odd"),
            outcome("ok", row=engine_row(2)), outcome("failed", "worse"),
            outcome("ok", row=engine_row(4))]
    with pytest.raises(UserError, match="2 failed, the first by this: .*size 4 failed: odd .*csv"):
        plan_sweep(bench, monkeypatch, tmp_path, ends)
    auto, other = read_csv(tmp_path / "plans.csv")
    assert (auto["seconds"], auto["repeats"], auto["best_over_this"]) == ("3", "1", "1")
    assert (other["seconds"], other["repeats"]) == ("3", "2")
    assert other["policy"].endswith("--gpu-batch-size 8")
    assert capsys.readouterr().err.count(" failed: ") == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "plans.csv"]


def test_the_sweep_of_plans_leaves_out_what_does_not_fit(bench, monkeypatch, tmp_path):
    outcome = bench.processes.Outcome
    ok = outcome("ok", row=engine_row(3))
    seen = plan_sweep(bench, monkeypatch, tmp_path,
                      [ok, outcome("does not fit", "so"), ok, ok, ok])
    assert [config.gpu_batch_size for config in seen] == [None, 4, 8, None, 8]
    assert (seen[0].memory_limit, seen[0].num_prompts) == (10 ** 9, 4)
    assert len(read_csv(tmp_path / "plans.csv")) == 2


def test_a_sweep_of_plans_that_is_stopped_keeps_its_rows(bench, monkeypatch, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        plan_sweep(bench, monkeypatch, tmp_path, [
            bench.processes.Outcome("ok", row=engine_row(3)), KeyboardInterrupt()])
    (auto,) = read_csv(tmp_path / "plans.csv.partial")
    assert (auto["seconds"], auto["best_over_this"]) == ("3", "")
