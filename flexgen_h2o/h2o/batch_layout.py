"""The sequences of a batch, and the tokens of each that a forward pass computes. No torch.

A *forward pass* takes rows through all layers once: a chunk of each prompt, or one new token of
each sequence. Without chunked prefill the prompts are forward pass 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PromptSpan:
    """Tokens start:end of the prompt of a sequence, by its place in the batch."""

    sequence: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ContinuedSequence:
    """A sequence that continues from the last block.

    Attributes
    ----------
    batch, sequence : int
        Its batch and place in the last block.
    generated : int
        Tokens generated so far; all but the newest are cached.
    """

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
        Maximum number of tokens appended to a sequence in this block: one fewer than are
        generated.
    chunk : int or None
        Tokens of a prompt in a forward pass; None: all of them.
    prefill_passes : int
        Forward passes of the block's longest prompt; 0 without prompts. All prompts end in the
        last pass, so that all first tokens are sampled together; shorter ones start later.
    past : int
        Tokens of each sequence from earlier runs, included in positions and `lengths`.
    limits : tuple of int
        Maximum number of tokens that are ever appended to each sequence; empty: `new`. At its limit
        a sequence computes its newest token again in each step.
    continued : tuple of (ContinuedSequence or None)
        One per sequence; None: its prompt is in this block. Empty: all prompts are in this block.
        Continued sequences precede new ones.
    evicts : tuple of bool
        Whether a layer evicts tokens of any sequence that may share a batch with these sequences.
        Empty: only these sequences count.
    draft_tokens : int
        Maximum number of drafted tokens of a sequence in a forward pass.
    """

    lengths: tuple[int, ...]
    new: int
    chunk: int | None = None
    prefill_passes: int = 1
    past: int = 0
    limits: tuple[int, ...] = ()
    continued: tuple[ContinuedSequence | None, ...] = ()
    evicts: tuple[bool, ...] = ()
    draft_tokens: int = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def token(self, forward_pass: int) -> int:
        """Return the number of the new token of a forward pass.

        0 is the token of the last prefill pass; numbers of earlier passes are negative.
        """
        return forward_pass - self.prefill_passes + 1

    def in_prefill(self, forward_pass: int) -> bool:
        """Return whether a forward pass computes prompts."""
        return forward_pass < self.prefill_passes

    def origin(self, sequence: int) -> ContinuedSequence | None:
        """Return the sequence in the last block; None if its prompt is in this block."""
        return self.continued[sequence] if self.continued else None

    @property
    def has_continued(self) -> bool:
        """True if any sequence is continued."""
        return any(self.continued)

    def limit(self, sequence: int) -> int:
        """Return the maximum number of tokens that are ever appended to a sequence."""
        return self.limits[sequence] if self.limits else self.new

    def tokens(self, sequence: int, token: int) -> int:
        """Return the tokens of a sequence up to the block's new token `token` (from 1; 0: none)."""
        origin = self.origin(sequence)
        appended = token if origin is None else origin.generated - 1 + token
        return self.lengths[sequence] + min(appended, self.limit(sequence))

    def max_tokens(self, token: int) -> int:
        """Return the tokens of the longest sequence; see `tokens`."""
        return max(self.tokens(sequence, token) for sequence in range(len(self)))

    def select_layers(self, layers: Sequence[int]) -> BatchLayout:
        """Return the layout for a cache of some layers."""
        return replace(self, evicts=tuple(self.evicts[layer] for layer in layers)
                       ) if self.evicts else self

    @property
    def longest(self) -> int:
        """Maximum number of tokens of any sequence."""
        return max(length + new for length, new in self.sizes)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Distinct pairs of prompt length and limit."""
        return {(length, self.limit(sequence)) for sequence, length in enumerate(self.lengths)}

    def spans(self, forward_pass: int) -> Iterator[PromptSpan]:
        """Yield the span of every prompt in a prefill pass, including empty spans."""
        for sequence, length in enumerate(self.lengths):
            if self.origin(sequence) is not None:
                yield PromptSpan(sequence, length, length)
                continue
            if self.chunk is None:
                yield PromptSpan(sequence, self.past, length)
                continue
            end = max(self.past, length + self.token(forward_pass) * self.chunk)
            yield PromptSpan(sequence, max(self.past, end - self.chunk), end)

    @property
    def appends(self) -> bool:
        """True if prompts are appended to cached tokens: earlier chunks, or earlier runs."""
        return self.chunk is not None or self.past > 0

    def has_cached(self, forward_pass: int) -> bool:
        """Return whether any token of these prompts was cached before a forward pass."""
        return not self.in_prefill(forward_pass) or any(
            span.start for span in self.spans(forward_pass) if self.origin(span.sequence) is None)


def prefill_passes(longest: int, chunk: int | None) -> int:
    """Return the forward passes of a prompt of `longest` tokens."""
    return 1 if chunk is None else -(-longest // chunk)
