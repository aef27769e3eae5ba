"""Reasoning parser: split answers of reasoning models into reasoning and content. No torch."""

from __future__ import annotations

import re

from flexgen_h2o.engine.detokenization import Detokenizer
from flexgen_h2o.outputs import Output

_PAIRS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
_CHANNEL = "<|channel|>"  # of gpt-oss: a header, <|message|>, and the text of the channel
_MARKS = (_CHANNEL, "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>",
          "<|constrain|>", *(mark for pair in _PAIRS for mark in pair))
_MESSAGE = re.compile(r"<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)"
                      r"(?=<\|(?:channel|start|end|return|call)\|>|\Z)", re.DOTALL)
_LAST = 32  # tokens at a prompt's end that are searched for an opening mark


class ReasoningParser:
    """Splits answers of chat models into reasoning and content.

    It knows ``<think>``, ``<seed:think>`` and ``[THINK]``, where the answer begins or the prompt
    ends with one, and the channels of gpt-oss.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.

    Attributes
    ----------
    detokenizer : Detokenizer
    """

    def __init__(self, tokenizer):
        self.detokenizer = Detokenizer(tokenizer)
        added = tokenizer.get_added_vocab()
        self._keep = {added[mark] for mark in _MARKS if mark in added}
        self._has_channels = _CHANNEL in added

    def split(self, output: Output) -> tuple[str, str | None]:
        """Return content and reasoning of an answer; the latter is None if there is none."""
        prompt = output.prompt_token_ids
        text = self.detokenizer.text(output.token_ids, prompt, self._keep)
        before = self.detokenizer.text(prompt[-_LAST:], prompt[:-_LAST], self._keep)
        if self._has_channels and _CHANNEL in text:
            _, found, header = before.rpartition("<|start|>")
            return _by_channels((header if found else "") + text)
        for begin, end in _PAIRS:
            body = text.lstrip()
            if body.startswith(begin) or before.rstrip().endswith(begin):
                reasoning, _, content = body.removeprefix(begin).partition(end)
                return content.lstrip(), reasoning.strip() or None
        return output.text or "", None


def _by_channels(text: str) -> tuple[str, str | None]:
    """Split the messages of a gpt-oss answer; ignore a header that is cut off."""
    found = _MESSAGE.findall(text)
    content, reasoning = ("\n".join(body for channel, body in found
                                    if (channel == "analysis") == thought)
                          for thought in (False, True))
    return content, reasoning or None
