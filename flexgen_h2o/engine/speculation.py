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

_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 64
"""Decode steps without drafts before they are tried again; doubled each time they do not pay."""

_SHORTEST_DRAFT = 2
"""Drafted tokens of the first steps with drafts, until their cost is known."""

_CHEAP = 1.05
"""Drafts are always verified while that makes a decode step longer by less than this factor."""


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
    """Measures decode steps with and without drafts, and chooses the length of drafts.

    Verifying a draft costs compute. That is nearly free if decode steps wait for weights from disk,
    and drafts are then as long as possible. Otherwise they grow while they are accepted, and pause
    where a step with drafts takes more time than the steps that it replaces.

    Attributes
    ----------
    length : int
        The most drafted tokens of the next decode step; 0 during a pause.
    """

    def __init__(self) -> None:
        self._steps: dict[bool, deque[tuple[float, float]]] = {
            drafted: deque(maxlen=_MEASURED_STEPS) for drafted in (False, True)}
        self._length = _SHORTEST_DRAFT
        self._pause = _SHORTEST_PAUSE
        self._paused = 2  # for steps to compare with: the first one is not typical

    @property
    def length(self) -> int:
        return 0 if self._paused else self._length

    def record(self, seconds: float, *, sequences: int, drafted: int, accepted: int) -> None:
        """Add a decode step, and decide about the next ones.

        Parameters
        ----------
        seconds : float
        sequences : int
            Sequences that were computed.
        drafted, accepted : int
            Drafted tokens that were verified, and accepted.
        """
        self._paused = max(0, self._paused - 1)
        self._steps[drafted > 0].append((seconds / sequences, 1 + accepted / sequences))
        plain, verified = self._steps[False], self._steps[True]
        if not drafted or not plain:
            return
        (cost, _), (verified_cost, tokens) = map(_means, (plain, verified))
        cheap = verified_cost < _CHEAP * cost
        if cheap or accepted == drafted:
            self._length *= 2
        elif not accepted:
            self._length = max(_SHORTEST_DRAFT, self._length // 2)
        if cheap or verified_cost < tokens * cost:
            self._pause = _SHORTEST_PAUSE
        elif len(verified) > 1 or self._pause > _SHORTEST_PAUSE:
            self._paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            verified.clear()  # the text may have changed by the next trial


def _means(steps: deque[tuple[float, float]]) -> tuple[float, ...]:
    return tuple(sum(column) / len(steps) for column in zip(*steps, strict=True))
