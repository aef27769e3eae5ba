"""benchmarks/studies/stream_quality.py: rows by position, and when a cache has failed."""

from __future__ import annotations

import contextlib
import csv
import json
import types

import pytest
import stream_quality
import stream_segments as segments
from helpers.fake_llm import FakeLLM

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.metrics.run_stats import RunStats

H2O = H2OConfig(heavy_tokens=8, recent_tokens=8, positions="rolling")


class FakeStream:
    """A token costs 1 nat up to position 100, and past it, with the full cache, 9."""

    def __init__(self, h2o: H2OConfig | None):
        self.tokens, self._h2o = 0, h2o
        self.seen: list[int] = []

    def loglikelihood(self, tokens):
        start, self.tokens = self.tokens, self.tokens + len(tokens)
        self.seen += tokens
        late = self._h2o is None
        found = [-9.0 if late and place >= 100 else -1.0 for place in range(start, self.tokens)]
        self.cached_tokens = self.tokens if late else min(self.tokens, 16)
        self.stats = RunStats(
            model="fake", num_parameters=1, dtype="float32", device="cpu", num_prompts=1,
            prompt_tokens=0, generated_tokens=0, gpu_batch_size=1, num_gpu_batches=1,
            step_seconds=[place / 1000 for place in range(start, self.tokens)],
            kv_cache_bytes=100 * self.cached_tokens)
        return found if start else found[1:]


class FakeLLM(FakeLLM):
    def __init__(self, model="fake", **options):
        self.options = options
        self.model_config = types.SimpleNamespace(max_positions=100, plain_positions=100)
        self.tokenizer = lambda text, verbose: {"input_ids": [len(word) for word in text.split()]}
        FakeLLM.opened.append(self)

    @contextlib.contextmanager
    def stream(self, **options):
        self.asked = options
        self.given = FakeStream(self.options["h2o"])
        yield self.given


@pytest.fixture
def fake(monkeypatch):
    return FakeLLM.replace(monkeypatch)


@pytest.fixture
def articles(tmp_path) -> str:
    """Three articles, 300 words in all."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"article": "word " * 100}) + "\n" for _ in range(3)))
    return str(path)


def test_a_whole_run(fake, articles, tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert stream_quality.main([
        "--input-path", articles, "--tokens", "240", "--piece", "20", "--num-window-length", "16",
        "--policies", "h2o", "sink-window", "window", "full", "--csv", str(out)]) == 0
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == segments.COLUMNS
    its = segments.by_policy(rows)
    assert {policy: len(some) for policy, some in its.items()} == {
        "h2o": 12, "sink-window": 12, "window": 12, "full": 8}
    assert [llm.options["h2o"] for llm in fake.opened] == [
        H2O, H2OConfig(heavy_tokens=0, recent_tokens=12, sink_tokens=4, positions="rolling"),
        H2OConfig(heavy_tokens=0, recent_tokens=16, positions="rolling"), None]
    assert fake.opened[0].given.seen == [4] * 240
    assert all(row["date"] and row["version"] and row["host"] for row in rows)
    text = capsys.readouterr()
    assert text.err == ""
    lines = text.out.splitlines()
    assert [line.split()[0] for line in lines] == ["cache", "h2o", "sink-window", "window", "full"]
    assert lines[-1].split()[:5] == ["full", "160", "160", "2.718", "8103"]
    assert lines[-1].endswith("perplexity over 10 x the first 3 pieces', 3 pieces in a row")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv"]

    assert stream_quality.main(["--from-csv", str(out)]) == 0
    assert capsys.readouterr().out == text.out


@pytest.mark.parametrize(("flags", "message"), [
    ([], "give --input-path"),
    (["--input-path", "a", "--tokens", "1"], "--tokens must be at least 2"),
    (["--input-path", "a", "--policies", "h3o"], "each of --policies must be one of h2o, h2o-mean"),
    (["--input-path", "a", "--num-window-length", "4"], "leaves no recent tokens"),
])
def test_bad_flags_answer_in_one_line_and_leave_nothing(refuses_flags, flags, message):
    refuses_flags(stream_quality.main, flags, message)
