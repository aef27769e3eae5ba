"""Sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from flexgen_h2o.config.checks import check_bool, check_int, check_number
from flexgen_h2o.errors import UserError, check_text, shown


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: names and meaning of transformers' ``generate``.

    Lengths are tokens. Without `do_sample` decoding is greedy, and a `temperature` is refused.
    `top_k` 0 is off. `eos_token_id` is None (the model's own), -1 (never stop early), or one or
    more token ids. `stop_strings` is a text or several that end a generation once it contains one.
    The same `seed` gives the same tokens for every batch split. Two penalties are those of OpenAI's
    API, from -2 to 2: `frequency_penalty` is taken off a token's logit for each time that it has
    been generated, `presence_penalty` once if it has. `logprobs` is how many of the likeliest
    tokens come with each generated one in `Output.log_probs`, 0 to 20; None: there are none.
    Raises `UserError` for a value of a wrong type or range.
    """

    max_new_tokens: int = 32
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, low=1)
        check_int("min_new_tokens", self.min_new_tokens, low=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens must be at most the {self.max_new_tokens} tokens to generate, "
                f"got {self.min_new_tokens}"
            )
        check_bool("do_sample", self.do_sample)
        check_number("temperature", self.temperature, above=0)
        if self.temperature != 1 and not self.do_sample:
            raise UserError("temperature has no effect on greedy decoding: give do_sample=True, or "
                            "leave it out")
        check_int("top_k", self.top_k, low=0)
        check_number("top_p", self.top_p, low=0, high=1)
        if self.min_p is not None:
            check_number("min_p", self.min_p, low=0, high=1)
        check_number("repetition_penalty", self.repetition_penalty, above=0)
        check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, low=0)
        check_number("presence_penalty", self.presence_penalty, low=-2, high=2)
        check_number("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        check_int("seed", self.seed, low=0, high=2**63 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, low=0, high=20)
        self._check_eos()
        self._check_stop_strings()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The given tokens that end a text; none where the model's own are to."""
        eos = self.eos_token_id
        if eos is None or eos == -1:
            return ()
        return tuple(eos) if isinstance(eos, Sequence) else (eos,)

    def _check_eos(self) -> None:
        eos = self.eos_token_id
        if eos is None:
            return
        if isinstance(eos, Sequence) and not isinstance(eos, str) and len(eos) > 0:
            for token in eos:
                check_int("each eos_token_id", token, low=0)
            object.__setattr__(self, "eos_token_id", tuple(eos))  # frozen, but kept hashable
        else:
            check_int("eos_token_id", eos, low=-1)

    def _check_stop_strings(self) -> None:
        stops = self.stop_strings
        if stops is None:
            return
        texts = (stops,) if isinstance(stops, str) else stops
        if not isinstance(texts, Sequence) or not texts or not all(
                isinstance(text, str) and text for text in texts):
            raise UserError(f"stop_strings must be a text, or several, none empty, got {stops!r}")
        for text in texts:
            check_text("each of stop_strings", text)
        object.__setattr__(self, "stop_strings", tuple(texts))  # frozen, but kept hashable


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Keywords of a call as checked `SamplingParams`. An unknown one raises `UserError`."""
    known = [spec.name for spec in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise UserError(f"generate has no option {name!r}; it has {', '.join(known)}")
    return SamplingParams(**options)


def params_of_each(given: SamplingParams | Sequence[SamplingParams] | None,
                   keywords: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """The sampling parameters of each of so many prompts, with the seed of its random numbers.

    One set for all of them, also as keywords, gives each prompt random numbers of its own; a
    sequence has one set for each prompt. Raises `UserError` for anything else.
    """
    if given is not None and keywords:
        raise UserError(f"give sampling_params or {', '.join(keywords)}, not both")
    if given is None:
        given = sampling_params(keywords)
    if isinstance(given, SamplingParams):
        return [replace(given, seed=mixed_seed(given.seed, key)) for key in range(count)]
    if (not isinstance(given, Sequence) or len(given) != count
            or not all(isinstance(params, SamplingParams) for params in given)):
        raise UserError("sampling_params must be SamplingParams, or a list of one for each of the "
                        f"{count} prompts, got {shown(given)}")
    return list(given)


def mixed_seed(seed: int, number: int) -> int:
    """A seed for stream `number` of those that `seed` has; nearby ones give unrelated streams."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % 2**63
