"""Text of tokens, stop strings, and the reasoning before an answer."""

import random

import pytest
import torch
from helpers.selection import examples
from helpers.tiny_tokenizers import tiny_tokenizer, with_words
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, Policy
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.detokenization import (
    Detokenizer,
    IncrementalDetokenizer,
    ReasoningParser,
    StopStrings,
)
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import checkpoint_folder
from flexgen_h2o.outputs import Output

KINDS = ("byte-level", "llama", "gemma", "unigram", "wordpiece", "words")
TOKENIZERS = {kind: tiny_tokenizer(kind) for kind in KINDS}
DETOKENIZERS = {kind: Detokenizer(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
texts = st.lists(st.sampled_from([*"abx .,\n日é😀", "so", " time", "</s>"]),
                 max_size=12).map("".join)


def tokens_of(kind: str, *names: str) -> list[int]:
    return TOKENIZERS[kind].convert_tokens_to_ids([*names])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60))
@given(text=texts)
def test_prompt_and_completion_join_to_the_whole_text(kind, text):
    """At each cut of the tokens. The whole text is the tokenizer's own."""
    tokenizer, detokenizer = TOKENIZERS[kind], DETOKENIZERS[kind]
    tokens = tokenizer("so" + text, add_special_tokens=False)["input_ids"]
    whole = detokenizer.text(tokens)
    if kind != "words":  # transformers gives such a vocabulary no spaces
        assert whole == tokenizer.decode(tokens, skip_special_tokens=True)
    for cut in range(len(tokens) + 1):
        prompt, completion = tokens[:cut], tokens[cut:]
        assert detokenizer.text(prompt) + detokenizer.text(completion, prompt) == whole
    begun = IncrementalDetokenizer(detokenizer)
    assert "".join(map(begun.step, tokens)) == whole


@pytest.mark.parametrize(("kind", "names", "text"), [
    *((kind, ("▁time",), " time") for kind in ("llama", "gemma", "unigram")),
    ("wordpiece", ("time",), " time"), ("byte-level", ("Ġtime",), " time"),
    ("llama", ("▁", "▁", "▁b"), "   b"),  # a column of indentation
])
def test_a_completion_keeps_its_first_space(kind, names, text):
    (so,) = TOKENIZERS[kind]("so", add_special_tokens=False)["input_ids"][-1:]
    detokenizer, tokens = DETOKENIZERS[kind], tokens_of(kind, *names)
    assert detokenizer.text(tokens, [so]) == text
    assert b"".join(map(detokenizer.token_bytes, tokens)).decode() == text
    # After special tokens alone it is the beginning of a text.
    if kind in ("llama", "unigram", "wordpiece"):
        assert detokenizer.text(tokens, tokens_of(kind, "<s>")) == text[1:]


EMOJI = [f"<0x{value:02X}>" for value in "😀".encode()]


def test_parts_of_a_character_have_its_bytes():
    for kind in ("llama", "byte-level"):
        tokens = TOKENIZERS[kind]("so 😀é", add_special_tokens=False)["input_ids"]
        parts = [DETOKENIZERS[kind].token_bytes(token) for token in tokens]
        assert b"".join(parts).decode() in ("so 😀é", " so 😀é") and b"\xf0" in parts
    assert DETOKENIZERS["llama"].token_bytes(*tokens_of("llama", "<0x0A>")) == b"\n"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_incomplete_characters_are_left_out(cut):
    """Whole characters of bytes before it stay, which SentencePiece's own decoder would lose."""
    detokenizer = DETOKENIZERS["llama"]
    names = ["▁so", *EMOJI, *EMOJI[:cut]]
    tokens = tokens_of("llama", *names)
    assert detokenizer.text(tokens) == "so😀"
    # What goes on from there completes it, or does not.
    rest = tokens_of("llama", *EMOJI[cut:], "▁time")
    assert detokenizer.text(rest, tokens) == "😀 time"
    assert detokenizer.text(rest[-1:], tokens) == " time"


def test_invalid_bytes_become_replacement_characters():
    names = ["▁so", "<0xFF>", "▁time", "<0xF0>", "▁time"]
    assert DETOKENIZERS["llama"].text(tokens_of("llama", *names)) == "so\ufffd time\ufffd time"


def test_special_tokens_have_text_only_if_kept():
    detokenizer = DETOKENIZERS["llama"]
    tokens = tokens_of("llama", "▁so", "</s>", "▁time", "<s>")
    assert detokenizer.text(tokens) == "so time"
    assert detokenizer.text(tokens, keep=tokens[1:2]) == "so</s> time"
    assert detokenizer.token_bytes(tokens[1]) == b"</s>"
    assert detokenizer.token_bytes(100_000) == b""  # ids that only the model has


# Reasoning, and the answer

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
           "<|constrain|>"]
ANALYSIS = "<|channel|>analysis<|message|>so it is<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>time"


def split(prompt: str, answer: str, special=(), regular=()) -> tuple[str, str | None]:
    tokenizer = tiny_tokenizer("byte-level")
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    tokenizer.add_tokens([*regular])
    ids = [tokenizer(text)["input_ids"] for text in (prompt, answer)]
    text = Detokenizer(tokenizer).text(ids[1], ids[0])
    return ReasoningParser(tokenizer).split(Output(None, ids[0], ids[1], text, "stop"))


@pytest.mark.parametrize("tokens", [{}, {"special": ["MARK", "/MARK"]},
                                    {"regular": ["MARK", "/MARK"]}])
@pytest.mark.parametrize("mark", ["<think>", "<seed:think>", "[THINK]"])
@pytest.mark.parametrize(("prompt", "answer", "expected"), [
    ("so", "MARK\nso it is\n/MARK\n\ntime</s>", ("time", "so it is")),
    ("so MARK\n", "so it is\n/MARK\n\ntime</s>", ("time", "so it is")),
    ("so MARK\n", "MARK so it is/MARK time", ("time", "so it is")),
    ("so", "MARK so it", ("", "so it")),  # cut off before it has ended
    ("so MARK\n", "so it", ("", "so it")),
    ("so", "MARK\n\n/MARK\n\ntime", ("time", None)),
    ("so MARK\n\n/MARK\n\n", "time", ("time", None)),  # the template has told it not to think
    ("so", " time", (" time", None)),
    ("so", "  time </s>", ("  time ", None))])
def test_marked_reasoning(tokens, mark, prompt, answer, expected):
    def marked(text: str) -> str:
        return text.replace("/MARK", f"{mark[0]}/{mark[1:]}").replace("MARK", mark)

    kinds = {kind: [marked(name) for name in names] for kind, names in tokens.items()}
    assert split(marked(prompt), marked(answer), **kinds) == expected


def test_plain_text_marks_are_ignored():
    for text in ("Write <think> and </think> so", "so </think> time"):
        assert split("so", text) == (text, None)


@pytest.mark.parametrize(("prompt", "answer", "expected"), [
    ("<|start|>assistant", f"{ANALYSIS}{FINAL}<|return|>", ("time", "so it is")),
    ("<|start|>assistant", "<|channel|>final<|message|>time", ("time", None)),
    ("<|start|>assistant", "<|channel|>analysis<|message|>so it", ("", "so it")),
    ("<|start|>assistant", f"{ANALYSIS}<|start|>assistant<|channel|>fin", ("", "so it is")),
    ("<|start|>assistant", f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL}",
     ("time", "so it is\nso it is")),
    ("<|start|>assistant", f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.x "
     "<|constrain|>json<|message|>{}<|call|>", ("{}", "so it is")),
    ("<|start|>assistant<|channel|>analysis<|message|>", f"so it is<|end|>{FINAL}",
     ("time", "so it is")),
    ("<|start|>assistant<|channel|>final<|message|>", "time<|return|>", ("time", None))])
def test_channels_of_gpt_oss(prompt, answer, expected):
    before = f"<|start|>user<|message|>so<|end|>{ANALYSIS}"
    assert split(before + prompt, answer, special=HARMONY) == expected


# Stop strings

# A token is some bytes: parts of characters and of stop strings, and more than one of them.
TOKEN_BYTES = [*(bytes([byte]) for byte in "#ab\né€".encode()), b"##", b"###", b"a#", b"#b\n",
               b"ab" * 4, "é#".encode(), "€".encode()]
stop_texts = st.text(st.sampled_from("#ab\né€"), min_size=1, max_size=6)


def decode(tokens) -> str:
    return b"".join(TOKEN_BYTES[token] for token in tokens).decode("utf-8", "replace")


@given(st.lists(stop_texts, min_size=1, max_size=3),
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
        results = [next((i for i in range(1, len(tokens) + 1) if stops(tokens[:i])), None)
                 for stops in (ours, lambda ids: theirs(torch.tensor([ids]), None).all())]
        assert results[0] == results[1], text
        assert (results[0] is None) == (text in ("none", "four fives"))


def test_stop_strings_need_a_tokenizer(tiny_model):
    with LLM(str(tiny_model("llama").folder), device="cpu") as llm:
        with pytest.raises(UserError, match="no tokenizer here, and stop_strings are text"):
            llm.generate([[1, 2]], max_new_tokens=2, stop_strings="a")
        assert len(llm.generate([[1, 2]], max_new_tokens=2)[0].token_ids) == 2
