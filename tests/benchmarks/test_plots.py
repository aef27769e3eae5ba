"""benchmarks/plots.py: each figure is drawn."""

from __future__ import annotations

import csv
from pathlib import Path

from helpers.programs import benchmark_modules


def write_csv(path: Path, rows: list[dict]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def system_row(columns, system: str, rate: float | None = None, **others) -> dict[str, str]:
    """A row of a comparison: its roofline is twice as fast."""
    row = dict.fromkeys(columns, "") | {
        "date": "2026-11-21T10:00:00+00:00", "host": "box", "cpu": "a CPU", "threads": "2",
        "version": "0.1.0", "commit": "abc1234", "scenario": "small", "model": "opt-1.3b",
        "dtype": "bfloat16", "prompt_len": "512", "gen_len": "9", "memory_gb": "2.5",
        "system": system, "documented": "README.md, --percent auto", "at": "best", "batch": "4",
        "status": "ok", "projected": "False", "versions": "flexgen_h2o 0.1.0 torch 2.13.0"}
    if rate is not None:
        total = 4 * 9 / rate
        row |= {"tokens_per_s": str(rate), "prefill_roofline_s": str(total / 4),
                "decode_step_roofline_s": str(total / 4 / 8)}
    return row | others


def quality_row(policy: str, budget: float, over: float) -> dict[str, str]:
    """A row of the quality task: 100 prompt tokens, 100 that follow; 150 are cached on average."""
    row = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc1234", "host": "box", "model": "m",
           "dtype": "float32", "articles": "30", "prompt_tokens_mean": "100", "policy": policy,
           "variant": "", "budget_percent": budget, "cache_bits": 16, "cached_tokens_mean": 150,
           "kv_cache_bytes_per_sequence": 200 * 512, "perplexity_over_full": over}
    return {name: str(value) for name, value in row.items()}


def test_every_figure_is_drawn_by_its_name(tmp_path):
    """Of systems that ran, that ran out of memory and that did not start."""
    with benchmark_modules("plots", "comparison") as bench:
        columns = bench.comparison.COLUMNS
        systems = write_csv(tmp_path / "systems.csv", [
            system_row(columns, "slow", 0.5, projected="True"), system_row(columns, "h2o", 8),
            system_row(columns, "big", status="out of memory", reason="killed at the limit"),
            system_row(columns, "absent", status="refused", reason="x is not installed")])
        quality = write_csv(tmp_path / "quality.csv", [
            quality_row("full", 100, 1), quality_row("recall", 20, 1.04)])
        for name, flags in (("systems", [systems, "--scenario", "small", "--at", "best"]),
                            ("quality", [quality, quality, "--only", "articles=30"])):
            out = tmp_path / f"{name}.svg"
            bench.plots.main([name, "--csv", *flags, "--out", str(out)])
            assert out.read_bytes().startswith(b"<?xml")
