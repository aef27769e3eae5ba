"""benchmarks/check_quality.py: rows and bounds."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.programs import benchmark_modules
from helpers.read_back import read_csv
from helpers.tiny_tokenizers import with_words

from flexgen_h2o.cli.command import exit_status


@pytest.fixture
def gate(monkeypatch):
    """The command, run on a tiny model with short texts."""
    with benchmark_modules("check_quality") as found:
        for name, value in {"SCORED": 6, "LENGTHS": {"short": 16, "long": 40}, "LONG_TEXTS": 2,
                            "TOP": 20, "GENERATED": 3}.items():
            monkeypatch.setattr(found.check_quality, name, value)
        yield found.check_quality


@pytest.fixture
def run(gate, monkeypatch, tiny_model, tmp_path):
    """A function that runs the command with some modes and returns its status and rows."""
    articles = tmp_path / "in.jsonl"
    articles.write_text("".join(json.dumps({"article": " ".join(
        f"w{place * step % 100 + 3}" for place in range(24))}) + "\n" for step in (3, 7, 9)),
        encoding="utf-8")
    folder = str(with_words(tiny_model("llama").folder, tmp_path / "words"))
    monkeypatch.setattr(gate, "fetched", lambda name, into: folder)

    def run(*modes):
        monkeypatch.setattr(sys, "argv", [
            "check_quality", "--models", gate.SMOLLM2, "--input-path", str(articles),
            "--articles", "2", "--csv", str(tmp_path / "rows.csv"), "--modes", *modes])
        status = exit_status(gate.main)
        return status, read_csv(tmp_path / "rows.csv")

    return run


def test_a_row_for_each_mode_and_length(gate, run):
    status, rows = run("weights-8", "h2o-20")
    assert status == 0 and tuple(rows[0]) == gate.COLUMNS
    assert [(row["mode"], row["context_tokens"]) for row in rows] == [
        ("full", "10"), ("weights-8", "10"), ("h2o-20", "10"), ("full", "34"), ("h2o-20", "34")]
    full, coded, evicted, *_ = rows
    assert full["factor"] == full["top1_agreement"] == "1" and float(full["kl_nats"]) == 0
    assert 0 <= float(coded["kl_nats"]) < float(evicted["kl_nats"])
    assert coded["held"] == "yes" and evicted["held"] == full["held"] == ""
    assert float(full["bits_per_cached_element"]) == 16 > float(coded["bits_per_weight"])


def test_a_mode_that_exceeds_its_bound_fails_the_command(gate, run, monkeypatch, capsys):
    strict = [gate.Mode("full", long=True),
              gate.Mode("cache-4", {"cache_bits": 4}, {"full": {gate.SMOLLM2: 0.5}})]
    monkeypatch.setattr(gate, "modes", lambda: strict)
    status, rows = run("cache-4")
    assert status == 2 and [row["held"] for row in rows] == ["", "no", ""]
    error = capsys.readouterr().err
    assert "1 modes exceed their bounds" in error
    assert "smollm2-135m cache-4 (10 + 6 tokens)" in error
