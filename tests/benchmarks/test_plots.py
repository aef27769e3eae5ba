"""benchmarks/plots.py: figures and errors."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from helpers.error_cases import error_line
from helpers.programs import benchmark_modules

from flexgen_h2o.cli.command import exit_status

MODULES = ("plots", "comparison")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by their names."""
    with benchmark_modules(*MODULES) as found:
        yield found


def write_csv(path: Path, rows: list[dict]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def system_row(bench, system: str, rate: float | None = None, **others) -> dict[str, str]:
    """A row of a comparison: its roofline is twice as fast."""
    row = dict.fromkeys(bench.comparison.COLUMNS, "") | {
        "date": "2026-11-21T10:00:00+00:00", "host": "box", "cpu": "a CPU", "threads": "2",
        "version": "0.1.0", "commit": "abc1234", "scenario": "small", "model": "opt-1.3b",
        "dtype": "bfloat16", "prompt_len": "512", "gen_len": "9", "memory_gb": "2.5",
        "system": system, "documented": "https://example.com", "at": "best", "batch": "4",
        "status": "ok", "projected": "False", "versions": "other 1.0 torch 2.13.0"}
    if system.startswith("h2o") or system == "full":
        row |= {"documented": "README.md, --percent auto",
                "versions": "flexgen_h2o 0.1.0 torch 2.13.0"}
    if rate is not None:
        total = 4 * 9 / rate
        row |= {"tokens_per_s": str(rate), "prefill_roofline_s": str(total / 4),
                "decode_step_roofline_s": str(total / 4 / 8)}
    return row | others


def compared(bench) -> list[dict[str, str]]:
    """Rows of systems that ran, that ran out of memory and that did not start."""
    return [
        system_row(bench, "slow", 0.5, projected="True"), system_row(bench, "fast", 2),
        system_row(bench, "big", status="out of memory", reason="killed at the limit"),
        system_row(bench, "flexgen", status="refused", reason="it needs CUDA, and there is none"),
        system_row(bench, "absent", status="refused", reason="x is not installed: pip install x"),
        system_row(bench, "full", 5), system_row(bench, "h2o", 8)]


def quality_row(policy: str, budget: float, over: float) -> dict[str, str]:
    """A row of the quality task: 100 prompt tokens, 100 that follow; 150 are cached on average."""
    row = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc1234", "host": "box", "model": "m",
           "dtype": "float32", "articles": "30", "prompt_tokens_mean": "100", "policy": policy,
           "variant": "", "budget_percent": budget, "cache_bits": 16, "cached_tokens_mean": 150,
           "kv_cache_bytes_per_sequence": 200 * 512, "perplexity_over_full": over}
    return {name: str(value) for name, value in row.items()}


def main(bench, *argv) -> int:
    return exit_status(lambda: bench.plots.main([str(each) for each in argv]))


def test_every_figure_is_drawn_by_its_name(bench, tmp_path):
    systems = write_csv(tmp_path / "systems.csv", compared(bench))
    quality = write_csv(tmp_path / "quality.csv", [quality_row("full", 100, 1),
                                                   quality_row("recall", 20, 1.04)])
    for argv in (["systems", "--csv", systems, "--scenario", "small", "--at", "best"],
                 ["quality", "--csv", quality, quality, "--only", "articles=30"]):
        out = tmp_path / f"{argv[0]}.svg"
        assert main(bench, *argv, "--out", out) == 0
        assert out.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(("argv", "message"), [
    ([], "required: figure"),
    (["systems", "--csv", "a.csv", "--out", "a.txt"], "--out must name a .png, .svg, .pdf file"),
    (["systems", "--csv", "no.csv", "--out", "a.png"], "cannot read --csv no.csv"),
    (["systems", "--csv", "runs.csv", "--out", "a.png"], "has no column scenario"),
])
def test_bad_input_is_one_line_and_no_figure(bench, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "runs.csv", [quality_row("full", 100, 1)])
    assert main(bench, *argv) == 2
    error_line(capsys.readouterr().err, message)
    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]
