"""Prompts in and texts out: what users give becomes checked token ids, and back. No weights."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.detokenization import Detokenizer, StopStrings
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler, Sampler
from flexgen_h2o.engine.source import ModelSource, load_tokenizer
from flexgen_h2o.errors import UserError, check_text, shown
from flexgen_h2o.models.positions import check_length, clamped_new_tokens, longest_prompt
from flexgen_h2o.outputs import Output

_Each = TypeVar("_Each")
_log = logging.getLogger(__name__)

_CHARACTERS = 8  # of a token, at the most that is usual
_CUT = 128  # tokens that the cut at the end of a text's beginning may have made


class Prompts:
    """The tokenizer of a model, loaded when it is first needed, and the checks of what it makes.

    All methods raise `UserError`, in one line that names the prompt or pair by its number.
    """

    def __init__(self, source: ModelSource, name: str, h2o: H2OConfig | None):
        self._source = source
        self._h2o = h2o
        self._config = source.config
        self._name = name
        self._tokenizer = None
        self._detokenizer: Detokenizer | None = None
        self._warned = False
        longest = longest_prompt(source.config, h2o)
        self._limit = longest, f"the model's {longest} positions: shorten it"

    @property
    def tokenizer(self):
        """The transformers tokenizer, or None where the model has none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._source.folder)
        return self._tokenizer

    @property
    def detokenizer(self) -> Detokenizer | None:
        """The detokenizer, or None where the model has no tokenizer."""
        if self._detokenizer is None and self.tokenizer is not None:
            self._detokenizer = Detokenizer(self.tokenizer)
        return self._detokenizer

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of a chat: the model's end tokens and the tokenizer's."""
        ends = self._source.generation.end_tokens
        own = self._missing_end
        return ends if own is None else (*ends, own)

    @property
    def _missing_end(self) -> int | None:
        """The id of the tokenizer's EOS where it is none of the model's end tokens."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        known = own is None or own in self._source.generation.end_tokens
        return None if known or own >= self._config.vocab_size else own

    def encode(self, prompt: str | Sequence[int], key: int | str, *, continues: bool = False,
               limit: tuple[int | None, str] | None = None) -> list[int]:
        """Token ids of prompt number `key`, of which there is at least one.

        Parameters
        ----------
        continues : bool
            It comes after other text, and gets no special tokens in front. Otherwise a text gets
            those of the tokenizer, but no second BOS where it begins with one.
        limit : (int or None, str), optional
            The most tokens that a text may have, if there is a limit, and what sets it. Default:
            the model's positions. Only what is far above it is refused here, and soon.
        """
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, f"prompt {key}", special=not continues, limit=limit)
        else:
            ids = _token_ids(prompt, f"prompt {key}")
        # A tokenizer, too, may know more tokens than the model that it lies beside.
        self.check_tokens(f"prompt {key}", ids)
        if not ids:
            raise UserError(f"prompt {key} is empty: give it at least one token")
        return ids

    def check_tokens(self, name: str, ids: Iterable[int]) -> None:
        """Refuse a token id that the model does not have; the message begins with `name`."""
        wrong = next((token for token in ids if not 0 <= token < self._config.vocab_size), None)
        if wrong is not None:
            raise UserError(f"{name}: token id {wrong} is not below the vocabulary's "
                            f"{self._config.vocab_size}")

    def windows(self, text: str, what: str, *, count: int, length: int) -> list[list[int]]:
        """Cut the beginning of a text into sequences of tokens, each with BOS in front where the
        tokenizer puts it there.

        Parameters
        ----------
        text : str
        what : str
            How errors call it.
        count, length : int
            The most sequences, and the most tokens of each.
        """
        check_text(what, text)
        if self.tokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here, and {what} is text: leave it out")
        length = min(length, self._config.max_positions)
        bos = self.tokenizer.bos_token_id
        front = [] if bos is None or self._ids("", True)[:1] != [bos] else [bos]
        ids = self._ids(text[: 4 * _CHARACTERS * count * length], special=False)
        step = length - len(front)
        starts = range(0, min(len(ids), count * step), step)
        return [self.encode(front + ids[start : start + step], what) for start in starts]

    def fitting(self, prompt: str | Sequence[int], key: int | str, *, new_tokens: int,
                special: bool) -> list[int]:
        """Token ids of a prompt that leaves room for so many new tokens, with the tokenizer's
        special tokens in front or without them: see `encode`."""
        ids = self.encode(prompt, key, continues=not special)
        check_length(self._config, self._h2o, prompt=f"prompt {key}", length=len(ids),
                     new_tokens=new_tokens)
        return ids

    def clamped(self, tokens: int, most: int) -> int:
        """New tokens, up to `most`, that have positions after a prompt of so many tokens."""
        return clamped_new_tokens(self._config, self._h2o, length=tokens, most=most)

    def _tokenize(self, text: str, what: str, *, special: bool = True,
                  limit: tuple[int | None, str] | None = None) -> list[int]:
        check_text(what, text)
        if self.tokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here: give prompts as token ids")
        self._check_beginning(text, what, *(limit or self._limit))
        ids = self._ids(text, special)
        bos = self.tokenizer.bos_token_id
        if special and bos is not None and ids[:2] == [bos, bos] == self._ids("", True)[:1] * 2:
            ids = ids[1:]  # the text has one of its own
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        # Lengths are checked against the positions: tokenizers' own limits are often wrong.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _check_beginning(self, text: str, what: str, most: int | None, why: str) -> None:
        """Refuse a text whose beginning alone has too many tokens: all takes seconds a megabyte."""
        if most is None:
            return
        length = _CHARACTERS * (most + _CUT)
        while length < len(text):
            tokens = len(self._ids(text[:length], special=False))
            if tokens > most + _CUT:
                raise UserError(f"{what} has about {tokens * len(text) // length} tokens, more "
                                f"than {why}")
            length *= 4  # such as blanks, of which some tokenizers keep none

    def check_longest(self, texts: Sequence[str], new_tokens: int = 1) -> None:
        """Refuse the longest of these prompts if it is too long for so many new tokens, and all
        that are no text."""
        texts = check_list("text", texts)
        for key, text in enumerate(texts):
            check_text(f"prompt {key}", text)
        if texts:
            key = max(range(len(texts)), key=lambda key: len(texts[key]))
            ids = self._tokenize(texts[key], f"prompt {key}")
            self.check_lengths([Request(key, ids)], new_tokens)

    def encode_pairs(self, pairs: Sequence[tuple]) -> tuple[list[Request], dict[int, list[int]]]:
        """A request for each pair's context, and its continuation by key."""
        requests, continuations = [], {}
        for key, pair in enumerate(check_list("pair", pairs)):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise UserError(f"pair {key} is not (context, continuation): {pair!r:.80}")
            head, continuations[key] = self._encode_pair(*pair, key)
            requests.append(Request(key, head))
        return requests, continuations

    def _encode_pair(self, context, continuation, key: int) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation of pair number `key`, at least one each."""
        if isinstance(context, str) != isinstance(continuation, str):
            raise UserError(f"pair {key}: give context and continuation both as text or as tokens")
        if isinstance(context, str):
            head, tail = self._split(context, continuation, f"pair {key}")
        else:
            head, tail = (_token_ids(part, f"pair {key}") for part in (context, continuation))
        if not head and tail:
            start = self._config.bos_token_id
            if start is None:
                raise UserError(f"pair {key}: the context is empty, or one token with the "
                                "continuation, and the model has no BOS token: give more context")
            # Many tokenizers put it in front themselves.
            head, tail = [start], tail[1:] if tail[:1] == [start] else tail
        if not tail:
            raise UserError(f"pair {key}: the continuation is empty")
        self.encode(head + tail, key)
        return head, tail

    def _split(self, context: str, continuation: str, what: str) -> tuple[list[int], list[int]]:
        """Tokenize a context and its continuation as one text.

        White space at the context's end belongs to the continuation, as in lm-eval: most tokenizers
        join it with the next word. So does any other text of the context that shares a token with
        the continuation.
        """
        if not continuation:
            return [], []
        whole = self._tokenize(context + continuation, what)
        context = context.rstrip()
        head = self._tokenize(context, what) if context else []
        edge = len(os.path.commonprefix([head, whole]))
        return whole[:edge], whole[edge:]

    def generation(self, params: Mapping[int, SamplingParams], *, steps: int | None = None,
                   on_token: Callable[[int], None] | None = None) -> GenerationSampler:
        """A sink that continues texts by at most `steps` tokens if that is given.

        `params` has the sampling parameters by the requests' keys. Requests whose parameters differ
        in nothing but the seed are sampled together.
        """
        alike: dict[SamplingParams, GenerationRules] = {}
        rules = {}
        for key, own in params.items():
            kind = replace(own, seed=0)
            if kind not in alike:
                alike[kind] = self._rules(kind, steps or kind.max_new_tokens)
            rules[key] = alike[kind]
        return GenerationSampler(rules, on_token=on_token)

    def _rules(self, params: SamplingParams, steps: int) -> GenerationRules:
        params = self._source.generation.apply(params)
        if params.eos_token_id is None:
            self._warn_of_missing_end()
        self.check_tokens("bad_words_ids", chain.from_iterable(params.bad_words_ids or ()))
        self.check_tokens("logit_bias", dict(params.logit_bias))
        ends = self._ends(params)
        return GenerationRules(
            Sampler(params, ends), min(steps, params.max_new_tokens), frozenset(ends),
            self._stops(params.stop_strings), params.logprobs)

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        own = params.eos_token_id is not None
        ends = params.end_tokens if own else self._source.generation.end_tokens
        return (*ends, *params.stop_token_ids)

    def _warn_of_missing_end(self) -> None:
        """Warn once where the tokenizer's EOS ends chats alone."""
        own = self._missing_end
        if own is not None and not self._warned:
            self._warned = True
            named = ", ".join(map(str, self._source.generation.end_tokens)) or "none"
            _log.warning("%s: the tokenizer's EOS, %s (%d), is none of the model's end tokens (%s) "
                         "and ends chats alone; give eos_token_id to choose", self._name,
                         self.tokenizer.eos_token, own, named)

    def output(self, given: str | Sequence[int], ids: list[int], request: Request) -> Output:
        """Return the result of a request that has ended, for the prompt that was given and its
        ids. Its text does not have the token that ended it."""
        tokens, params = request.generated, request.params
        ended = request.finish_reason == "stop" and tokens[-1] in self._ends(params)
        text = self.detokenizer and self.detokenizer.text(
            tokens[:-1] if ended else tokens, request.prompt,
            keep=() if params.skip_special_tokens else range(self._config.vocab_size))
        return Output(given if isinstance(given, str) else None, ids, tokens, text,
                      request.finish_reason, request.log_probs or None)

    def _stops(self, strings: Sequence[str] | None) -> StopStrings | None:
        """A finder of these stop strings in generated tokens; None for none."""
        if not strings:
            return None
        if self.detokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here, and stop_strings are text: leave "
                            "them out")
        return StopStrings(strings, self.detokenizer.token_bytes)

    def check_lengths(self, requests: Sequence[Request], new_tokens: int | Mapping[int, int]
                      ) -> None:
        """Refuse what would run past the model's positions with so many new tokens, or with those
        that a request has by its key."""
        longest: dict[int, Request] = {}  # by new tokens
        for request in requests:
            new = new_tokens if isinstance(new_tokens, int) else new_tokens[request.key]
            if new not in longest or len(request.prompt) > len(longest[new].prompt):
                longest[new] = request
        for new, request in longest.items():
            check_length(self._config, self._h2o, prompt=f"prompt {request.key}",
                         length=len(request.prompt), new_tokens=new)


def check_list(what: str, values: Iterable[_Each]) -> list[_Each]:
    """The prompts, pairs or texts that are given, as a list. `what` names one of them.

    Raises `UserError` for what is no such thing, such as a text or None.
    """
    advice = f": put the one {what} in a list" if isinstance(values, str) else ""
    try:
        found = None if isinstance(values, (str, bytes, Mapping)) else iter(values)
    except TypeError:
        found = None
    if found is None:
        raise UserError(f"{what}s must be a list, got {shown(values)}{advice}")
    return list(found)


def _token_ids(tokens, what: str) -> list[int]:
    """Token ids as plain ints, from any iterable of whole numbers (a tensor, an array)."""
    try:
        if isinstance(tokens, bytes):
            raise TypeError("text that is not decoded")
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise UserError(f"{what} must be text or a sequence of whole token ids, "
                        f"got {shown(tokens)}") from None
