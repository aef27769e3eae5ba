"""The quality task: its articles, its list of caches, its arithmetic, its files, its command."""

from __future__ import annotations

import csv
import json
import math
import random
import sys
import types

import pytest
import quality
import quality as quality_plot
import quality_study as measures
from helpers.error_cases import command_refused
from helpers.fake_llm import FakeLLM
from quality_study import GROUPS, Configuration, configurations

from flexgen_h2o import LLM, Policy
from flexgen_h2o.cli.launch import llm_arguments
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import read_articles, select_articles, split_halves, strip_prompt
from flexgen_h2o.metrics import statistics
from flexgen_h2o.metrics.run_stats import RunStats

FULL = Configuration("full", 100)
H2O = Configuration("h2o", 20)


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


# --- articles


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
    (b'["article"]\n', "line 1 has no text"),
    (b'{"article": 7}\n', "line 1 has no text"),
    (b'{"article": "###\\nArticle: \\n\\nSummarize the above article in 1 sentence.\\n"}\n',
     "line 1 has no text"),
])
def test_a_bad_file_of_articles_is_told_in_one_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_articles(str(path))


def test_the_first_articles_that_are_long_enough_are_chosen_and_cut():
    texts = ["a", "b b b", "c c c c c c", "d d d d"]
    assert select_articles(texts, str.split, articles=2, min_tokens=3, max_tokens=4) == [
        ["b"] * 3, ["c"] * 4]
    with pytest.raises(UserError, match="has 2 articles of at least 4 tokens and 3 are needed"):
        select_articles(texts, str.split, articles=3, min_tokens=4, max_tokens=9)


def test_halves_lose_nothing():
    assert split_halves([[1, 2, 3, 4], [5, 6, 7], [8, 9]]) == [([1, 2], [3, 4]), ([5], [6, 7]),
                                                         ([8], [9])]


# --- the caches


def test_every_policy_is_measured_at_every_budget_and_variants_at_two():
    found = configurations([40, 5, 20, 20])
    assert found[0] == FULL
    assert [one.name for one in found] == [
        "full",
        "h2o 5 %", "h2o 20 %", "h2o 40 %", "window 5 %", "window 20 %", "window 40 %",
        "sink-window 5 %", "sink-window 20 %", "sink-window 40 %",
        "h2o 5 % of the text", "h2o 5 % mean", "h2o 5 % decay", "h2o 5 % caote", "h2o 5 % rolling",
        "h2o 5 % chunks of 16", "h2o 5 % chunks of 64",
        "recall 5 %", "recall 5 % of the text", "sparse-values 5 %",
        "h2o 20 % of the text", "h2o 20 % mean", "h2o 20 % decay", "h2o 20 % caote",
        "h2o 20 % rolling", "h2o 20 % chunks of 16", "h2o 20 % chunks of 64",
        "recall 20 %", "recall 20 % of the text", "sparse-values 20 %", "recall 20 % 2-bit index",
        "h2o 20 % 8-bit", "h2o 20 % 4-bit",
        "full, 12-bit weights",
        "full, 8-bit weights", "full, 8-bit weights and 8-bit activations",
        "full, 4-bit weights", "full, 4-bit weights and 8-bit activations",
        "h2o 20 %, 4-bit weights", "h2o 20 % 4-bit, 4-bit weights"]
    assert len({(one.policy, one.budget, one.variant) for one in found}) == len(found)
    assert {one.group for one in found} == set(GROUPS)


def test_only_some_are_measured_and_the_full_cache_always():
    assert configurations([20, 50], ["window"]) == [
        FULL, Configuration("window", 20), Configuration("window", 50)]
    assert [one.cache_bits for one in configurations([20, 50], ["bits"])] == [16, 8, 4]
    assert configurations([50], ["bits", "score"]) == [FULL]
    assert [(one.weight_bits, one.cache_bits) for one in configurations([20], ["weights"])] == [
        (16, 16), (12, 16), (8, 16), (8, 16), (4, 16), (4, 16), (4, 16), (4, 4)]
    assert [one.variant for one in configurations([50], ["weights"])] == [
        "", "12-bit weights", "8-bit weights", "8-bit weights and 8-bit activations",
        "4-bit weights", "4-bit weights and 8-bit activations"]


@pytest.mark.parametrize(("one", "h2o", "sizes"), [
    (FULL, None, None),
    (H2O, H2OConfig(heavy_ratio=0.1, recent_ratio=0.1), (10, 10, 0)),
    (Configuration("h2o", 1), H2OConfig(heavy_ratio=0.005, recent_ratio=0.005), (1, 1, 0)),
    (Configuration("window", 20), H2OConfig(heavy_tokens=0, recent_ratio=0.2), (0, 21, 0)),
    (Configuration("sink-window", 100),
     H2OConfig(heavy_tokens=0, recent_ratio=1.0, sink_tokens=4), (0, 105, 4)),
    (Configuration("h2o", 20, score="mean", positions="rolling"),
     H2OConfig(heavy_ratio=0.1, recent_ratio=0.1, score="mean", positions="rolling"), (10, 10, 0)),
])
def test_a_configuration_in_the_words_of_the_engine(one, h2o, sizes):
    assert one.arguments() == {"h2o": h2o, "cache_bits": 16, "weight_bits": 16}
    size = one.sizes(105)
    assert size is None if sizes is None else (size.heavy, size.recent, size.sinks) == sizes


def test_the_mean_of_cached_tokens():
    assert FULL.cached(100, 3) == 101.5  # 101, 102; the third new token is never cached
    assert FULL.cached(100, 1) == 100
    assert H2O.cached(100, 50) == 20
    assert Configuration("sink-window", 100).cached(10, 7) == pytest.approx(
        (11 + 12 + 13 + 14 + 14 + 14) / 6)


# --- the arithmetic


def measurement(log_probs, tokens) -> measures.Measurement:
    return measures.Measurement(log_probs, tokens, None, 1.0)


def test_figures_by_hand():
    full = measurement([[-1.0, -2.0], [-3.0]], [[1, 2, 3, 4], [5, 6, 7, 8]])
    less = measurement([[-1.0, -3.0], [-5.0]], [[1, 2, 9, 4], [0, 6, 7, 8]])
    found = measures.figures(less, full)
    assert found["perplexity"] == pytest.approx(math.exp(3))
    assert found["perplexity_over_full"] == pytest.approx(math.e)
    assert found["delta_nats"] == pytest.approx(1.0)  # 3 nats over 3 tokens
    # Of two articles drawn: both the first, 2 / 4 nats a token; both the second, 2 / 1.
    assert (found["delta_nats_low"], found["delta_nats_high"]) == pytest.approx((0.5, 2.0))
    assert found["greedy_equal_share"] == 6 / 8
    assert found["common_prefix_mean"] == 1.0  # 2 and 0


def test_the_full_cache_beside_itself():
    full = measurement([[-1.0, -2.0], [-3.0]], [[1, 2], [3, 4]])
    assert measures.figures(full, full) == {
        "perplexity": pytest.approx(math.exp(2)), "perplexity_over_full": 1.0, "delta_nats": 0.0,
        "delta_nats_low": 0.0, "delta_nats_high": 0.0, "greedy_equal_share": 1.0,
        "common_prefix_mean": 2.0}


def test_a_token_of_probability_0_makes_it_infinite():
    assert statistics.perplexity([[-1.0], [-math.inf]]) == math.inf
    assert statistics.perplexity([[-1e6]]) == math.inf


def test_the_bootstrap_is_the_same_every_time_and_holds_the_mean():
    draw = random.Random(1)
    sums, tokens = [draw.gauss(30, 20) for _ in range(30)], [300] * 30
    low, high = statistics.bootstrap_interval(sums, tokens)
    assert (low, high) == statistics.bootstrap_interval(sums, tokens)
    assert (low, high) != statistics.bootstrap_interval(sums, tokens, seed=1)
    mean = sum(sums) / sum(tokens)
    error = math.sqrt(sum((value / 300 - mean) ** 2 for value in sums) / 30 / 30)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), rel=0.1)


# --- the command, with the engine replaced

COMMAND = ["--articles", "3", "--min-tokens", "10", "--max-tokens", "20", "--gen-len", "10"]


def run(articles, *extra) -> int:
    return quality.main(["--input-path", articles, *COMMAND, *map(str, extra)])


def test_a_whole_run(fake, articles, tmp_path, capsys):
    out = tmp_path / "out.csv"
    assert run(articles, "--budgets", 20, 50, "--csv", out, "--gpu-batch-size", 2) == 0
    with open(out, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == measures.COLUMNS
    names = [one.name for one in configurations([20, 50])]
    assert [row["configuration"] for row in rows] == names
    full, h2o = rows[0], rows[1]
    assert float(full["perplexity"]) == pytest.approx(math.e, rel=1e-5)
    assert [full[name] for name in ("perplexity_over_full", "delta_nats", "heavy_tokens_mean",
                                    "sink_tokens", "score", "greedy_equal_share")] == [
        "1", "0", "", "", "", "1"]
    # Articles of 10, 11 and 20 tokens (of 30).
    assert [h2o[name] for name in (
        "articles", "prompt_tokens_mean", "continuation_tokens", "gen_len", "policy",
        "budget_percent", "heavy_tokens_mean", "recent_tokens_mean", "sink_tokens", "score",
        "positions", "cache_bits", "weight_bits", "cached_tokens_mean",
        "kv_cache_bytes_per_sequence", "greedy_equal_share", "common_prefix_mean", "model",
        "dtype", "device")] == [
        "3", "6.66667", "21", "10", "h2o", "20", "1", "1", "0", "sum", "original", "16", "16",
        "2", "3000", "0.2", "2", "smollm2-135m", "float32", "cpu"]
    nats = float(h2o["delta_nats"])
    assert 0 < float(h2o["delta_nats_low"]) < nats < float(h2o["delta_nats_high"]) < 0.8
    assert float(h2o["perplexity_over_full"]) == pytest.approx(math.exp(nats), rel=1e-4)
    assert all(row["date"] and row["version"] and row["host"] for row in rows)
    text = capsys.readouterr()
    assert text.err == ""
    assert [line.split("  ")[0] for line in text.out.splitlines()] == ["cache", *names]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv"]

    assert quality.main(["--from-csv", str(out)]) == 0  # the same table, of six digits each
    assert capsys.readouterr().out == text.out


def test_what_the_engine_is_opened_with(fake, articles):
    assert run(articles, "--only", "bits", "weights", "--model", "m", "--path", "p",
               "--device", "cpu", "--dtype", "bfloat16", "--gpu-batch-size", 7) == 0
    assert fake.opened == [
        llm_arguments(RunConfig()) |
        {"model": "m", "path": "p", "device": "cpu", "dtype": "bfloat16", "progress": False,
         "policy": Policy(gpu_batch_size=7), "h2o": h2o, "cache_bits": bits, "weight_bits": weights,
         "activation_bits": activations}
        for h2o, bits, weights, activations in (
            (None, 16, 16, 16), (H2O.h2o(), 8, 16, 16), (H2O.h2o(), 4, 16, 16),
            (None, 16, 12, 16), (None, 16, 8, 16), (None, 16, 8, 8), (None, 16, 4, 16),
            (None, 16, 4, 8), (H2O.h2o(), 16, 4, 16), (H2O.h2o(), 4, 4, 16))]


def without(path, *columns) -> None:
    """Make a CSV file one of an earlier version, without some columns."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in columns:
            del row[column]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("columns", [["prompt_chunk"], ["prompt_chunk", "weight_bits"]])
def test_files_of_earlier_versions_are_read(fake, articles, tmp_path, capsys, columns):
    out = tmp_path / "out.csv"
    assert run(articles, "--only", "bits", "window", "--csv", out) == 0
    now = measures.read_rows(str(out))
    assert {row["weight_bits"] for row in now} == {16}
    without(out, *columns)
    assert measures.read_rows(str(out)) == now
    capsys.readouterr()
    assert quality.main(["--from-csv", str(out)]) == 0
    assert capsys.readouterr().out == measures.table(now) + "\n"


def test_learned_positions_do_not_roll(fake, articles, capsys):
    assert run(articles, "--model", "learned", "--only", "positions", "score") == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["cache", "full", "h2o 5 % mean", "h2o 5 % decay", "h2o 5 % caote",
                     "h2o 20 % mean", "h2o 20 % decay", "h2o 20 % caote"]


def test_a_run_that_stops_keeps_its_rows(fake, articles, tmp_path, monkeypatch, capsys):
    out, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"
    out.write_text("older")
    command = (articles, "--csv", out, "--only", "window")
    generate = fake.generate

    def stop(self, *arguments, **options):
        if len(fake.opened) == 3:
            raise failure
        return generate(self, *arguments, **options)

    monkeypatch.setattr(fake, "generate", stop)
    failure, fake.opened = UserError("too small a\nmachine"), []
    assert run(*command) == 2
    assert capsys.readouterr().err == (
        f"error: too small a machine (rows measured before that: {partial})\n")
    assert len(measures.read_rows(str(partial))) == 2
    failure, fake.opened = KeyboardInterrupt(), []
    assert run(*command) == 130
    assert capsys.readouterr().err == f"interrupted (rows measured before that: {partial})\n"
    assert out.read_text() == "older"
    monkeypatch.setattr(fake, "generate", generate)
    assert run(*command) == 0
    assert len(measures.read_rows(str(out))) == 6 and not partial.exists()


@pytest.mark.parametrize(("flags", "message"), [
    ([], "give --input-path"),
    (["--input-path", "nope.jsonl"], "cannot read --input-path nope.jsonl"),
    (["--input-path", "a", "--from-csv", "b"], "--input-path has no effect with --from-csv"),
    (["--input-path", "a", "--nonsense"], "unknown flag"),
    (["--input-path", " "], "--input-path must be text that is not empty"),
    (["--input-path", "a", "--articles", "0"], "--articles must be at least 1"),
    (["--input-path", "a", "--articles", "x"], "invalid int value"),
    (["--input-path", "a", "--min-tokens", "1"], "--min-tokens must be at least 2"),
    (["--input-path", "a", "--max-tokens", "1"], "--max-tokens must be at least 2"),
    (["--input-path", "a", "--gen-len", "0"], "--gen-len must be at least 1"),
    (["--input-path", "a", "--gpu-batch-size", "0"], "--gpu-batch-size must be at least 1"),
    (["--input-path", "a", "--dtype", "int4"], "--dtype must be one of"),
    (["--input-path", "a", "--device", "tpu"], "--device must be"),
    (["--input-path", "a", "--budgets"], "expected at least one argument"),
    (["--input-path", "a", "--budgets", "20", "0"], "each of --budgets must be greater than 0"),
    (["--input-path", "a", "--budgets", "101"], "each of --budgets must be at most 100"),
    (["--input-path", "a", "--budgets", "nan"], "each of --budgets must be a finite number"),
    (["--input-path", "a", "--only", "heavy"], "each of --only must be one of full, h2o"),
    (["--input-path", "a", "--plot", "a.txt"], "--plot must name a .png"),
    (["--input-path", "a", "--csv", "./a"], "name the same file"),
    (["--input-path", "a", "--csv", "no/such/folder.csv"], "cannot write --csv into the folder"),
    (["--input-path", "a", "--csv", "."], "--csv . is not a regular file"),
    (["--input-path", "a", "--budgets", "5", "--only", "h2o", "bits"],
     "--only bits measures nothing at these --budgets: add 20"),
    (["--from-csv", "a", "--articles", "3"], "--articles has no effect with --from-csv"),
    (["--from-csv", "nope.csv"], "cannot read --from-csv nope.csv"),
])
def test_bad_flags_answer_in_one_line_and_leave_nothing(refuses_flags, flags, message):
    refuses_flags(quality.main, flags, message)


def test_too_few_articles_leave_nothing(fake, articles, tmp_path, capsys):
    assert run(articles, "--articles", 9, "--csv", tmp_path / "out.csv") == 2
    assert capsys.readouterr().err == (
        "error: --input-path has 4 articles of at least 10 tokens and 9 are needed: "
        "lower --articles or --min-tokens\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_model_without_a_tokenizer_is_refused(fake, articles, monkeypatch, capsys):
    monkeypatch.setattr(FakeTokenizer, "__new__", lambda _: None)
    assert run(articles) == 2
    assert "has no tokenizer here" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [
    (lambda text: "", "has other columns"),
    (lambda text: text.replace("perplexity,", "ppl,", 1), "has other columns"),
    (lambda text: text.replace("prompt_chunk,", "", 1), "line 2 is not a row"),
    (lambda text: text.replace(",full,full,", ",h2o,h2o,"), "has no row of the full cache"),
    (lambda text: text.replace(",full,full,,", ",full,full,4-bit weights,"),
     "has no row of the full cache"),
    (lambda text: text.rsplit(",", 1)[0] + "\n", "line 3 is not a row"),
    (lambda text: text.rstrip("\n") + ",1\n", "line 3 is not a row"),
    (lambda text: text.replace(",float32,3,", ",float32,many,", 1), "line 2 is not a row"),
    (lambda text: text.replace(",float32,3,", ",float32,,", 1), "line 2 is not a row"),
    (lambda text: text + '"', "is not a CSV file"),
])
def test_a_bad_csv_is_told_in_one_line(fake, articles, tmp_path, change, message, capsys):
    out = tmp_path / "out.csv"
    assert run(articles, "--only", "h2o", "--budgets", 50, "--csv", out) == 0
    out.write_text(change(out.read_text(encoding="utf-8")), encoding="utf-8")
    command_refused(quality.main, capsys, ["--from-csv", str(out)], message)


# --- the plot


def test_a_plot_without_matplotlib_is_refused_at_once(articles, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", None)
    assert run(articles, "--plot", tmp_path / "out.png") == 2
    assert capsys.readouterr().err == (
        "error: --plot needs matplotlib: pip install 'flexgen_h2o[plot]'\n")


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_plot_is_drawn(fake, articles, tmp_path, suffix, start):
    plot, out = tmp_path / f"out.{suffix}", tmp_path / "out.csv"
    assert run(articles, "--csv", out, "--plot", plot) == 0
    first = plot.read_bytes()
    assert first.startswith(start)
    plot.unlink()
    assert quality.main(["--from-csv", str(out), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(start)
    names = {"in.jsonl", "out.csv", plot.name}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_plot_of_little_is_a_plot_too(fake, articles, tmp_path):
    """The full cache alone; an infinite perplexity; a variant that is not known."""
    out, plot = tmp_path / "out.csv", tmp_path / "out.png"
    assert run(articles, "--csv", out, "--only", "full", "--plot", plot) == 0
    full = measures.read_rows(str(out))[0]
    h2o = full | {"policy": "h2o", "budget_percent": 20.0, "perplexity": math.inf,
                  "delta_nats_low": math.nan, "delta_nats_high": math.nan}
    quality_plot.draw([full, h2o, h2o | {"variant": "new"}], str(plot))


def test_the_plot_leaves_quantized_weights_out(fake, articles, tmp_path):
    """With such rows, even before the full cache's, it is the one without them."""
    out, plain, more = (tmp_path / name for name in ("out.csv", "plain.png", "more.png"))
    assert run(articles, "--only", "h2o", "weights", "--csv", out) == 0
    rows = measures.read_rows(str(out))
    others = [row | {"perplexity": 1.5, "greedy_equal_share": 0.5} for row in rows
              if row["weight_bits"] != 16]
    assert len(others) == 7
    quality_plot.draw([row for row in rows if row["weight_bits"] == 16], str(plain))
    quality_plot.draw([*others, *(row for row in rows if row["weight_bits"] == 16)], str(more))
    assert more.read_bytes() == plain.read_bytes()


# --- the engine itself, on a random model and token ids


@pytest.mark.parametrize("only", [("h2o", "window", "sink-window"), ("score", "positions"),
                                  ("bits",), ("weights",), ("recall", "sparse-values")])
def test_the_real_engine(tiny_model, only, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path))  # of quantized weights
    draw = random.Random(0)
    pairs = split_halves([draw.choices(range(120), k=length) for length in (60, 41, 53)])
    todo = configurations([5, 20], only)

    def open_llm(one):
        return LLM(str(tiny_model("llama").folder), policy=Policy(gpu_batch_size=2),
                   device="cpu", dtype="float32", progress=False, **one.arguments())

    rows = list(measures.compare(todo, open_llm, lambda llm: pairs, gen_len=6))
    assert [row["configuration"] for row in rows] == [one.name for one in todo]
    full = rows[0]
    assert full["perplexity_over_full"] == 1 and full["greedy_equal_share"] == 1
    for row in rows[1:]:
        assert math.isfinite(row["perplexity"]) and row["delta_nats"] != 0
        exact = row["cache_bits"] == row["weight_bits"] == 16
        assert row["common_prefix_mean"] >= (1 if exact else 0)  # of an exact prefill
        if row["policy"] in ("full", "recall", "sparse-values"):
            assert row["kv_cache_bytes_per_sequence"] == full["kv_cache_bytes_per_sequence"]
            continue
        assert row["kv_cache_bytes_per_sequence"] < full["kv_cache_bytes_per_sequence"]
        # The cache of the longest prompt, of 30 tokens, has these slots and no more.
        longest = todo[rows.index(row)].sizes(30)
        per_slot = 2 * 3 * 2 * 8 * 4  # keys and values, layers, KV heads, size of a head, float32
        if row["cache_bits"] == 16:
            assert row["kv_cache_bytes_per_sequence"] == longest.total * per_slot
