"""benchmarks/studies/quality.py: articles, figures and rows."""

from __future__ import annotations

import csv
import json
import math
import random
import types

import pytest
import quality
import quality_study as measures
from helpers.fake_llm import FakeLLM
from quality_study import configurations

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import read_articles, select_articles, split_halves, strip_prompt
from flexgen_h2o.metrics import statistics
from flexgen_h2o.metrics.run_stats import RunStats


class FakeTokenizer:
    """A token for each word: its length."""

    def __call__(self, text: str, verbose: bool = True) -> dict:
        return {"input_ids": [len(word) for word in text.split()]}


class FakeLLM(FakeLLM):
    """Log-probabilities of -1 with the full cache and less with a smaller one; greedy tokens that
    are the full cache's up to a place that the budget sets."""

    def __init__(self, model: str, **options):
        FakeLLM.opened.append({"model": model, **options})
        h2o = options["h2o"]
        self.ratio = 1.0 if h2o is None else (h2o.heavy_ratio or 0) + h2o.recent_ratio
        self.model, self.policy = model, options["policy"]
        self.tokenizer = FakeTokenizer()
        self.model_config = types.SimpleNamespace(rope=None if model == "learned" else "rotary")

    def loglikelihood(self, pairs):
        draw = random.Random(0)
        loss = 1 - self.ratio
        found = [[-1 - loss * draw.random() for _ in tail] for _, tail in pairs]
        self.stats = RunStats(
            model=self.model, num_parameters=1, dtype="float32", device="cpu",
            num_prompts=len(pairs), prompt_tokens=0, generated_tokens=0,
            gpu_batch_size=self.policy.gpu_batch_size, num_gpu_batches=1, kv_cache_bytes=6000)
        return found

    def generate(self, prompts, *, max_new_tokens, eos_token_id):
        assert eos_token_id == -1
        same = round(max_new_tokens * self.ratio)
        tokens = [0] * same + [1] * (max_new_tokens - same)
        return [types.SimpleNamespace(token_ids=tokens) for _ in prompts]


@pytest.fixture
def fake(monkeypatch):
    """The engine replaced; returns what each LLM was opened with."""
    return FakeLLM.replace(monkeypatch)


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def wrapped(text: str) -> str:
    return f"###\nArticle: {text}\n\nSummarize the above article in 1 sentence.\n"


@pytest.fixture
def articles(tmp_path) -> str:
    """Five articles of 3, 10, 11, 30 and 12 words."""
    return write(tmp_path / "in.jsonl", [{"article": wrapped("word " * n)}
                                         for n in (3, 10, 11, 30, 12)])


def test_articles_are_read_without_their_prompt(tmp_path):
    records = [{"article": wrapped("One.\u2028Two.")}, {"article": "Bare"}]
    path = write(tmp_path / "a.jsonl", records)
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n\n")
    assert read_articles(path) == ["One.\u2028Two.", "Bare"]
    assert strip_prompt("Article: stays. Summarize it.") == "Article: stays. Summarize it."


@pytest.mark.parametrize(("content", "message"), [
    (b"", "holds no articles"),
    (b"\xff\xfe", "is not UTF-8"),
    (b'{"article": "a"}\n{"article": \n', "line 2 is not JSON"),
    (b'{"article": "a"}\n\n{"text": "b"}\n', "line 3 has no text under the key `article`"),
    (b'{"article": "###\\nArticle: \\n\\nSummarize the above article in 1 sentence.\\n"}\n',
     "line 1 has no text"),
])
def test_invalid_article_files_are_errors(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_articles(str(path))


def test_articles_are_selected_and_truncated():
    texts = ["a", "b b b", "c c c c c c", "d d d d"]
    assert select_articles(texts, str.split, articles=2, min_tokens=3, max_tokens=4) == [
        ["b"] * 3, ["c"] * 4]
    with pytest.raises(UserError, match="has 2 articles of at least 4 tokens and 3 are needed"):
        select_articles(texts, str.split, articles=3, min_tokens=4, max_tokens=9)


def test_split_halves():
    assert split_halves([[1, 2, 3, 4], [5, 6, 7], [8, 9]]) == [
        ([1, 2], [3, 4]), ([5], [6, 7]), ([8], [9])]


def test_perplexity_of_probability_0_is_infinite():
    assert statistics.perplexity([[-1.0], [-math.inf]]) == math.inf
    assert statistics.perplexity([[-1e6]]) == math.inf


def test_bootstrap_interval_is_deterministic():
    draw = random.Random(1)
    sums, tokens = [draw.gauss(30, 20) for _ in range(30)], [300] * 30
    low, high = statistics.bootstrap_interval(sums, tokens)
    assert (low, high) == statistics.bootstrap_interval(sums, tokens)
    assert (low, high) != statistics.bootstrap_interval(sums, tokens, seed=1)
    mean = sum(sums) / sum(tokens)
    error = math.sqrt(sum((value / 300 - mean) ** 2 for value in sums) / 30 / 30)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), rel=0.1)


def test_a_whole_run(fake, articles, tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert quality.main(["--input-path", articles, "--articles", "3", "--min-tokens", "10",
                         "--max-tokens", "20", "--gen-len", "10", "--budgets", "20", "50",
                         "--csv", str(out), "--gpu-batch-size", "2"]) == 0
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == measures.COLUMNS
    names = [one.name for one in configurations([20, 50])]
    assert [row["configuration"] for row in rows] == names
    full, h2o = rows[0], rows[1]
    assert float(full["perplexity"]) == pytest.approx(math.e, rel=1e-5)
    # Articles of 10, 11 and 20 tokens (of 30).
    wanted = {"prompt_tokens_mean": "6.66667", "continuation_tokens": "21", "policy": "h2o",
              "budget_percent": "20", "heavy_tokens_mean": "1", "cached_tokens_mean": "2",
              "greedy_equal_share": "0.2", "common_prefix_mean": "2"}
    assert {name: h2o[name] for name in wanted} == wanted
    nats = float(h2o["delta_nats"])
    assert 0 < float(h2o["delta_nats_low"]) < nats < float(h2o["delta_nats_high"]) < 0.8
    assert float(h2o["perplexity_over_full"]) == pytest.approx(math.exp(nats), rel=1e-4)
    assert all(row["date"] and row["version"] and row["host"] for row in rows)
    text = capsys.readouterr()
    assert text.err == ""
    assert [line.split("  ")[0] for line in text.out.splitlines()] == ["cache", *names]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv"]


@pytest.mark.parametrize(("flags", "message"), [
    ([], "give --input-path"),
    (["--input-path", "a", "--articles", "0"], "--articles must be at least 1"),
    (["--input-path", "a", "--budgets", "101"], "each of --budgets must be at most 100"),
    (["--input-path", "a", "--csv", "./a"], "name the same file"),
])
def test_bad_flags_answer_in_one_line_and_leave_nothing(refuses_flags, flags, message):
    refuses_flags(quality.main, flags, message)
