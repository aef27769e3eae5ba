"""The stream command: conversations, flags, figures and files."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types

import numpy as np
import pytest
from helpers.fake_llm import FakeLLM, run_stats
from helpers.read_back import read_csv

from flexgen_h2o.commands import stream
from flexgen_h2o.commands.stream import Printer
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Turn
from flexgen_h2o.metrics.run_stats import RunStats


class FakeTokenizer:
    """A token for each character, its number."""

    chat_template = None
    special_tokens_map = {"bos_token": "<start>"}

    def __call__(self, text: str, add_special_tokens: bool = True,
                 verbose: bool = True) -> dict:
        return {"input_ids": [1] * add_special_tokens + [ord(each) for each in text]}

    def __len__(self) -> int:
        return 128

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        assert not clean_up_tokenization_spaces
        return "".join(map(chr, tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


class FakeStream:
    """Answers each turn with its length in as many tokens; step n of the stream took n ms."""

    def __init__(self, room: int):
        self.tokens = self.cached_tokens = 0
        self._room, self._steps = room, 0
        self.turns: list[dict] = []
        self.stats: RunStats | None = None

    def generate(self, turn, *, streamer, **sampling):
        import torch

        self.turns.append({"turn": turn, **sampling})
        ids = [ord(each) for each in turn] if isinstance(turn, str) else turn
        text = f"{len(ids)} said\n"[: sampling["max_new_tokens"]]
        new = [ord(each) for each in text]
        if streamer is not None:
            streamer.put(torch.tensor([ids]))
            for token in new:
                streamer.put(torch.tensor([token]))
            streamer.end()
        self.tokens += len(ids) + len(new)
        self.cached_tokens = min(self.tokens, self._room)
        steps = [(self._steps + place) / 1000 for place in range(1, len(new))]
        self._steps += len(steps)
        self.stats = run_stats(prefill_seconds=0.5, step_seconds=steps, kv_cache_bytes=2_000_000)
        return types.SimpleNamespace(prompt_token_ids=ids, token_ids=new, text=text,
                                     finish_reason="stop")


class FakeLLM(FakeLLM):
    """Remembers what it was opened with, and the streams that it gave."""

    def __init__(self, model: str, **options):
        self.model, self.options, self.streams = model, options, []
        self.tokenizer = None if model == "mute" else FakeTokenizer()
        self.model_config = types.SimpleNamespace(
            max_positions=2048, plain_positions=2048)
        FakeLLM.opened.append(self)

    @contextlib.contextmanager
    def stream(self, **options):
        self.streams.append((options, FakeStream(room=20)))
        yield self.streams[-1][1]


@pytest.fixture
def fake(monkeypatch):
    """The engine replaced."""
    return FakeLLM.replace(monkeypatch)


@pytest.fixture
def questions(tmp_path) -> str:
    """Two conversations, of three turns in all."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"question_id": 81, "category": "x", "turns": ["Hi.", "And?"]}\n'
                    '{"question_id": "b", "turns": ["Bye \u2028 now."]}\n\n', encoding="utf-8")
    return str(path)


def run(questions, *flags) -> int:
    return stream.main(["--input-path", str(questions), *map(str, flags)])


EVICT = ("--enable-h2o-generation", "--enable-position-rolling")


# --- conversations


# --- the flags


def test_the_command_of_the_h2o_repository_in_both_spellings():
    dashes = ["--model-name", "m", "--input-path", "a", "--enable-h2o-generation",
              "--num-window-length", "512", "--num-heavy-hitter-tokens", "200",
              "--enable-position-rolling", "--sample-num", "3"]
    underscores = [each.replace("-", "_").replace("__", "--") if each.startswith("--") else each
                   for each in dashes]
    options = stream.parse_args(dashes)
    assert options == stream.parse_args(underscores)
    assert (options.run.model, options.sample_num) == ("m", 3)
    assert options.run.h2o() == H2OConfig(heavy_tokens=200, recent_tokens=312,
                                          positions="rolling")
    assert options.run.gen_len == 256


def test_what_the_engine_is_opened_with(fake, questions):
    assert run(questions, *EVICT, "--model-name", "m", "--path", "p", "--percent", "0", "100",
               "100", "0", "--cache-bits", "8", "--do-sample", "--temperature", "0.5", "--gen-len",
               "4", "--ignore-eos", "--verbose", "0") == 0
    llm = fake.opened[0]
    assert llm.model == "m"
    expected = {"path": "p", "cache_bits": 8, "progress": False}
    assert {name: llm.options[name] for name in expected} == expected
    assert (llm.options["policy"].weights.cpu, llm.options["policy"].gpu_batch_size) == (100, 1)
    options, stream = llm.streams[0]
    assert options == {"max_tokens": None, "past_context": False}
    expected = {"temperature": 0.5, "max_new_tokens": 4, "eos_token_id": -1, "do_sample": True}
    assert all({name: turn[name] for name in expected} == expected for turn in stream.turns)


@pytest.mark.parametrize(("flags", "expected"), [
    ((), {"max_tokens": 2048, "past_context": False}),
    (("--max-tokens", "99"), {"max_tokens": 99, "past_context": False}),
    (("--max-tokens", "9999", "--past-context"), {"max_tokens": 9999, "past_context": True}),
    (("--enable-h2o-generation", "--past-context"), {"max_tokens": None, "past_context": True}),
])
def test_the_room_of_the_stream(fake, questions, flags, expected):
    assert run(questions, *flags, "--verbose", "0") == 0
    assert fake.opened[0].streams[0][0] == expected


@pytest.mark.parametrize(("flags", "message"), [
    ([], "give --input-path"),
    (["--input-path", "a", "--num-window-length", "9"],
     "--num-window-length has no effect on the full cache: add --enable-h2o-generation"),
    (["--input-path", "a", "--enable-h2o-generation", "--eviction", "full"], "--eviction full out"),
    (["--input-path", "a", "--enable-h2o-generation", "--max-tokens", "9"], "--max-tokens is"),
    (["--input-path", "a", *EVICT, "--past-context"], "--past-context has no effect"),
    (["--input-path", "a", "--past-context"], "--past-context needs --max-tokens"),
    (["--input-path", "a", "--percent", "auto"], "--percent auto plans for batches"),
    (["--input-path", "a", "--hh-ratio", "0.1"], "unknown flag"),
    (["--input-path", "a", "--output-path", "./a"], "name the same file"),
])
def test_bad_flags_answer_in_one_line_and_leave_nothing(refuses_flags, flags, message):
    refuses_flags(stream.main, flags, message)


# --- what is printed and written


def test_text_comes_with_its_prompts_and_a_summary_at_the_end(fake, questions, capsys):
    assert run(questions, *EVICT, "--num-window-length", "20") == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[:9] == [
        "USER: Hi.", "", "ASSISTANT: 22 said", "", "USER: And?", "", "ASSISTANT: 23 said", "",
        "USER: Bye \u2028 now."]
    assert lines[-2].startswith(
        "3 turns of 98 tokens, 20 cached at the end in 2.0 MB; first tenth 1.50 ms a token")
    assert fake.opened[0].streams[0][1].turns[0]["turn"] == "USER: Hi.\n\nASSISTANT: "


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (1, 1)])
def test_less_is_printed_on_request(fake, questions, verbose, lines, capsys):
    assert run(questions, "--sample-num", "1", "--verbose", verbose) == 0
    text = capsys.readouterr()
    assert (text.out.count("\n"), text.err) == (lines, "")
    assert len(fake.opened[0].streams[0][1].turns) == 2, "of the first conversation alone"


def test_a_line_and_a_row_for_each_turn(fake, questions, tmp_path):
    out, table = tmp_path / "out.jsonl", tmp_path / "out.csv"
    assert run(questions, *EVICT, "--output-path", out, "--csv", table, "--verbose", "0") == 0
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(each["question_id"], each["turn"], each["text"]) for each in records] == [
        (81, 1, "22 said\n"), (81, 2, "23 said\n"), ("b", 1, "29 said\n")]
    assert [(each["position"], each["prompt_tokens"], each["generated_tokens"],
             each["cached_tokens"]) for each in records] == [
        (0, 22, 8, 20), (30, 23, 8, 20), (61, 29, 8, 20)]
    assert [each["decode_ms_per_token"] for each in records] == pytest.approx([4, 11, 18])
    assert all(each["process_bytes"] > 10**6 and each["prefill_seconds"] == 0.5
               and each["kv_cache_bytes"] == 2_000_000 for each in records)
    rows = read_csv(table)
    assert tuple(rows[0]) == stream.COLUMNS
    assert [{name: row[name] for name in ("question_id", "turn", "position", "cached_tokens")}
            for row in rows] == [
        {name: str(each[name]) for name in ("question_id", "turn", "position", "cached_tokens")}
        for each in records]
    assert all(row["date"] and row["model"] == "m" for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv", "out.jsonl"]


def test_tenths_are_of_decode_steps():
    def answer(steps, memory):
        return stream.Answer(Turn(1, 1, "a"), "", "stop", 0, 5, 1 + len(steps), 9, memory,
                                     run_stats(step_seconds=steps, kv_cache_bytes=10**6))

    answers = [answer([], 1_000_000), answer([0.001] * 2, 2_000_000),
               answer([0.003] * 27, 3_000_000), answer([0.005], 4_000_000)]
    assert stream.summary(answers) == (
        "4 turns of 54 tokens, 9 cached at the end in 1.0 MB; first tenth 1.67 ms a token, "
        "process 3 MB; last tenth 3.67 ms a token, process 4 MB")


def test_what_the_model_lacks_is_refused(fake, questions, capsys):
    assert run(questions, "--chat-template") == 2
    assert "has no chat template: leave --chat-template out" in capsys.readouterr().err
    assert run(questions, "--model-name", "mute") == 2
    assert "has no tokenizer here" in capsys.readouterr().err


@pytest.mark.parametrize(("failure", "status", "message"), [
    (UserError("past the model's\n2048 positions"), 2, "error: past the model's 2048 positions "),
    (KeyboardInterrupt(), 130, "interrupted "),
])
def test_a_run_that_stops_keeps_its_turns(fake, questions, tmp_path, monkeypatch, capsys, failure,
                                          status, message):
    out, table = tmp_path / "out.jsonl", tmp_path / "out.csv"
    out.write_text("older")
    generate = FakeStream.generate

    def stop(self, turn, **options):
        if len(self.turns) == 2:
            raise failure
        return generate(self, turn, **options)

    monkeypatch.setattr(FakeStream, "generate", stop)
    assert run(questions, "--output-path", out, "--csv", table, "--verbose", "1") == status
    text = capsys.readouterr()
    assert text.err == (f"{message}(rows of turns before that: {table}.partial) "
                        f"(turns answered before that: {out}.partial)\n")
    assert text.out.startswith("2 turns of 61 tokens")
    partial = (tmp_path / "out.jsonl.partial").read_text(encoding="utf-8")
    assert [json.loads(line)["turn"] for line in partial.splitlines()] == [1, 2]
    assert partial.endswith("\n") and out.read_text() == "older" and not table.exists()


def test_a_turn_that_is_interrupted_shows_what_it_said(fake, questions, monkeypatch, capsys):
    put = Printer.put

    def stop(self, value):
        put(self, value)
        if value.tolist() == [ord("i")]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Printer, "put", stop)
    assert run(questions) == 130
    assert capsys.readouterr() == ("USER: Hi.\n\nASSISTANT: 22 sai\n", "interrupted\n")


def test_what_a_terminal_cannot_show_is_printed_as_an_escape(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    printer = Printer(FakeTokenizer())
    for word in ("caf\u00e9 ", "end"):
        printer.put(np.array([[ord(letter) for letter in word]]))
    printer.end()
    assert raw.getvalue() == b"caf\\xe9 end\n"
