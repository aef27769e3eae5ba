"""The figures of a run: formulas, union of intervals, projection, and the files they go to."""

from dataclasses import replace
from functools import partial

import pytest
from helpers.delays import run_together
from helpers.error_cases import refused
from helpers.fake_llm import run_stats
from helpers.internals import kept_intervals
from helpers.read_back import read_csv
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.cli.results import CSV_COLUMNS, append_csv
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.files import writing
from flexgen_h2o.files.rows import check_header
from flexgen_h2o.metrics import provenance
from flexgen_h2o.metrics.report import align_columns, fit_rows, format_bytes, stats_table
from flexgen_h2o.metrics.run_stats import RATES, RunStats
from flexgen_h2o.metrics.trace import LinkStats


def make_stats(**changes) -> RunStats:
    return run_stats(**{
        "model": "tiny", "num_parameters": 1_500_000, "num_prompts": 4, "prompt_tokens": 400,
        "generated_tokens": 44, "gpu_batch_size": 2, "num_gpu_batches": 2, "load_seconds": 0.5,
        "prefill_seconds": 2.0, "decode_seconds": 4.0, "step_seconds": [0.4] * 10,
        "peak_process_bytes": 10**9, "kv_cache_bytes": 10**6,
        "links": {"disk->cpu": (3 * 10**9, 1.5)}, **changes})


# RunStats


def test_rates_are_as_defined():
    stats = make_stats()
    assert [getattr(stats, name) for name in RATES] == [400 / 2, (44 - 4) / 4, 44 / 6, 0.4, 0.4]
    stats = make_stats(step_seconds=[0.5, 0.1, 0.2, 0.4])
    assert stats.latency_p50_seconds == pytest.approx(0.3)
    assert stats.latency_p95_seconds == pytest.approx(0.4 + 0.85 * 0.1)
    stats = make_stats(prefill_seconds=0.0, decode_seconds=0.0, step_seconds=[])
    assert all(getattr(stats, name) is None for name in RATES)
    assert "nan" not in stats_table(stats)


def test_runs_merge():
    """Sums, the larger of each peak, links by name; and a share of all slots."""
    first = make_stats(decode_slots=30, idle_slots=6, peak_device_bytes=7)
    second = make_stats(decode_slots=10, idle_slots=4, peak_device_bytes=3,
                        links={"disk->cpu": (10**9, 0.5), "cpu->disk": (5, 1.0)})
    both = first.merge(second)
    assert both == make_stats(
        num_prompts=8, prompt_tokens=800, generated_tokens=88, prefill_seconds=4.0,
        decode_seconds=8.0, step_seconds=[0.4] * 20, decode_slots=40, idle_slots=10,
        peak_device_bytes=7, links={"disk->cpu": (4 * 10**9, 2.0), "cpu->disk": (5, 1.0)})
    assert both.idle_share == 0.25 and make_stats().idle_share is None


def test_projection_extends_decode_by_the_mean_step():
    # Two blocks, each cut at 3 of 21 tokens: two decode steps a block were measured.
    stats = make_stats(generated_tokens=12, step_seconds=[0.1, 0.3, 0.1, 0.3], decode_seconds=0.8)
    projected = stats.project(cut=3, gen_len=21)
    assert projected == replace(stats, projected=True, generated_tokens=4 * 21,
                                decode_seconds=pytest.approx(0.2 * 20 * 2))
    assert projected.decode_tokens_per_second == pytest.approx(stats.decode_tokens_per_second)
    stats = make_stats(generated_tokens=4, step_seconds=[], decode_seconds=0.0)
    refused(lambda: stats.project(cut=1, gen_len=8), match="no decode step")
    assert stats.project(cut=1, gen_len=1).generated_tokens == 4


@given(st.lists(st.integers(1, 30), min_size=2, max_size=9))
def test_wide_tables_are_split_between_columns(widths):
    cells = [letter * width for letter, width in zip("abcdefghi", widths, strict=False)]
    tables = align_columns([cells, cells], 80).split("\n\n")
    assert all(len(line) <= 80 for table in tables for line in table.splitlines())
    rows = [[table.splitlines()[row].split() for table in tables] for row in (0, 1)]
    assert all([row[0][0], *(cell for part in row for cell in part[1:])] == cells for row in rows)


@given(st.lists(st.text("ab-", min_size=1, max_size=40), min_size=1, max_size=30))
def test_long_rows_are_wrapped_and_can_be_pasted(words):
    text = " ".join(words)
    for name in ("policy", "memory"):
        shown = fit_rows(f"{name:<12} {text}", 13)
        assert all(len(line) <= 80 for line in shown.split("\n"))
        joined = shown.replace("\\\n" if name == "policy" else "\n", " ")
        assert joined.split() == [name, *words]


# LinkStats


interval = st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1]))


@given(st.lists(interval, min_size=1, max_size=40))
def test_busy_time_is_the_union(intervals):
    links = LinkStats()
    for start, end in intervals:
        links.add("disk->cpu", 2, float(start), float(end))
    seconds = len({t for start, end in intervals for t in range(start, end)})
    assert links.totals() == {"disk->cpu": (2 * len(intervals), pytest.approx(seconds))}


def test_a_long_run_keeps_few_intervals():
    links = LinkStats()
    for index in range(5000):
        links.add("cpu->gpu", 1, index, index + 0.5)
    assert kept_intervals(links, "cpu->gpu") <= LinkStats.MAX_INTERVALS
    assert links.totals() == {"cpu->gpu": (5000, pytest.approx(2500))}


def test_links_add_up_from_many_threads():
    links = LinkStats()

    def work(first):
        for index in range(first, first + 500):
            links.add("gpu->cpu", 3, index, index + 1)

    run_together(*(partial(work, n * 500) for n in range(4)))
    assert links.totals() == {"gpu->cpu": (6000, pytest.approx(2000))}
    links.reset()
    assert links.totals() == {}


# CSV


def test_experts_in_the_row(tmp_path):
    assert make_stats().expert_hit_rate is None
    one = make_stats(expert_touches=9, expert_hits=2, expert_loads=6, expert_prefetches=1,
                     expert_bytes=4 * 10**9)
    both = one.merge(one)
    assert both.expert_hit_rate == 0.25 and both.expert_bytes == 8 * 10**9
    append_csv(tmp_path / "r.csv", replace(one, projected=True),
               RunConfig(expert_percent=(0, 50, 50), expert_slots=7))
    (row,) = read_csv(tmp_path / "r.csv")
    cells = [row[name] for name in ("expert_percent", "expert_slots", "expert_touches",
                                    "expert_hit_rate", "expert_loads", "expert_gb", "projected")]
    assert cells == ["0 50 50", "7", "9", "0.25", "6", "4", "true"]


def test_csv_rows(tmp_path):
    path = tmp_path / "r.csv"
    config = RunConfig(percent=(0, 50, 100, 0, 100, 0), gen_len=11, overlap=False)
    for model in ("a", "b, \"c\"\nd"):
        append_csv(path, make_stats(model=model), config)
    rows = read_csv(path)
    assert [row["model"] for row in rows] == ["a", "b, \"c\"\nd"]
    first = rows[0]
    assert tuple(first) == CSV_COLUMNS
    assert (first["weights_gpu"], first["weights_cpu"], first["weights_disk"]) == ("0", "50", "50")
    assert (first["overlap"], first["projected"], first["prompt_len"]) == ("false", "false", "100")
    assert (first["disk_to_cpu_gb"], first["disk_to_cpu_gb_per_s"]) == ("3", "2")
    assert (first["cpu_to_gpu_gb"], first["cpu_to_gpu_gb_per_s"]) == ("0", "")
    assert float(first["total_tokens_per_second"]) == pytest.approx(44 / 6, rel=1e-5)
    assert first["version"] and first["host"] and first["torch"] and first["date"]


def csv_of(tmp_path, **flags) -> dict[str, str]:
    config = RunConfig(**flags)
    stats = make_stats(full_kv_cache_bytes=4 * 10**6, kv_bytes_per_token=96,
                       weight_bits=config.resolved_weight_bits)  # as the engine says
    append_csv(tmp_path / "r.csv", stats, config)
    return read_csv(tmp_path / "r.csv")[0]


@pytest.mark.parametrize(("flags", "cells"), [
    ({"compress_cache": True, "key_bits": 8},
     {"weight_bits": "16", "cache_bits": "6", "key_bits": "8", "value_bits": "4"}),
    ({"model": "m.gguf"}, {"weight_bits": "auto"}),
    ({}, {"cache_bits": "16", "eviction": "full", "hh_ratio": "1", "recent_ratio": "",
          "num_heavy_hitter_tokens": "", "num_window_length": "", "score": "sum",
          "score_decay": "", "sink_tokens": "0", "enable_position_rolling": "false",
          "prefill_chunk": "", "full_kv_cache_bytes": "4000000", "kv_bytes_per_token": "96"}),
    ({"hh_ratio": [0.1, 1 / 3, 1], "recent_ratio": 0.5, "compress_cache": True},
     {"hh_ratio": "0.1 0.333333 1", "recent_ratio": "0.5", "eviction": "h2o", "cache_bits": "4",
      "compress_cache": "true"}),
    ({"hh_ratio": 0.2, "score": "decay", "cache_bits": 8, "sink_tokens": 2},
     {"score": "decay", "score_decay": "0.98", "cache_bits": "8", "compress_cache": "false",
      "sink_tokens": "2"}),
    ({"hh_long_seq": True}, {"eviction": "full", "sink_tokens": "0", "attn_sparsity": "1"})])
def test_csv_says_how_weights_and_cache_are_kept(tmp_path, flags, cells):
    row = csv_of(tmp_path, **flags)
    assert {name: row[name] for name in cells} == cells


def test_csv_header_is_written_once(tmp_path):
    path = tmp_path / "r.csv"
    path.touch()
    run_together(*[partial(append_csv, path, make_stats(), RunConfig())] * 8)
    assert [row["model"] for row in read_csv(path)] == ["tiny"] * 8
    path.write_text(path.read_text().rstrip("\n"))  # a missing newline is added
    append_csv(path, make_stats(), RunConfig())
    assert len(read_csv(path)) == 9
    path.write_text("date,speed\n1,2\n")
    refused(lambda: append_csv(path, make_stats(), RunConfig()), "other columns")
    refused(lambda: check_header(path, CSV_COLUMNS), "other columns")
    assert path.read_text() == "date,speed\n1,2\n"


@pytest.mark.parametrize(("info", "expected"), [
    ("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n\nprocessor\t: 1\nmodel name\t: other\n",
     "AMD EPYC 9R14"),
    ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n"
     "processor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
     "aarch64, CPU implementer 0x41, CPU part 0xd40"),
    ("", "aarch64")])
def test_processors_are_told_apart(tmp_path, monkeypatch, info, expected):
    """Rates that were measured on one are not taken for another's."""
    monkeypatch.setattr(provenance.platform, "processor", lambda: "")
    monkeypatch.setattr(provenance.platform, "machine", lambda: "aarch64")
    path = tmp_path / "cpuinfo"
    path.write_text(info)
    assert provenance.cpu_model(path) == expected


# Files


def test_two_writers_do_not_share_a_temporary_file(tmp_path, monkeypatch):
    """In two containers that share a folder they have one process number."""
    path = tmp_path / "out.txt"
    with writing.open_atomic(path) as first:
        with writing.open_atomic(path) as second:
            second.write("second")
        first.write("first")
    assert path.read_text() == "first"
    monkeypatch.setattr(writing.secrets, "token_hex", lambda nbytes: "drawn twice")
    with writing.open_atomic(path) as file:
        with pytest.raises(FileExistsError), writing.open_atomic(path):
            pass
        file.write("whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


# Sizes in messages


def test_sizes_have_a_suitable_unit():
    sizes = [0, 999, 1000, 1_500_000, 99_940_000, 24 * 10**9, 63_549_999_999]
    assert format_bytes(*sizes) == [
        "0 bytes", "999 bytes", "1.0 KB", "1.5 MB", "99.9 MB", "24.0 GB", "63.5 GB"]
    assert format_bytes(10**8, 10**8 - 1, 10**8) == [
        "100.000000 MB", "99.999999 MB", "100.000000 MB"]
    assert format_bytes(63_520_000_000, 63_480_000_000) == ["63.52 GB", "63.48 GB"]


@given(st.lists(st.integers(0, 2**41), min_size=2, max_size=5), st.integers(0, 3))
def test_different_sizes_read_differently_and_in_order(sizes, near):
    sizes.append(sizes[0] + near)
    scale = {"bytes": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    shown = format_bytes(*sizes)
    values = [float(number) * scale[unit] for number, unit in map(str.split, shown)]
    assert len(set(shown)) == len(set(sizes))
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    assert [values[i] for i in order] == sorted(values)
