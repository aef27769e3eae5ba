"""Answers of reasoning models: the answer, and what the model thought before."""

from __future__ import annotations

import pytest
from helpers.tiny_tokenizers import tiny_tokenizer

from flexgen_h2o.engine.detokenization import Detokenizer, ReasoningParser
from flexgen_h2o.outputs import Output

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
    ("so", "  time </s>", ("  time ", None)),
])
def test_marked_reasoning(tokens, mark, prompt, answer, expected):
    def marked(text: str) -> str:
        return text.replace("/MARK", f"{mark[0]}/{mark[1:]}").replace("MARK", mark)

    kinds = {kind: [marked(each) for each in names] for kind, names in tokens.items()}
    assert split(marked(prompt), marked(answer), **kinds) == expected


def test_marks_that_are_plain_text_do_not_count():
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
    ("<|start|>assistant<|channel|>final<|message|>", "time<|return|>", ("time", None)),
])
def test_channels_of_gpt_oss(prompt, answer, expected):
    before = f"<|start|>user<|message|>so<|end|>{ANALYSIS}"
    assert split(before + prompt, answer, special=HARMONY) == expected
