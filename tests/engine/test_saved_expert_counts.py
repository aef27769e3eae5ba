"""Counts of chosen experts that are kept between runs."""

import logging

import pytest

from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.engine.expert_counts import MAX_TOKENS, MIN_TOKENS, load_counts, save_counts

LAYERS, PER_TOKEN = [3, 0, 3], 2


def choices(tokens: int) -> ExpertChoices:
    return ExpertChoices(((tokens, tokens, 0), (), (tokens, 0, tokens)), PER_TOKEN)


def test_counts_of_all_runs_are_added(tmp_path):
    file = tmp_path / "new" / "counts.json"
    assert load_counts(file, LAYERS, PER_TOKEN) is None
    save_counts(file, choices(MIN_TOKENS - 1))
    assert not file.exists(), "too few to say anything"
    for _ in range(2):
        save_counts(file, choices(MIN_TOKENS))
    assert load_counts(file, LAYERS, PER_TOKEN) == choices(2 * MIN_TOKENS)
    assert [path.name for path in file.parent.iterdir()] == ["counts.json"]


def test_old_counts_lose_weight(tmp_path):
    file = tmp_path / "counts.json"
    for _ in range(9):
        save_counts(file, choices(MAX_TOKENS))
    kept = load_counts(file, LAYERS, PER_TOKEN)
    assert MAX_TOKENS / 2 <= kept.counts[0][0] <= MAX_TOKENS


@pytest.mark.parametrize("text", ["", "[[1", "7", "[1, 2, 3]", "[[1, 2], [], [3, 4]]", "{}",
                                  "[[1, 2, -3], [], [3, 4, 5]]", "[[1, 2, 3.5], [], [3, 4, 5]]",
                                  "[" * 100_000])
def test_damaged_counts_are_ignored_and_replaced(tmp_path, caplog, text):
    file = tmp_path / "counts.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_counts(file, LAYERS, PER_TOKEN) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged and ignored; the next counts replace it"]
    save_counts(file, choices(MIN_TOKENS))
    assert load_counts(file, LAYERS, PER_TOKEN) == choices(MIN_TOKENS)


def test_counts_need_no_writable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    save_counts(tmp_path / "file" / "counts.json", choices(MIN_TOKENS))
