"""Quality and memory studies: rows survive a stop, and errors are one line."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from helpers.programs import program
from helpers.read_back import read_csv
from helpers.selection import full_cases
from helpers.tiny_tokenizers import with_words

from flexgen_h2o.cli.command import exit_status


@pytest.fixture
def flags(tiny_model, tmp_path):
    """Of a run over two short articles; its rows go to rows.csv."""
    articles = tmp_path / "in.jsonl"
    articles.write_text("".join(json.dumps({"article": " ".join(
        f"w{place * step % 100 + 3}" for place in range(24))}) + "\n" for step in (3, 7)),
        encoding="utf-8")
    folder = with_words(tiny_model("llama").folder, tmp_path / "words")
    return ["--model", folder, "--input-path", str(articles), "--articles", "2", "--min-tokens",
            "16", "--max-tokens", "24", "--csv", str(tmp_path / "rows.csv")]


def stop_at(monkeypatch, study, call: int) -> None:
    """Ctrl-C as a model is opened for the time number `call`."""
    opened, real = itertools.count(1), study.LLM

    def open_model(*given, **options):
        if next(opened) == call:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(study, "LLM", open_model)


@pytest.mark.parametrize(("name", "before"), [
    ("rounding_quality", ["16"]), *full_cases(("quality_by_position", ["full"] * 4))])
def test_interrupted_study_keeps_its_rows(flags, monkeypatch, tmp_path, capsys, name, before):
    study = program(f"benchmarks/studies/{name}.py")
    monkeypatch.setattr(sys, "argv", [name, *flags])
    if name == "rounding_quality":
        monkeypatch.setattr(study, "ROUNDINGS", [(4, 32, False)])
    assert exit_status(study.main) == 0
    key = "cache" if name == "quality_by_position" else "bits"
    whole = read_csv(tmp_path / "rows.csv")
    assert [row[key] for row in whole][: len(before)] == before
    assert len(whole) == (20 if key == "cache" else 3)
    assert tuple(whole[0]) == study.COLUMNS
    stop_at(monkeypatch, study, 2)
    assert exit_status(study.main) == 130
    assert f"{tmp_path}/rows.csv.partial" in capsys.readouterr().err
    assert [row[key] for row in read_csv(tmp_path / "rows.csv.partial")] == before
    assert read_csv(tmp_path / "rows.csv") == whole
