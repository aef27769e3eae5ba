"""Stop strings: found as tokens come, where the text first holds one; and in the engine."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.tiny_tokenizers import with_words
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o import LLM, Policy
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.detokenization import Detokenizer, StopStrings
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import checkpoint_folder

# A token is some bytes: parts of characters and of stop strings, and more than one of them.
TOKEN_BYTES = [*(bytes([byte]) for byte in "#ab\né€".encode()), b"##", b"###", b"a#", b"#b\n",
               b"ab" * 4,
               "é#".encode(), "€".encode()]
texts = st.text(st.sampled_from("#ab\né€"), min_size=1, max_size=6)


def decode(tokens) -> str:
    return b"".join(TOKEN_BYTES[token] for token in tokens).decode("utf-8", "replace")


@given(st.lists(texts, min_size=1, max_size=3),
       st.lists(st.integers(0, len(TOKEN_BYTES) - 1), max_size=60))
def test_stops_where_the_text_first_has_one(strings, tokens):
    expected = next((i for i in range(1, len(tokens) + 1)
                     if any(text in decode(tokens[:i]) for text in strings)), None)
    stops = StopStrings(strings, TOKEN_BYTES.__getitem__)
    assert next((i for i in range(1, len(tokens) + 1) if stops(tokens[:i])), None) == expected


def test_only_the_last_tokens_are_decoded():
    seen = []
    stops = StopStrings(["##", "€"], lambda token: seen.append(token) or b"#")
    assert stops([0, 0])
    seen.clear()
    assert stops([0] * 100) and len(seen) == 4


def test_tokens_without_bytes_do_not_hide_a_stop_string():
    stops = StopStrings(["ab"], {0: b"", 1: b"a", 2: b"b"}.__getitem__)
    assert stops([1, *[0] * 20, 2]) and not stops([1, 0, 1]) and not stops([0])
    assert not stops([1, 2, 0])  # it has been there before


@pytest.mark.parametrize("bad", ["", ["a", ""], [1], 7, {"a"}, b"a"])
def test_bad_stop_strings(bad):
    with pytest.raises(UserError, match="stop_strings must be a text, or several, none empty"):
        SamplingParams(stop_strings=bad)


def test_stop_strings_are_one_or_several():
    assert SamplingParams(stop_strings="ab").stop_strings == ("ab",)
    assert SamplingParams(stop_strings=["ab", "c"]).stop_strings == ("ab", "c")
    assert SamplingParams().stop_strings is None


def test_each_generation_ends_at_its_first_stop_string(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    tiny = tiny_model("llama")
    folder = with_words(tiny.folder, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw = random.Random(0)
    prompts = [draw.choices(range(1, 119), k=length) for length in (9, 4, 14, 6)]
    with LLM(folder, dtype="float32", device="cpu", policy=Policy(gpu_batch_size=3)) as llm:
        free = llm.generate(prompts, max_new_tokens=12)
        assert {out.finish_reason for out in free} == {"length"}
        # Across the join of two tokens; the middle of one; and one that never comes.
        words = [out.text.split() for out in free]
        stops = [" ".join(words[0][4:6]), words[1][2][1:], "never"]
        outputs = llm.generate(prompts, max_new_tokens=12, stop_strings=stops)
        one = llm.generate(prompts[:1], max_new_tokens=12, stop_strings=stops[0])
        (first,) = llm.generate(prompts[:1], max_new_tokens=12, stop_strings=f" {words[0][0]}")
    assert first.text == f" {words[0][0]}" and first.token_ids == free[0].token_ids[:1]
    for prompt, text, out in zip(prompts, free, outputs, strict=True):
        end = next((i for i in range(1, 13) if any(
            stop in tokenizer.decode(text.token_ids[:i]) for stop in stops)), 12)
        assert out.token_ids == text.token_ids[:end]
        assert out.text == " " + tokenizer.decode(out.token_ids)
        stopped = any(stop in out.text for stop in stops)
        assert out.finish_reason == ("stop" if stopped else "length")
        assert len(out.prompt_token_ids) == len(prompt)
    assert [out.finish_reason for out in outputs[:2]] == ["stop", "stop"]
    assert one[0].token_ids == outputs[0].token_ids and one[0].text.endswith(stops[0])
    assert len(one[0].token_ids) <= 6


def test_stops_equal_those_of_transformers():
    """With a real tokenizer, whose tokens are parts of words and characters."""
    from transformers import AutoTokenizer
    from transformers.generation import StopStringCriteria

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder("smollm2-135m"))
    strings = ["###", "end.\n", "naïve", " four five"]
    theirs = StopStringCriteria(tokenizer, strings)
    ours = StopStrings(strings, Detokenizer(tokenizer).token_bytes)
    for text in ("One #two ##three ###four", "At the\nend. \nThe end.\n\nMore", "A naïvety", "none",
                 "a#####", "日本###", "three four five", "four fives"):
        tokens = tokenizer(text)["input_ids"]
        found = [next((i for i in range(1, len(tokens) + 1) if stops(tokens[:i])), None)
                 for stops in (ours, lambda some: theirs(torch.tensor([some]), None).all())]
        assert found[0] == found[1], text
        assert (found[0] is None) == (text in ("none", "four fives"))


def test_stop_strings_need_a_tokenizer(tiny_model):
    with LLM(str(tiny_model("llama").folder), device="cpu") as llm:
        with pytest.raises(UserError, match="no tokenizer here, and stop_strings are text"):
            llm.generate([[1, 2]], max_new_tokens=2, stop_strings="a")
        assert len(llm.generate([[1, 2]], max_new_tokens=2)[0].token_ids) == 2
