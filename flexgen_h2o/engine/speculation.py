"""Speculative decoding: draft tokens cheaply, verify them in one forward pass. No torch.

A decode step of one sequence reads all weights for one row. With drafts of the next tokens it
computes several rows: a row's token is sampled as without speculation, and the next row counts if
that token is its draft. So generated tokens do not depend on the drafts (arXiv 2211.17192; for
drafts out of the prompt: https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from flexgen_h2o.engine.batch import Request

NGRAM_SIZES = (4, 3, 2)
"""Tokens at the end of a text that are looked up in it: the longest n-gram that is found counts."""

_MEASURED_STEPS = 8
"""Newest decode steps, with drafts and without, whose times are compared."""

_LONGEST_PAUSE = 32
"""The most decode steps without drafts before they are tried again."""


class Drafter(Protocol):
    """Drafts the tokens that a request may generate next."""

    def draft(self, request: Request, most: int) -> list[int]:
        """Return at most `most` tokens; none if the request has finished."""


@dataclass
class _NgramIndex:
    """Positions behind the latest n-grams of a text, of which `tokens` are indexed."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    tokens: int = 0


class NgramDrafter:
    """Drafts what followed the newest tokens the last time (prompt lookup)."""

    def __init__(self) -> None:
        self._indices: dict[int, _NgramIndex] = {}

    def draft(self, request: Request, most: int) -> list[int]:
        """Return the tokens after the latest earlier occurrence of the text's last n-gram."""
        if request.finish_reason:
            self._indices.pop(request.key, None)
            return []
        index = self._indices.setdefault(request.key, _NgramIndex())
        text = request.history
        for end in range(index.tokens, len(text)):
            for size in NGRAM_SIZES:
                if size <= end:
                    index.ends[tuple(text[end - size : end])] = end
        index.tokens = len(text)
        for size in NGRAM_SIZES:
            following = text[index.ends.get(tuple(text[-size:]), len(text)) :]
            if following:  # if they reach the end of the text, it repeats itself
                return (following * (most // len(following) + 1))[:most]
        return []


class DraftAutotune:
    """Measures decode steps with and without drafts, and pauses drafts that do not pay.

    Verifying a draft costs compute. It is nearly free if decode steps wait for weights from disk.

    Attributes
    ----------
    enabled : bool
        Whether the next decode step may verify drafts.
    """

    def __init__(self) -> None:
        self._steps: dict[bool, deque[tuple[float, int]]] = {
            drafted: deque(maxlen=_MEASURED_STEPS) for drafted in (False, True)}
        self._pause = self._paused = 0

    @property
    def enabled(self) -> bool:
        return not self._paused

    def record(self, seconds: float, tokens: int, *, drafted: bool) -> None:
        """Add a decode step that generated some tokens, and decide about the next ones."""
        self._steps[drafted].append((seconds, tokens))
        if not drafted:
            self._paused = max(0, self._paused - 1)
            return
        plain, verified = self._steps[False], self._steps[True]
        if not plain and len(verified) == _MEASURED_STEPS:
            self._paused = 1  # there is nothing to compare with
        elif plain and len(verified) > 1 and _per_token(verified) > _per_token(plain):
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._paused = self._pause
        else:
            self._pause = 0


def _per_token(steps: deque[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in steps) / sum(tokens for _, tokens in steps)
