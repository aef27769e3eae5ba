"""Where logits go: the next token of each sequence, or the log-probability of a given one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexgen_h2o.engine.batching import Batch
from flexgen_h2o.engine.sampling import Sampler


class Generation:
    """A sink that extends each request by a token, until EOS or the length.

    Parameters
    ----------
    sampler : Sampler
    eos_token_ids : tuple of int
        A sequence ends with any of them.
    max_new_tokens : int
    """

    def __init__(self, sampler: Sampler, eos_token_ids: tuple[int, ...], max_new_tokens: int):
        self._sampler = sampler
        self._eos = frozenset(eos_token_ids)
        self._max_new_tokens = max_new_tokens

    def __call__(self, batch: Batch, token: int, row: int, logits: torch.Tensor) -> None:
        requests = batch.requests[row : row + len(logits)]
        chosen = self._sampler(logits, requests, token)
        for request, choice in zip(requests, chosen, strict=True):
            if request.finish_reason:
                continue
            request.generated.append(choice)
            if choice in self._eos:
                request.finish_reason = "stop"
            elif len(request.generated) == self._max_new_tokens:
                request.finish_reason = "length"


class Scoring:
    """A sink that collects the log-probabilities of given continuations.

    A request's prompt is context and continuation without its last token; the logits of the last
    ``len(continuation)`` rows of each prompt predict the continuation.

    Parameters
    ----------
    continuations : mapping
        Request key to token ids, at least one each.
    """

    def __init__(self, continuations: Mapping[int, Sequence[int]]):
        self._continuations = continuations
        self.log_probs: dict[int, list[float]] = {key: [] for key in continuations}

    def rows(self, batch: Batch) -> torch.Tensor:
        """Rows of the batch's prefill that predict a continuation: int64 [rows]."""
        end, rows = 0, []
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            end += length
            rows.append(torch.arange(end - len(self._continuations[request.key]), end))
        return torch.cat(rows)

    def __call__(self, batch: Batch, token: int, row: int, logits: torch.Tensor) -> None:
        owners = [(request.key, target) for request in batch.requests
                  for target in self._continuations[request.key]][row : row + len(logits)]
        targets = torch.tensor([target for _, target in owners], device=logits.device)
        found = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        for (key, _), value in zip(owners, found, strict=True):
            self.log_probs[key].append(value)
        for request in batch.requests:
            request.finish_reason = "length"
