"""Prompts to checked token ids, generated tokens to outputs, and loading of tokenizers."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.batch import Request
from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer, StopStrings
from flexgen_h2o.engine.sampling import GenerationRules, GenerationSampler, Sampler
from flexgen_h2o.engine.source import ModelSource
from flexgen_h2o.engine.structured_outputs import GrammarCompiler
from flexgen_h2o.errors import UserError, check_text, short_repr
from flexgen_h2o.files.readers import check_regular_file, check_text_file, read_checkpoint_json
from flexgen_h2o.models.convert import CONFIG_SUFFIXES
from flexgen_h2o.models.positions import check_length, clamped_new_tokens, longest_prompt
from flexgen_h2o.models.registry import read_config, retry_imports
from flexgen_h2o.outputs import Output

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

OnText = Callable[[int, str, bool], object]
"""Gets the index of a prompt, the text of a new token, and whether it is the last: `LLM.generate`.
"""

_Item = TypeVar("_Item")
_log = logging.getLogger(__name__)

_REMOTE_CODE = "trust_remote_code"  # part of transformers' error
_CHARACTERS = 8
"""Characters of a token, at most, in ordinary text."""
_CUT_TOKENS = 128
"""Tokens that cutting a text in the middle may add."""


class Prompts:
    """Encoder of prompts and decoder of outputs of one model.

    The tokenizer is loaded on first use. A `UserError` of any method names the prompt or pair by
    its number.

    Parameters
    ----------
    source : ModelSource
    name : str
        Name of the model in error messages.
    h2o : H2OConfig or None
        Determines whether positions may exceed the trained ones.
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
        """The transformers tokenizer; None if the model has none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._source.folder)
        return self._tokenizer

    @property
    def detokenizer(self) -> Detokenizer | None:
        """The detokenizer; None if the model has no tokenizer."""
        if self._detokenizer is None and self.tokenizer is not None:
            self._detokenizer = Detokenizer(self.tokenizer)
        return self._detokenizer

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of a chat: end tokens of the model and of the tokenizer."""
        ends = self._source.generation.end_tokens
        missing = self._missing_end
        return ends if missing is None else (*ends, missing)

    @property
    def _missing_end(self) -> int | None:
        """The tokenizer's EOS if it is not one of the model's end tokens."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        known = eos is None or eos in self._source.generation.end_tokens
        return None if known or eos >= self._config.vocab_size else eos

    def encode(self, prompt: str | Sequence[int], key: int | str, *, special: bool = True,
               limit: tuple[int | None, str] | None = None) -> list[int]:
        """Return the token ids of prompt number `key`, at least one.

        Parameters
        ----------
        special : bool
            Add the tokenizer's special tokens to a text, but no second BOS.
        limit : (int or None, str), optional
            Maximum number of tokens of a text, and the reason for errors. Default: the model's
            positions. Only texts far above it are refused here, without tokenizing all of them.
        """
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, f"prompt {key}", special=special, limit=limit)
        else:
            ids = _token_ids(prompt, f"prompt {key}")
        # A tokenizer may have more tokens than its model.
        self.check_tokens(f"prompt {key}", ids)
        if not ids:
            raise UserError(f"prompt {key} is empty: give it at least one token")
        return ids

    def check_tokens(self, name: str, ids: Iterable[int]) -> None:
        """Raise `UserError`, which begins with `name`, for token ids that the model lacks."""
        wrong = next((token for token in ids if not 0 <= token < self._config.vocab_size), None)
        if wrong is not None:
            raise UserError(f"{name}: token id {wrong} is not below the vocabulary's "
                            f"{self._config.vocab_size}")

    def check_same_tokens(self, other: Prompts) -> None:
        """Raise `UserError` unless the token ids of another model mean the same.

        Special tokens may be missing from either.
        """
        vocabularies = [prompts.tokenizer and prompts.tokenizer.get_vocab()
                        for prompts in (self, other)]
        if None in vocabularies:
            same = self._config.vocab_size == other._config.vocab_size
        else:
            fewer, more = sorted(vocabularies, key=len)
            same = fewer.items() <= more.items()
        if not same:
            raise UserError(f"the tokens of draft_model {other._name} are not those of "
                            f"{self._name}: choose a model with the same tokenizer")

    def windows(self, text: str, name: str, *, count: int, length: int) -> list[list[int]]:
        """Cut the beginning of a text into token sequences, with BOS if the tokenizer adds it.

        Parameters
        ----------
        name : str
            Name of the text in error messages.
        count, length : int
            Maximum number of sequences, and of tokens per sequence.
        """
        check_text(name, text)
        if self.tokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here, and {name} is text: leave it out")
        length = min(length, self._config.max_positions)
        bos = self.tokenizer.bos_token_id
        front = [] if bos is None or self._ids("", True)[:1] != [bos] else [bos]
        ids = self._ids(text[: 4 * _CHARACTERS * count * length], special=False)
        step = length - len(front)
        starts = range(0, min(len(ids), count * step), step)
        return [self.encode(front + ids[start : start + step], name) for start in starts]

    def encode_checked(self, prompt: str | Sequence[int], key: int | str, *, new_tokens: int,
                special: bool) -> list[int]:
        """Return the token ids of a prompt after which `new_tokens` fit: see `encode`."""
        ids = self.encode(prompt, key, special=special)
        check_length(self._config, self._h2o, prompt=f"prompt {key}", length=len(ids),
                     new_tokens=new_tokens)
        return ids

    def clamp_new_tokens(self, tokens: int, max_new_tokens: int) -> int:
        """Return `max_new_tokens`, or the number of positions after `tokens` tokens if less."""
        return clamped_new_tokens(self._config, self._h2o, length=tokens,
                                  max_new_tokens=max_new_tokens)

    def _tokenize(self, text: str, name: str, *, special: bool = True,
                  limit: tuple[int | None, str] | None = None) -> list[int]:
        check_text(name, text)
        if self.tokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here: give prompts as token ids")
        self._check_beginning(text, name, *(limit or self._limit))
        ids = self._ids(text, special)
        bos = self.tokenizer.bos_token_id
        if special and bos is not None and ids[:2] == [bos, bos] == self._ids("", True)[:1] * 2:
            ids = ids[1:]  # the text begins with BOS
        return ids

    def _ids(self, text: str, special: bool) -> list[int]:
        # Lengths are checked against the positions: tokenizers' own limits are often wrong.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _check_beginning(self, text: str, name: str, max_tokens: int | None, why: str) -> None:
        """Refuse a text whose beginning has too many tokens: a megabyte takes seconds."""
        if max_tokens is None:
            return
        length = _CHARACTERS * (max_tokens + _CUT_TOKENS)
        while length < len(text):
            tokens = len(self._ids(text[:length], special=False))
            if tokens > max_tokens + _CUT_TOKENS:
                raise UserError(f"{name} has about {tokens * len(text) // length} tokens, more "
                                f"than {why}")
            length *= 4  # for example blanks, which some tokenizers drop

    def check_longest(self, texts: Sequence[str], new_tokens: int = 1) -> None:
        """Check that all prompts are text, and that `new_tokens` fit after the longest one."""
        texts = check_list("text", texts)
        for key, text in enumerate(texts):
            check_text(f"prompt {key}", text)
        if texts:
            key = max(range(len(texts)), key=lambda key: len(texts[key]))
            ids = self._tokenize(texts[key], f"prompt {key}")
            self.check_lengths([Request(key, ids)], new_tokens)

    def encode_pairs(self, pairs: Sequence[tuple]) -> tuple[list[Request], dict[int, list[int]]]:
        """Return a request for the context of each pair, and continuations by request key."""
        requests, continuations = [], {}
        for key, pair in enumerate(check_list("pair", pairs)):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise UserError(f"pair {key} is not (context, continuation): {pair!r:.80}")
            head, continuations[key] = self._encode_pair(*pair, key)
            requests.append(Request(key, head))
        return requests, continuations

    def _encode_pair(self, context, continuation, key: int) -> tuple[list[int], list[int]]:
        """Return the token ids of context and continuation of pair `key`, at least one each."""
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
            # Many tokenizers add BOS themselves.
            head, tail = [start], tail[1:] if tail[:1] == [start] else tail
        if not tail:
            raise UserError(f"pair {key}: the continuation is empty")
        self.encode(head + tail, key)
        return head, tail

    def _split(self, context: str, continuation: str, name: str) -> tuple[list[int], list[int]]:
        """Tokenize a context and its continuation as one text.

        White space at the end of the context belongs to the continuation, as in lm-eval: most
        tokenizers join it with the next word. So does other text of the context that shares a token
        with the continuation.
        """
        if not continuation:
            return [], []
        joined = self._tokenize(context + continuation, name)
        context = context.rstrip()
        head = self._tokenize(context, name) if context else []
        edge = len(os.path.commonprefix([head, joined]))
        return joined[:edge], joined[edge:]

    def generation(self, params: Mapping[int, SamplingParams], *, steps: int | None = None,
                   on_token: Callable[[Request], None] | None = None) -> GenerationSampler:
        """Return the sampler of requests.

        Parameters
        ----------
        params : mapping of int to SamplingParams
            Sampling parameters by request key. Requests that differ only in the seed are sampled
            together.
        steps : int, optional
            Maximum number of tokens to generate.
        on_token : callable, optional
            See `GenerationSampler`.
        """
        shared: dict[SamplingParams, GenerationRules] = {}
        return GenerationSampler({key: self.rules(params_of_prompt, shared, steps=steps)
                                  for key, params_of_prompt in params.items()}, on_token=on_token)

    def rules(self, params: SamplingParams,
              shared: MutableMapping[SamplingParams, GenerationRules], *,
              steps: int | None = None) -> GenerationRules:
        """Return the rules of a request: out of `shared` if only the seed differs, or added to it.

        Parameters and errors are those of `generation`.
        """
        unseeded = replace(params, seed=0)
        rules = shared.get(unseeded)
        if rules is None:
            rules = shared[unseeded] = self._rules(unseeded, steps or params.max_new_tokens)
        return rules

    def _rules(self, params: SamplingParams, steps: int) -> GenerationRules:
        params = self._source.generation.apply(params)
        if params.eos_token_id is None:
            self._warn_of_missing_end()
        self.check_tokens("bad_words_ids", chain.from_iterable(params.bad_words_ids or ()))
        self.check_tokens("logit_bias", dict(params.logit_bias))
        ends = self._ends(params)
        form = params.structured_outputs
        masks = None if form is None else self._grammars.masks(form, ends)
        return GenerationRules(
            Sampler(params, ends, masks), min(steps, params.max_new_tokens), frozenset(ends),
            self._stops(params.stop_strings), params.logprobs)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        if self.tokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here, and structured_outputs are text: "
                            "leave them out")
        return GrammarCompiler(self.tokenizer, self._config.vocab_size)

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        is_set = params.eos_token_id is not None
        ends = params.end_tokens if is_set else self._source.generation.end_tokens
        if params.structured_outputs and not (is_set or ends) and self._missing_end is not None:
            ends = (self._missing_end,)  # a text with a form must be able to end
        return (*ends, *params.stop_token_ids)

    def _warn_of_missing_end(self) -> None:
        """Warn once if the tokenizer's EOS ends only chats."""
        missing = self._missing_end
        if missing is not None and not self._warned:
            self._warned = True
            named = ", ".join(map(str, self._source.generation.end_tokens)) or "none"
            _log.warning("%s: the tokenizer's EOS, %s (%d), is not an end token of the model (%s) "
                         "and only ends chats; give eos_token_id to choose", self._name,
                         self.tokenizer.eos_token, missing, named)

    def output(self, prompt: str | Sequence[int], ids: list[int], request: Request) -> Output:
        """Return the output of a finished request.

        Parameters
        ----------
        prompt : str or sequence of int
            The prompt of the user.
        ids : list of int
            Token ids of the prompt.
        request : Request
            Its end token is not part of the text.
        """
        tokens = request.generated
        text = None if self.detokenizer is None else self.detokenizer.text(
            tokens[:-1] if self._has_end(request) else tokens, request.prompt,
            self._kept_special_ids(request))
        return Output(prompt if isinstance(prompt, str) else None, ids, tokens, text,
                      request.finish_reason, request.log_probs or None)

    def text_callback(self, on_text: OnText) -> Callable[[Request], None]:
        """Return a callback for each new token of a request, which calls `on_text` with its text.

        See `LLM.generate`. All texts of a request make the text of its `output`.
        """
        if not callable(on_text):
            raise UserError(f"on_text must be a function, got {short_repr(on_text)}")
        if self.detokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here, and on_text gets text: leave it "
                            "out")
        new_text: dict[int, Callable[[], str]] = {}

        def on_token(request: Request) -> None:
            if request.key not in new_text:
                new_text[request.key] = self.new_text(request)
            on_text(request.key, new_text[request.key](), bool(request.finish_reason))

        return on_token

    def new_text(self, request: Request) -> Callable[[], str]:
        """Return a function that, after each token, returns the characters that it completes."""
        decoder = IncrementalDetokenizer(self.detokenizer, request.prompt,
                                         self._kept_special_ids(request))
        return lambda: "" if self._has_end(request) else decoder.step(request.generated[-1])

    def _has_end(self, request: Request) -> bool:
        """Return True if the last token is an end token, which is not part of the text."""
        return (request.finish_reason == "stop"
                and request.generated[-1] in self._ends(request.params))

    def _kept_special_ids(self, request: Request) -> Collection[int]:
        """Return the special tokens whose names are part of the text."""
        return () if request.params.skip_special_tokens else range(self._config.vocab_size)

    def _stops(self, strings: Sequence[str] | None) -> StopStrings | None:
        """Return the detector of stop strings; None without stop strings."""
        if not strings:
            return None
        if self.detokenizer is None:
            raise UserError(f"{self._name} has no tokenizer here, and stop_strings are text: leave "
                            "them out")
        return StopStrings(strings, self.detokenizer.token_bytes)

    def check_lengths(self, requests: Sequence[Request], new_tokens: int | Mapping[int, int]
                      ) -> None:
        """Check that prompts and new tokens, of all or by request key, fit the positions."""
        longest: dict[int, Request] = {}  # by new tokens
        for request in requests:
            new = new_tokens if isinstance(new_tokens, int) else new_tokens[request.key]
            if new not in longest or len(request.prompt) > len(longest[new].prompt):
                longest[new] = request
        for new, request in longest.items():
            check_length(self._config, self._h2o, prompt=f"prompt {request.key}",
                         length=len(request.prompt), new_tokens=new)


def check_list(name: str, values: Iterable[_Item]) -> list[_Item]:
    """Return the prompts, pairs or texts of a call as a list. `name` names one of them.

    Raises
    ------
    UserError
        `values` is a text, a mapping, or not iterable.
    """
    advice = f": put the one {name} in a list" if isinstance(values, str) else ""
    try:
        items = None if isinstance(values, (str, bytes, Mapping)) else iter(values)
    except TypeError:
        items = None
    if items is None:
        raise UserError(f"{name}s must be a list, got {short_repr(values)}{advice}")
    return list(items)


def _token_ids(tokens, name: str) -> list[int]:
    """Return token ids as ints, from any iterable of integers (a tensor, an array)."""
    try:
        if isinstance(tokens, bytes):
            raise TypeError("bytes")
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise UserError(f"{name} must be text or a sequence of whole token ids, "
                        f"got {short_repr(tokens)}") from None


def load_tokenizer(folder: Path | None):
    """Return the tokenizer of a folder; None if it has none (dummy weights).

    Raises
    ------
    UserError
        Its files are damaged, it needs code of the model, or sentencepiece is missing.
    """
    if folder is None or not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    for path in folder.iterdir():
        if not path.is_dir():  # the libraries may read any of them
            (check_text_file if path.suffix in CONFIG_SUFFIXES else check_regular_file)(path)
    if find_spec("sentencepiece") is None and _is_sentencepiece(folder):
        raise UserError(f"the tokenizer in {folder} is a SentencePiece model without a "
                        "tokenizer.json: pip install sentencepiece, which the extra "
                        "flexgen-h2o[sentencepiece] brings")
    try:
        return _read_tokenizer(folder)
    except BaseException as error:  # damaged files raise any type
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        if _REMOTE_CODE in reason:
            raise UserError(f"the tokenizer in {folder} needs the model's own code, which is not "
                            "run: add a tokenizer.json, or give prompts as token ids in a folder "
                            "without tokenizer files") from None
        raise UserError(f"the tokenizer in {folder} can't be read ({type(error).__name__}: "
                        f"{reason[:200]}); get its files again") from error


@retry_imports
def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read a folder's tokenizer, without running code that comes with it."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False,
                                             config=_plain_config(folder))
    except ValueError as error:
        if _REMOTE_CODE not in str(error) or not (folder / "tokenizer.json").exists():
            raise
        return PreTrainedTokenizerFast.from_pretrained(str(folder))


def _is_sentencepiece(folder: Path) -> bool:
    """Return True if a folder's only tokenizer is a SentencePiece model."""
    path = folder / "tokenizer.model"
    if not path.exists() or (folder / "tokenizer.json").exists():
        return False
    with open(path, "rb") as file:
        return file.read(1) == b"\n"  # a protocol buffer; tiktoken's file is text


def _plain_config(folder: Path) -> PreTrainedConfig | None:
    """Return a plain config with what AutoTokenizer needs.

    Configs of model families import torch._dynamo: 160 MB that inference does not need. None if
    only the family's config names the class of the tokenizer.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists() or "tokenizer_class" not in read_checkpoint_json(path):
        return None
    from transformers import PreTrainedConfig

    config = PreTrainedConfig(name_or_path=str(folder))
    for name in ("model_type", "model_name", "tokenizer_class"):
        if name in (given := read_config(folder)):
            setattr(config, name, given[name])
    return config
