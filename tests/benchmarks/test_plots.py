"""benchmarks/plots.py: figures and errors."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from helpers.error_cases import error_line
from helpers.internals import count_from
from helpers.programs import benchmark_modules

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.metrics.trace import COMPUTE, DEVICE_MEMORY, PHASES, PROCESS_MEMORY, Trace

MODULES = ("plots", "comparison", "plotting", "plot_systems", "plot_sweeps", "plot_traces",
           "plot_quality", "plot_summary")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by their names."""
    with benchmark_modules(*MODULES) as found:
        yield found


def texts(figure) -> list[str]:
    """All texts of a figure."""
    from matplotlib.text import Text

    return [each.get_text() for each in figure.findobj(Text) if each.get_text()]


def write_csv(path: Path, rows: list[dict]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


# Systems


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


@pytest.fixture
def compared(bench):
    return [
        system_row(bench, "slow", 0.5, projected="True"), system_row(bench, "fast", 2),
        system_row(bench, "big", status="out of memory", reason="killed at the limit"),
        system_row(bench, "flexgen", status="refused", reason="it needs CUDA, and there is none"),
        system_row(bench, "absent", status="refused", reason="x is not installed: pip install x"),
        system_row(bench, "full", 5), system_row(bench, "h2o", 8)]


def test_bars_rooflines_and_reasons_of_systems(bench, compared):
    figure = bench.plot_systems.draw(compared)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "slow", "fast", "big", "flexgen", "absent", "full", "h2o"]
    ends = [(bar.get_y() + bar.get_height() / 2, bar.get_x() + bar.get_width())
            for bar in axes.patches]
    assert ends == [(0, pytest.approx(0.5)), (1, pytest.approx(2)), (5, pytest.approx(5)),
                    (6, pytest.approx(8))]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [True, False, False, False]
    assert len({bar.get_facecolor() for bar in axes.patches[:2]}) == 1
    assert axes.patches[2].get_facecolor() != axes.patches[1].get_facecolor()
    assert [(line.get_ydata()[0], line.get_xdata()[0]) for line in axes.lines] == [
        (0, pytest.approx(1)), (1, pytest.approx(4)), (5, pytest.approx(10)),
        (6, pytest.approx(16))]
    assert axes.get_xscale() == "log"
    shown = texts(figure)
    for words in ("0.5, batch 4", "2, batch 4", "5 (2.5x), batch 4", "8 (4x), batch 4",
                  "✕ out of memory", "✕ needs CUDA", "✕ not installed", "generated tokens/s"):
        assert words in shown
    caption = " ".join(figure.get_supxlabel().split())
    assert "Measured on box, a CPU, threads 2, 2026-11-21, flexgen_h2o 0.1.0" in caption
    assert caption.endswith("commit abc1234, other 1.0, torch 2.13.0.")
    assert any("2.5\xa0GB" in each for each in shown)


# Sweeps


def run_row(**others) -> dict[str, str]:
    """A row of a run, with 10 s of prefill and 30 s of decode."""
    row = dict.fromkeys(CSV_COLUMNS, "") | {
        "host": "box", "device": "cpu", "date": "2026-11-21T10:00:00+00:00", "model": "opt",
        "dtype": "float32", "weights_gpu": "100", "eviction": "h2o", "hh_ratio": "0.1",
        "score": "sum", "weight_bits": "16", "cache_bits": "16", "prompt_len": "512",
        "gen_len": "32", "gpu_batch_size": "4", "num_gpu_batches": "1", "num_prompts": "4",
        "prefill_seconds": "10", "decode_seconds": "30", "total_tokens_per_second": "100",
        "latency_p50_seconds": "0.5", "kv_cache_bytes": "200000000",
        "full_kv_cache_bytes": "1000000000", "projected": "false"}
    return row | {name: str(value) for name, value in others.items()}


def full_row(**others) -> dict[str, str]:
    return run_row(**{"eviction": "full", "hh_ratio": 1, "kv_cache_bytes": 10**9} | others)


def test_lines_of_batches_have_medians_of_repeats(bench):
    rows = [run_row(gpu_batch_size=batch, num_prompts=2 * batch, repeat=repeat, status="ok",
                    total_tokens_per_second=batch * (10 + repeat), hh_ratio=ratio,
                    eviction="full" if ratio == 1 else "h2o", projected=str(batch == 8).lower())
            for ratio in (1, 0.1) for batch in (8, 4) for repeat in (0, 2, 1)]
    found, left = bench.plot_sweeps.batch_lines(rows)
    assert [line.label for line in found] == ["full cache", "hh_ratio 0.1"] and not left
    for line in found:
        assert [(point.x, point.projected, point.repeats) for point in line.points] == [
            (4, False, 3), (8, True, 3)]
        assert line.points[0].figures == {"throughput": (40, 44, 48), "step": (0.5, 0.5, 0.5),
                                          "block": (20, 20, 20)}, "two blocks: half of the time"


# Quality


def quality_row(policy: str, budget: float, over: float, **others) -> dict[str, str]:
    """A row of the quality task: 100 prompt tokens, 100 that follow; 150 are cached on average."""
    row = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc1234", "host": "box", "model": "m",
           "dtype": "float32", "articles": "30", "prompt_tokens_mean": "100", "policy": policy,
           "variant": "", "budget_percent": budget, "cache_bits": 16, "cached_tokens_mean": 150,
           "kv_cache_bytes_per_sequence": 200 * 512, "perplexity_over_full": over}
    return {name: str(value) for name, value in (row | others).items()}


# Traces


def write_trace(path: Path, **about) -> str:
    """Of two blocks of a second of prefill, two of decode; compute, a link beside half of it."""
    trace = Trace()
    count_from(trace, 0.0)
    trace.about = about
    for start in (1.0, 5.0):
        trace.add("prefill", PHASES, start, start + 1)
        trace.add("decode", PHASES, start + 1, start + 3)
        trace.add("layer", COMPUTE, start, start + 2)
        trace.add("chunk", "disk->cpu", start + 1.5, start + 2.5, 10**9)
    for at, nbytes in ((0, 1), (2, 4), (8, 2)):
        trace.sample(PROCESS_MEMORY, at, nbytes * 10**9)
        trace.sample(DEVICE_MEMORY, at, nbytes * 10**8)
    trace.write_chrome(path)
    return str(path)


def test_a_breakdown_is_of_the_prefill_and_of_one_step(bench, tmp_path):
    path = write_trace(tmp_path / "run.json", decode_steps=8)
    prefill, step = bench.plot_traces.parts(Trace.read_chrome(path), path)
    assert (prefill.name, prefill.wall, step.name, step.wall) == ("prefill", 2, "a decode step", .5)
    times = {lane: (time.busy, time.alone) for lane, time in step.lanes.items()}
    assert times == {"compute": (0.25, 0.125), "disk->cpu": (0.25, 0.125), "idle": (0.125, 0.125)}
    other = write_trace(tmp_path / "other.json")
    parts = bench.plot_traces.parts(Trace.read_chrome(other), other)
    assert [(part.name, part.wall) for part in parts] == [("prefill", 2), ("decode, all steps", 4)]


# The command line


def main(bench, *argv) -> int:
    return exit_status(lambda: bench.plots.main([str(each) for each in argv]))


def test_every_figure_is_drawn_by_its_name(bench, compared, tmp_path):
    systems = write_csv(tmp_path / "systems.csv", compared)
    sweep = write_csv(tmp_path / "sweep.csv", [full_row(), run_row(), run_row(gpu_batch_size=8)])
    trace = write_trace(tmp_path / "run.json")
    quality = write_csv(tmp_path / "quality.csv", [quality_row("full", 100, 1),
                                                   quality_row("recall", 20, 1.04)])
    for argv in (["systems", "--csv", systems, "--scenario", "small", "--at", "best"],
                 ["batch", "--csv", sweep, "--only", "eviction=h2o"], ["budget", "--csv", sweep],
                 ["quality", "--csv", quality, quality], ["breakdown", "--trace", trace, trace]):
        out = tmp_path / f"{argv[0]}.svg"
        assert main(bench, *argv, "--out", out) == 0
        assert out.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(("argv", "message"), [
    ([], "required: figure"),
    (["systems", "--csv", "a.csv", "--out", "a.txt"], "--out must name a .png, .svg, .pdf file"),
    (["systems", "--csv", "no.csv", "--out", "a.png"], "cannot read --csv no.csv"),
    (["systems", "--csv", "runs.csv", "--out", "a.png"], "has no column scenario"),
    (["breakdown", "--trace", "runs.csv", "--out", "a.png"], "runs.csv is not JSON"),
])
def test_bad_input_is_one_line_and_no_figure(bench, tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "runs.csv", [run_row()])
    assert main(bench, *argv) == 2
    error_line(capsys.readouterr().err, message)
    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]
