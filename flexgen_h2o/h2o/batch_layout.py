"""Who sits in the cache, and what of each prompt a sweep through the network carries. No torch.

A *sweep* takes rows through all layers once: a chunk of the prompts, or one new token of each
sequence. Without chunks the prefill is the one sweep 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Tokens start:end of the prompt of one sequence (its place in the batch)."""

    sequence: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Seats:
    """The sequences of a GPU batch.

    Attributes
    ----------
    lengths : tuple of int
        Tokens up to the end of each prompt.
    new : int
        Tokens that will be appended to each, at most: one fewer than are generated.
    chunk : int or None
        Tokens of a prompt in a sweep; None for all of them.
    prefill_sweeps : int
        Sweeps of the block's longest prompt. All prompts end in the last of them, so that all
        first tokens are sampled together; shorter ones come in later.
    past : int
        Tokens of each sequence that came in an earlier run. Positions and `lengths` count them.
    """

    lengths: tuple[int, ...]
    new: int
    chunk: int | None = None
    prefill_sweeps: int = 1
    past: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def token(self, sweep: int) -> int:
        """Number of the new token that comes out of a sweep: 0 of the prefill, negative before."""
        return sweep - self.prefill_sweeps + 1

    def in_prefill(self, sweep: int) -> bool:
        """Whether a sweep carries prompts."""
        return sweep < self.prefill_sweeps

    def spans(self, sweep: int) -> Iterator[Span]:
        """The part of every prompt in a sweep of the prefill, empty ones too."""
        for sequence, length in enumerate(self.lengths):
            if self.chunk is None:
                yield Span(sequence, self.past, length)
                continue
            end = max(self.past, length + self.token(sweep) * self.chunk)
            yield Span(sequence, max(self.past, end - self.chunk), end)

    @property
    def grows(self) -> bool:
        """Whether prompts come onto something that is cached, of themselves or of earlier runs."""
        return self.chunk is not None or self.past > 0

    def begun(self, sweep: int) -> bool:
        """Whether something of these sequences was cached before a sweep."""
        return not self.in_prefill(sweep) or any(span.start for span in self.spans(sweep))


def prefill_sweeps(longest: int, chunk: int | None) -> int:
    """Sweeps that a prompt of `longest` tokens takes."""
    return 1 if chunk is None else -(-longest // chunk)
