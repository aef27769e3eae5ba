"""Sample tokens from logits; the interface of logits consumers (see `scoring` for the others)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.blocks import GPUBatch, Request
from flexgen_h2o.engine.structured_outputs import TokenMasks
from flexgen_h2o.errors import NonFiniteLogits, UserError
from flexgen_h2o.kernels.torch_ops import argmax, to_host
from flexgen_h2o.models.registry import retry_imports
from flexgen_h2o.outputs import TokenLogProb

_NOISE_BLOCK = 256  # tokens, about the square root of a vocabulary


class Sampler:
    """Chooses the next tokens of sequences with the same sampling parameters.

    Greedy, or sampled through transformers' logits processors. Each request has its own random
    generator, so its tokens do not depend on its batch.

    Parameters
    ----------
    params : SamplingParams
        `seed` is not used. transformers' defaults replace None.
    eos_token_ids : tuple of int
        Tokens that end a sequence. min_new_tokens and min_length suppress them.
    masks : TokenMasks, optional
        Of structured outputs.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...],
                 masks: TokenMasks | None = None):
        self._params = params = params.with_defaults({})
        self._ends = eos_token_ids
        self._masks = masks
        self._suppresses = any((params.min_new_tokens, params.min_length, params.suppress_tokens,
                                params.begin_suppress_tokens))
        self._generators: dict[int, torch.Generator] = {}
        self._history = _history_processors(params, eos_token_ids)
        self._warpers = _warpers(params)
        self._bias_tokens = torch.tensor([*dict(params.logit_bias)], dtype=torch.int64)
        self._biases = torch.tensor([*dict(params.logit_bias).values()],
                                    dtype=torch.float32)

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """Choose a token for each row.

        Parameters
        ----------
        logits : Tensor [sequences, vocab]
        requests : sequence of Request
            The rows' requests, with their seeds and tokens so far.

        Raises
        ------
        UserError
            A row of an unfinished request has NaN or infinity, or no token is left to choose.
        """
        tokens = self._sample(logits, requests)
        if self._masks is not None:
            self._masks.prepare(requests, tokens)
        return tokens

    def _sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        raw = logits
        if self._masks is not None:
            logits = self._masks.apply(logits, requests)
        if len(self._bias_tokens):
            biases = self._biases.to(logits.device).expand(len(logits), -1)
            logits = logits.float().index_add(1, self._bias_tokens.to(logits.device), biases)
        suppressed = [(row, token) for row, request in enumerate(requests)
                      for token in self._suppressed(request) if token < logits.shape[1]
                      ] if self._suppresses else []
        if suppressed:
            rows, tokens = torch.tensor(suppressed, device=logits.device).T
            logits = logits.clone()
            logits[rows, tokens] = float("-inf")
        if self._params.presence_penalty or self._params.frequency_penalty:
            logits = torch.stack([self._penalized(row, request.generated)
                                  for row, request in zip(logits.float(), requests, strict=True)])
        if self._history:
            logits = torch.cat([
                _processed(self._history, row[None], torch.tensor([request.history],
                                                                  device=logits.device))
                for row, request in zip(logits.float(), requests, strict=True)
            ])
        if not self._params.do_sample:
            return _checked(*argmax(logits), raw, requests)
        probabilities = _processed(self._warpers, logits.float()).softmax(-1)
        return _checked(*self._draw(probabilities, requests), raw, requests)

    def _draw(self, probabilities: torch.Tensor, requests: Sequence[Request]
              ) -> tuple[list[int], list[float]]:
        """Return a token of each row [vocab] and the sum of its probabilities.

        The token of the largest p / e wins, with exponential noise e: first among the sums of
        blocks of tokens, then within the block. So rounding errors of probabilities matter only if
        the best two are about equal. With one draw among cumulative sums they move the bounds of
        all tokens, and that of an unlikely token is soon crossed.
        """
        count, vocab = probabilities.shape
        blocks = pad(probabilities, (0, -vocab % _NOISE_BLOCK)).view(count, -1, _NOISE_BLOCK)
        sums = blocks.sum(-1)
        noise = torch.stack([self._noise(request, sums.shape[1] + _NOISE_BLOCK)
                             for request in requests]).to(sums.device)
        block = (sums / noise[:, _NOISE_BLOCK:]).argmax(-1)
        inside = blocks[torch.arange(count, device=block.device), block]
        tokens = block * _NOISE_BLOCK + (inside / noise[:, :_NOISE_BLOCK]).argmax(-1)
        return to_host(tokens, sums.sum(-1))

    def _noise(self, request: Request, count: int) -> torch.Tensor:
        if request.key not in self._generators:
            self._generators[request.key] = torch.Generator().manual_seed(request.seed)
        # In float64: the noise of unlikely tokens that win is close to 0.
        return torch.empty(count, dtype=torch.float64).exponential_(
            generator=self._generators[request.key])

    def forget(self, request: Request) -> None:
        """Drop the random numbers and the parser of a request that ends or begins again."""
        self._generators.pop(request.key, None)
        if self._masks is not None:
            self._masks.forget(request)

    def _suppressed(self, request: Request) -> Sequence[int]:
        """Return the tokens that must not be chosen."""
        params, new = self._params, len(request.generated)
        tokens: Any = params.suppress_tokens  # tuples, as SamplingParams makes them
        if not new:
            tokens += params.begin_suppress_tokens
        early = new < params.min_new_tokens or len(request.prompt) + new < params.min_length
        return tokens + self._ends if early else tokens

    def _penalized(self, logits: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        """Subtract presence and frequency penalties of generated tokens from logits [vocab]."""
        tokens, counts = torch.tensor(generated, dtype=torch.int64).unique(return_counts=True)
        cost = self._params.presence_penalty + self._params.frequency_penalty * counts
        return logits.index_add(0, tokens.to(logits.device), -cost.to(logits))


@retry_imports
def _history_processors(params: SamplingParams, ends: tuple[int, ...]) -> list[Callable]:
    """Return the logits processors that need previous tokens. Only they load transformers."""
    repeated, ngram = params.repetition_penalty != 1.0, params.no_repeat_ngram_size
    words = [list(word) for word in params.bad_words_ids
             if len(word) > 1 or word[0] not in ends]  # end tokens are always allowed
    if not (repeated or ngram > 0 or words):
        return []
    from transformers import generation as hf

    processors: list[Callable] = []
    if repeated:
        # transformers takes no integers here.
        processors.append(hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if ngram > 0:
        processors.append(hf.NoRepeatNGramLogitsProcessor(ngram))
    if words:
        processors.append(hf.NoBadWordsLogitsProcessor(words))
    return processors


@retry_imports
def _warpers(params: SamplingParams) -> list[Callable]:
    """Return transformers' processors that change the distribution to sample from."""
    if not params.do_sample:
        return []
    from transformers import generation as hf

    processors: list[Callable] = []
    if params.temperature != 1.0:
        processors.append(hf.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(hf.MinPLogitsWarper(params.min_p))
    return processors


def _processed(processors: Sequence[Callable], logits: torch.Tensor,
               history: torch.Tensor | None = None) -> torch.Tensor:
    """Apply processors to logits [rows, vocab]."""
    for process in processors:
        logits = process(history, logits)
    return logits


def _checked(tokens: list[int], values: list[float], logits: torch.Tensor,
             requests: Sequence[Request]) -> list[int]:
    """Return the tokens if their values are finite: their logits, or sums of probabilities.

    `logits` [rows, vocab] are the model's, for the error message.
    """
    for row, (request, value) in enumerate(zip(requests, values, strict=False)):
        if not math.isfinite(value) and not request.finish_reason:
            top = logits[row].max().item()
            if not math.isfinite(top):
                raise not_finite(request.key, top)
            raise UserError(f"prompt {request.key}: the sampling options leave no token to choose: "
                            "relax min_new_tokens, no_repeat_ngram_size, suppressed tokens, "
                            "penalties, logit_bias or temperature")
    return tokens


def not_finite(key: int, value: float) -> NonFiniteLogits:
    """Return the error for logits of prompt `key`, whose maximum is `value`."""
    return NonFiniteLogits(f"the model's logits of prompt {key} are not finite ({value}): its "
                           "weights are damaged, or too large for this dtype (try another "
                           "--dtype)", key)


@dataclass(frozen=True, eq=False)
class GenerationRules:
    """How requests are sampled, and when they finish.

    Attributes
    ----------
    sampler : Sampler
    max_new_tokens : int
    end_tokens : collection of int
        Any of them ends a sequence.
    stops : callable, optional
        Called after each token. Returns True if the generated tokens end the sequence.
    top : int or None
        Number of most likely tokens whose log-probabilities are recorded beside the chosen
        token's. None: record no log-probabilities.
    """

    sampler: Sampler
    max_new_tokens: int
    end_tokens: Collection[int] = ()
    stops: Callable[[Sequence[int]], bool] | None = None
    top: int | None = None

    def reason_to_end(self, generated: Sequence[int]) -> str:
        """Return the finish reason after the newest token; empty if the sequence continues."""
        if generated[-1] in self.end_tokens or self.stops and self.stops(generated):
            return "stop"
        return "length" if len(generated) == self.max_new_tokens else ""


class LogitsConsumer(ABC):
    """Turns the logits of a forward pass into tokens or scores, in two steps.

    `reduce` computes a few values per row, on the rank that has the logits. `apply` appends them to
    the requests, on every rank of a pipeline.
    """

    def __call__(self, batch: GPUBatch, forward_pass: int, row: int, logits: torch.Tensor) -> None:
        """Reduce and apply logits [rows, vocab] of the rows from index `row` on."""
        self.apply(batch, forward_pass, row, self.reduce(batch, forward_pass, row, logits))

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of values of a row."""

    def rows(self, batch: GPUBatch, forward_pass: int) -> torch.Tensor:
        """Return the rows of a forward pass that need logits: int64 [rows], on the host.

        By default they are the row of the newest token of each of `batch.sampled`, and no rows in a
        prefill pass before the last.
        """
        if batch.layout.token(forward_pass) < 0:
            return torch.empty(0, dtype=torch.int64)
        if not batch.layout.in_prefill(forward_pass):
            return torch.arange(len(batch))
        newest, row = {}, -1
        for span in batch.spans(forward_pass):
            row += len(span)
            newest.update(dict.fromkeys(batch.duplicates[span.sequence], row))
        return torch.tensor([row for _, row in sorted(newest.items())], dtype=torch.int64)

    @abstractmethod
    def reduce(self, batch: GPUBatch, forward_pass: int, row: int, logits: torch.Tensor
             ) -> torch.Tensor:
        """Reduce logits [rows, vocab] to values: float64 [rows, width], on the host.

        The logits belong to the rows that `rows` returned, from index `row` on.
        """

    @abstractmethod
    def apply(self, batch: GPUBatch, forward_pass: int, row: int, values: torch.Tensor) -> None:
        """Append the values of the rows from index `row` on to their requests."""

    @abstractmethod
    def restart(self, request: Request) -> None:
        """Discard the state of a request that is restarted."""


class GenerationSampler(LogitsConsumer):
    """Appends a token to each request, until an end token, a stop string or the maximum length.

    The values of a row are the token, and with log-probabilities: the token's log-probability, the
    ids of the most likely tokens, and their log-probabilities.

    Parameters
    ----------
    rules : mapping of int to GenerationRules
        Rules by request key. Requests that share a sampler are sampled together.
    on_token : callable, optional
        Called with the request after each new token. Tokens that a restart repeats are skipped.
    """

    def __init__(self, rules: Mapping[int, GenerationRules], *,
                 on_token: Callable[[Request], None] | None = None):
        self._on_token = on_token
        self._num_reported: dict[int, int] = {}  # tokens that `on_token` has seen, by request key
        self._rules: dict[int, GenerationRules] = {}
        self._top: int | None = None
        for key, rule in rules.items():
            self.add(key, rule)

    def add(self, key: int, rules: GenerationRules) -> None:
        """Add the rules of a request."""
        self._rules[key] = rules
        if rules.top is not None:
            self._top = max(self._top or 0, rules.top)

    def discard(self, request: Request) -> None:
        """Drop all state of a request."""
        self._num_reported.pop(request.key, None)
        self._rules.pop(request.key).sampler.forget(request)
        if not self._rules:
            self._top = None

    @property
    def width(self) -> int:
        return 1 if self._top is None else 2 + 2 * self._top

    def reduce(self, batch: GPUBatch, forward_pass: int, row: int, logits: torch.Tensor
             ) -> torch.Tensor:
        """Choose the next tokens."""
        requests = batch.sampled(forward_pass)[row : row + len(logits)]
        by_sampler: dict[Sampler, list[int]] = {}
        for index, request in enumerate(requests):
            by_sampler.setdefault(self._rules[request.key].sampler, []).append(index)
        if len(by_sampler) == 1 and self._top is None:  # the usual case: nothing to index
            (sampler, _), = by_sampler.items()
            return torch.tensor(sampler(logits, requests), dtype=torch.float64)[:, None]
        values = torch.zeros((len(requests), self.width), dtype=torch.float64)
        for sampler, indices in by_sampler.items():
            rows = torch.tensor(indices)
            group_logits = logits if len(by_sampler) == 1 else logits[rows.to(logits.device)]
            group = [requests[index] for index in indices]
            chosen = torch.tensor(sampler(group_logits, group))
            values[rows, 0] = chosen.double()
            self._write_log_probs(group_logits, group, chosen, values, rows)
        return values

    def apply(self, batch: GPUBatch, forward_pass: int, row: int, values: torch.Tensor) -> None:
        """Append the tokens."""
        requests = batch.sampled(forward_pass)[row : row + len(values)]
        for request, (first, *log_probs) in zip(requests, values.tolist(), strict=True):
            if request.finish_reason:
                continue
            rules, token = self._rules[request.key], int(first)
            if rules.top is not None:
                request.log_probs.append(_log_prob(token, log_probs, rules.top))
            request.generated.append(token)
            request.finish_reason = rules.reason_to_end(request.generated)
            if request.finish_reason:
                rules.sampler.forget(request)
            count = len(request.generated)
            if self._on_token is not None and count > self._num_reported.get(request.key, 0):
                self._num_reported[request.key] = count
                self._on_token(request)

    def restart(self, request: Request) -> None:
        """Restart the random numbers and the parser of a request."""
        self._rules[request.key].sampler.forget(request)

    def _write_log_probs(self, logits: torch.Tensor, requests: Sequence[Request],
                         chosen: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Write log-probabilities to `rows` of `values`, for requests whose rules have `top`.

        logits are [requests, vocab], chosen tokens and rows int64 [requests], values float64 [all
        requests, width].
        """
        if self._top is None:
            return
        selected = torch.tensor([row for row, request in enumerate(requests)
                                 if self._rules[request.key].top is not None
                                 and not request.finish_reason], dtype=torch.int64)
        if not len(selected):
            return
        log_probs = logits[selected.to(logits.device)].float().log_softmax(-1)
        chosen_log_probs = log_probs.gather(1, chosen[selected].to(logits.device)[:, None])
        best = log_probs.topk(min(log_probs.shape[1], self._top))
        columns = torch.cat([chosen_log_probs.double(), best.indices.double(),
                             best.values.double()], 1)
        # A small vocabulary may have fewer tokens than requested.
        values[rows[selected], 1:] = float("nan")
        count = best.indices.shape[1]
        for column, part in ((1, columns[:, :1]), (2, columns[:, 1 : 1 + count]),
                             (2 + self._top, columns[:, 1 + count :])):
            values[rows[selected], column : column + part.shape[1]] = part.cpu()


def _log_prob(token: int, values: Sequence[float], top: int) -> TokenLogProb:
    """Return a token's log-probabilities from the values after it: see `GenerationSampler`."""
    log_prob, *likeliest = values
    half = len(likeliest) // 2
    pairs = [(int(top_token), top_log_prob) for top_token, top_log_prob
             in zip(likeliest[:half], likeliest[half:], strict=True) if not math.isnan(top_token)]
    return TokenLogProb(token, log_prob, tuple(pairs[:top]))
