"""Speculative decoding: draft tokens cheaply, verify them in one forward pass. No torch.

A decode step of one sequence reads all weights for one row. With drafts of the next tokens it
computes several rows: a row's token is sampled as without speculation, and the next row counts if
that token is its draft. So generated tokens do not depend on the drafts: a draft is compared with
the sampled token, which needs no probabilities of the drafter (unlike in arXiv 2211.17192). Drafts
out of the prompt: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Protocol

from flexgen_h2o.engine.blocks import Request

if TYPE_CHECKING:
    from torch import Tensor

NGRAM_SIZES = (4, 3, 2)
"""Tokens at the end of a text that are looked up in it: the longest n-gram that is found counts."""

LOSS_SHARE = 0.03
"""Share of the time of decode steps that rejected drafts may cost."""

_MEASURED_STEPS = 8
"""Newest decode steps, with drafts and without, that are compared."""

_SHORTEST_DRAFT = 4
"""Drafted tokens of the first steps with drafts. Fewer hardly pay for a step of several rows."""


class Drafter(Protocol):
    """Drafts the tokens that a request may generate next."""

    def read_hidden(self, request: Request, hidden: Iterator[Tensor]) -> None:
        """Read the verifying model's hidden states at a request's next positions.

        Parameters
        ----------
        hidden : iterator of Tensor [rows, hidden]
            Hidden states after the final norm, computed lazily. Rows of rejected drafts are last.
        """

    def begin(self, request: Request) -> None:
        """Read a prompt, so that its first draft takes no longer than others."""

    def draft(self, request: Request, max_drafts: int) -> list[int]:
        """Return at most `max_drafts` tokens."""

    def forget(self, request: Request) -> None:
        """Drop the state of a request that ends or begins again."""

    def close(self) -> None:
        """Drop the state of all requests."""


@dataclass
class _NgramIndex:
    """N-grams of the first `tokens` tokens of a text.

    `ends` has the position after the latest occurrence of each.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    tokens: int = 0


class NgramDrafter:
    """Drafts the continuation of the newest tokens at their last occurrence (prompt lookup)."""

    def __init__(self) -> None:
        self._indices: dict[int, _NgramIndex] = {}

    def begin(self, request: Request) -> None:
        """Index the n-grams of the text."""
        self._index(request)

    def _index(self, request: Request) -> _NgramIndex:
        """Return the index of the text so far."""
        index = self._indices.setdefault(request.key, _NgramIndex())
        text = request.history
        for end in range(index.tokens, len(text)):
            for size in NGRAM_SIZES:
                if size <= end:
                    index.ends[tuple(text[end - size : end])] = end
        index.tokens = len(text)
        return index

    def draft(self, request: Request, max_drafts: int) -> list[int]:
        """Return the tokens after the latest earlier occurrence of the text's last n-gram."""
        index, text = self._index(request), request.history
        for size in NGRAM_SIZES:
            following = text[index.ends.get(tuple(text[-size:]), len(text)) :]
            if following:  # repeated up to the requested length
                return (following * (max_drafts // len(following) + 1))[:max_drafts]
        return []

    def read_hidden(self, request: Request, hidden: Iterator[Tensor]) -> None:
        """Do nothing: drafts come from the text alone."""

    def forget(self, request: Request) -> None:
        """Drop the n-grams of a request."""
        self._indices.pop(request.key, None)

    def close(self) -> None:
        """Drop the n-grams of all requests."""
        self._indices.clear()


class DraftAutotune:
    """Chooses the length of drafts, so that rejected ones cost at most `LOSS_SHARE` of the time.

    A drafted token takes time to draft and to verify, and an accepted one saves a decode step. The
    balance is kept as a credit in seconds, to which each decode step adds `LOSS_SHARE` of its time.
    A step drafts as many tokens as the credit pays for if none is accepted. So drafts are long
    where they are accepted or cost nothing, as with weights on disk, and rare elsewhere. The
    measurements of one block are kept for the next.

    Parameters
    ----------
    max_drafts : int
        Maximum length of a draft.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._shortest = self._longest = min(_SHORTEST_DRAFT, max_drafts)
        self._credit = 0.0
        self._sequences = 1
        self._plain: deque[float] = deque(maxlen=_MEASURED_STEPS)
        """Seconds of a sequence in each of the newest decode steps without drafts."""
        self._verified: deque[tuple[float, int, int]] = deque(maxlen=_MEASURED_STEPS)
        """Seconds, sequences and drafted tokens of each of the newest other forward passes."""

    def length(self, sequences: int) -> int:
        """Return the maximum length of the drafts of the next decode step; 0: no drafts.

        `sequences` are computed in it.
        """
        if sequences != self._sequences:
            self._plain.clear()
            self._sequences = sequences
        if not self._plain or self._credit <= 0:
            return 0
        row = self._row_seconds()
        affordable = self._credit / (row * sequences) if row else self._max_drafts
        return int(min(self._longest, affordable)) if affordable >= self._shortest else 0

    def _row_seconds(self) -> float:
        """Return the seconds of a drafted token: at most the seconds of a decode step."""
        step = fmean(self._plain)
        rows = [(seconds - step * sequences) / drafted
                for seconds, sequences, drafted in self._verified]
        return max(0.0, min([step, *([median(rows)] if rows else [])]))

    def begin(self) -> None:
        """Begin a block: texts of other lengths take other times."""
        self._plain.clear()

    def record_prefill(self, seconds: float, *, sequences: int, rows: int) -> None:
        """Add a forward pass of prompts. It shows the cost of several rows before any draft."""
        if rows > _SHORTEST_DRAFT * sequences:
            self._verified.append((seconds, sequences, rows - sequences))

    def record(self, seconds: float, *, sequences: int, drafted: int, accepted: int) -> None:
        """Add a decode step.

        Parameters
        ----------
        sequences : int
            Sequences that were computed.
        drafted, accepted : int
            Drafted tokens that were verified, and accepted.
        """
        if drafted:
            self._verified.append((seconds, sequences, drafted))
        else:
            self._plain.append(seconds / sequences)
        if not self._plain:
            return
        step = fmean(self._plain)
        replaced = step * (sequences + accepted) if drafted else seconds
        # Accepted drafts of an earlier part of the text pay for one longest draft only, and a step
        # that was slow for another reason does not end drafting.
        bound = self._max_drafts * step * sequences
        self._credit += (1 + LOSS_SHARE) * replaced - seconds
        self._credit = max(-bound, min(self._credit, bound))
        if not drafted:
            return
        costs_nothing = self._longest * self._row_seconds() <= LOSS_SHARE * step
        if costs_nothing or accepted == drafted:
            self._longest = min(2 * self._longest, self._max_drafts)
        elif not accepted:
            self._longest = max(self._shortest, self._longest // 2)
