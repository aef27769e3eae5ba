"""Texts that end a generation, found as tokens come. No torch, and no tokenizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_SLACK = 4  # tokens: the tail may begin within a character, and lose a space in front


def until(text: str, stops: Sequence[str]) -> str:
    """A text up to where the first of the stops begins."""
    return text[: min((place for place in map(text.find, stops) if place >= 0),
                      default=len(text))]


class StopStrings:
    """Tells if generated tokens hold one of some texts, special tokens counted as text.

    Asked after each new token, it decodes only a tail of them: every token is a byte of text at
    least, so that a text of n bytes that has just come lies within the last n tokens.

    Parameters
    ----------
    strings : sequence of str
        None of them empty.
    decode : callable
        Text of token ids, such as a tokenizer's `decode`.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self._strings = tuple(strings)
        self._decode = decode
        longest = max(len(text.encode("utf-8")) for text in self._strings)
        self._tail = longest + _SLACK

    def __call__(self, tokens: Sequence[int]) -> bool:
        """True if one is there now that was not before the last of `tokens`."""
        text = self._decode(tokens[-self._tail :])
        return any(string in text for string in self._strings)
