"""The work of one call on a model: requests and a sink, made of what the user gives and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexgen_h2o.config.checks import check_int
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.sinks import Forcing, OnLogits, Scoring, Sink
from flexgen_h2o.engine.tokenization import Prompts


@dataclass(frozen=True, eq=False)
class CallWork:
    """Requests, and what becomes of them.

    Attributes
    ----------
    requests : list of Request
    new : int or mapping
        Up to so many tokens are appended to each, or so many as it has by key.
    sink : Sink
    planned : int
        The most tokens that a request may get, by the memory plan.
    """

    requests: list[Request]
    new: int | Mapping[int, int]
    sink: Sink
    planned: int


@dataclass(frozen=True, eq=False)
class ScoringWork(CallWork):
    """The work of scoring continuations."""

    sink: Forcing | Scoring


def generation_work(prompts: Prompts, given: Sequence[str | Sequence[int]],
                    params: Sequence[SamplingParams], steps: int | None, *,
                    special: bool = True) -> CallWork:
    """The work of continuing prompts, each by its own parameters.

    Parameters
    ----------
    prompts : Prompts
    given : sequence of str or of token id sequences
    params : sequence of SamplingParams
    steps : int or None
        Tokens at most, whatever the parameters say.
    special : bool
        Put the tokenizer's special tokens in front of texts.

    Raises
    ------
    UserError
        A prompt is empty or too long, or a parameter does not go with the model.
    """
    _ = prompts.tokenizer  # a damaged one must show now and not after the work
    requests = [Request(key, prompts.encode(prompt, key, goes_on=not special), seed=each.seed,
                        params=each)
                for key, (prompt, each) in enumerate(zip(given, params, strict=True))]
    prompts.check_lengths(requests, {key: each.max_new_tokens for key, each in enumerate(params)})
    if steps is not None:
        check_int("cut_gen_len", steps, low=1)
    new = {key: min(each.max_new_tokens, steps or each.max_new_tokens) - 1
           for key, each in enumerate(params)}
    return CallWork(requests, new, prompts.generation(dict(enumerate(params)), steps=steps),
                    planned=max((each.max_new_tokens for each in params), default=1))


def scoring_work(prompts: Prompts, pairs: Sequence[tuple], *, whole: bool,
                 on_logits: OnLogits | None = None) -> ScoringWork:
    """The work of scoring continuations.

    Parameters
    ----------
    prompts : Prompts
    pairs : sequence of (context, continuation)
    whole : bool
        Context and continuation are one prompt; else the continuation is fed token by token.
    on_logits : callable, optional
        As of the sinks.

    Raises
    ------
    UserError
        A pair is no such thing, or too long.
    """
    requests, continuations = prompts.encode_pairs(pairs)
    sink: Forcing | Scoring = Forcing(continuations, on_logits)
    new = {key: len(tail) for key, tail in continuations.items()}
    if whole:
        sink, new = Scoring(continuations, on_logits), dict.fromkeys(new, 1)
        requests = sink.joined(requests)
    prompts.check_lengths(requests, new)
    return ScoringWork(requests, {key: count - 1 for key, count in new.items()}, sink,
                       planned=max(new.values(), default=1))
