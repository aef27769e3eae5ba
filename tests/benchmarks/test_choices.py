"""benchmarks/studies/choices.py: items as they are cut into tokens, what counts as right, rows."""

from __future__ import annotations

import csv
import json

import pytest
from helpers.programs import BENCHMARKS, program

from flexgen_h2o.errors import UserError


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


def test_an_item_is_cut_where_its_article_ends(study):
    items = [{"article": "a b", "choices": ["x", "yz"], "gold": 1}]
    (item,) = study.make_items(items, CharacterTokenizer())
    context = "Article: a b\nSummary:"
    assert item.prompt == CharacterTokenizer()(context)["input_ids"]
    assert item.choices == [CharacterTokenizer()(text)["input_ids"] for text in (" x", " yz")]
    assert (item.lengths, item.gold) == ([1, 2], 1)
    assert not item.right([-1.0, -1.5]) and item.right_by_length([-1.0, -1.5])


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


def test_items_of_another_input_have_rows_of_their_own(tiny_model, study, articles, tmp_path,
                                                       monkeypatch):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(study.AutoTokenizer, "from_pretrained", lambda folder: CharacterTokenizer())
    args = study.parse_args(["--model", str(tiny_model("llama").folder), "--input-path",
                             str(articles), "--items", "5", "--caches", "--csv", str(path)])
    study.run(args)
    articles.write_text(articles.read_text(encoding="utf-8").replace("story", "tales"),
                        encoding="utf-8")
    study.run(args)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["cache"] for row in rows] == ["full", "full"]
    assert len({row["input_digest"] for row in rows}) == 2


def test_a_file_of_other_columns_is_not_gone_on_with(study, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("items,right\n5,3\n", encoding="utf-8")
    with pytest.raises(UserError, match="rows.csv has other columns .* choose a new --csv"):
        study.GrowingTable(str(path), study.COLUMNS, study.KEY, {})
    with pytest.raises(UserError, match="cannot write --csv into the folder"):
        study.GrowingTable(str(tmp_path / "none" / "a.csv"), study.COLUMNS, study.KEY, {})
    assert path.read_text(encoding="utf-8") == "items,right\n5,3\n"


def test_a_choice_is_scored_as_in_a_text_of_its_own(tiny_model, study, articles):
    """By transformers, where nothing is cut."""
    import torch

    folder = str(tiny_model("llama").folder)
    model = tiny_model("llama").model
    items = study.make_items(
        [{"article": "some words", "choices": ["one", "another"], "gold": 0}], CharacterTokenizer())
    (found,), _ = study.choice_scores(items, folder, None)
    for choice, score in zip(items[0].choices, found, strict=True):
        ids = torch.tensor([items[0].prompt + choice])
        logits = model(ids).logits[0, -len(choice) - 1 : -1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(choice)[:, None]).sum()
        assert score == pytest.approx(float(expected), abs=1e-3)


def test_too_few_articles_and_no_kvpress_are_told(study, articles, monkeypatch):
    given = ["--input-path", str(articles), "--model", "m"]
    with pytest.raises(UserError, match="has 6 articles: lower --items 200"):
        study.run(study.parse_args(given))
    with pytest.raises(UserError, match="--items must be 4 or more"):
        study.run(study.parse_args([*given, "--items", "3"]))
    monkeypatch.setattr(study, "kvpress", None)
    with pytest.raises(UserError, match="needs kvpress"):
        study.run(study.parse_args([*given, "--presses", "TOVA"]))
