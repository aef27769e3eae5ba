"""benchmarks/plots.py: what stands in each figure, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from helpers.error_cases import error_line
from helpers.internals import count_from
from helpers.programs import ROOT, benchmark_modules
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.errors import UserError
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


def test_scenarios_are_chosen_and_each_shows_its_best_batch_or_the_same(bench, compared):
    equal = [row | {"at": "equal", "batch": "2"} for row in compared[:2]]
    rows = [*compared, *equal, *(row | {"scenario": "other"} for row in equal),
            system_row(bench, "slow", 9, scenario="other", at="search")]
    found = bench.plot_systems.panels(rows, scenarios=[], at=None)
    assert {name: [row["at"] for row in mine] for name, mine in found.items()} == {
        "small": ["best"] * 7, "other": ["equal"] * 2}
    assert list(bench.plot_systems.panels(rows, scenarios=["other", "small"], at="equal")) == [
        "other", "small"]
    assert list(bench.plot_systems.panels(rows, scenarios=[], at="best")) == ["small"]
    words = texts(bench.plot_systems.draw(rows, scenarios=["other"]))
    assert any(each.endswith("all at batch 2") for each in words)
    assert "2" in words, "a value, whose batch stands above"
    for scenarios, at, message in ((["no"], None, "--scenario no is not in --csv: it has small, "),
                                   (["other"], "best", "no rows measured at best")):
        with pytest.raises(UserError, match=message):
            bench.plot_systems.panels(rows, scenarios=scenarios, at=at)
    with pytest.raises(UserError, match="several rows of fast in small.*--only host"):
        bench.plot_systems.panels([*compared, compared[1] | {"host": "b"}], scenarios=[], at=None)


def test_nothing_to_compare_with_is_no_multiple(bench, compared):
    shown = texts(bench.plot_systems.draw(compared[2:]))
    assert "8, batch 4" in shown
    assert "✕ needs CUDA" in texts(bench.plot_systems.draw(compared[3:4])), "no bar at all"


def test_speed_and_the_perplexity_factor_beside_it(bench, compared):
    gguf = [{"file": "a.gguf", "system": system, "sequences": sequences, "tokens_per_second": rate}
            for sequences, rates in (("2", ("8", "9")), ("16", ("50", "140")))
            for system, rate in zip(("llama.cpp", "flexgen_h2o"), rates, strict=True)]
    quality = [{"model": "m", "mode": mode, "factor": factor} for mode, factor in (
        ("full", "1"), ("h2o-20", "1.25"), ("weights-auto", "1.01"))]
    rows = [*compared, system_row(bench, "accelerate-disk", 1), system_row(bench, "h2o", 7)]
    figure = bench.plot_summary.draw(rows, gguf, quality, "m")
    speed, factor = figure.axes[:2]
    assert [label.get_text() for label in speed.get_yticklabels()] == [
        "Accelerate, layers on disk, batch 4", "flexgen_h2o, full cache, batch 4",
        "flexgen_h2o, H2O 20 %, batch 4"]
    assert [bar.get_width() for bar in speed.patches] == [1, 5, 8]
    assert [bar.get_width() for bar in factor.patches] == [1, 1, 1.25]
    assert [bar.get_width() for bar in figure.axes[2].patches] == [50, 140]
    with pytest.raises(UserError, match="--quality has no rows of n"):
        bench.plot_summary.draw(rows, gguf, quality, "n")
    with pytest.raises(UserError, match="--quality has no row of h2o-20"):
        bench.plot_summary.draw(rows, gguf, quality[:1], "m")


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


rows_of_letters = st.integers(1, 4).flatmap(lambda width: st.lists(
    st.tuples(*[st.sampled_from("abc")] * width), min_size=1, max_size=12))


@given(rows_of_letters)
def test_the_columns_that_tell_rows_apart_do_so_as_all_of_them(bench, table):
    names = [f"column {number}" for number in range(len(table[0]))]
    rows = [dict(zip(names, each, strict=True)) for each in table]

    def groups(columns):
        return {frozenset(number for number, row in enumerate(rows)
                          if [row[name] for name in columns] == [one[name] for name in columns])
                for one in rows}

    kept = bench.plot_sweeps.telling(rows, names)
    assert groups(kept) == groups(names)
    given_first = bench.plot_sweeps.telling(rows, names[1:], names[:1])
    assert groups([*names[:1], *given_first]) == groups(names)


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


def test_batches_count_all_of_a_block_and_what_follows_from_them_makes_no_line(bench):
    rows = [run_row(gpu_batch_size=size, num_gpu_batches=count, weights_gpu=weights,
                    num_prompts=int(size) * int(count))
            for size, count, weights in (("1", "2", "80"), ("2", "2", "60"), ("4", "2", "40"))]
    (line,), _ = bench.plot_sweeps.batch_lines(rows)
    assert line.label == "" and [point.x for point in line.points] == [2, 4, 8]
    split = [run_row(gpu_batch_size=size, num_gpu_batches=count, num_prompts=8)
             for size, count in (("8", "1"), ("4", "2"))]
    assert [line.label for line in bench.plot_sweeps.batch_lines(split)[0]] == [
        "num_gpu_batches 1", "num_gpu_batches 2"]


def test_batches_that_failed_are_crosses_on_their_lines(bench):
    ran = [run_row(gpu_batch_size=size, num_prompts=size, **kind) for size in (2, 4)
           for kind in ({"hh_ratio": 0.1}, {"hh_ratio": 1, "eviction": "full"})]
    ran = [row | {"status": "ok", "reason": "", "flags": ""} for row in ran]
    empty = dict.fromkeys(ran[0], "") | {"status": "does not fit", "reason": "too little memory"}
    failed = empty | {"gpu_batch_size": "8", "hh_ratio": "1"}
    figure = bench.plot_sweeps.draw_batch([*ran, failed, empty])
    lines, left = bench.plot_sweeps.batch_lines([*ran, failed, empty])
    assert {line.label: [x for x, _ in line.failed] for line in lines} == {
        "hh_ratio 0.1": [], "full cache": [8]}
    assert [row["status"] for row in left] == ["does not fit"]
    crosses = [line for line in figure.axes[0].lines
               if line.get_marker() == "x" and len(line.get_xdata())]
    assert [line.get_xdata()[0] for line in crosses] == [8]
    assert {"does not fit", "full cache", "hh_ratio 0.1", "seconds of prefill and decode"} <= set(
        texts(figure))
    assert "Left out: 1 run without figures (does not fit)." in figure.get_supxlabel()


def test_lines_of_budgets_end_at_the_full_cache(bench):
    rows = [run_row(eviction=policy, hh_ratio=ratio, cache_bits=bits,
                    kv_cache_bytes=ratio * 2e9 * bits / 16, total_tokens_per_second=1 / ratio,
                    cell=f"{ratio}", status="ok")
            for bits in (16, 4) for policy in ("h2o", "window") for ratio in (0.05, 0.25)]
    rows.append(full_row(total_tokens_per_second=1, cell="1", status="ok", score="mean"))
    found, _ = bench.plot_sweeps.budget_lines(rows)
    shown = {line.label: [(point.x, point.figures["throughput"][1]) for point in line.points]
             for line in found}
    plain, packed = [(10, 20), (50, 4), (100, 1)], [(2.5, 20), (12.5, 4)]
    assert shown == {f"cache_bits {bits}, eviction {policy}": points
                     for bits, points in ((16, plain), (4, packed)) for policy in ("h2o", "window")}
    figure = bench.plot_sweeps.draw_budget(rows)
    assert {"generated tokens/s", "KV cache, GB"} <= set(texts(figure))
    assert figure.axes[0].containers[0].lines[0].get_xdata().tolist() == [10, 50, 100]


def test_budgets_alone_are_one_line_without_a_legend(bench):
    (line,), _ = bench.plot_sweeps.budget_lines(
        [full_row(), run_row(), run_row(total_tokens_per_second=300)])
    assert line.label == "" and [point.x for point in line.points] == [20, 100]
    assert line.points[0].figures["throughput"] == (100, 200, 300)
    figure = bench.plot_sweeps.draw_budget([full_row(), run_row()])
    assert figure.axes[0].get_legend() is None
    (beside,), _ = bench.plot_sweeps.budget_lines([full_row(), run_row(kv_cache_bytes=10**9)])
    assert [(point.x, point.repeats) for point in beside.points] == [(100, 1)] * 2
    (alone,), _ = bench.plot_sweeps.budget_lines([full_row()])
    assert [point.x for point in alone.points] == [100]


def test_too_many_lines_are_refused(bench):
    rows = [run_row(gpu_batch_size=batch, hh_ratio=ratio / 100)
            for batch in (1, 2) for ratio in range(1, 12)]
    with pytest.raises(UserError, match="11 lines are too many .* --only hh_ratio=0.01"):
        bench.plot_sweeps.draw_batch(rows)
    few = bench.plotting.chosen(rows, ["hh_ratio=0.01", "hh_ratio=0.02", "gpu_batch_size=2"])
    assert [row["hh_ratio"] for row in few] == ["0.01", "0.02"]


# Quality


def quality_row(policy: str, budget: float, over: float, **others) -> dict[str, str]:
    """A row of the quality task: 100 prompt tokens, 100 that follow; 150 are cached on average."""
    row = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc1234", "host": "box", "model": "m",
           "dtype": "float32", "articles": "30", "prompt_tokens_mean": "100", "policy": policy,
           "variant": "", "budget_percent": budget, "cache_bits": 16, "cached_tokens_mean": 150,
           "kv_cache_bytes_per_sequence": 200 * 512, "perplexity_over_full": over}
    return {name: str(value) for name, value in (row | others).items()}


def test_quality_stands_against_bytes_held_and_read(bench):
    small = {"cached_tokens_mean": 30, "kv_cache_bytes_per_sequence": 30 * 512}
    rows = [quality_row("full", 100, 1), quality_row("h2o", 30, 1.2, **small),
            quality_row("h2o", 10, 1.5, cached_tokens_mean=10, kv_cache_bytes_per_sequence=5120),
            quality_row("h2o", 30, 9.9, **small), quality_row("h2o", 30, 1.3, variant="rolling"),
            quality_row("h2o", 30, 1.25, variant="8-bit", cache_bits=8, cached_tokens_mean=30,
                        kv_cache_bytes_per_sequence=30 * 2 * 68),
            quality_row("sparse-values", 20, 1.1), quality_row("recall", 30, 1.04),
            quality_row("recall", 30, 1.02, variant="of the text"),
            quality_row("recall", 30, 1.1, variant="2-bit index")]
    found = bench.plot_quality.points(rows)
    shares = {mode: [(round(point.held, 2), round(point.read, 2), point.over) for point in mine]
              for mode, mine in found.items()}
    # A key of 64 numbers of 16 bits takes 128 bytes, of a token's 256: 4 bits with two scales and
    # zero points take 40 of them, 2 bits 24.
    assert shares == {
        ("full", ""): [(100, 100, 1)],
        ("h2o", ""): [(5, 6.67, 1.5), (15, 20, 1.2)],
        ("h2o", "8-bit"): [(7.97, 10.63, 1.25)],
        ("sparse-values", ""): [(100, 60, 1.1)],
        ("recall", ""): [(115.62, 35.62, 1.04)],
        ("recall", "of the text"): [(115.62, 45.62, 1.02)],
        ("recall", "2-bit index"): [(109.38, 29.37, 1.1)]}
    figure = bench.plot_quality.draw(rows)
    assert len(figure.axes) == 2 and {"recall, of the text so far", "h2o, cache of 8 bits",
                                      "bytes that a token reads, % of the full cache's"} <= set(
        texts(figure))
    assert "Recall holds everything" in " ".join(figure.get_supxlabel().split())


def test_quality_of_several_models_or_without_a_full_cache_is_refused(bench):
    rows = [quality_row("full", 100, 1), quality_row("h2o", 20, 1.2)]
    with pytest.raises(UserError, match="several values of model: add --only model="):
        bench.plot_quality.points([*rows, quality_row("h2o", 20, 1.2, model="other")])
    with pytest.raises(UserError, match="no row of the full cache"):
        bench.plot_quality.points(rows[1:])


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


def test_bars_of_a_breakdown(bench, tmp_path):
    about = {"decode_steps": 8, "model": "opt", "gpu_batch_size": 4, "num_gpu_batches": 2,
             "prompt_len": 16.0, "gen_len": 5, "kv_cache_bytes": 1, "full_kv_cache_bytes": 4}
    figure = bench.plot_traces.draw_breakdown([write_trace(tmp_path / "a run.json", **about)])
    prefill, step = figure.axes
    assert [label.get_text() for label in prefill.get_yticklabels()] == ["compute", "disk->cpu",
                                                                         "idle"]
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
            for bar in step.patches]
    assert bars == [(0, 0, 0.125), (0, 0.125, 0.125), (1, 0, 0.125), (1, 0.125, 0.125),
                    (2, 0, 0.125), (2, 0.125, 0)]
    assert [bool(bar.get_hatch()) for bar in step.patches[:2]] == [False, True]
    shown = texts(figure)
    assert {"a decode step: 500 ms", "prefill: 2 s", "250 ms, 50 %", "milliseconds"} <= set(shown)
    label = next(each for each in shown if each.startswith("a run\n"))
    assert " ".join(label.split()) == (
        "a run opt, 4 x 2 sequences, 16+5 tokens KV cache: 25 % of a full one")


def test_memory_over_time(bench, tmp_path):
    path = write_trace(tmp_path / "run.json", model="opt", gpu_batch_size=4, num_gpu_batches=1,
                       prompt_len=16.0, gen_len=5, host="box", threads=2)
    figure = bench.plot_traces.draw_memory(path, limit=2_500_000_000)
    (axes,) = figure.axes
    process, peak, device, _, limit = axes.lines
    assert process.get_xdata().tolist() == [0, 2, 8]
    assert process.get_ydata().tolist() == pytest.approx([1, 4, 2])
    assert (peak.get_xdata()[0], peak.get_ydata()[0]) == (2, pytest.approx(4))
    assert device.get_ydata().tolist() == pytest.approx([0.1, 0.4, 0.2])
    assert set(limit.get_ydata()) == {2.5}
    spans = [(shade.get_x(), shade.get_width()) for shade in axes.patches]
    assert spans == [(1, 1), (2, 2), (5, 1), (6, 2)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["prefill", "decode", "process, resident, at most 4 GB",
                      "device, allocated, at most 0.4 GB", "limit, 2.5 GB"]
    assert "Measured on box, threads 2." in figure.get_supxlabel()
    assert not any("limit" in each for each in texts(bench.plot_traces.draw_memory(path))
                   if "cgroup" not in each)


# The command line


def main(bench, *argv) -> int:
    return exit_status(lambda: bench.plots.main([str(each) for each in argv]))


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"),
                                               ("pdf", b"%PDF")])
def test_every_format_is_written(bench, tmp_path, ending, start):
    out = tmp_path / f"memory.{ending}"
    trace = write_trace(tmp_path / "run.json")
    assert main(bench, "memory", "--trace", trace, "--limit", "5GB", "--out", out) == 0
    assert out.read_bytes().startswith(start)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", out.name}


@pytest.mark.parametrize("name", ["batch", "budget"])
def test_files_that_lack_columns_of_today_are_drawn(bench, tmp_path, name):
    rows = ROOT / "benchmarks/results/epyc-avx512bf16" / f"sweep_{name}.csv"
    assert main(bench, name, "--csv", rows, "--out", tmp_path / "a.svg") == 0


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
    (["systems", "--csv", "a.csv"], "required: --out"),
    (["pie", "--out", "a.png"], "invalid choice: 'pie'"),
    (["systems", "--csv", "a.csv", "--out", "a.txt"], "--out must name a .png, .svg, .pdf file"),
    (["systems", "--csv", "a.csv", "--out", "no/a.png"], "cannot write --out into the folder no"),
    (["systems", "--csv", "no.csv", "--out", "a.png"], "cannot read --csv no.csv"),
    (["systems", "--csv", "bytes.csv", "--out", "a.png"], "is not a CSV file in UTF-8"),
    (["systems", "--csv", "runs.csv", "--out", "a.png"], "has no column scenario"),
    (["batch", "--csv", "systems.csv", "--out", "a.png"], "has no column eviction"),
    (["budget", "--csv", "nothing.csv", "--out", "a.png"], "nothing.csv has no column eviction"),
    (["batch", "--csv", "empty.csv", "--out", "a.png"], "has no rows"),
    (["batch", "--csv", "short.csv", "--out", "a.png"], "line 2 has more or fewer cells"),
    (["batch", "--csv", "zero.csv", "--out", "a.png"],
     "column total_tokens_per_second of --csv has '0' where a number above 0 must be"),
    (["budget", "--csv", "text.csv", "--out", "a.png"], "column kv_cache_bytes of --csv has 'x'"),
    (["budget", "--csv", "failed.csv", "--out", "a.png"], "no row of a run that succeeded"),
    (["batch", "--csv", "runs.csv", "--only", "x", "--out", "a.png"], "takes COLUMN=VALUE"),
    (["batch", "--csv", "runs.csv", "--only", "no=1", "--out", "a.png"], "takes COLUMN=VALUE"),
    (["batch", "--csv", "runs.csv", "--only", "model=x", "--out", "a.png"],
     "no row has --only model=x"),
    (["memory", "--trace", "no.json", "--out", "a.png"], "cannot read the trace no.json"),
    (["memory", "--trace", "empty.json", "--out", "a.png"], "has no samples of memory"),
    (["memory", "--trace", "empty.json", "--limit", "much", "--out", "a.png"], "--limit takes"),
    (["breakdown", "--trace", "empty.json", "--out", "a.png"], "empty.json has no phases"),
    (["breakdown", "--trace", "runs.csv", "--out", "a.png"], "runs.csv is not JSON"),
])
def test_bad_input_is_one_line_and_no_figure(bench, compared, tmp_path, monkeypatch, capsys, argv,
                                             message):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "systems.csv", compared)
    write_csv(tmp_path / "runs.csv", [run_row()])
    write_csv(tmp_path / "zero.csv", [run_row(total_tokens_per_second=0)])
    write_csv(tmp_path / "text.csv", [run_row(kv_cache_bytes="x")])
    write_csv(tmp_path / "failed.csv", [run_row(status="failed")])
    (tmp_path / "empty.csv").write_text(",".join(CSV_COLUMNS) + "\n")
    (tmp_path / "nothing.csv").write_text("")
    (tmp_path / "short.csv").write_text(",".join(CSV_COLUMNS) + "\n1,2\n")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\n\xff")
    (tmp_path / "empty.json").write_text(json.dumps({"traceEvents": []}))
    before = set(tmp_path.iterdir())
    assert main(bench, *argv) == 2
    error_line(capsys.readouterr().err, message)
    assert set(tmp_path.iterdir()) == before
