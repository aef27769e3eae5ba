"""Text of tokens: the bytes of each, after a prompt, and characters of several tokens."""

from __future__ import annotations

import pytest
from helpers.selection import examples
from helpers.tiny_tokenizers import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer

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
    """Wherever the tokens are cut; the whole is what the tokenizer itself makes of them."""
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
