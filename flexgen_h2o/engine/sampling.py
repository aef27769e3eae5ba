"""The next token: greedy, or sampled through transformers' logits processors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from flexgen_h2o.config.imports import retry_imports
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.errors import NotFinite, UserError
from flexgen_h2o.kernels.choice import likeliest, on_host


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
            return _checked(*likeliest(logits), raw, requests)
        probabilities = _processed(self._warpers, logits.float()).softmax(-1)
        cumulative = probabilities.cumsum(-1)
        draws = torch.tensor([self._draw(request) for request in requests])
        # Inverse transform; scaled by the last sum, which rounding keeps from being exactly 1.
        points = draws[:, None].to(cumulative) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True)[:, 0]
        last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
        chosen, sums = on_host(torch.minimum(tokens, last), cumulative[:, -1])
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
