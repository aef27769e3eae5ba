"""Detokenization: token ids to bytes and text, whole or incremental. No torch."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token of SentencePiece's byte fallback
_REPLACEMENT = "\ufffd"
_LONGEST = 4  # bytes of a character, and so the most tokens of one


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
    detokenizer : Detokenizer
    prompt : sequence of int
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
    """Return the bytes of a token from its name in the vocabulary; None if it has no such name."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if name is None:
        return None
    if byte := _BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)])
    values = {character: value for value, character in bytes_to_unicode().items()}
    return bytes(map(values.__getitem__, name)) if values.keys() >= set(name) else None
