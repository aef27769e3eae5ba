"""Texts that end a generation, found as tokens come. No torch, and no tokenizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def until(text: str, stops: Sequence[str]) -> str:
    """A text up to where the first of the stops begins."""
    return text[: min((place for place in map(text.find, stops) if place >= 0),
                      default=len(text))]


class StopStrings:
    """Tells if generated tokens hold one of some texts, special tokens counted as text.

    Call it after each new token. It decodes a tail as long as the longest text.

    Parameters
    ----------
    strings : sequence of str
        None of them empty.
    token_bytes : callable
        The bytes that a token adds to a text, such as `Detokenizer.token_bytes`.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Callable[[int], bytes]):
        self._strings = [text.encode() for text in strings]
        self._token_bytes = token_bytes
        self._longest = max(map(len, self._strings))

    def __call__(self, tokens: Sequence[int]) -> bool:
        """True if one is there now that was not before the last of `tokens`."""
        before, place = b"", len(tokens) - 1
        while place and len(before) < self._longest:
            place -= 1
            before = self._token_bytes(tokens[place]) + before
        begin = max(0, len(before) - self._longest + 1)
        tail = before[begin:] + self._token_bytes(tokens[-1])
        return any(string in tail for string in self._strings)
