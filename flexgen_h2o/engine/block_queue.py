"""The queue of a call's requests, and the blocks of batches that they come in. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flexgen_h2o.engine.batch import Batch, Request
from flexgen_h2o.h2o.batch_layout import BatchLayout, Carried, prefill_passes


@dataclass(frozen=True)
class BlockSize:
    """The most of a block: sequences of a batch, batches, and tokens of a prompt that are read at
    once (None: all). With `shares`, a batch computes equal prompts once, and with `shares_prefix`
    what several begin with."""

    gpu_batch_size: int
    num_gpu_batches: int
    prefill_chunk: int | None = None
    shares: bool = False
    shares_prefix: bool = False

    @property
    def sequences(self) -> int:
        """Those of all batches."""
        return self.gpu_batch_size * self.num_gpu_batches


class BlockQueue:
    """Requests on their way through blocks: those that wait, and those of the block before.

    They wait sorted by length, so that those of a batch are alike. The longest come first: what
    does not fit shows at once. Those that may go on for twice as long come before others. With
    `shares`, equal prompts come next to each other.

    Parameters
    ----------
    requests : sequence of Request
    new : int or mapping
        Up to so many tokens will be appended to each, or so many as it has by key.
    size : BlockSize

    Attributes
    ----------
    evicts : tuple of bool
        Layers in which some request loses tokens, which has to be told where blocks carry
        sequences; none: each batch is looked at alone.
    """

    def __init__(self, requests: Sequence[Request], new: int | Mapping[int, int], size: BlockSize):
        self._new = new if isinstance(new, Mapping) else {request.key: new for request in requests}
        self.size = size
        self.evicts: tuple[bool, ...] = ()
        first: dict[object, int] = {}
        if size.shares:
            for request in requests:
                first.setdefault(request.shared, request.key)
        self._waiting = deque(sorted(requests, key=lambda request: (
            -self._new[request.key].bit_length(), -len(request.prompt),
            first[request.shared] if size.shares else 0, request.key)))
        self._block: list[Batch] = []

    @property
    def left(self) -> bool:
        """True if some request has not ended."""
        return bool(self._waiting) or not all(batch.finished for batch in self._block)

    def next(self) -> list[Batch]:
        """The next block: what has not ended in the block before, and others in free places.

        The last block may be partial.
        """
        carried = {request.key: Carried(batch.index, sequence, len(request.generated))
                   for batch in self._block for sequence, request in enumerate(batch.requests)
                   if not request.finish_reason}
        requests = [request for batch in self._block for request in batch.requests
                    if request.key in carried]
        fresh = [self._waiting.popleft()
                 for _ in range(min(len(self._waiting), self.size.sequences - len(requests)))]
        passes, chunk = 0, self.size.prefill_chunk
        if fresh:
            passes = prefill_passes(max(len(request.prompt) for request in fresh), chunk)
        new = max(self._new[request.key] - max(0, len(request.generated) - 1)
                  for request in requests + fresh)
        self._block = []
        for group in _groups(requests + fresh, self.size.gpu_batch_size):
            batch_layout = BatchLayout(
                tuple(len(request.prompt) for request in group), new, chunk if passes > 1 else None,
                passes, limits=tuple(self._new[request.key] for request in group),
                carried=tuple(carried.get(request.key) for request in group),
                evicts=self.evicts)
            self._block.append(Batch(len(self._block), group, batch_layout,
                                     shares=self.size.shares,
                                     shares_prefix=self.size.shares_prefix))
        return self._block

    def halve(self) -> list[Request] | None:
        """Put the last block's requests back in front, for blocks of half as many sequences.

        Returns them, to be begun anew; None where a block has one sequence only.
        """
        requests = [request for batch in self._block for request in batch.requests]
        self._waiting.extendleft(reversed(requests))
        self._block = []
        sequences, batches = self.batches()
        if sequences > 1:
            self.size = replace(self.size, gpu_batch_size=sequences // 2)
        elif batches > 1:
            self.size = replace(self.size, num_gpu_batches=batches // 2)
        else:
            return None
        return requests

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Prompt lengths of what waits, with the tokens that may be appended."""
        return {(len(request.prompt), self._new[request.key]) for request in self._waiting}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that waits."""
        return max(len(request.prompt) for request in self._waiting)

    def batches(self) -> tuple[int, int]:
        """The most sequences of a batch, and batches of a block, that what waits can fill."""
        sequences = min(len(self._waiting), self.size.gpu_batch_size)
        return sequences, min(self.size.num_gpu_batches, -(-len(self._waiting) // sequences))

    def rows(self) -> int:
        """The most rows of a batch in a forward pass: of prompts that stand together in the queue,
        and of new tokens."""
        limit = self.size.prefill_chunk or self.longest
        lengths = [min(len(request.prompt), limit) for request in self._waiting]
        prompts = [request.shared for request in self._waiting]
        # What equal prompts add to a batch that holds the one before.
        added = [0 if self.size.shares and place and prompts[place] == prompts[place - 1]
                 else length for place, length in enumerate(lengths)]
        sums = [0, *accumulate(added)]
        sequences, _ = self.batches()
        return max(sequences, max(
            sums[min(start + sequences, len(lengths))] - sums[start] + length - added[start]
            for start, length in enumerate(lengths)))


def _groups(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    return (requests[start : start + size] for start in range(0, len(requests), size))
