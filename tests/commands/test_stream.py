"""The stream command on a tiny model that reads characters: conversations, flags and files."""

import io
import shutil
import sys
from functools import partial

import numpy as np
import pytest
from helpers.batch_jobs import write_lines
from helpers.fake_llm import run_stats
from helpers.read_back import read_csv, read_jsonl
from helpers.selection import full
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM
from flexgen_h2o.commands import stream
from flexgen_h2o.commands.stream import Printer
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import Turn
from flexgen_h2o.sessions import StreamingSession

LETTERS = "\n" + "".join(map(chr, [*range(32, 127), *range(224, 248)]))
TEMPLATE = ("{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")
EVICT = ("--enable-h2o-generation", "--enable-position-rolling")
WINDOW = (*EVICT, "--num-window-length", 24, "--prefill-chunk", 8)


@pytest.fixture(scope="session")
def letters_model(tiny_model, tmp_path_factory):
    """A function from a key of `TINY` to the folder of that model, with a token for each letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def get(key: str) -> str:
        tiny = tiny_model(key)
        vocab = {letter: place for place, letter in enumerate(LETTERS[: tiny.config.vocab_size])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="~"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        folder = tmp_path_factory.mktemp("model") / key
        shutil.copytree(tiny.folder, folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer,
                                chat_template=TEMPLATE).save_pretrained(folder)
        return str(folder)

    return get


@pytest.fixture(scope="session")
def model(letters_model) -> str:
    return letters_model("llama")


@pytest.fixture
def questions(tmp_path) -> str:
    """Six conversations of two turns."""
    return write_lines(tmp_path / "in.jsonl", [
        {"question_id": number, "turns": ["Say a word.", "Why?"]} for number in range(6)])


@pytest.fixture
def talk(model, questions, tmp_path):
    """A function that runs the command; its answers are in out.jsonl."""
    def run(*flags, model: str = model) -> int:
        return stream.main(["--model-name", model, "--input-path", questions, "--device", "cpu",
                            "--dtype", "float32", "--gen-len", "10", "--output-path",
                            str(tmp_path / "out.jsonl"), "--offload-dir",
                            str(tmp_path / "offload"), *map(str, flags)])

    return run


@pytest.mark.parametrize(("flags", "words"), [
    ([], "give --input-path"),
    (["--input-path", "a", "--num-window-length", "9"], "add --enable-h2o-generation"),
    (["--input-path", "a", "--enable-h2o-generation", "--eviction", "full"], "--eviction full out"),
    (["--input-path", "a", "--enable-h2o-generation", "--max-tokens", "9"], "--max-tokens is"),
    (["--input-path", "a", *EVICT, "--past-context"], "--past-context has no effect"),
    (["--input-path", "a", "--past-context"], "--past-context needs --max-tokens"),
    (["--input-path", "a", "--percent", "auto"], "--percent auto plans for batches"),
    (["--input-path", "a", "--hh-ratio", "0.1"], "unknown flag"),
    (["--input-path", "a", "--output-path", "./a"], "name the same file")])
def test_bad_flags_are_refused(refuses_flags, flags, words):
    refuses_flags(stream.main, flags, words)


@pytest.mark.parametrize("flags", [
    (), *full(("--eviction", "sink-window"), ("--percent", 0, 0, 0, 0, 0, 0),
              ("--eviction", "window"), ("--num-heavy-hitter-tokens", 6), ("--cache-bits", 4),
              ("--score", "mean"), ("--percent", 0, 100, 0, 100))])
def test_a_conversation_of_any_length(talk, tmp_path, capsys, flags):
    assert talk(*WINDOW, "--csv", tmp_path / "out.csv", *flags) == 0
    records = read_jsonl(tmp_path / "out.jsonl")
    # Each turn with its frame, and ten new tokens.
    lengths = [len("USER: Say a word.\n\nASSISTANT: "), len("USER: Why?\n\nASSISTANT: ")] * 6
    assert [(record["question_id"], record["turn"], record["prompt_tokens"], record["position"])
            for record in records] == [
        (place // 2, 1 + place % 2, lengths[place], sum(lengths[:place]) + 10 * place)
        for place in range(12)]
    assert records[-1]["position"] > 256  # the model's positions
    assert {record["cached_tokens"] for record in records} == {24}
    assert len({record["kv_cache_bytes"] for record in records}) == 1
    assert all(record["decode_ms_per_token"] > 0 and record["process_bytes"] > 10**6
               and len(record["text"]) == 10 for record in records)
    text = capsys.readouterr().out
    assert text.startswith(f"USER: Say a word.\n\nASSISTANT: {records[0]['text']}\n")
    assert all(f"ASSISTANT: {record['text']}" in text for record in records)
    assert text.splitlines()[-1].startswith("12 turns of ")
    rows = read_csv(tmp_path / "out.csv")
    assert tuple(rows[0]) == stream.COLUMNS and all(row["date"] for row in rows)
    for name in ("question_id", "turn", "position", "cached_tokens"):
        assert [row[name] for row in rows] == [str(record[name]) for record in records]


def test_text_depends_on_the_chunk_size_alone(talk, tmp_path):
    texts = []
    for chunk in (8, 8, 3):
        assert talk(*WINDOW, "--prefill-chunk", chunk, "--sample-num", 2, "--verbose", 0) == 0
        texts.append([record["text"] for record in read_jsonl(tmp_path / "out.jsonl")])
    assert texts[0] == texts[1] != texts[2]


def test_the_full_cache_stops_where_the_positions_end(talk, tmp_path, capsys):
    out, table = tmp_path / "out.jsonl", tmp_path / "out.csv"
    out.write_text("older")
    assert talk("--verbose", 1, "--csv", table) == 2
    text = capsys.readouterr()
    assert text.err.startswith("error: ") and text.err.count("\n") == 1 and "256" in text.err
    assert f"{out}.partial" in text.err and f"{table}.partial" in text.err
    records = read_jsonl(tmp_path / "out.jsonl.partial")
    assert 0 < len(records) < 12 and text.out.startswith(f"{len(records)} turns of ")
    assert len(read_csv(tmp_path / "out.csv.partial")) == len(records)
    last = records[-1]
    assert last["cached_tokens"] == (last["position"] + last["prompt_tokens"]
                                     + last["generated_tokens"] - 1)
    assert out.read_text() == "older" and not table.exists()
    assert talk("--past-context", "--max-tokens", 1000, "--verbose", 0) == 0
    assert len(read_jsonl(out)) == 12


def test_prompts_by_a_chat_template(talk, tmp_path):
    assert talk(*WINDOW, "--chat-template", "--sample-num", 1, "--verbose", 0) == 0
    (first, _) = read_jsonl(tmp_path / "out.jsonl")
    assert first["prompt_tokens"] == len("<user>Say a word.<assistant>")


@pytest.mark.full
def test_a_real_model_answers_by_its_template(talk, tmp_path):
    assert talk("--enable-h2o-generation", "--num-window-length", 32, "--enable-position-rolling",
                "--chat-template", "--sample-num", 1, "--verbose", 0, model="smollm2-135m") == 0
    records = read_jsonl(tmp_path / "out.jsonl")
    assert [record["cached_tokens"] for record in records] == [32, 32]
    assert all(any(letter.isalpha() for letter in record["text"]) for record in records)


def test_learned_positions_do_not_roll(talk, letters_model, tmp_path, capsys):
    talk = partial(talk, model=letters_model("opt"))
    assert talk(*WINDOW, "--verbose", 0) == 2
    assert "can't roll" in capsys.readouterr().err
    assert talk("--enable-h2o-generation", "--num-window-length", 24, "--sample-num", 2,
                "--verbose", 0) == 0
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 4


@pytest.mark.parametrize(("flags", "options"), [
    ((), {"max_tokens": 256, "past_context": False}),
    (("--max-tokens", "99"), {"max_tokens": 99, "past_context": False}),
    (("--max-tokens", "9999", "--past-context"), {"max_tokens": 9999, "past_context": True}),
    (("--enable-h2o-generation", "--past-context"), {"max_tokens": None, "past_context": True})])
def test_capacity_and_sampling_reach_the_stream(talk, monkeypatch, flags, options):
    calls = []

    def generate(self, turn, *, streamer, **sampling):
        calls.append(sampling)
        raise UserError("stopped")

    monkeypatch.setattr(StreamingSession, "generate", generate)
    open_stream = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda llm, **given: (
        calls.append(given), open_stream(llm, **given))[1])
    assert talk("--do-sample", "--temperature", "0.5", "--ignore-eos", *flags) == 2
    given, sampling = calls
    assert given == options
    expected = {"temperature": 0.5, "max_new_tokens": 10, "eos_token_id": -1, "do_sample": True}
    assert {name: sampling[name] for name in expected} == expected


@pytest.mark.parametrize("verbose", [0, 1])
def test_less_is_printed_on_request(talk, verbose, capsys):
    assert talk("--sample-num", "1", "--verbose", verbose) == 0
    assert capsys.readouterr().out.count("\n") == verbose


def test_a_missing_template_or_tokenizer_is_refused(talk, tiny_model, tmp_path, capsys):
    folder = tiny_model("llama").folder
    for model, words in ((str(folder), "has no tokenizer"),
                         (with_words(folder, tmp_path / "words"), "has no chat template")):
        assert talk("--chat-template", model=model) == 2
        assert words in capsys.readouterr().err


def test_an_interrupted_turn_shows_its_text(talk, tmp_path, monkeypatch, capsys):
    put, words = Printer.put, []

    def stop(self, value):
        put(self, value)
        words.append(value)
        if len(words) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Printer, "put", stop)
    assert talk() == 130
    out, err = capsys.readouterr()
    assert out.startswith("USER: Say a word.\n\nASSISTANT: ") and out.endswith("\n")
    assert err.startswith("interrupted") and not (tmp_path / "out.jsonl").exists()


def test_tenths_are_of_decode_steps():
    def answer(steps, memory):
        return stream.Answer(Turn(1, 1, "a"), "", "stop", 0, 5, 1 + len(steps), 9, memory,
                             run_stats(step_seconds=steps, kv_cache_bytes=10**6))

    answers = [answer([], 1_000_000), answer([0.001] * 2, 2_000_000),
               answer([0.003] * 27, 3_000_000), answer([0.005], 4_000_000)]
    summary = stream.summary(answers)
    assert "4 turns of 54 tokens, 9 cached" in summary
    assert "first tenth 1.67 ms a token, process 3 MB; last tenth 3.67 ms a token" in summary


def test_unprintable_letters_are_printed_as_escapes(model, monkeypatch):
    from transformers import AutoTokenizer

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    printer = Printer(AutoTokenizer.from_pretrained(model))
    for word in ("caf\u00e9 ", "end"):
        printer.put(np.array([[LETTERS.index(letter) for letter in word]]))
    printer.end()
    assert raw.getvalue() == b"caf\\xe9 end\n"
