"""The layout of a batch: its sequences, and the tokens of each that a forward pass computes. No
torch.

A *forward pass* takes rows through all layers once: a chunk of the prompts, or one new token of
each sequence. Without chunks the prefill is the one forward pass 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptChunk:
    """Tokens start:end of the prompt of one sequence (its place in the batch)."""

    sequence: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ContinuedSequence:
    """A sequence that goes on from the block before: its batch and place there, and the tokens that
    have been generated, of which all but the newest are cached."""

    batch: int
    sequence: int
    generated: int


@dataclass(frozen=True)
class BatchLayout:
    """The sequences of a GPU batch.

    Attributes
    ----------
    lengths : tuple of int
        Tokens up to the end of each prompt.
    new : int
        Tokens that will be appended to each in this block, at most: one fewer than are generated.
    chunk : int or None
        Tokens of a prompt in a forward pass; None for all of them.
    prefill_passes : int
        Forward passes of the block's longest prompt. All prompts end in the last of them, so that
        all first tokens are sampled together; shorter ones come in later. 0 in a block without
        prompts.
    past : int
        Tokens of each sequence that came in an earlier run. Positions and `lengths` count them.
    limits : tuple of int
        Tokens that will ever be appended to each, at most; none: `new`. When it has so many, its
        newest is computed again in each step.
    continued : tuple of (ContinuedSequence or None)
        Of each sequence, None where its prompt comes in this block; none: all come. Those that are
        continued stand before others.
    evicts : tuple of bool
        Layers in which what may stand in a batch with these loses tokens; none: they alone count.
    """

    lengths: tuple[int, ...]
    new: int
    chunk: int | None = None
    prefill_passes: int = 1
    past: int = 0
    limits: tuple[int, ...] = ()
    continued: tuple[ContinuedSequence | None, ...] = ()
    evicts: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def token(self, forward_pass: int) -> int:
        """Number of the new token that comes out of a forward pass: 0 of the prefill, negative
        before."""
        return forward_pass - self.prefill_passes + 1

    def in_prefill(self, forward_pass: int) -> bool:
        """True if a forward pass carries prompts."""
        return forward_pass < self.prefill_passes

    def origin(self, sequence: int) -> ContinuedSequence | None:
        """The sequence in the block before; None where its prompt comes in this one."""
        return self.continued[sequence] if self.continued else None

    @property
    def has_continued(self) -> bool:
        """True if some sequence is continued."""
        return any(self.continued)

    def limit(self, sequence: int) -> int:
        """Tokens that will ever be appended to a sequence, at most."""
        return self.limits[sequence] if self.limits else self.new

    def tokens(self, sequence: int, token: int) -> int:
        """All tokens of a sequence with the block's new token `token` (from 1; 0: before it)."""
        origin = self.origin(sequence)
        appended = token if origin is None else origin.generated - 1 + token
        return self.lengths[sequence] + min(appended, self.limit(sequence))

    def max_tokens(self, token: int) -> int:
        """Those of the sequence that has most."""
        return max(self.tokens(sequence, token) for sequence in range(len(self)))

    @property
    def longest(self) -> int:
        """The most tokens that a sequence will ever have."""
        return max(length + new for length, new in self.sizes)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Prompt lengths with limits, each pair once."""
        return {(length, self.limit(sequence)) for sequence, length in enumerate(self.lengths)}

    def spans(self, forward_pass: int) -> Iterator[PromptChunk]:
        """The part of every prompt in a forward pass of the prefill, empty ones too."""
        for sequence, length in enumerate(self.lengths):
            if self.origin(sequence) is not None:
                yield PromptChunk(sequence, length, length)
                continue
            if self.chunk is None:
                yield PromptChunk(sequence, self.past, length)
                continue
            end = max(self.past, length + self.token(forward_pass) * self.chunk)
            yield PromptChunk(sequence, max(self.past, end - self.chunk), end)

    @property
    def appends(self) -> bool:
        """True if prompts come onto something that is cached, of themselves or of earlier runs."""
        return self.chunk is not None or self.past > 0

    def has_cached(self, forward_pass: int) -> bool:
        """True if something of these prompts was cached before a forward pass."""
        return not self.in_prefill(forward_pass) or any(
            span.start for span in self.spans(forward_pass) if self.origin(span.sequence) is None)


def prefill_passes(longest: int, chunk: int | None) -> int:
    """Forward passes that a prompt of `longest` tokens takes."""
    return 1 if chunk is None else -(-longest // chunk)
