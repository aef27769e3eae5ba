"""benchmarks/studies/needles.py: texts with needles, and rows."""

from __future__ import annotations

import csv
import json

import pytest
from helpers.programs import BENCHMARKS, program


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "studies"))
    return program("benchmarks/studies/needles.py")


class WordTokenizer:
    """A token for each word or digit, numbered as they come."""

    def __init__(self):
        self.words: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        pieces = [piece for word in text.split()
                  for piece in (word.rstrip(".") if word[0].isdigit() else [word])]
        return {"input_ids": [self.words.setdefault(piece, 1 + len(self.words) % 100)
                              for piece in pieces]}


def test_rows_of_every_cache_are_made_once(tiny_model, study, tmp_path, monkeypatch, capsys):
    path, articles = tmp_path / "rows.csv", tmp_path / "in.jsonl"
    articles.write_text(json.dumps({"article": "word " * 300}), encoding="utf-8")
    monkeypatch.setattr(study.AutoTokenizer, "from_pretrained", lambda folder: WordTokenizer())
    args = study.parse_args(["--model", str(tiny_model("llama").folder), "--input-path",
                             str(articles), "--tokens", "100", "--texts", "1", "--asked", "later",
                             "--csv", str(path)])
    study.run(args)
    study.run(args)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["asked"], row["cache"]) for row in rows] == [("", "full")] + [
        ("later", cache) for cache in study.CACHES]
    nats = {(row["asked"], row["cache"]): float(row["answer_nats"]) for row in rows}
    assert all(len(row["which"]) == int(row["tasks"]) == 6 for row in rows)
    assert len(set(nats.values())) == len(nats)
    assert capsys.readouterr().out.count("100 tokens, ") == len(rows)
