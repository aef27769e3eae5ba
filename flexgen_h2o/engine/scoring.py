"""Score given continuations: logits consumers that collect log-probabilities."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from flexgen_h2o.engine.blocks import GPUBatch, Request
from flexgen_h2o.engine.sampling import LogitsConsumer, not_finite
from flexgen_h2o.outputs import Scored

OnLogits = Callable[[list[tuple[int, int]], torch.Tensor], None]


class _ContinuationScorer(LogitsConsumer):
    """Collects the log-probabilities of given continuations.

    Parameters
    ----------
    continuations : mapping of int to sequence of int
        Token ids by request key, at least one each.
    on_logits : callable (targets, logits), optional
        See `LLM.score`; pairs are request keys.
    """

    def __init__(self, continuations: Mapping[int, Sequence[int]],
                 on_logits: OnLogits | None = None):
        self._continuations = continuations
        self._on_logits = on_logits
        self.scores = {key: Scored([], []) for key in continuations}
        """Scores of the tokens so far, by request key."""

    @property
    def width(self) -> int:
        """2: the log-probability of a row's token, and 1 if it is the likeliest."""
        return 2

    def scored(self) -> list[Scored]:
        """Return the scores of the continuations, by ascending keys."""
        return [self.scores[key] for key in sorted(self.scores)]

    def restart(self, request: Request) -> None:
        """Discard the scores of a request."""
        self.scores[request.key] = Scored([], [])

    @abstractmethod
    def _targets(self, batch: GPUBatch, forward_pass: int) -> list[tuple[int, int]]:
        """Return (request key, index of the predicted token) of each row with logits.

        The index of a finished sequence is past the end.
        """

    def reduce(self, batch: GPUBatch, forward_pass: int, row: int, logits: torch.Tensor
             ) -> torch.Tensor:
        """Score the predicted tokens: see `LogitsConsumer.reduce`."""
        targets = self._targets(batch, forward_pass)[row : row + len(logits)]
        continuations = [self._continuations[key] for key, _ in targets]
        if self._on_logits is not None:
            live = [i for i, (_, index) in enumerate(targets) if index < len(continuations[i])]
            self._on_logits([targets[i] for i in live],
                            logits if len(live) == len(targets) else logits[live])
        # A finished sequence repeats its last token; the value is not used.
        return _log_probs(logits, [
            continuation[min(index, len(continuation) - 1)]
            for (_, index), continuation in zip(targets, continuations, strict=True)])

    def _append(self, key: int, log_prob: float, likeliest: float) -> None:
        """Append the score of the next token of a continuation.

        Raises
        ------
        NonFiniteLogits
            It is NaN: some logit is NaN or infinity. A probability of 0 is valid.
        """
        if math.isnan(log_prob):
            raise not_finite(key, log_prob)
        self.scores[key].log_probs.append(log_prob)
        self.scores[key].likeliest.append(bool(likeliest))


class PrefillScorer(_ContinuationScorer):
    """Scores continuations in one prefill.

    A request's prompt is context and continuation without the last token. The logits of its last
    ``len(continuation)`` rows predict the continuation.
    """

    def joined(self, contexts: Sequence[Request]) -> list[Request]:
        """Return requests whose prompts are context and continuation."""
        return [Request(context.key, context.prompt + [*self._continuations[context.key][:-1]])
                for context in contexts]

    def rows(self, batch: GPUBatch, forward_pass: int) -> torch.Tensor:
        """Return the rows of a forward pass that predict a continuation: int64 [rows]."""
        return torch.tensor([row for row, _, _ in self._predictions(batch, forward_pass)],
                            dtype=torch.int64)

    def _targets(self, batch: GPUBatch, forward_pass: int) -> list[tuple[int, int]]:
        return [(key, index) for _, key, index in self._predictions(batch, forward_pass)]

    def _predictions(self, batch: GPUBatch, forward_pass: int) -> list[tuple[int, int, int]]:
        """Return (row, request key, index of the predicted token) of the rows that predict."""
        predictions, row = [], 0
        for span in batch.layout.spans(forward_pass):
            request = batch.requests[span.sequence]
            begin = len(request.prompt) - len(self._continuations[request.key])
            predictions += [(row + position - span.start, request.key, position - begin)
                            for position in range(max(span.start, begin), span.end)]
            row += len(span)
        return predictions

    def apply(self, batch: GPUBatch, forward_pass: int, row: int, values: torch.Tensor) -> None:
        """Append the scores: see `LogitsConsumer.apply`."""
        predictions = self._predictions(batch, forward_pass)[row : row + len(values)]
        for (_, key, _), score in zip(predictions, values.tolist(), strict=True):
            self._append(key, *score)
        if batch.layout.token(forward_pass) == 0:
            for request in batch.requests:
                request.finish_reason = "length"


class DecodeScorer(_ContinuationScorer):
    """Scores continuations token by token, as if they were generated (teacher forcing).

    Only the context is a prompt: predictions of an evicting cache depend on how tokens came.
    """

    def _targets(self, batch: GPUBatch, forward_pass: int) -> list[tuple[int, int]]:
        return [(request.key, len(request.generated)) for request in batch.sampled(forward_pass)]

    def apply(self, batch: GPUBatch, forward_pass: int, row: int, values: torch.Tensor) -> None:
        """Append the tokens and their scores: see `LogitsConsumer.apply`."""
        requests = batch.sampled(forward_pass)[row : row + len(values)]
        for request, score in zip(requests, values.tolist(), strict=True):
            if request.finish_reason:
                continue
            self._append(request.key, *score)
            continuation = self._continuations[request.key]
            request.generated.append(continuation[len(request.generated)])
            if len(request.generated) == len(continuation):
                request.finish_reason = "length"


def _log_probs(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Return float64 [rows, 2], on the host, for one token of each row of logits [rows, vocab].

    The columns are its natural log-probability, and 1 if it is the likeliest.
    """
    index = torch.tensor(targets, device=logits.device)
    values = logits.float().log_softmax(-1).gather(1, index[:, None])[:, 0]
    # max() and not argmax(), which takes ten times as long on a CPU.
    return torch.stack([values.double(), (logits.max(-1).indices == index).double()], 1).cpu()
