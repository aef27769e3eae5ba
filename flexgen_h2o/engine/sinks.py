"""Sinks of logits: the next token of each sequence, or the log-probability of a given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.engine.batch import Batch, Request
from flexgen_h2o.engine.sampling import Sampler, not_finite
from flexgen_h2o.outputs import Scored, TokenLogProb


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules by which requests go on and end.

    Attributes
    ----------
    sampler : Sampler
    max_new_tokens : int
    end_tokens : collection of int
        A sequence ends with any of them.
    stops : callable, optional
        Whether a sequence ends with what it has generated; asked after each token.
    top : int or None
        Log-probabilities that are kept of each place, beside the token's own; None: none.
    """

    sampler: Sampler
    max_new_tokens: int
    end_tokens: Collection[int] = ()
    stops: Callable[[Sequence[int]], bool] | None = None
    top: int | None = None

    def reason_to_end(self, generated: Sequence[int]) -> str:
        """The finish reason of a sequence after its newest token; empty while it goes on."""
        if generated[-1] in self.end_tokens or self.stops and self.stops(generated):
            return "stop"
        return "length" if len(generated) == self.max_new_tokens else ""


class Generation:
    """A sink that extends each request by a token, until EOS, a stop string or the length.

    Parameters
    ----------
    rules : mapping
        By the requests' keys. Those that share a sampler are sampled together.
    on_token : callable, optional
        Called with each new token as it comes.
    """

    def __init__(self, rules: Mapping[int, Rules], *,
                 on_token: Callable[[int], None] | None = None):
        self._on_token = on_token
        self._rules = rules

    def rows(self, batch: Batch, forward_pass: int) -> torch.Tensor:
        """Rows that get logits: the newest token of each sequence, once its prompt has ended."""
        return newest_rows(batch, forward_pass)

    def __call__(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor) -> None:
        requests = batch.sampled(forward_pass)[row : row + len(logits)]
        alike: dict[Sampler, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(self._rules[request.key].sampler, []).append(place)
        for sampler, places in alike.items():
            some = logits if len(alike) == 1 else logits[torch.tensor(places).to(logits.device)]
            mine = [requests[place] for place in places]
            chosen = sampler(some, mine)
            self._keep_log_probs(some, mine, chosen)
            for request, choice in zip(mine, chosen, strict=True):
                if request.finish_reason:
                    continue
                request.generated.append(choice)
                if self._on_token is not None:
                    self._on_token(choice)
                request.finish_reason = self._rules[request.key].reason_to_end(request.generated)

    def restart(self, request: Request) -> None:
        """Go on with a request from its beginning."""
        self._rules[request.key].sampler.restart(request)

    def _keep_log_probs(self, logits: torch.Tensor, requests: Sequence[Request],
                        chosen: Sequence[int]) -> None:
        """Note the log-probabilities of the chosen tokens, and of the likeliest, where asked."""
        tops = [self._rules[request.key].top for request in requests]
        wanted = [row for row, top in enumerate(tops)
                  if top is not None and not requests[row].finish_reason]
        if not wanted:
            return
        index = torch.tensor(wanted, device=logits.device)
        known = logits[index].float().log_softmax(-1)
        own = known.gather(1, torch.tensor(chosen, device=logits.device)[index, None])[:, 0]
        best = known.topk(min(known.shape[1], max(top or 0 for top in tops)))
        for row, log_prob, values, tokens in zip(
                wanted, own.tolist(), best.values.tolist(), best.indices.tolist(), strict=True):
            likeliest = tuple(zip(tokens, values, strict=True))[: tops[row]]
            requests[row].log_probs.append(TokenLogProb(chosen[row], log_prob, likeliest))


class _Continuations:
    """A sink that collects the log-probabilities of given continuations.

    `greedy` says by key whether each token so far has been the likeliest.

    Parameters
    ----------
    continuations : mapping
        Request key to token ids, at least one each.
    """

    def __init__(self, continuations: Mapping[int, Sequence[int]]):
        self._continuations = continuations
        self.log_probs: dict[int, list[float]] = {key: [] for key in continuations}
        self.greedy = dict.fromkeys(continuations, True)

    def scored(self) -> list[Scored]:
        """The scores of the continuations, by ascending keys."""
        return [Scored(self.log_probs[key], self.greedy[key]) for key in sorted(self.log_probs)]

    def restart(self, request: Request) -> None:
        """Forget what was found of a request."""
        self.log_probs[request.key] = []
        self.greedy[request.key] = True

    def _note(self, key: int, log_prob: float, likeliest: bool) -> None:
        """Add what was found of the next token of a continuation.

        Raises `UserError` for NaN, which one NaN or infinity among the logits makes of them all; a
        token of which the probability is 0 is all right.
        """
        if math.isnan(log_prob):
            raise not_finite(key, log_prob)
        self.log_probs[key].append(log_prob)
        self.greedy[key] &= likeliest


class Scoring(_Continuations):
    """Scores continuations in one prefill.

    A request's prompt is context and continuation without its last token; the logits of the last
    ``len(continuation)`` rows of each prompt predict the continuation.
    """

    def joined(self, contexts: Sequence[Request]) -> list[Request]:
        """These requests with such prompts."""
        return [Request(context.key, context.prompt + [*self._continuations[context.key][:-1]])
                for context in contexts]

    def rows(self, batch: Batch, forward_pass: int) -> torch.Tensor:
        """Rows of a forward pass that predict a continuation: int64 [rows]."""
        return torch.tensor([row for row, _, _ in self._owners(batch, forward_pass)],
                            dtype=torch.int64)

    def _owners(self, batch: Batch, forward_pass: int) -> list[tuple[int, int, int]]:
        """(row, request key, token to predict) of the rows that predict."""
        owners, row = [], 0
        for span in batch.batch_layout.spans(forward_pass):
            request = batch.requests[span.sequence]
            tail = self._continuations[request.key]
            begin = len(request.prompt) - len(tail)
            owners += [(row + position - span.start, request.key, tail[position - begin])
                       for position in range(max(span.start, begin), span.end)]
            row += len(span)
        return owners

    def __call__(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor) -> None:
        owners = self._owners(batch, forward_pass)[row : row + len(logits)]
        found = _log_probs(logits, [target for _, _, target in owners])
        for (_, key, _), each in zip(owners, found, strict=True):
            self._note(key, *each)
        if batch.batch_layout.token(forward_pass) == 0:
            for request in batch.requests:
                request.finish_reason = "length"


class Forcing(_Continuations):
    """Scores continuations by feeding them token by token.

    What an evicting cache predicts depends on how tokens came: only the context is a prompt.
    """

    def rows(self, batch: Batch, forward_pass: int) -> torch.Tensor:
        """Rows that get logits: as in generation."""
        return newest_rows(batch, forward_pass)

    def __call__(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor) -> None:
        requests = batch.sampled(forward_pass)[row : row + len(logits)]
        # One that has ended goes on with its last token, whose probability is not used.
        tails = [self._continuations[request.key] for request in requests]
        targets = [tail[min(len(request.generated), len(tail) - 1)]
                   for request, tail in zip(requests, tails, strict=True)]
        found = _log_probs(logits, targets)
        for request, tail, target, each in zip(requests, tails, targets, found, strict=True):
            if request.finish_reason:
                continue
            self._note(request.key, *each)
            request.generated.append(target)
            if len(request.generated) == len(tail):
                request.finish_reason = "length"


def newest_rows(batch: Batch, forward_pass: int) -> torch.Tensor:
    """The row of each newest token of `batch.sampled`, int64 [rows]; none while prompts have not
    ended."""
    if batch.batch_layout.token(forward_pass) < 0:
        return torch.empty(0, dtype=torch.int64)
    if not batch.batch_layout.in_prefill(forward_pass):
        return torch.arange(len(batch))
    newest, row = {}, -1
    for span in batch.spans(forward_pass):
        row += len(span)
        newest.update(dict.fromkeys(batch.alike[span.sequence], row))
    return torch.tensor([row for _, row in sorted(newest.items())], dtype=torch.int64)


def _log_probs(logits: torch.Tensor, targets: Sequence[int]) -> list[tuple[float, bool]]:
    """Probability of one token per row of logits [rows, vocab]: natural log-probability, and if it
    is the top.
    """
    index = torch.tensor(targets, device=logits.device)
    values = logits.float().log_softmax(-1).gather(1, index[:, None])[:, 0]
    # max() and not argmax(), which takes ten times as long on a CPU.
    return list(zip(values.tolist(), (logits.max(-1).indices == index).tolist(), strict=True))
