"""The next token: greedy, or sampled through transformers' logits processors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.config.imports import retry_imports
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.batch import Batch, Request
from flexgen_h2o.errors import NotFinite, UserError
from flexgen_h2o.kernels.torch_ops import argmax, to_host
from flexgen_h2o.outputs import Scored, TokenLogProb


class Sampler:
    """Chooses next tokens for sequences that are sampled alike.

    Each sequence draws from a generator of its own, by the seed of its request: what it gets does
    not depend on the batch that it runs in.

    Parameters
    ----------
    params : SamplingParams
        Its `seed` does not count. transformers' defaults replace None.
    eos_token_ids : tuple of int
        Tokens that end a sequence; min_new_tokens and min_length keep them away.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...]):
        self._params = params = params.with_defaults({})
        self._ends = eos_token_ids
        self._suppresses = any((params.min_new_tokens, params.min_length, params.suppress_tokens,
                                params.begin_suppress_tokens))
        self._generators: dict[int, torch.Generator] = {}
        self._history = _history_processors(params, eos_token_ids)
        self._warpers = _warpers(params)
        self._biased = torch.tensor([*dict(params.logit_bias)], dtype=torch.int64)
        self._biases = torch.tensor([*dict(params.logit_bias).values()],
                                    dtype=torch.float32)

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """Choose a token for each row.

        Parameters
        ----------
        logits : Tensor [sequences, vocab]
        requests : sequence of Request
            The rows' requests: their seeds, and what they hold so far, without pads.

        Raises
        ------
        UserError
            A row holds NaN or infinity, or no token is left in it. Rows of requests that have
            ended are not looked at.
        """
        raw = logits
        if len(self._biased):
            biases = self._biases.to(logits.device).expand(len(logits), -1)
            logits = logits.float().index_add(1, self._biased.to(logits.device), biases)
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
        cumulative = probabilities.cumsum(-1)
        draws = torch.tensor([self._draw(request) for request in requests])
        # Inverse transform; scaled by the last sum, which rounding keeps from being exactly 1.
        points = draws[:, None].to(cumulative) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True)[:, 0]
        last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
        chosen, sums = to_host(torch.minimum(tokens, last), cumulative[:, -1])
        return _checked(chosen, sums, raw, requests)

    def restart(self, request: Request) -> None:
        """Draw the same random numbers again for a request that begins anew."""
        self._generators.pop(request.key, None)

    def _suppressed(self, request: Request) -> Sequence[int]:
        """Return the tokens that must not come next."""
        params, new = self._params, len(request.generated)
        tokens = params.suppress_tokens
        if not new:
            tokens += params.begin_suppress_tokens
        early = new < params.min_new_tokens or len(request.prompt) + new < params.min_length
        return tokens + self._ends if early else tokens

    def _penalized(self, logits: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        """The logits [vocab] less what each token's number among the generated ones costs."""
        tokens, counts = torch.tensor(generated, dtype=torch.int64).unique(return_counts=True)
        cost = self._params.presence_penalty + self._params.frequency_penalty * counts
        return logits.index_add(0, tokens.to(logits.device), -cost.to(logits))

    def _draw(self, request: Request) -> float:
        if request.key not in self._generators:
            self._generators[request.key] = torch.Generator().manual_seed(request.seed)
        return torch.rand((), generator=self._generators[request.key], dtype=torch.float64).item()


@retry_imports
def _history_processors(params: SamplingParams, ends: tuple[int, ...]) -> list[Callable]:
    """transformers' processors that look at the text so far. It is loaded only for those."""
    repeated, ngram = params.repetition_penalty != 1.0, params.no_repeat_ngram_size
    words = [list(word) for word in params.bad_words_ids
             if len(word) > 1 or word[0] not in ends]  # an end token alone may always come
    if not (repeated or ngram > 0 or words):
        return []
    from transformers import generation as hf

    found: list[Callable] = []
    if repeated:
        found.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if ngram > 0:
        found.append(hf.NoRepeatNGramLogitsProcessor(ngram))
    if words:
        found.append(hf.NoBadWordsLogitsProcessor(words))
    return found


@retry_imports
def _warpers(params: SamplingParams) -> list[Callable]:
    """transformers' processors that change the distribution to draw from."""
    if not params.do_sample:
        return []
    from transformers import generation as hf

    found: list[Callable] = []
    if params.temperature != 1.0:
        found.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        found.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(hf.MinPLogitsWarper(params.min_p))
    return found


def _processed(processors: Sequence[Callable], logits: torch.Tensor,
               history: torch.Tensor | None = None) -> torch.Tensor:
    """The logits [rows, vocab] after one processor and then the next."""
    for process in processors:
        logits = process(history, logits)
    return logits


def _checked(tokens: list[int], values: list[float], logits: torch.Tensor,
             requests: Sequence[Request]) -> list[int]:
    """The tokens, once the number that came with each is known to be finite: else it is no choice.

    The model's logits [rows, vocab] are looked at only to say what is wrong.
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


def not_finite(key: int, value: float) -> NotFinite:
    """The error for logits of prompt `key` that hold `value`, or nothing above it."""
    return NotFinite(f"the model's logits of prompt {key} are not finite ({value}): its weights "
                     "are damaged, or too large for this dtype (try another --dtype)", key)


# Sinks of logits: the next token of each sequence, or the log-probability of a given one.
#
# A sink first finds figures in logits, which is done where the logits are, and then takes them,
# which
# every rank of a pipeline does.


OnLogits = Callable[[list[tuple[int, int]], torch.Tensor], None]


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


class LogitsConsumer(ABC):
    """Takes the logits of a forward pass."""

    def __call__(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor) -> None:
        """Take logits [rows, vocab] of the chosen rows from number `row` on."""
        self.apply(batch, forward_pass, row, self.reduce(batch, forward_pass, row, logits))

    @abstractmethod
    def rows(self, batch: Batch, forward_pass: int) -> torch.Tensor:
        """The rows of a batch's forward pass that get logits: int64 [rows], on the host."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Figures of a row."""

    @abstractmethod
    def reduce(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor
             ) -> torch.Tensor:
        """Figures, float64 [rows, width] on the host, of logits [rows, vocab] of the chosen rows
        from number `row` on."""

    @abstractmethod
    def apply(self, batch: Batch, forward_pass: int, row: int, found: torch.Tensor) -> None:
        """Go on by what was found, of the chosen rows from number `row` on."""

    @abstractmethod
    def restart(self, request: Request) -> None:
        """Forget what it knows of a request, which begins anew."""


class GenerationSampler(LogitsConsumer):
    """A sink that extends each request by a token, until EOS, a stop string or the length.

    It finds of each row the token and, where some request asks for log-probabilities, that of the
    token, and the likeliest tokens and theirs.

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
        tops = {each.top for each in rules.values()} - {None}
        self._top = max(tops) if tops else None

    def rows(self, batch: Batch, forward_pass: int) -> torch.Tensor:
        """Rows that get logits: the newest token of each sequence, once its prompt has ended."""
        return newest_rows(batch, forward_pass)

    @property
    def width(self) -> int:
        """Figures of a row."""
        return 1 if self._top is None else 2 + 2 * self._top

    def reduce(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor
             ) -> torch.Tensor:
        """The tokens to go on with; see `LogitsConsumer.reduce`."""
        requests = batch.sampled(forward_pass)[row : row + len(logits)]
        alike: dict[Sampler, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(self._rules[request.key].sampler, []).append(place)
        if len(alike) == 1 and self._top is None:  # the usual case: nothing to index
            (sampler, _), = alike.items()
            return torch.tensor(sampler(logits, requests), dtype=torch.float64)[:, None]
        found = torch.zeros((len(requests), self.width), dtype=torch.float64)
        for sampler, places in alike.items():
            index = torch.tensor(places)
            some = logits if len(alike) == 1 else logits[index.to(logits.device)]
            mine = [requests[place] for place in places]
            chosen = torch.tensor(sampler(some, mine))
            found[index, 0] = chosen.double()
            self._find_log_probs(some, mine, chosen, found, index)
        return found

    def apply(self, batch: Batch, forward_pass: int, row: int, found: torch.Tensor) -> None:
        """Append the tokens; see `LogitsConsumer.apply`."""
        requests = batch.sampled(forward_pass)[row : row + len(found)]
        for request, (first, *figures) in zip(requests, found.tolist(), strict=True):
            if request.finish_reason:
                continue
            rules, token = self._rules[request.key], int(first)
            if rules.top is not None:
                request.log_probs.append(_log_prob(token, figures, rules.top))
            request.generated.append(token)
            if self._on_token is not None:
                self._on_token(token)
            request.finish_reason = rules.reason_to_end(request.generated)

    def restart(self, request: Request) -> None:
        """Go on with a request from its beginning."""
        self._rules[request.key].sampler.restart(request)

    def _find_log_probs(self, logits: torch.Tensor, requests: Sequence[Request],
                        chosen: torch.Tensor, found: torch.Tensor, index: torch.Tensor) -> None:
        """Note the log-probabilities of the chosen tokens, and of the likeliest, where asked; the
        logits' rows are those of `found` at `index`."""
        if self._top is None:
            return
        wanted = torch.tensor([row for row, request in enumerate(requests)
                               if self._rules[request.key].top is not None
                               and not request.finish_reason], dtype=torch.int64)
        if not len(wanted):
            return
        here = wanted.to(logits.device)
        known = logits[here].float().log_softmax(-1)
        own = known.gather(1, chosen[wanted].to(logits.device)[:, None])
        best = known.topk(min(known.shape[1], self._top))
        figures = torch.cat([own.double(), best.indices.double(), best.values.double()], 1)
        # A small vocabulary may have fewer tokens than were asked for.
        found[index[wanted], 1:] = float("nan")
        count = best.indices.shape[1]
        for column, part in ((1, figures[:, :1]), (2, figures[:, 1 : 1 + count]),
                             (2 + self._top, figures[:, 1 + count :])):
            found[index[wanted], column : column + part.shape[1]] = part.cpu()


def _log_prob(token: int, figures: Sequence[float], top: int) -> TokenLogProb:
    """The log-probabilities of a place out of the figures after its token."""
    own, *likeliest = figures
    half = len(likeliest) // 2
    pairs = [(int(each), value) for each, value in zip(likeliest[:half], likeliest[half:],
                                                       strict=True) if not math.isnan(each)]
    return TokenLogProb(token, own, tuple(pairs[:top]))


class _Continuations(LogitsConsumer):
    """A sink that collects the log-probabilities of given continuations.

    `likeliest` says by key of each token so far whether it has been the likeliest.

    Parameters
    ----------
    continuations : mapping
        Request key to token ids, at least one each.
    on_logits : callable (places, logits), optional
        Called with logits [rows, vocab] that predict tokens of continuations. `places` holds the
        request key and the token's index of each row.
    """

    def __init__(self, continuations: Mapping[int, Sequence[int]],
                 on_logits: OnLogits | None = None):
        self._continuations = continuations
        self._on_logits = on_logits
        self.log_probs: dict[int, list[float]] = {key: [] for key in continuations}
        self.likeliest: dict[int, list[bool]] = {key: [] for key in continuations}

    @property
    def width(self) -> int:
        """Figures of a row: the log-probability of its token, and 1 if that is the likeliest."""
        return 2

    def scored(self) -> list[Scored]:
        """The scores of the continuations, by ascending keys."""
        return [Scored(self.log_probs[key], self.likeliest[key])
                for key in sorted(self.log_probs)]

    def restart(self, request: Request) -> None:
        """Forget what was found of a request."""
        self.log_probs[request.key] = []
        self.likeliest[request.key] = []

    @abstractmethod
    def _places(self, batch: Batch, forward_pass: int) -> list[tuple[int, int]]:
        """Return the request key and the index of the predicted token of each row with logits.

        The index is past the end for a sequence that has ended.
        """

    def reduce(self, batch: Batch, forward_pass: int, row: int, logits: torch.Tensor
             ) -> torch.Tensor:
        """Score the tokens to predict; see `LogitsConsumer.reduce`."""
        places = self._places(batch, forward_pass)[row : row + len(logits)]
        tails = [self._continuations[key] for key, _ in places]
        if self._on_logits is not None:
            live = [i for i, (_, place) in enumerate(places) if place < len(tails[i])]
            self._on_logits([places[i] for i in live],
                            logits if len(live) == len(places) else logits[live])
        # A sequence that has ended repeats its last token, whose probability is not used.
        return _log_probs(logits, [tail[min(place, len(tail) - 1)]
                                   for (_, place), tail in zip(places, tails, strict=True)])

    def _note(self, key: int, log_prob: float, likeliest: float) -> None:
        """Add what was found of the next token of a continuation.

        Raises `UserError` for NaN, which one NaN or infinity among the logits makes of them all; a
        token of which the probability is 0 is all right.
        """
        if math.isnan(log_prob):
            raise not_finite(key, log_prob)
        self.log_probs[key].append(log_prob)
        self.likeliest[key].append(bool(likeliest))


class PrefillScorer(_Continuations):
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

    def _places(self, batch: Batch, forward_pass: int) -> list[tuple[int, int]]:
        return [(key, place) for _, key, place in self._owners(batch, forward_pass)]

    def _owners(self, batch: Batch, forward_pass: int) -> list[tuple[int, int, int]]:
        """Return (row, request key, index of the predicted token) of the rows that predict."""
        owners, row = [], 0
        for span in batch.batch_layout.spans(forward_pass):
            request = batch.requests[span.sequence]
            begin = len(request.prompt) - len(self._continuations[request.key])
            owners += [(row + position - span.start, request.key, position - begin)
                       for position in range(max(span.start, begin), span.end)]
            row += len(span)
        return owners

    def apply(self, batch: Batch, forward_pass: int, row: int, found: torch.Tensor) -> None:
        """Note the scores; see `LogitsConsumer.apply`."""
        owners = self._owners(batch, forward_pass)[row : row + len(found)]
        for (_, key, _), each in zip(owners, found.tolist(), strict=True):
            self._note(key, *each)
        if batch.batch_layout.token(forward_pass) == 0:
            for request in batch.requests:
                request.finish_reason = "length"


class DecodeScorer(_Continuations):
    """Scores continuations by feeding them token by token.

    What an evicting cache predicts depends on how tokens came: only the context is a prompt.
    """

    def rows(self, batch: Batch, forward_pass: int) -> torch.Tensor:
        """Rows that get logits: as in generation."""
        return newest_rows(batch, forward_pass)

    def _places(self, batch: Batch, forward_pass: int) -> list[tuple[int, int]]:
        return [(request.key, len(request.generated)) for request in batch.sampled(forward_pass)]

    def apply(self, batch: Batch, forward_pass: int, row: int, found: torch.Tensor) -> None:
        """Append the tokens and note their scores; see `LogitsConsumer.apply`."""
        requests = batch.sampled(forward_pass)[row : row + len(found)]
        for request, each in zip(requests, found.tolist(), strict=True):
            if request.finish_reason:
                continue
            self._note(request.key, *each)
            tail = self._continuations[request.key]
            request.generated.append(tail[len(request.generated)])
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


def _log_probs(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """Probability of one token per row of logits [rows, vocab]: float64 [rows, 2] on the host,
    natural log-probability, and 1 if it is the top."""
    index = torch.tensor(targets, device=logits.device)
    values = logits.float().log_softmax(-1).gather(1, index[:, None])[:, 0]
    # max() and not argmax(), which takes ten times as long on a CPU.
    return torch.stack([values.double(), (logits.max(-1).indices == index).double()], 1).cpu()
