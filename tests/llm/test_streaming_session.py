"""`LLM.stream`: a text that continues from turn to turn, against the same text at once."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import MODES, PLACES, answers, open_llm, prompts_of, transformers_tokens
from helpers.internals import buffer_bytes, cache_of, scratch_bytes
from helpers.selection import examples, full, full_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import H2OConfig, Placement
from flexgen_h2o.cache import tiers
from flexgen_h2o.errors import UserError

SMALL = H2OConfig(heavy_tokens=9, recent_tokens=8)


# The full cache: the text so far as one prompt


@pytest.mark.parametrize("key, chunk", [
    ("opt", None), ("llama", 1), ("mistral_window", 4), ("mistral_window", None),
    ("qwen3_5", None), ("qwen3_5", 4),
    *full_cases(*itertools.product(["opt", "opt_350m_style", "llama", "llama3_rope", "neox"],
                                   [None, 1, 4]))])
def test_turns_on_a_full_cache_are_one_text(tiny_model, key, chunk):
    tiny = tiny_model(key)
    turns = prompts_of(tiny, [7, 1, 13, 2])
    with open_llm(tiny, chunk=chunk, cache=PLACES[2 if chunk == 4 else 0]) as llm:
        results = answers(llm, turns, 6, max_tokens=100)
    text = []
    for turn, answer in zip(turns, results, strict=True):
        text += turn
        assert answer == transformers_tokens(tiny, [text], 6)[0]
        text += answer


def test_log_probabilities_are_those_of_one_text(tiny_model):
    tiny = tiny_model("llama")
    (text,) = prompts_of(tiny, [60])
    with open_llm(tiny) as llm:
        (whole,) = llm.loglikelihood([(text[:1], text[1:])])
        with llm.stream(max_tokens=60) as stream:
            chunks = [stream.loglikelihood(text[a:b])
                      for a, b in ((0, 1), (1, 2), (2, 20), (20, 21), (21, 60))]
            assert [len(chunk) for chunk in chunks] == [0, 1, 18, 1, 39]
            assert sum(chunks, []) == pytest.approx(whole, abs=1e-4)
            assert stream.tokens == 60 and stream.cached_tokens == 59
            assert len(stream.stats.step_seconds) == 39
            with pytest.raises(UserError, match="60 tokens, and 1 more would exceed max_tokens"):
                stream.loglikelihood([5])


# Eviction: the simulation, which masks a full cache


RECALL = H2OConfig(heavy_tokens=5, recall=True)


@pytest.mark.parametrize("key, h2o", [
    ("opt", SMALL), ("llama", replace(SMALL, positions="rolling")), ("neox", SMALL),
    ("mistral_window", H2OConfig(heavy_tokens=3, recent_tokens=2)), ("llama", RECALL),
    ("gemma2", RECALL), ("gemma4", SMALL),
    *full_cases(*((key, replace(SMALL, positions=positions)) for key, positions in MODES))])
def test_a_stream_equals_its_simulation(tiny_model, key, h2o):
    tiny = tiny_model(key)
    turns = prompts_of(tiny, [20, 3, 13, 1])
    with open_llm(tiny, replace(h2o, simulate=True), chunk=6) as llm:
        expected = answers(llm, turns, 6, max_tokens=140)
    with open_llm(tiny, h2o, chunk=6, cache=PLACES[2 if h2o.recall else 0]) as llm:
        assert answers(llm, turns, 6, max_tokens=140) == expected
    with open_llm(tiny, chunk=6) as llm:
        assert answers(llm, turns, 6, max_tokens=140) != expected, "nothing was evicted"


@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_turns_and_budget_equal_the_simulation(tiny_model, data):
    tiny = tiny_model("llama")
    turns = prompts_of(tiny, data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3)))
    h2o = H2OConfig(heavy_tokens=data.draw(st.integers(0, 8)),
                    recent_tokens=data.draw(st.integers(1, 8)),
                    sink_tokens=data.draw(st.integers(0, 3)),
                    score=data.draw(st.sampled_from(["sum", "mean", "decay"])),
                    positions=data.draw(st.sampled_from(["original", "rolling"])))
    chunk, new = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    with open_llm(tiny, replace(h2o, simulate=True), chunk=chunk) as llm:
        expected = answers(llm, turns, new, max_tokens=200)
    with open_llm(tiny, h2o, chunk=chunk, cache=data.draw(st.sampled_from(PLACES))) as llm:
        assert answers(llm, turns, new) == expected


@pytest.mark.parametrize("case", [(None, 4), (replace(SMALL, positions="rolling"), 16),
                                  *full((None, 16), (SMALL, (8, 4)), (SMALL, 4))], ids=str)
def test_the_same_answers_on_every_tier(tiny_model, device, monkeypatch, case):
    """On disk, a full cache grows between write-backs of the log."""
    monkeypatch.setattr(tiers, "CACHE_GROWTH", 5)
    (h2o, bits), tiny = case, tiny_model("llama")
    turns, most = prompts_of(tiny, [18, 3, 13, 1]), 140 if h2o is None else None
    with open_llm(tiny, h2o, chunk=8, cache_bits=bits) as llm:
        expected = answers(llm, turns, 5, max_tokens=most)
    host, disk = Placement(0, 100, 0), Placement(0, 0, 100)
    for place, options in ((disk, {"overlap": case != (None, 16)}),
                           (host, {"cpu_cache_compute": case != (None, 4)})):
        with open_llm(tiny, h2o, chunk=8, cache_bits=bits, cache=place, activations=place,
                      weights=Placement(0, 50, 50), **options) as llm:
            assert answers(llm, turns, 5, max_tokens=most) == expected, (place, options)


def test_a_long_stream_takes_constant_memory(tiny_model):
    tiny = tiny_model("llama")  # 256 positions
    h2o = replace(SMALL, positions="rolling")
    with open_llm(tiny, h2o, chunk=16) as llm, llm.stream() as stream:
        (part,) = cache_of(stream).tiers
        token = llm.model_config.kv_bytes_per_token(4)
        assert buffer_bytes(part) <= 17 * token + 3 * 4096
        buffers = []
        for turn in prompts_of(tiny, [120] * 3):
            stream.generate(turn, max_new_tokens=5, eos_token_id=-1)
            assert stream.stats.kv_cache_bytes == 17 * token
            buffers.append(scratch_bytes(stream))
        assert len(set(buffers)) == 1
        assert stream.tokens == 3 * 125 and stream.cached_tokens == 17


def test_streams_exceed_the_context_on_request(tiny_model):
    tiny = tiny_model("llama")  # 256 positions
    turns = prompts_of(tiny, [230, 20])
    for h2o, most in ((None, 400), (SMALL, None)):
        with open_llm(tiny, h2o) as llm:
            with llm.stream(max_tokens=most) as stream:
                stream.generate(turns[0], max_new_tokens=10, eos_token_id=-1)
                with pytest.raises(UserError, match="256 positions"):
                    stream.generate(turns[1], max_new_tokens=10)
                # A refused turn leaves the text as it was.
                assert stream.tokens == 240
                stream.generate(turns[1][:5], max_new_tokens=10, eos_token_id=-1)
            assert len(answers(llm, turns, 10, max_tokens=most, past_context=True)[1]) == 10


class Recorder:
    """transformers' interface of a streamer."""

    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        assert value.dtype == torch.int64
        self.got.append((value.dim(), value.flatten().tolist()))

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_turn_and_each_token(tiny_model):
    tiny = tiny_model("llama")
    turns = prompts_of(tiny, [6, 4])
    with open_llm(tiny) as llm, llm.stream(max_tokens=60) as stream:
        for turn in turns:
            recorder = Recorder()
            out = stream.generate(turn, streamer=recorder, max_new_tokens=5, eos_token_id=-1)
            assert recorder.got == [(2, turn), *((1, [token]) for token in out.token_ids)]
            assert recorder.ended == 1 and out.prompt_token_ids == turn


def test_an_end_token_ends_the_turn_and_not_the_text(tiny_model):
    tiny = tiny_model("llama")
    (first, second) = prompts_of(tiny, [6, 4])
    with open_llm(tiny) as llm:
        (usual, _) = answers(llm, [first, second], max_tokens=60)
        end = usual[3]
        with llm.stream(max_tokens=60) as stream:
            out = stream.generate(first, max_new_tokens=12, eos_token_id=end)
            assert out.finish_reason == "stop"
            assert out.token_ids == usual[: usual.index(end) + 1]
            text = first + out.token_ids + second
            assert stream.generate(second, max_new_tokens=12, eos_token_id=-1).token_ids == (
                transformers_tokens(tiny, [text], 12)[0])


def test_streams_and_calls_take_turns(tiny_model):
    tiny = tiny_model("llama")
    turns = prompts_of(tiny, [12, 5, 9])
    with open_llm(tiny, SMALL) as llm:
        alone = answers(llm, turns)
        usual = llm.generate([turns[0]], max_new_tokens=12, eos_token_id=-1)[0].token_ids
        one, other = llm.stream(), llm.stream()
        results = [], []
        for turn in turns:
            for stream, tokens in zip((one, other), results, strict=True):
                tokens.append(stream.generate(turn, max_new_tokens=12, eos_token_id=-1).token_ids)
            again = llm.generate([turns[0]], max_new_tokens=12, eos_token_id=-1)
            assert again[0].token_ids == usual
        assert results == (alone, alone)
    refused(lambda: one.generate(turns[0]), match="has ended")


def test_an_error_ends_the_stream_and_not_the_llm(tiny_model):
    tiny = tiny_model("llama")
    (turn,) = prompts_of(tiny, [12])

    class Failing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.got) == 4:
                raise KeyboardInterrupt

    with open_llm(tiny, SMALL) as llm:
        usual = answers(llm, [turn])
        stream = llm.stream()
        with pytest.raises(KeyboardInterrupt):
            stream.generate(turn, streamer=Failing(), max_new_tokens=12)
        refused(lambda: stream.generate(turn), match="has ended")
        assert answers(llm, [turn]) == usual


@pytest.mark.parametrize("key, h2o, options, words", [
    ("llama", None, {}, "give max_tokens"),
    ("llama", H2OConfig(heavy_ratio=0.1), {}, "heavy_tokens"),
    ("llama", H2OConfig(heavy_ratio=0.1, recall=True), {"max_tokens": 100}, "no base"),
    ("llama", replace(SMALL, evict_generated=False), {}, "leave evict_generated"),
    ("llama", replace(SMALL, simulate=True), {}, "give max_tokens"),
    ("opt", SMALL, {"past_context": True}, "learned positions"),
    ("llama", H2OConfig(heavy_tokens=100, recent_tokens=100, positions="rolling"), {},
     "cache of 200 tokens and a chunk of 256"),
    ("llama", SMALL, {"max_tokens": 0}, "at least 1"),
    ("llama", SMALL, {"past_context": 1}, "true or false"),
    ("llama", None, {"max_tokens": 2**40}, "does not fit")])
def test_unsupported_streams(tiny_model, key, h2o, options, words):
    with open_llm(tiny_model(key), h2o) as llm:
        refused(lambda: llm.stream(**options), match=words)
    refused(lambda: llm.stream(max_tokens=20), match="has been closed")
