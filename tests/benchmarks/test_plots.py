"""benchmarks/plots.py: the figure of quality."""

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


def quality_row(policy: str, budget: float, over: float) -> dict[str, str]:
    """A row of the quality task: 100 prompt tokens, 100 that follow; 150 are cached on average."""
    row = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc1234", "host": "box", "model": "m",
           "dtype": "float32", "articles": "30", "prompt_tokens_mean": "100", "policy": policy,
           "variant": "", "budget_percent": budget, "cache_bits": 16, "cached_tokens_mean": 150,
           "kv_cache_bytes_per_sequence": 200 * 512, "perplexity_over_full": over}
    return {name: str(value) for name, value in row.items()}


def test_quality_figure_is_drawn_from_several_files(tmp_path):
    with benchmark_modules("plots") as bench:
        quality = write_csv(tmp_path / "quality.csv", [
            quality_row("full", 100, 1), quality_row("recall", 20, 1.04)])
        out = tmp_path / "quality.svg"
        bench.plots.main(["quality", "--csv", quality, quality, "--only", "articles=30",
                          "--out", str(out)])
        assert out.read_bytes().startswith(b"<?xml")
