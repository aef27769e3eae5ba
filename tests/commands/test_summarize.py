"""The summarize command: input, ROUGE, files, flags, and the engine."""

import csv
import random
import types

import pytest
import yaml
from helpers.batch_jobs import write_lines
from helpers.error_cases import command_refused, refused
from helpers.fake_llm import FakeLLM, run_stats
from helpers.read_back import read_jsonl
from helpers.tiny_tokenizers import WORDS, with_words
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cli.launch import llm_arguments
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands import summarize
from flexgen_h2o.commands.summarize import table
from flexgen_h2o.commands.summarize import table as summary_table
from flexgen_h2o.commands.summarize.table import Rouge
from flexgen_h2o.engine.detokenization import until
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import Article
from flexgen_h2o.files.rows import ResumableJsonl
from flexgen_h2o.metrics import figures
from flexgen_h2o.outputs import Output

STOP = "###"


def article(number: int, words: int = 20, **options) -> dict:
    text = f"Text {number} has {'many ' * words}words. It goes on."
    return {"article": f"###\nArticle: {text}\n\nSummarize the above article in 1 sentence.\n",
            "summary_gt": f"Text {number} has words", "stop": [STOP], "temperature": 0.3,
            "max_tokens": 8, **options}


# --- input


@given(st.text(st.sampled_from("aB. #\n"), max_size=30),
       st.lists(st.text(st.sampled_from("a#\n"), min_size=1, max_size=3), max_size=3))
def test_a_summary_ends_before_the_first_stop(text, stops):
    summary = until(text, stops)
    assert text.startswith(summary)
    assert not any(stop in summary for stop in stops)
    assert summary == text or any(text[len(summary):].startswith(stop) for stop in stops)


# --- scores


@pytest.mark.parametrize(("summary", "reference", "rouges"), [
    ("A cat sat.", "The cats sat on it", (2 * 2 / 8, 2 * 1 / 6, 2 * 2 / 8)),  # cat, stemmed; sat
    ("", "The cats", (0, 0, 0)), ("sat cat", "cat sat", (1, 0, 0.5))])
def test_rouge_by_hand(summary, reference, rouges):
    assert Rouge()(summary, reference) == dict(zip(
        ("rouge1", "rouge2", "rougeL"), map(pytest.approx, rouges), strict=True))


def test_scores_by_hand():
    rows = [dict.fromkeys(table.ROUGES, value) for value in (0.1, 0.2, 0.6)]
    full = [dict.fromkeys(table.ROUGES, value) for value in (0.2, 0.3, 0.7)]
    scores = summary_table.scores(rows, full)
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx(0.3)
    assert 0.1 <= scores["rouge2_low"] < 0.3 < scores["rouge2_high"] <= 0.6
    # Each article loses the same: of pairs there is no doubt, though the intervals overlap.
    assert [scores[f"delta_rouge2{end}"] for end in ("", "_low", "_high")] == [
        pytest.approx(-0.1)] * 3
    assert summary_table.scores(rows, None)["delta_rouge2"] is None
    low, high = figures.bootstrap_interval([0.1, 0.2, 0.6], [1, 1, 1])
    assert (scores["rouge1_low"], scores["rouge1_high"]) == (low, high)


def row(number: int, summary: str | None, new: int = 4) -> dict:
    """A row of `summaries`, of one that was too long if there is no summary."""
    scored = (dict.fromkeys(table.ROUGES) if summary is None
              else Rouge()(summary, f"text {number}"))
    return {"index": number, "summary": summary, **scored, "prompt_tokens": 10 * number,
            "generated_tokens": new, "finish_reason": "stop" if new < 5 else "length",
            "seconds": 2.0, "kv_cache_bytes": 100 * number, "device": "cpu", "dtype": "float32"}


def test_only_articles_of_every_cache_are_scored():
    """Numbers 1 and 3 of four: the full cache lacks 0, the other 2."""
    articles = [Article("Text. More.", f"text {number}") for number in range(4)]
    h2o = H2OConfig(heavy_tokens=3, recent_tokens=4, sink_tokens=1, positions="rolling")
    runs = {summary_table.SummaryCache("h2o", h2o, 8): [row(0, "a"), row(1, "text 1"), row(2, None),
                                                       row(3, "none", 6)],
            summary_table.SummaryCache("full", None): [row(0, None), row(1, "text 1"),
                                                       row(2, "text 2"), row(3, "text 3")]}
    small, full, lead = summary_table.all_rows(runs, articles, model="m", chat=True, score=Rouge())
    assert [(one["articles"], one["too_long"]) for one in (small, full, lead)] == [(2, 2)] * 3
    assert [one["rouge2"] for one in (small, full, lead)] == [0.5, 1, 0]
    assert [one["delta_rouge2"] for one in (small, full, lead)] == [-0.5, 0, -1]
    assert (small["delta_rouge2_low"], small["delta_rouge2_high"]) == (-1, 0)
    assert lead["rouge1"] == pytest.approx(2 / 3) and lead["budget_tokens"] is None
    assert {name: small[name] for name in (
        "policy", "budget_tokens", "heavy_tokens", "recent_tokens", "sink_tokens", "positions",
        "cache_bits", "prompt_tokens_mean", "generated_tokens_mean", "stopped_share",
        "kv_cache_bytes_per_sequence", "seconds", "generated_tokens_per_second")} == {
        "policy": "h2o", "budget_tokens": 8, "heavy_tokens": 3, "recent_tokens": 4,
        "sink_tokens": 1, "positions": "rolling", "cache_bits": 8, "prompt_tokens_mean": 20,
        "generated_tokens_mean": 5, "stopped_share": 0.5, "kv_cache_bytes_per_sequence": 200,
        "seconds": 4, "generated_tokens_per_second": 2.5}
    assert {small["chat_template"], full["positions"]} == {"true", "original"}


# --- the file of lines


def lines(tmp_path, **options) -> ResumableJsonl:
    return ResumableJsonl("--output-path", str(tmp_path / "o.jsonl"),
                    {"model": "m", "batch": 1} | options, ["model"])


def test_lines_are_added_only_when_something_is_written(tmp_path):
    path, file = tmp_path / "o.jsonl", lines(tmp_path)
    assert file.read() == [] and list(tmp_path.iterdir()) == []
    file.add([{"i": "é\n"}])
    with open(path, "a", encoding="utf-8") as torn:
        torn.write('{"i": 2, "te')
    assert lines(tmp_path, batch=7).read() == [{"i": "é\n"}]  # the batch size decides nothing
    assert path.read_text().endswith('"te'), "nothing is cut before there is something to write"
    saved = yaml.safe_load((tmp_path / "o.jsonl.config.yaml").read_text())
    assert saved == {"model": "m", "batch": 1}


@given(cut=st.integers(0, 200))
def test_a_file_cut_anywhere_is_continued(cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    rows = [{"i": i, "text": "é" * i} for i in range(6)]
    lines(folder).add(rows)
    path = folder / "o.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    file = lines(folder)
    kept = file.read()
    assert kept == rows[: len(kept)]
    file.add(rows[len(kept):])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("name", "text", "message"), [
    ("o.jsonl.config.yaml", None, "exists without"), ("o.jsonl.config.yaml", "model: a", "'a'"),
    ("o.jsonl.config.yaml", "{", "not valid YAML"), ("o.jsonl", "{}\n[1]\n", "line 2")])
def test_results_that_cannot_be_resumed(tmp_path, name, text, message):
    lines(tmp_path).add([{"i": 0}])
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    before = (tmp_path / "o.jsonl").read_bytes()
    refused(lambda: lines(tmp_path).read(), message)
    assert (tmp_path / "o.jsonl").read_bytes() == before


# --- the command, with the engine replaced


class FakeTokenizer:
    """A token for each word."""

    chat_template = None

    def __call__(self, text: str, verbose: bool = True) -> dict:
        return {"input_ids": [len(word) for word in text.split()]}


class FakeLLM(FakeLLM):
    """Summarizes in fewer words if tokens are evicted. `fail` is (call number, exception)."""

    calls: list[dict] = []
    fail: tuple[int, BaseException] | None = None

    def __init__(self, model: str, **options):
        FakeLLM.opened.append({"model": model, **options})
        self.h2o, self.policy = options["h2o"], options["policy"]
        self.tokenizer = FakeTokenizer()
        self.model_config = types.SimpleNamespace(
            num_layers=2, attention_layers=(0, 1), max_positions=60, plain_positions=60,
            rope="rotary", attention=())

    def generate(self, prompts, **options):
        if FakeLLM.fail is not None and FakeLLM.fail[0] == len(FakeLLM.calls):
            raise FakeLLM.fail[1]
        FakeLLM.calls.append({"lengths": [len(prompt) for prompt in prompts], **options})
        self.stats = run_stats(prefill_seconds=0.5 * len(prompts), kv_bytes_per_token=100,
                               decode_seconds=1.5 * len(prompts))
        text = " Text has words ### more" if self.h2o is None else " Text of ### more"
        return [Output(None, prompt, [1] * 5, text, "stop") for prompt in prompts]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(FakeLLM, "calls", [])
    monkeypatch.setattr(FakeLLM, "fail", None)
    return FakeLLM.replace(monkeypatch)


@pytest.fixture
def articles(tmp_path) -> str:
    """Eleven articles; number 2 is too long for the model."""
    return write_lines(tmp_path / "in.jsonl", [article(i, 80 if i == 2 else 20) for i in range(11)])


def run(articles, out, *extra) -> int:
    return summarize.main(["--input-path", str(articles), "--output-path", str(out),
                           *map(str, extra)])


def test_a_whole_run(fake, articles, tmp_path, capsys):
    out = tmp_path / "o.jsonl"
    assert run(articles, out, "--batch_size", 1, "--csv", tmp_path / "r.csv") == 0
    rows = read_jsonl(out)
    assert [row["index"] for row in rows] == list(range(11))
    length = len(article(0)["article"].split())
    assert rows[0] == {"index": 0, "summary": "Text has words", "reference": "Text 0 has words",
                       "rouge1": pytest.approx(6 / 7), "rouge2": pytest.approx(2 / 5),
                       "rougeL": pytest.approx(6 / 7), "prompt_tokens": length,
                       "generated_tokens": 5, "finish_reason": "stop", "seconds": 2.0,
                       "kv_cache_bytes": 100 * (length + 4), "device": "cpu", "dtype": "float32"}
    assert (rows[2]["summary"], rows[2]["finish_reason"]) == (None, "too_long")
    assert rows[2]["rouge1"] is None and rows[2]["prompt_tokens"] > 60
    # Groups of 4 batches of 1; the one that is too long never runs.
    assert [call["lengths"] for call in fake.calls] == [[length] * n for n in (3, 4, 3)]
    assert all((call["max_new_tokens"], call["stop_strings"]) == (8, (STOP,))
               for call in fake.calls)
    assert [one["h2o"] for one in fake.opened] == [None]
    text = capsys.readouterr()
    assert text.err == ""
    assert names_of(text.out) == [
        "cache", "full", "lead-1", "articles: 10; too long for the model and left out: 1"]
    with open(tmp_path / "r.csv", newline="", encoding="utf-8") as file:
        full, lead = csv.DictReader(file)
    assert tuple(full) == summary_table.COLUMNS
    assert [full[name] for name in ("policy", "budget_tokens", "articles", "too_long", "rouge2",
                                    "delta_rouge2", "seconds", "generated_tokens_per_second",
                                    "stopped_share", "chat_template", "positions")] == [
        "full", "", "10", "1", "0.4", "0", "20", "2.5", "1", "false", "original"]
    # "Text 0 has many ... words." beside "Text 0 has words": of 23 and 3 pairs, 2.
    assert float(lead["rouge2"]) == pytest.approx(2 * 2 / (23 + 3), abs=1e-5)
    assert (lead["policy"], lead["device"], lead["seconds"]) == ("lead-1", "", "")
    assert summarize.main(["--from-csv", str(tmp_path / "r.csv")]) == 0
    assert capsys.readouterr().out == text.out


def test_lines_with_other_limits_run_apart_in_order(fake, tmp_path):
    records = [article(0), article(1, max_tokens=3), article(2, stop=None), article(3, 9)]
    out = tmp_path / "o.jsonl"
    assert run(write_lines(tmp_path / "in.jsonl", records), out) == 0
    assert [(len(c["lengths"]), c["max_new_tokens"], c["stop_strings"]) for c in fake.calls] == [
        (2, 8, (STOP,)), (1, 3, (STOP,)), (1, 8, None)]
    assert [row["index"] for row in read_jsonl(out)] == [0, 1, 2, 3]
    assert read_jsonl(out)[2]["summary"] == "Text has words ### more"


@pytest.mark.parametrize("failure", [UserError("too small"), KeyboardInterrupt()])
def test_stopped_run_is_resumed(fake, articles, tmp_path, capsys, failure):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "o.jsonl"
    assert run(articles, whole, "--batch-size", 1) == 0
    text = capsys.readouterr().out
    fake.calls.clear()
    fake.fail = (2, failure)
    status = 130 if isinstance(failure, KeyboardInterrupt) else 2
    assert run(articles, out, "--batch-size", 1) == status
    error = capsys.readouterr().err
    assert f"(8 of 11 lines are in {out}; run the same command to resume)" in error
    assert error.count("\n") == 1 and len(read_jsonl(out)) == 8
    with open(out, "ab") as file:
        file.write(b'{"index": 8, "summ')
    fake.fail = None
    fake.calls.clear()
    assert run(articles, out, "--batch-size", 2, "--num-gpu-batches", 2) == 0
    assert [len(call["lengths"]) for call in fake.calls] == [3]
    assert out.read_bytes() == whole.read_bytes()
    assert capsys.readouterr().out == text
    opened = len(fake.opened)
    assert run(articles, out, "--sample-num", 5) == 0  # all there: no model is loaded
    assert len(fake.opened) == opened and len(read_jsonl(out)) == 11
    assert "articles: 4; too long" in capsys.readouterr().out


def test_results_of_other_options_are_refused(fake, articles, tmp_path, capsys):
    out = tmp_path / "o.jsonl"
    assert run(articles, out, "--sample-num", 3) == 0
    before, opened = out.read_bytes(), len(fake.opened)
    other = write_lines(tmp_path / "other.jsonl", [article(i) for i in (0, 7)])
    for path, flags, words in ((articles, ["--enable-h2o-generation"], "was made with"),
                               (articles, ["--gen-len", "4"], "was made with"),
                               (other, [], "line 2 is not of the article of that line")):
        assert run(path, out, *flags) == 2
        assert words in capsys.readouterr().err
    assert out.read_bytes() == before and len(fake.opened) == opened


def test_inputs_that_cannot_run_are_refused(fake, articles, tmp_path, monkeypatch, capsys):
    path = write_lines(tmp_path / "long.jsonl", [article(0, 99)])
    for source, flags, words in ((path, (), "no prompt"), (articles, ("--chat-template",), "none")):
        assert run(source, tmp_path / f"{words}.jsonl", *flags) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr(FakeTokenizer, "__new__", lambda _: None)
    assert run(articles, tmp_path / "p.jsonl") == 2
    assert "no tokenizer" in capsys.readouterr().err


def names_of(text: str) -> list[str]:
    """The names of a table's rows, whose last columns may have lines of their own."""
    assert all(len(line) <= 80 for line in text.splitlines())
    return list(dict.fromkeys(line.split("  ")[0] for line in text.splitlines() if line))


def test_a_sweep(fake, articles, tmp_path, capsys):
    out, table, plot = (tmp_path / name for name in ("o.jsonl", "r.csv", "p.svg"))
    command = ("--sweep", "16", "full", "8", "16", "--csv", table)
    assert run(articles, out, *command, "--plot", plot) == 0
    names = ["h2o 8", "h2o 16", "window 8", "window 16", "full", "lead-1"]
    text = capsys.readouterr().out
    assert names_of(text)[1:-1] == names
    files = [f"o.{name.replace(' ', '-')}.jsonl" for name in names[:-1]]
    assert {path.name for path in tmp_path.iterdir()} == {
        "in.jsonl", "r.csv", "p.svg", *files, *(f"{name}.config.yaml" for name in files)}
    rows = summary_table.read_rows(str(table))
    assert [(row["heavy_tokens"], row["recent_tokens"]) for row in rows] == [
        (4, 4), (8, 8), (0, 8), (0, 16), (None, None), (None, None)]
    assert [one["h2o"] for one in fake.opened] == [
        H2OConfig(heavy_tokens=4, recent_tokens=4), H2OConfig(heavy_tokens=8, recent_tokens=8),
        H2OConfig(heavy_tokens=0, recent_tokens=8), H2OConfig(heavy_tokens=0, recent_tokens=16),
        None]
    # "Text of" has no pair of the reference's; "Text has words" has one of its 2, of 3.
    assert [row["rouge2"] for row in rows[:5]] == [0, 0, 0, 0, 0.4]
    assert [row["delta_rouge2_high"] for row in rows[:5]] == [-0.4] * 4 + [0]
    assert [row["kv_cache_bytes_per_sequence"] for row in rows[:2]] == [800, 1600]
    assert plot.read_bytes().startswith(b"<?xml")
    opened = len(fake.opened)
    plot.unlink()
    assert run(articles, out, *command) == 0 and len(fake.opened) == opened
    capsys.readouterr()
    assert summarize.main(["--from-csv", str(table), "--plot", str(plot)]) == 0
    assert capsys.readouterr().out == text and plot.exists()


def test_the_engine_gets_flags_in_both_spellings(fake, articles, tmp_path):
    assert run(articles, tmp_path / "o.jsonl", "--model_name", "m", "--batch-size", 7,
               "--num-gpu-batches", 3, "--cache-bits", 4, "--enable-h2o-generation",
               "--enable-position-rolling", "--sample_num", 1) == 0
    assert fake.opened == [llm_arguments(RunConfig()) | {
        "model": "m", "progress": False, "cache_bits": 4,
        "policy": Policy(gpu_batch_size=7, num_gpu_batches=3),
        "h2o": H2OConfig(heavy_tokens=128, recent_tokens=128, positions="rolling")}]


GIVEN = ["--input-path", "a", "--output-path", "b"]


@pytest.mark.parametrize(("flags", "words"), [
    ([], "give --input-path"), (GIVEN, "cannot read --input-path a"),
    ([*GIVEN[:3], "./a"], "name the same file"),
    (["--from-csv", "a", "--batch-size", "3"], "--gpu-batch-size has no effect with --from-csv"),
    *(([*GIVEN, *flags], words) for flags, words in (
        (["--csv", "b.config.yaml"], "name the same file"),
        (["--sweep", "8", "--csv", "b.h2o-8"], "name the same file"),
        (["--num-window-length", "8"], "add --enable-h2o-generation"),
        (["--policies", "h2o"], "--policies has no effect without --sweep"),
        (["--plot", "p.png"], "add --sweep"),
        (["--sweep", "8", "--num-window-length", "8"], "has no effect with --sweep"),
        (["--sweep", "full", "--enable-position-rolling"], "add a budget to --sweep"),
        (["--sweep", "full", "--policies", "h2o"], "--policies has no effect on the full"),
        (["--sweep", "8", "some"], "tokens or full"),
        (["--sweep", "8", "--plot", "p.txt"], "--plot must name a .png")))])
def test_bad_flags_are_refused(refuses_flags, flags, words):
    refuses_flags(summarize.main, flags, words)


def test_an_invalid_csv_is_refused(fake, articles, tmp_path, capsys):
    table = tmp_path / "r.csv"
    assert run(articles, tmp_path / "o.jsonl", "--csv", table) == 0
    good = table.read_text(encoding="utf-8")
    for text, words in (("", "other columns"), (good.splitlines()[0] + "\n", "has no rows"),
                        (good.replace(",float32,full,", ",float32,full,x", 1), "line 2 is not")):
        table.write_text(text, encoding="utf-8")
        command_refused(summarize.main, capsys, ["--from-csv", str(table)], words)


# --- the engine itself


CHAT = "{% for m in messages %}w1 w2 {{ m.content }} w3{% endfor %}"


def word_articles(path, count: int = 5) -> str:
    """Articles of words that the tiny model's tokenizer has."""
    draw = random.Random(0)
    return write_lines(path, [
        {"article": " ".join(draw.choices(WORDS[1:119], k=draw.randrange(20, 60))),
         "summary_gt": " ".join(draw.choices(WORDS[1:119], k=8)), "stop": [STOP],
         "max_tokens": 6 + number % 2} for number in range(count)])


def test_summaries_do_not_depend_on_the_batches(tiny_model, tmp_path):
    folder = with_words(tiny_model("llama").folder, tmp_path / "m", chat_template=CHAT)
    path = word_articles(tmp_path / "in.jsonl")
    base = ["--model-name", folder, "--device", "cpu", "--dtype", "float32"]
    command = [*base, "--sweep", 16, "full", "--policies", "h2o", "sink-window"]
    assert run(path, tmp_path / "o.jsonl", *command, "--batch-size", 1) == 0
    assert run(path, tmp_path / "p.jsonl", *command, "--batch-size", 3, "--num-gpu-batches", 2) == 0
    texts = {}
    for name in ("h2o-16", "sink-window-16", "full"):
        rows, others = ([{**row, "seconds": None}
                         for row in read_jsonl(tmp_path / f"{one}.{name}.jsonl")] for one in "op")
        assert rows == others
        texts[name] = [row["summary"] for row in rows]
        for row in rows:
            assert row["generated_tokens"] == len(row["summary"].split()) + (
                row["finish_reason"] == "stop")
            if name != "full":  # 3 layers, 2 KV heads of 8, keys and values, float32
                assert row["kv_cache_bytes"] == 16 * 3 * 2 * 2 * 8 * 4
    assert len(set(map(tuple, texts.values()))) == 3, "the policy must show"

    assert run(path, tmp_path / "chat.jsonl", *base, "--chat-template", "--sample-num", 2) == 0
    chat = read_jsonl(tmp_path / "chat.jsonl")
    assert [row["prompt_tokens"] for row in chat] == [
        row["prompt_tokens"] + 3 for row in read_jsonl(tmp_path / "o.full.jsonl")[:2]]
    with LLM(folder, device="cpu", dtype="float32") as llm:
        [out] = llm.generate([f"w1 w2 {read_jsonl(path)[0]['article']} w3"], max_new_tokens=6,
                             stop_strings=STOP)
    assert chat[0]["summary"] == until(out.text, [STOP]).strip()


def test_eviction_inside_prompts_takes_prompts_past_the_context(tiny_model, tmp_path, capsys):
    folder = with_words(tiny_model("llama").folder, tmp_path / "m")
    path = write_lines(tmp_path / "in.jsonl", [
        {"article": "w5 w6 w7 w9 " * (length // 4), "summary_gt": "w5", "max_tokens": 6}
        for length in (120, 252, 600)])
    base = ["--model-name", folder, "--device", "cpu", "--dtype", "float32",
            "--enable-h2o-generation", "--num-window-length", 16, "--enable-position-rolling",
            "--prefill-chunk", 8]
    within, usual = tmp_path / "w.jsonl", tmp_path / "u.jsonl"
    csv = tmp_path / "r.csv"
    assert run(path, within, *base, "--evict-while-prefilling", "--csv", csv) == 0
    assert run(path, usual, *base) == 0
    assert [row["finish_reason"] for row in read_jsonl(usual)] == ["length", "length", "too_long"]
    assert [row["finish_reason"] for row in read_jsonl(within)] == ["length"] * 3
    assert read_jsonl(within)[0]["summary"] != read_jsonl(usual)[0]["summary"]
    assert summary_table.read_rows(str(csv))[0]["prompt_chunk"] == 8
    # It decides the summaries: results of the other are not resumed.
    capsys.readouterr()
    assert run(path, usual, *base, "--evict-while-prefilling") == 2
    assert "prompt_chunk" in capsys.readouterr().err
