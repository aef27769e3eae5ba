"""The analyze task: its command, its files, and the real engine under it."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import analyze
import attention_report as analysis_plots
import pytest
import torch
from attention_report import EVICTED, NAMES, PARTS, RANKS, RUN, SEEN, mean_by, summary, table
from attention_survey import KINDS
from helpers.read_back import read_csv

from flexgen_h2o import LLM
from flexgen_h2o.errors import UserError

ARTICLES = Path(__file__).parents[2] / "examples/data/articles.jsonl"


class NumberTokenizer:
    """A text of numbers is its token ids."""

    def __call__(self, text: str, verbose: bool = True) -> dict:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture
def numbers(monkeypatch):
    """Models without a tokenizer get one."""
    monkeypatch.setattr(LLM, "tokenizer", NumberTokenizer())


def number_text(length: int, seed: int) -> str:
    return " ".join(map(str, random.Random(seed).choices(range(100), k=length)))


@pytest.fixture
def articles(tmp_path) -> str:
    """Texts of 30, 8, 41 and 50 numbers."""
    path = tmp_path / "in.jsonl"
    texts = [number_text(length, length) for length in (30, 8, 41, 50)]
    path.write_text("".join(json.dumps({"article": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def command(articles, tiny_model, tmp_path) -> list[str]:
    """All of the texts of 30 and 41, in tmp_path / out."""
    return ["--input-path", articles, "--model-name", str(tiny_model("llama").folder),
            "--device", "cpu", "--articles", "2", "--min-tokens", "20", "--max-tokens", "41",
            "--output-dir", str(tmp_path / "out")]


# --- the command


def test_one_call_writes_every_file_and_prints_a_summary(numbers, command, tmp_path, capsys):
    out = tmp_path / "out"
    assert analyze.main([*command, "--budgets", "50", "20", "--evict", "10", "100"]) == 0
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{suffix}" for name in NAMES for suffix in ("csv", "png")}
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in NAMES)
    rows = {name: read_csv(out / f"{name}.csv") for name in NAMES}
    for name, found in rows.items():
        assert tuple(found[0]) == (*RUN, *PARTS.get(name, EVICTED))
        assert found[0]["articles"] == "2" and found[0]["tokens_mean"] == "35.5"
        assert found[0]["dtype"] == "float32" and found[0]["device"] == "cpu"
    layers, heads = 3, 6
    assert {name: len(found) for name, found in rows.items()} == {
        "sparsity": layers * heads, "scores": layers * len(RANKS),
        "local": layers * len(SEEN) * 2, "frequency": layers, "misses": layers * 4 * 2,
        "evicted": 1 + 2 * len(KINDS)}
    assert Counter((row["evicted"], row["evicted_tokens_mean"]) for row in rows["evicted"]) == {
        ("none", "0"): 1, **{(kind, count): 1 for kind in KINDS for count in ("1.5", "17.5")}}
    assert {row["budget_percent"] for row in rows["misses"]} == {"20", "50"}
    # With all keys of the first half gone it is the same which of them.
    last = {row["perplexity"] for row in rows["evicted"][-len(KINDS):]}
    assert len(last) == 1 and last != {rows["evicted"][0]["perplexity"]}
    text = capsys.readouterr()
    assert text.err == "" and "attention lost at" in text.out and "heavy 100 %" in text.out


def test_without_eviction_the_perplexity_is_that_of_loglikelihood(numbers, command, tmp_path):
    assert analyze.main([*command, "--only", "evicted", "--evict", "20"]) == 0
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"evicted"}
    rows = read_csv(tmp_path / "out/evicted.csv")
    with LLM(command[3], device="cpu", dtype="float32", progress=False) as llm:
        ids = [list(map(int, number_text(length, length).split())) for length in (30, 41)]
        found = llm.loglikelihood([(one[: len(one) // 2], one[len(one) // 2 :]) for one in ids])
    values = [value for one in found for value in one]
    assert float(rows[0]["perplexity"]) == pytest.approx(math.exp(-sum(values) / len(values)),
                                                         rel=1e-4)
    assert rows[0]["scored_tokens"] == str(len(values)) == "36"
    for row in rows:
        assert float(row["perplexity_over_full"]) == pytest.approx(
            math.exp(float(row["delta_nats"])), rel=1e-4)


@pytest.mark.parametrize("key", ["llama", "opt", "neox_partial"])
def test_sparsity_is_that_of_transformers_own_attention(numbers, command, tiny_model, key,
                                                        tmp_path):
    """Of a whole model: rotation, scale and the order of heads are as they should be."""
    from transformers import AutoModelForCausalLM

    folder = str(tiny_model(key).folder)
    assert analyze.main([*command, "--model", folder, "--only", "sparsity"]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    shares = []
    for length in (30, 41):
        ids = torch.tensor([list(map(int, number_text(length, length).split()))[:-1]])
        with torch.no_grad():
            attention = torch.cat(model(ids, output_attentions=True).attentions)
        visible = torch.ones(attention.shape[2:], dtype=torch.bool).tril()
        small = (attention < 0.01 * attention.amax(-1, keepdim=True)) & visible
        shares.append(small.sum((2, 3)) / visible.sum())
    expected = torch.stack(shares).mean(0)
    assert expected.max() > 0
    found = {(int(row["layer"]), int(row["head"])): float(row["sparsity"])
             for row in read_csv(tmp_path / "out/sparsity.csv")}
    assert found == {(layer, head): pytest.approx(expected[layer, head].item(), abs=2e-3)
                     for layer in range(len(expected)) for head in range(expected.shape[1])}


def test_a_plain_text_is_one_text_and_flags_may_have_underscores(numbers, command, tmp_path,
                                                                 capsys):
    text, out = tmp_path / "long.txt", tmp_path / "new" / "folder"
    text.write_text("\n\n".join([number_text(150, 1), number_text(150, 2)]))
    assert analyze.main(["--input_path", str(text), "--model_name", command[3], "--device", "cpu",
                         "--max_tokens", "200", "--output_dir", str(out), "--only", "misses",
                         "local"]) == 0
    assert {path.stem for path in out.iterdir()} == {"misses", "local"}
    row = read_csv(out / "misses.csv")[0]
    assert (row["articles"], row["tokens_mean"]) == ("1", "200")
    assert "heavy hitters known" in capsys.readouterr().out


def test_a_run_that_stops_keeps_what_it_has(numbers, command, tmp_path, monkeypatch, capsys):
    probe, calls = LLM.probe, []

    def stop(self, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return probe(self, *arguments)

    monkeypatch.setattr(LLM, "probe", stop)
    assert analyze.main([*command, "--only", "frequency", "evicted"]) == 130
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"frequency.csv", "frequency.png",
                                                     "evicted.csv.partial"}
    assert [row["evicted"] for row in read_csv(out / "evicted.csv.partial")] == ["none", "heavy"]
    assert capsys.readouterr().err == (
        f"interrupted (rows measured before that: {out / 'evicted.csv.partial'})\n")


GIVEN = ["--input-path", "in.txt", "--output-dir", "out"]


@pytest.mark.parametrize(("flags", "message"), [
    ([], "give --input-path: a .jsonl file of articles"),
    (GIVEN[:2], "give --output-dir: a folder"),
    ([*GIVEN, "--output-dir", " "], "--output-dir must be text that is not empty"),
    ([*GIVEN, "--nonsense"], "unknown flag"),
    (GIVEN, "cannot read --input-path in.txt"),
    ([*GIVEN, "--articles", "3"], "--articles has no effect on a plain text"),
    (["--input-path", "a.jsonl", *GIVEN[2:], "--articles", "0"], "--articles must be at least 1"),
    ([*GIVEN, "--max-tokens", "3"], "--max-tokens must be at least 4"),
    ([*GIVEN, "--min-tokens", "3"], "--min-tokens must be at least 4"),
    ([*GIVEN, "--budgets", "0"], "each of --budgets must be greater than 0"),
    ([*GIVEN, "--budgets", "101"], "each of --budgets must be at most 100"),
    ([*GIVEN, "--evict", "nan"], "each of --evict must be a finite number"),
    ([*GIVEN, "--evict"], "expected at least one argument"),
    ([*GIVEN, "--only", "heavy"], "each of --only must be one of sparsity, scores"),
    ([*GIVEN, "--budgets", "5", "--only", "scores", "evicted"],
     "--budgets has no effect without local or misses in --only"),
    ([*GIVEN, "--evict", "5", "--only", "misses"], "--evict has no effect without evicted"),
    ([*GIVEN, "--dtype", "int4"], "--dtype must be one of"),
    ([*GIVEN, "--device", "tpu"], "--device must be"),
    ([*GIVEN, "--output-dir", "/dev/null/x"], "cannot be a folder: /dev/null is a file"),
    (["--input-path", "./out/misses.csv", *GIVEN[2:]], "would be overwritten"),
    ([*GIVEN, "--output-dir", "/dev/null"], "cannot be a folder: /dev/null is a file"),
])
def test_bad_flags_answer_in_one_line_and_leave_nothing(refuses_flags, flags, message):
    refuses_flags(analyze.main, flags, message)


@pytest.mark.parametrize(("flags", "message"), [
    (["--articles", "9"], "has 3 articles of at least 20 tokens and 9 are needed"),
    (["--max-tokens", "8", "--min-tokens", "60"], "has 0 articles of at least 60"),
])
def test_too_few_texts_leave_nothing(numbers, command, tmp_path, flags, message, capsys):
    assert analyze.main([*command, *flags]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_text_that_is_too_short_is_refused(numbers, command, tmp_path, capsys):
    short = tmp_path / "short.txt"
    for text, flags, needed in (("1 2 3", [], 4), ("1 2 3 4 5", ["--min-tokens", "6"], 6)):
        short.write_text(text)
        assert analyze.main(["--input-path", str(short), *command[2:6], *flags,
                             "--output-dir", str(tmp_path / "out")]) == 2
        assert f"tokens, and {needed} are needed at least" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_shortest_text_is_looked_at(numbers, command, tmp_path):
    """Two tokens, one query of the second half, and nothing to fit a line through."""
    short = tmp_path / "short.txt"
    short.write_text("7 8 9 8")
    assert analyze.main(["--input-path", str(short), *command[2:6],
                         "--output-dir", str(tmp_path / "out")]) == 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".csv", ".png"}


def test_a_text_past_the_models_positions_is_refused(numbers, command, tmp_path, capsys):
    long = tmp_path / "long.txt"
    long.write_text(number_text(300, 0))
    assert analyze.main(["--input-path", str(long), *command[2:6], "--max-tokens", "300",
                         "--output-dir", str(tmp_path / "out")]) == 2
    assert "256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_in_the_way_of_a_file_is_told_before_the_run(command, tmp_path, capsys):
    (tmp_path / "out/misses.csv").mkdir(parents=True)
    assert analyze.main([*command, "--only", "misses"]) == 2
    assert "misses.csv is not a regular file" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(command, tmp_path, capsys):
    assert analyze.main(command) == 2
    assert "has no tokenizer here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_matplotlib_is_told_at_once(command, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert analyze.main(command) == 2
    assert "needs matplotlib: pip install" in capsys.readouterr().err


# --- summary and plots


def test_the_summary_by_hand():
    rows = [{"layer": layer, "head": head, "sparsity": value} for layer, head, value in
            ((0, 0, 0.1), (0, 1, 0.3), (1, 0, 0.9), (1, 1, 0.9))]
    assert mean_by(rows, "layer", "sparsity") == pytest.approx({0: 0.2, 1: 0.9})
    assert summary({"sparsity": rows}) == (
        "entries below 1 % of their row's maximum: 55.0% (layer 0: 20.0%, layer 1: 90.0%)")
    rows = [{"layer": 0, "pearson": None, "spearman": None}]
    assert summary({"frequency": rows}).splitlines() == [
        "score and token frequency: Pearson: not known",
        "score and token frequency: Spearman: not known"]
    assert table(("a", "bb"), [("ccc", "d")]) == ["a    bb", "ccc   d"]


def test_plots_of_little_are_plots_too(tmp_path):
    """One layer, correlations that are not known, an infinite perplexity, no fit."""
    run = {"model": "m", "dtype": "float32", "articles": 1, "tokens_mean": 4.0, "layer": 0}
    nats = {"evicted_percent": 0.0, "perplexity": 2.0}
    for name, rows in {
        "frequency": [{"pearson": None, "spearman": None}],
        "scores": [{"relative_rank": rank, "score": float(rank < 1), "slope": None, "r2": None}
                   for rank in RANKS],
        "evicted": [{"evicted": "none", **nats},
                    {"evicted": "heavy", **nats, "perplexity": math.inf}],
    }.items():
        path = tmp_path / f"{name}.png"
        analysis_plots.draw(name, [{**run, **row} for row in rows], str(path))
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_one_line(command, tmp_path, monkeypatch):
    options = analyze.parse_args(command)
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(UserError, match="cannot write --output-dir"):
        analyze._save(options, "sparsity", [])


# --- the real model


def test_a_real_model_is_as_the_paper_says(tmp_path):
    """Sparse but for the first layer, heavy hitters known early, and it breaks without them."""
    assert analyze.main(["--input-path", str(ARTICLES), "--articles", "1", "--max-tokens", "96",
                         "--evict", "10", "--budgets", "20", "--output-dir", str(tmp_path)]) == 0
    figures = ("sparsity", "overlap", "miss_rate", "perplexity", "slope", "chance")
    rows = {name: [{key: float(value) if key in figures else value for key, value in row.items()}
                   for row in read_csv(tmp_path / f"{name}.csv")] for name in NAMES}
    by_layer = mean_by(rows["sparsity"], "layer", "sparsity")
    assert by_layer.pop("0") < min(by_layer.values()) and min(by_layer.values()) > 0.3
    assert all(row["slope"] < -0.2 for row in rows["scores"])
    assert mean_by(rows["local"], "seen_percent", "overlap")["50"] > 0.6
    lost = mean_by(rows["misses"], "policy", "miss_rate")
    assert lost["best"] < lost["h2o"] < lost["sink-window"] < lost["window"]
    perplexity = {row["evicted"]: row["perplexity"] for row in rows["evicted"]}
    assert perplexity["heavy"] > 2 * max(perplexity[kind] for kind in ("random", "lowest", "none"))
