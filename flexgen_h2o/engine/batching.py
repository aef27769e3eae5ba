"""Requests, GPU batches and blocks: who is computed together, and which rows are whose. No torch.

In the prefill the sequences of a batch lie packed, one after the other, with no pads between them.
In the cache they are padded on the left to the longest of the batch, so that every sequence's
next token goes to the same slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Request:
    """One prompt on its way: `key` is its place among the prompts of the call."""

    key: int
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def history(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.generated


class Batch:
    """The sequences computed together; `index` is the batch's place in its block."""

    def __init__(self, index: int, requests: Sequence[Request]):
        self.index = index
        self.requests = list(requests)
        self.lengths = [len(request.prompt) for request in requests]
        self.padded = max(self.lengths)
        self.pads = [self.padded - length for length in self.lengths]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def finished(self) -> bool:
        """Whether every sequence of the batch has ended."""
        return all(request.finish_reason for request in self.requests)

    def rows(self, token: int) -> int:
        """Rows of hidden states when token number `token` is computed."""
        return sum(self.lengths) if token == 0 else len(self)

    def inputs(self, token: int) -> tuple[list[int], list[int]]:
        """Token ids and positions of the rows: the prompts, or each sequence's newest token."""
        if token == 0:
            ids = [i for request in self.requests for i in request.prompt]
            return ids, [p for length in self.lengths for p in range(length)]
        # A sequence that has ended repeats its last token; nobody looks at what comes of it.
        ids = [request.generated[-1] for request in self.requests]
        return ids, [length + token - 1 for length in self.lengths]

    def chunks(self, token: int, most_rows: int) -> Iterator[Chunk]:
        """Cut the rows between sequences so that a chunk has at most `most_rows` of them.

        A sequence longer than that is a chunk of its own.
        """
        lengths = self.lengths if token == 0 else [1] * len(self)
        first = row = 0
        for last in range(1, len(lengths) + 1):
            rows = sum(lengths[first:last])
            if last == len(lengths) or rows + lengths[last] > most_rows:
                yield Chunk(first, last, row, row + rows)
                first, row = last, row + rows


@dataclass(frozen=True)
class Chunk:
    """Sequences first:last of a batch, whose rows are row:end."""

    first: int
    last: int
    row: int
    end: int


def make_blocks(requests: Sequence[Request], gpu_batch_size: int, num_gpu_batches: int
                ) -> list[list[Batch]]:
    """Sort requests by length, so that little is padded, and cut them into blocks of batches.

    The longest come first: what does not fit shows at once. The last block may be partial.
    """
    ordered = sorted(requests, key=lambda request: (-len(request.prompt), request.key))
    groups = [ordered[i : i + gpu_batch_size] for i in range(0, len(ordered), gpu_batch_size)]
    return [
        [Batch(index, group) for index, group in enumerate(groups[i : i + num_gpu_batches])]
        for i in range(0, len(groups), num_gpu_batches)
    ]
