"""The exchange of a block between the ranks of a pipeline: hidden states, and what sinks found."""

from __future__ import annotations

import math
from collections import deque

import torch

from flexgen_h2o.config.stage import Stage
from flexgen_h2o.engine.pipeline import HIDDEN, TOKENS, Message, Pipeline


class Exchange:
    """The messages of one rank, block after block.

    Sends do not wait, but for the oldest of as many as the batches of a group: a rank that is ahead
    of the next one holds no more than that.

    Parameters
    ----------
    pipeline : Pipeline
    stage : Stage
    groups : int
        Into which each block's batches are cut, the same number on all ranks.
    width : int
        Of hidden states, [rows, width] of `dtype` on `device`.
    """

    def __init__(self, pipeline: Pipeline, stage: Stage, groups: int, *, width: int,
                 dtype: torch.dtype, device: torch.device):
        self.stage, self.groups, self.pipeline = stage, groups, pipeline
        self.sent_bytes = 0
        self._width, self._dtype, self._device = width, dtype, device
        self._spare: list[torch.Tensor] = []  # flat, of `dtype`
        self._hidden: dict[int, Message] = {}
        self._tokens: dict[int, tuple[int, Message]] = {}
        self._sent: deque[Message] = deque()
        self._most = 1

    def begin(self, num_batches: int) -> None:
        """Start a block of so many batches."""
        self._most = math.ceil(num_batches / min(self.groups, num_batches))

    def _buffer(self, rows: int) -> torch.Tensor:
        """[rows, width], of which nothing is known."""
        size = rows * self._width
        found = self._spare.pop() if self._spare else None
        if found is None or found.numel() < size:
            found = torch.empty(size, dtype=self._dtype, device=self._device)
        return found

    def receive_hidden(self, batch: int, rows: int) -> None:
        """Make ready for a batch's hidden states from the rank before."""
        buffer = self._buffer(rows)[: rows * self._width]
        self._hidden[batch] = self.pipeline.receive(self.stage.rank - 1, HIDDEN, buffer)

    def take_hidden(self, batch: int, into: torch.Tensor) -> None:
        """Wait for a batch's hidden states, and copy them: [rows, width]."""
        received = self._hidden.pop(batch).wait()
        into.copy_(received.view_as(into))
        self._spare.append(received)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Start to send a batch's hidden states [rows, width], which are copied, to the next rank.
        """
        while len(self._sent) >= self._most:
            self._spare.append(self._sent.popleft().wait())
        buffer = self._buffer(len(hidden))[: hidden.numel()]
        buffer.view_as(hidden).copy_(hidden)
        self._sent.append(self.pipeline.send(self.stage.rank + 1, HIDDEN, buffer))
        self.sent_bytes += buffer.nbytes

    def receive_tokens(self, batch: int, forward_pass: int, shape: tuple[int, int]) -> None:
        """Make ready for what the last rank finds for a batch: float64 of this shape."""
        found = torch.empty(shape, dtype=torch.float64)
        self._tokens[batch] = forward_pass, self.pipeline.receive(self.pipeline.last, TOKENS, found)

    def take_tokens(self, batch: int, forward_pass: int) -> torch.Tensor | None:
        """Wait for what has been found for a batch in a forward pass; None if nothing was to be.
        """
        awaited, message = self._tokens.get(batch, (None, None))
        if message is None or awaited != forward_pass:
            return None
        del self._tokens[batch]
        return message.wait()

    def under_way(self) -> list[tuple[int, int]]:
        """Batches, and forward passes of them, whose tokens have not been taken."""
        return [(batch, forward_pass) for batch, (forward_pass, _) in self._tokens.items()]

    def send_tokens(self, found: torch.Tensor) -> None:
        """Start to send what was found for a batch to all other ranks."""
        for rank in range(self.pipeline.last):
            # They have made ready for it, so that it is soon over.
            self.pipeline.send(rank, TOKENS, found)
            self.sent_bytes += found.nbytes

    def settle(self) -> None:
        """Wait until all that was sent has been taken, at the end of a block."""
        while self._sent:
            self._spare.append(self._sent.popleft().wait())
