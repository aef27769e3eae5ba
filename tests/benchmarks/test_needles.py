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


@pytest.mark.parametrize("tokens", [120, 301])
def test_each_text_hides_the_numbers_that_are_asked_for(study, tokens):
    encode, hay = WordTokenizer(), list(range(1000, 1000 + 3 * tokens))
    tasks = study.make_tasks(hay, encode, tokens=tokens, texts=3)
    assert len(tasks) == 3 * len(study.QUESTIONS)
    seen: list[int] = []
    for task in tasks:
        assert len(task.text) == tokens and len(task.answer) == 5
        needle = task.question + task.answer
        assert sum(task.text[at : at + len(needle)] == needle for at in range(tokens)) == 1
        for asked in study.ASKED:
            prompt, rest = task.parts(asked)
            assert prompt + rest == task.text + needle and rest[-5:] == task.answer
        if task.text[0] not in seen:
            seen += [token for token in task.text if token >= 1000]
    assert seen == hay[: len(seen)]  # the articles in order, each once


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
