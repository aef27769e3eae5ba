"""benchmarks/studies/quality.py: a run and its rows."""

from __future__ import annotations

import math

import pytest
import quality
import quality_study
from helpers.batch_jobs import write_lines
from helpers.read_back import read_csv


def test_a_run_has_a_row_for_each_configuration(words_model, tmp_path, capsys):
    texts = [" ".join(f"w{number % 100 + 3}" for number in range(count)) for count in (3, 24, 40)]
    articles = write_lines(tmp_path / "in.jsonl", [{"article": text} for text in texts])
    assert quality.main([
        "--input-path", articles, "--articles", "2", "--min-tokens", "10", "--max-tokens", "30",
        "--gen-len", "3", "--budgets", "50", "--csv", str(tmp_path / "out.csv"), "--model",
        words_model, "--device", "cpu", "--only", "h2o", "window"]) == 0
    rows = read_csv(tmp_path / "out.csv")
    assert tuple(rows[0]) == quality_study.COLUMNS
    policies = [row["policy"] for row in rows]
    assert policies[0] == "full" and {"h2o", "window"} == {*policies[1:]}
    assert {row["continuation_tokens"] for row in rows} == {"27"}
    full, h2o = rows[:2]
    assert (float(full["delta_nats"]), full["greedy_equal_share"]) == (0, "1")
    nats = float(h2o["delta_nats"])
    assert float(h2o["delta_nats_low"]) <= nats <= float(h2o["delta_nats_high"])
    assert float(h2o["perplexity_over_full"]) == pytest.approx(math.exp(nats), rel=1e-4)
    assert float(h2o["cached_tokens_mean"]) < float(full["cached_tokens_mean"])
    assert capsys.readouterr().err == ""
