"""The bench command: its rows, its table and the roofline."""

import pytest
from helpers.error_cases import command_refused
from helpers.fake_llm import run_stats
from helpers.planning_cases import CPU
from helpers.read_back import read_csv

from flexgen_h2o.cli import planner
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import load_yaml
from flexgen_h2o.commands import bench, generate
from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.planning import calibrate
from flexgen_h2o.storage.free_memory import MemoryLimits


def stats(prefill: float, decode: float) -> RunStats:
    return run_stats(num_prompts=4, prompt_tokens=40, generated_tokens=20, prefill_seconds=prefill,
                     decode_seconds=decode, step_seconds=[decode / 4] * 4)


@pytest.fixture
def flags(tiny_model, tmp_path, monkeypatch) -> list[str]:
    """A configuration of a tiny model, in a folder and with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return ["--model", str(tiny_model("opt").folder), "--device", "cpu", "--prompt-len", "12",
            "--gen-len", "5", "--gpu-batch-size", "2", "--num-gpu-batches", "2",
            "--hh-ratio", "0.2", "--repeats", "3", "--csv", "b.csv"]


def figures(out: str, name: str) -> list[float | None]:
    """The figures of a row of the table, whose last columns may have lines of their own."""
    lines = [line for line in out.splitlines() if line.startswith(f"{name}  ")]
    assert all(len(line) <= 80 for line in lines)
    return [None if word == "-" else float(word) for line in lines
            for word in line[len(name):].split()]


def test_each_repeat_is_a_row_and_a_line(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "load_calibration", lambda device, offload_dir: CPU)
    assert bench.main(flags) == 0
    out = capsys.readouterr().out
    rows = read_csv("b.csv")
    assert len(rows) == 3 and tuple(rows[0]) == CSV_COLUMNS
    names = ("prefill_seconds", "prefill_tokens_per_second", "decode_seconds",
             "decode_tokens_per_second", "total_tokens_per_second", "latency_p50_seconds",
             "latency_p95_seconds")
    for number, row in enumerate(rows, 1):
        assert row["generated_tokens"] == "20"
        assert figures(out, str(number)) == pytest.approx([float(row[name]) for name in names],
                                                          rel=1e-3)
    median, least, over = (figures(out, name) for name in ("median", "roofline", "over roofline"))
    assert median[0] == sorted(figures(out, str(number))[0] for number in (1, 2, 3))[1]
    assert over == pytest.approx(
        [measured / best if name.endswith("_seconds") else best / measured
         for name, measured, best in zip(names, median, least, strict=True)], rel=5e-3)
    saved = RunConfig.from_mapping(load_yaml("b.csv.config.yaml"))
    assert saved == bench.parse_args(flags).run and saved.warm_up
    assert bench.main(["--config", "b.csv.config.yaml", "--repeats", "1", "--gen-len", "1",
                       "--warm-up", "false"]) == 0
    assert len(read_csv("b.csv")) == 4
    assert figures(capsys.readouterr().out, "1")[2:4] == [0, None]


def test_a_planned_policy_is_measured_with_its_prediction(flags, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "load_or_calibrate", lambda *_, **__: CPU)
    monkeypatch.setattr(calibrate, "load_calibration", lambda device, offload_dir: None)
    monkeypatch.setattr(planner, "free_memory",
                        lambda folder, device: MemoryLimits(None, CPU.cpu_bytes, CPU.disk_bytes))
    assert bench.main([*flags, "--percent", "auto", "--repeats", "1", "--num-prompts", "3",
                       "--cut-gen-len", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan ") and "(projected)" in out and "roofline: not known" in out
    (row,) = read_csv("b.csv")
    assert row["predicted_decode_seconds"] and row["projected"] == "true"


def test_median_of_repeats_and_missing_roofline(monkeypatch):
    repeats = [stats(1.0, 8.0), stats(3.0, 4.0), stats(2.0, 4.0)]
    out = bench.format_repeats(repeats, "not known: why")
    assert figures(out, "median") == pytest.approx([2, 20, 4, 4, 20 / 7, 1, 1], rel=1e-3)
    assert "prefill            3.000 s" in out  # of the repeat whose total is the median's
    assert out.endswith("roofline: not known: why")

    def damaged(device, offload_dir):
        raise UserError("x.yaml is damaged")

    config = generate.parse_args(["--device", "cpu"])
    assert bench.ideal_plan_of(None, config, "float32") == (
        "not known in float32: rates are measured in bfloat16")
    monkeypatch.setattr(calibrate, "load_calibration", damaged)
    assert bench.ideal_plan_of(None, config, "bfloat16") == "not known: x.yaml is damaged"


@pytest.mark.parametrize("given, words", [
    (["--repeats", "0"], "--repeats must be"), (["--prompts", "p.txt"], "unknown flag --prompts"),
    (["--plan-only"], "unknown flag --plan-only"),
    (["--csv", "no/such/folder.csv"], "cannot write --csv into the folder no/such"),
    (["--config", "c.yaml"], "--output has no effect on bench: take it out of the file")])
def test_flags_that_do_nothing_are_refused(given, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("output: o.jsonl\n")
    command_refused(bench.main, capsys, given, words)
