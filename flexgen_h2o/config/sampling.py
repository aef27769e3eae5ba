"""Sampling parameters, and structured outputs: the form that generated text must have."""

from __future__ import annotations

import json as json_module
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from msgspec import Meta

from flexgen_h2o.config.validation import (
    Count,
    NonNegative,
    Positive,
    Seed,
    Share,
    check_fields,
    check_int,
    check_number,
)
from flexgen_h2o.errors import UserError, check_text, short_repr

_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"}
"""Options of JSON schemas. Models that may write any number of blanks between two values sometimes
never end."""
_CRASHING = re.compile(r"-922337203685477\d{4}(?!\d)")
"""Integers near -2**63, whose constants overflow the stack of llguidance 1.9."""
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([0-9.]+)')
_LARGEST_MULTIPLE = 100_000
"""Bound of the states that llguidance 1.9 needs for ``multipleOf``: 0.7 s. Its own limits do not
count them."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of a generated text: vLLM's `StructuredOutputsParams`. Give exactly one field.

    Parameters
    ----------
    json : str or mapping, optional
        A JSON schema, as text or as an object. It is kept as text.
    regex : str, optional
        A regular expression in the syntax of Rust's `regex`, for the whole text.
    choice : sequence of str, optional
        The text is one of these.
    grammar : str, optional
        A context-free grammar, in llguidance's dialect of Lark or in llama.cpp's GBNF.
    json_object : bool
        The text is any JSON object.

    Raises
    ------
    UserError
        No field or more than one is given, or a value is of a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        present = [name for name in names if getattr(self, name) not in (None, False)]
        if len(present) != 1:
            raise UserError(f"structured_outputs must have exactly one of {', '.join(names)}, got "
                            f"{', '.join(present) or 'none'}")
        name, value = present[0], getattr(self, present[0])
        if name == "json" and isinstance(value, Mapping):
            value = _as_json(value)
        elif name == "choice":
            value = self._checked_choice(value)
        elif name == "json_object":
            if value is not True:
                raise UserError(f"json_object must be true or false, got {short_repr(value)}")
            return
        else:
            check_text(f"structured_outputs' {name}", value)
        object.__setattr__(self, name, value)  # frozen, but kept hashable

    @staticmethod
    def _checked_choice(texts: object) -> tuple[str, ...]:
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise UserError("structured_outputs' choice must be a list of texts, not empty, got "
                            f"{short_repr(texts)}")
        for text in texts:
            check_text("each of structured_outputs' choice", text)
        return tuple(texts)

    def compile(self) -> str:
        """Return the grammar for llguidance, checked.

        Raises
        ------
        UserError
            llguidance is not installed, or does not accept the schema, expression or grammar. Its
            limits bound time and memory.
        """
        try:
            import llguidance
        except ImportError:
            raise UserError("structured_outputs need llguidance: pip install llguidance, which the "
                            "extra flexgen-h2o[structured-outputs] brings") from None
        name, text = next((field.name, getattr(self, field.name)) for field in fields(self)
                          if getattr(self, field.name) not in (None, False))
        if name in ("json", "grammar") and (number := _CRASHING.search(text)):
            raise UserError(f"structured_outputs' {name} has the number {number[0]}, which "
                            "llguidance cannot take: use one that is not near -2**63")
        if name in ("json", "grammar") and _common_multiple(text) > _LARGEST_MULTIPLE:
            raise UserError(f"structured_outputs' {name} has values of multipleOf that would take "
                            "gigabytes: their least common multiple, in units of their last "
                            f"digits, must be at most {_LARGEST_MULTIPLE:,}")
        try:
            if name in ("json", "json_object"):
                schema = '{"type": "object"}' if name == "json_object" else text
                grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=_OPTIONS)
            else:
                source = json_module.dumps(text) if name == "choice" else text
                grammar = llguidance.grammar_from(name, source)
        except ValueError as error:
            raise UserError(f"structured_outputs' {name}: {error}") from None
        refused, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        if refused:
            raise UserError(f"structured_outputs' {name}: {messages[0]}")
        return grammar


def _common_multiple(text: str) -> int:
    """Return the least common multiple of all `multipleOf`, in units of their last digits."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    digits = (number.replace(".", "").strip("0")[:20] for number in _MULTIPLE_OF.findall(text))
    return math.lcm(*(int(number or 1) for number in digits))


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json_module.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"structured_outputs' json is not a JSON schema: {error}") from None


_Penalty = Annotated[float, Meta(ge=-2, le=2)]

_NEUTRAL: Mapping[str, Any] = {
    "min_new_tokens": 0, "min_length": 0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "min_p": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": (),
    "begin_suppress_tokens": (), "bad_words_ids": (), "stop_strings": ()}
"""transformers' values for parameters that neither the user nor the model sets."""

SAMPLING_ONLY = ("temperature", "top_k", "top_p", "min_p")
"""Parameters that greedy decoding does not use."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: names and meaning of transformers' ``generate``.

    A parameter that is None takes its default from the model's generation_config.json, or else from
    transformers.

    Parameters
    ----------
    max_new_tokens : int
    min_new_tokens : int, optional
        Tokens before which no end token is generated; it also replaces the model's `min_length`.
    min_length : int, optional
        The same, but counted with the prompt.
    do_sample : bool
        False: greedy decoding, for which a `temperature` is refused.
    temperature, top_k, top_p, min_p : float or int, optional
        For sampling. Default: 1, 50, 1 and 0; a `top_k` of 0 is off.
    repetition_penalty : float, optional
        Divides positive logits of tokens in the prompt or the text, and multiplies negative ones.
    no_repeat_ngram_size : int, optional
        Size of the n-grams that may occur only once; 0 turns this off.
    suppress_tokens, begin_suppress_tokens : sequence of int, optional
        Tokens that are never generated, or not as the first one.
    bad_words_ids : sequence of sequence of int, optional
        Sequences of tokens that are never generated.
    presence_penalty, frequency_penalty : float
        OpenAI's penalties, from -2 to 2: subtracted from the logit of each token that was already
        generated, once or once per occurrence.
    eos_token_id : int or sequence of int, optional
        Tokens that end a text; -1: none.
    stop_token_ids : sequence of int
        Additional tokens that end a text, even with an `eos_token_id` of -1 (vLLM's name).
    logit_bias : mapping of int to float
        Added to the logits of tokens, before all other processing.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    stop_strings : str or sequence of str, optional
        Texts that end a generation that contains one of them.
    seed : int
        Equal seeds give equal tokens, for every batch split.
    logprobs : int, optional
        Number of most likely tokens in `Output.log_probs` for each generated token, 0 to 20; None:
        no log-probabilities.
    structured_outputs : StructuredOutputs, optional
        The form of the text. Only tokens that continue it in this form are generated. A text that
        reaches `max_new_tokens` may be incomplete.

    Raises
    ------
    UserError
        A value is of a wrong type or out of range.
    """

    max_new_tokens: Count = 32
    min_new_tokens: NonNegative | None = None
    min_length: NonNegative | None = None
    do_sample: bool = False
    temperature: Positive | None = None
    top_k: NonNegative | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repetition_penalty: Positive | None = None
    no_repeat_ngram_size: NonNegative | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    seed: Seed = 0
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.min_new_tokens or 0) > self.max_new_tokens:
            raise UserError(
                f"min_new_tokens must be at most the {self.max_new_tokens} tokens to generate, "
                f"got {self.min_new_tokens}"
            )
        if self.temperature not in (None, 1) and not self.do_sample:
            raise UserError("temperature has no effect on greedy decoding: give do_sample=True, or "
                            "leave it out")
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            self._keep_tokens(name, getattr(self, name))
        self._check_bad_words()
        self._check_eos()
        self._check_tokens()
        self._check_stop_strings()

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The given end tokens; empty if the model's own apply."""
        eos = self.eos_token_id
        if eos is None or eos == -1:
            return ()
        return tuple(eos) if isinstance(eos, Sequence) else (eos,)

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with the model's, or else transformers', values instead of None.

        Parameters
        ----------
        defaults : mapping
            The model's defaults by parameter name. Sampling needs `do_sample`.
        """
        values = {name: value for name, value in {**_NEUTRAL, **defaults}.items()
                  if getattr(self, name) is None}
        if not self.do_sample:
            values.update((name, _NEUTRAL[name]) for name in SAMPLING_ONLY if name in values)
        if self.min_new_tokens is not None and "min_length" in values:
            values["min_length"] = 0  # min_new_tokens replaces the model's min_length
        elif isinstance(values.get("min_new_tokens"), int):
            values["min_new_tokens"] = min(values["min_new_tokens"], self.max_new_tokens)
        return replace(self, **values)

    def _keep_tokens(self, name: str, tokens: object) -> None:
        """Check token ids and keep them as a (hashable) tuple; None stays None."""
        if tokens is None:
            return
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
            raise UserError(f"{name} must be a list of token ids, got {short_repr(tokens)}")
        for token in tokens:
            check_int(f"each of {name}", token, ge=0)
        object.__setattr__(self, name, tuple(tokens))

    def _check_bad_words(self) -> None:
        words = self.bad_words_ids
        if words is None:
            return
        if isinstance(words, (str, bytes)) or not isinstance(words, Sequence) or not all(
                isinstance(word, Sequence) and not isinstance(word, (str, bytes)) and len(word)
                for word in words):
            raise UserError("bad_words_ids must be a list of lists of token ids, none empty, got "
                            f"{short_repr(words)}")
        for word in words:
            for token in word:
                check_int("each token of bad_words_ids", token, ge=0)
        object.__setattr__(self, "bad_words_ids", tuple(map(tuple, words)))

    def _check_eos(self) -> None:
        eos = self.eos_token_id
        if eos is None:
            return
        if isinstance(eos, Sequence) and not isinstance(eos, str) and len(eos) > 0:
            self._keep_tokens("eos_token_id", eos)
        else:
            check_int("eos_token_id", eos, ge=-1)

    def _check_tokens(self) -> None:
        """Check `stop_token_ids` and `logit_bias` and keep them as (hashable) tuples."""
        stops, biases = self.stop_token_ids, self.logit_bias
        if not isinstance(stops, Sequence) or isinstance(stops, str):
            raise UserError(f"stop_token_ids must be a list of token ids, got {short_repr(stops)}")
        for token in stops:
            check_int("each of stop_token_ids", token, ge=0)
        try:
            pairs = sorted((biases if isinstance(biases, Mapping) else dict(biases)).items())
        except (TypeError, ValueError):
            raise UserError("logit_bias must be a mapping of token ids to numbers, got "
                            f"{short_repr(biases)}") from None
        for token, bias in pairs:
            check_int("each token of logit_bias", token, ge=0)
            check_number(f"logit_bias of token {token}", bias)
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        object.__setattr__(self, "logit_bias", tuple(pairs))

    def _check_stop_strings(self) -> None:
        stops = self.stop_strings
        if stops is None:
            return
        texts = (stops,) if isinstance(stops, str) else stops
        if not isinstance(texts, Sequence) or not all(
                isinstance(text, str) and text for text in texts):
            raise UserError(f"stop_strings must be a text, or several, none empty, got {stops!r}")
        for text in texts:
            check_text("each of stop_strings", text)
        object.__setattr__(self, "stop_strings", tuple(texts))  # frozen, but kept hashable


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Return the keywords of a call as `SamplingParams`. Raises `UserError` for unknown ones."""
    known = [spec.name for spec in fields(SamplingParams)]
    for name in options:
        if name not in known:
            raise UserError(f"generate has no option {name!r}; it has {', '.join(known)}")
    return SamplingParams(**options)


def expand_params(call_params: SamplingParams | Sequence[SamplingParams] | None,
                  keywords: Mapping[str, Any], count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each of `count` prompts, with its seed.

    One set for all prompts, also as keywords, gives each prompt its own seed. A sequence has
    one set per prompt. Raises `UserError` for anything else.
    """
    if call_params is not None and keywords:
        raise UserError(f"give sampling_params or {', '.join(keywords)}, not both")
    if call_params is None:
        call_params = sampling_params(keywords)
    if isinstance(call_params, SamplingParams):
        return [replace(call_params, seed=mix_seed(call_params.seed, key)) for key in range(count)]
    if (not isinstance(call_params, Sequence) or len(call_params) != count
            or not all(isinstance(params, SamplingParams) for params in call_params)):
        raise UserError("sampling_params must be SamplingParams, or a list of one for each of the "
                        f"{count} prompts, got {short_repr(call_params)}")
    return list(call_params)


def mix_seed(seed: int, number: int) -> int:
    """Return the seed of random stream `number`; nearby seeds give independent streams."""
    return (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % 2**63
