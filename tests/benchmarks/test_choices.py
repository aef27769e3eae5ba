"""benchmarks/studies/choices.py: items and rows."""

from __future__ import annotations

import csv
import json

import pytest
from helpers.programs import BENCHMARKS, program


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "studies"))
    return program("benchmarks/studies/choices.py")


class CharacterTokenizer:
    """A token for each character."""

    def __call__(self, text: str) -> dict:
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}


@pytest.fixture
def articles(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({
        "article": f"Article: story {number} of a town.", "summary_gt": f"Town {number} " * number})
        + "\n" for number in range(1, 7)), encoding="utf-8")
    return path


def test_rows_of_every_cache_are_made_once(tiny_model, study, articles, tmp_path, monkeypatch,
                                           capsys):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(study.AutoTokenizer, "from_pretrained", lambda folder: CharacterTokenizer())
    args = study.parse_args(["--model", str(tiny_model("llama").folder), "--input-path",
                             str(articles), "--items", "5", "--csv", str(path)])
    study.run(args)
    study.run(args)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["cache"] for row in rows] == ["full", *study.CACHES]
    assert all(0 <= int(row["right"]) <= int(row["items"]) == 5 for row in rows)
    assert rows[0]["as_full"] == "5" and {len(row["which"]) for row in rows} == {5}
    nbytes = [int(row["kv_cache_bytes_per_sequence"]) for row in rows]
    assert all(each < 0.6 * nbytes[0] for each in nbytes[1:4]), "20 % of a prompt, and the rest"
    assert "20 %: " in capsys.readouterr().out
