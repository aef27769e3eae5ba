"""Detokenization: token ids to bytes and text, whole or incremental. No torch."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from flexgen_h2o.outputs import Output

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of SentencePiece's byte fallback
_REPLACEMENT = "\ufffd"
_LONGEST = 4  # bytes of a character, and therefore the maximum number of its tokens


class Detokenizer:
    """Decoder of token ids to bytes and text.

    A tokenizer's own `decode` drops the first space of a SentencePiece text, as if the tokens began
    it, and replaces bytes of incomplete characters by U+FFFD.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[bytes, bool]] = {}
        # Tokens are decoded after one of a word. Byte tokens would be decoded as one group.
        word = next((token for token in range(len(tokenizer)) if self._is_word(token)), None)
        self._before = [] if word is None else [word]
        self._skipped = len(self._decode(self._before))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; for a special token, its name."""
        return self.lookup(token)[0]

    def text(self, tokens: Iterable[int], prompt: Sequence[int] = (),
             keep: Collection[int] = ()) -> str:
        """Decode the tokens that follow a prompt; see `IncrementalDetokenizer`."""
        return "".join(map(IncrementalDetokenizer(self, prompt, keep).step, tokens))

    def lookup(self, token: int) -> tuple[bytes, bool]:
        """Return the bytes of a token, and whether the token is special."""
        if token not in self._known:
            text = self._decode([*self._before, token])[self._skipped :]
            special = bool(self._decode([token])) and not self._decode([token], skip=True)
            data = text.encode()
            if _REPLACEMENT in text:
                data = _part_of_character(self._tokenizer.convert_ids_to_tokens(token)) or data
            self._known[token] = data, special
        return self._known[token]

    def first_bytes(self, token: int) -> bytes:
        """Return the bytes of the first token of a text, without SentencePiece's space."""
        data = self.token_bytes(token)
        alone = self._decode([token]).encode()
        return alone if data == b" " + alone else data

    def _decode(self, tokens: list[int], *, skip: bool = False) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=skip,
                                      clean_up_tokenization_spaces=False)

    def _is_word(self, token: int) -> bool:
        text = self._decode([token], skip=True)
        return (text != "" and text == text.strip() and _REPLACEMENT not in text
                and not _BYTE.fullmatch(self._tokenizer.convert_ids_to_tokens(token) or ""))


class IncrementalDetokenizer:
    """Decoder of the tokens that follow a prompt, one by one.

    A character is returned with its last byte, also if its first bytes end the prompt. Invalid
    bytes become U+FFFD. Special tokens have no text.

    Parameters
    ----------
    keep : collection of int
        Special tokens whose names are part of the text.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int] = (),
                 keep: Collection[int] = ()):
        self._detokenizer, self._keep = detokenizer, keep
        self._begins = all(detokenizer.lookup(token)[1] for token in prompt)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(b"".join(map(detokenizer.token_bytes, prompt[-_LONGEST:])))
        self._in_character = self._utf8.getstate()[0] != b""

    def step(self, token: int) -> str:
        """Decode the next token and return the characters that it completes."""
        data, special = self._detokenizer.lookup(token)
        if special and token not in self._keep:
            return ""
        if self._begins and not special:
            self._begins = False
            data = self._detokenizer.first_bytes(token)
        text = self._utf8.decode(data)
        if text and self._in_character:
            self._in_character = False
            text = text.removeprefix(_REPLACEMENT)  # of the prompt's incomplete character
        return text


def _part_of_character(name: str | None) -> bytes | None:
    """Return the bytes of a token from its name in the vocabulary; None if it has none."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if name is None:
        return None
    if byte := _BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)])
    values = {character: value for value, character in bytes_to_unicode().items()}
    return bytes(map(values.__getitem__, name)) if values.keys() >= set(name) else None


def until(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first occurrence of a stop string."""
    return text[: min((index for index in map(text.find, stops) if index >= 0),
                      default=len(text))]


def without_beginning(text: str, stops: Sequence[str]) -> str:
    """Return a text without its longest end that begins one of `stops`."""
    longest = max((length for stop in stops for length in range(1, min(len(stop), len(text) + 1))
                   if text.endswith(stop[:length])), default=0)
    return text[: len(text) - longest]


class StopStrings:
    """Detects stop strings in generated tokens. Special tokens count as text.

    Call it after each new token. It decodes only as many tokens as the longest string needs.

    Parameters
    ----------
    strings : sequence of str
        Not empty.
    token_bytes : callable
        Returns the bytes that a token adds to a text: `Detokenizer.token_bytes`.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Callable[[int], bytes]):
        self._strings = [text.encode() for text in strings]
        self._token_bytes = token_bytes
        self._longest = max(map(len, self._strings))

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Return True if the last token completes a stop string."""
        before, index = b"", len(tokens) - 1
        while index and len(before) < self._longest:
            index -= 1
            before = self._token_bytes(tokens[index]) + before
        begin = max(0, len(before) - self._longest + 1)
        tail = before[begin:] + self._token_bytes(tokens[-1])
        return any(string in tail for string in self._strings)


_PAIRS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
_CHANNEL = "<|channel|>"  # of gpt-oss: a header, <|message|>, and the text of the channel
_MARKS = (_CHANNEL, "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>",
          "<|constrain|>", *(mark for pair in _PAIRS for mark in pair))
_MESSAGE = re.compile(r"<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)"
                      r"(?=<\|(?:channel|start|end|return|call)\|>|\Z)", re.DOTALL)
_LAST = 32  # tokens at a prompt's end that are searched for an opening mark


class ReasoningParser:
    """Splits answers of chat models into reasoning and content.

    It supports ``<think>``, ``<seed:think>`` and ``[THINK]`` at the beginning of the answer or the
    end of the prompt, and the channels of gpt-oss.

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

    @property
    def has_hidden_marks(self) -> bool:
        """Whether marks are special tokens, which `Output.text` does not have."""
        return any(self.detokenizer.lookup(token)[1] for token in self._keep)

    def before(self, prompt: Sequence[int]) -> str:
        """Return the end of a prompt, which may have an opening mark."""
        return self.detokenizer.text(prompt[-_LAST:], prompt[:-_LAST], self._keep)

    def split(self, output: Output) -> tuple[str, str | None]:
        """Return content and reasoning of an answer. Reasoning may be None."""
        prompt = output.prompt_token_ids
        text = self.detokenizer.text(output.token_ids, prompt, self._keep)
        before = self.before(prompt)
        if self._has_channels and _CHANNEL in text:
            _, start, header = before.rpartition("<|start|>")
            return _by_channels((header if start else "") + text)
        for begin, end in _PAIRS:
            body = text.lstrip()
            if body.startswith(begin) or before.rstrip().endswith(begin):
                reasoning, _, content = body.removeprefix(begin).partition(end)
                return content.lstrip(), reasoning.strip() or None
        return output.text or "", None

    def split_beginning(self, text: str, before: str) -> tuple[str, str]:
        """Return content and reasoning of the text so far that later text does not change.

        The marks are part of the text. `before` is the end of the prompt: see `before`.
        """
        body = text.lstrip()
        for begin, end in _PAIRS:
            if body.startswith(begin) or before.rstrip().endswith(begin):
                reasoning, mark, content = body.removeprefix(begin).partition(end)
                if not mark:
                    reasoning = without_beginning(reasoning, [end])
                return content.lstrip(), reasoning.strip()
        if any(begin.startswith(body) for begin, _ in _PAIRS):
            return "", ""
        return text, ""


def _by_channels(text: str) -> tuple[str, str | None]:
    """Split the messages of a gpt-oss answer; ignore a header that is cut off."""
    messages = _MESSAGE.findall(text)
    content, reasoning = ("\n".join(body for channel, body in messages
                                    if (channel == "analysis") == thought)
                          for thought in (False, True))
    return content, reasoning or None
