"""Tokenize and check prompts; load tokenizers."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.engine.blocks import Request
from flexgen_h2o.engine.source import ModelSource
from flexgen_h2o.errors import UserError, check_text, short_repr
from flexgen_h2o.files.readers import check_regular_file, check_text_file, read_checkpoint_json
from flexgen_h2o.models.convert import CONFIG_SUFFIXES
from flexgen_h2o.models.positions import check_length, clamped_new_tokens, longest_prompt
from flexgen_h2o.models.registry import read_config, retry_imports

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_Item = TypeVar("_Item")

_REMOTE_CODE = "trust_remote_code"  # part of transformers' error
_CHARACTERS = 8
"""Characters of a token, at most, in ordinary text."""
_CUT_TOKENS = 128
"""Tokens that cutting a text in the middle may add."""


class InputProcessor:
    """Turns prompts into checked token ids.

    The tokenizer is loaded on first use. A `UserError` of any method names the prompt or pair by
    its number.

    Parameters
    ----------
    name : str
        Name of the model in error messages.
    h2o : H2OConfig or None
        Determines whether positions may exceed the trained ones.
    """

    def __init__(self, source: ModelSource, name: str, h2o: H2OConfig | None):
        self.source, self.name = source, name
        self.vocab_size = source.config.vocab_size
        self._config, self._h2o = source.config, h2o
        longest = longest_prompt(source.config, h2o)
        self._limit = longest, f"the model's {longest} positions: shorten it"

    @cached_property
    def tokenizer(self):
        """The transformers tokenizer; None if the model has none."""
        return load_tokenizer(self.source.folder)

    @property
    def tokenizer_eos(self) -> int | None:
        """The tokenizer's EOS if the model has it and does not count it among its end tokens."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        known = eos is None or eos in self.source.generation.end_tokens
        return None if known or eos >= self.vocab_size else eos

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of a chat: end tokens of the model and of the tokenizer."""
        ends, eos = self.source.generation.end_tokens, self.tokenizer_eos
        return ends if eos is None else (*ends, eos)

    def check_tokenizer(self, advice: str) -> None:
        """Raise `UserError`, which ends with `advice`, if the model has no tokenizer."""
        if self.tokenizer is None:
            raise UserError(f"{self.name} has no tokenizer here{advice}")

    def encode(self, prompt: str | Sequence[int], name: int | str, *,
               add_special_tokens: bool = True, new_tokens: int | None = None,
               limit: tuple[int | None, str] | None = None) -> list[int]:
        """Return the token ids of a prompt, at least one.

        Parameters
        ----------
        name : int or str
            Number or name of the prompt in error messages.
        add_special_tokens : bool
            Add the tokenizer's special tokens to a text, but no second BOS.
        new_tokens : int, optional
            Check that this number of tokens fits after the prompt. Default: do not check.
        limit : (int or None, str), optional
            Maximum number of tokens of a text, and the reason for errors. Default: the model's
            positions. Only texts far above it are refused here, without tokenizing all of them.
        """
        if isinstance(prompt, str):
            ids = self._tokenize(prompt, f"prompt {name}", add_special_tokens, limit)
        else:
            ids = _token_ids(prompt, f"prompt {name}")
        # A tokenizer may have more tokens than its model.
        self.check_tokens(f"prompt {name}", ids)
        if not ids:
            raise UserError(f"prompt {name} is empty: give it at least one token")
        if new_tokens is not None:
            self._check_length(ids, name, new_tokens)
        return ids

    def check_tokens(self, name: str, ids: Iterable[int]) -> None:
        """Raise `UserError`, which begins with `name`, for token ids that the model lacks."""
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise UserError(f"{name}: token id {wrong} is not below the vocabulary's "
                            f"{self.vocab_size}")

    def check_same_tokens(self, other: InputProcessor) -> None:
        """Raise `UserError` unless the token ids of another model mean the same.

        Special tokens may be missing from either.
        """
        vocabularies = [inputs.tokenizer and inputs.tokenizer.get_vocab()
                        for inputs in (self, other)]
        if None in vocabularies:
            same = self.vocab_size == other.vocab_size
        else:
            smaller, larger = sorted(vocabularies, key=len)
            same = smaller.items() <= larger.items()
        if not same:
            raise UserError(f"the tokens of draft_model {other.name} differ from the tokens of "
                            f"{self.name}: choose a model with the same tokenizer")

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
        self.check_tokenizer(f", and {name} is text: leave it out")
        length = min(length, self._config.max_positions)
        bos = self.tokenizer.bos_token_id
        front = [] if bos is None or self._ids("", True)[:1] != [bos] else [bos]
        ids = self._ids(text[: 4 * _CHARACTERS * count * length], False)
        size = length - len(front)
        starts = range(0, min(len(ids), count * size), size)
        return [self.encode(front + ids[start : start + size], name) for start in starts]

    def clamp_new_tokens(self, tokens: int, max_new_tokens: int) -> int:
        """Return `max_new_tokens`, or the number of positions after `tokens` tokens if less."""
        return clamped_new_tokens(self._config, self._h2o, length=tokens,
                                  max_new_tokens=max_new_tokens)

    def _tokenize(self, text: str, name: str, add_special_tokens: bool = True,
                  limit: tuple[int | None, str] | None = None) -> list[int]:
        check_text(name, text)
        self.check_tokenizer(": give prompts as token ids")
        self._check_beginning(text, name, *(limit or self._limit))
        ids = self._ids(text, add_special_tokens)
        bos = self.tokenizer.bos_token_id
        if (add_special_tokens and bos is not None
                and ids[:2] == [bos, bos] == self._ids("", True)[:1] * 2):
            ids = ids[1:]  # the text begins with BOS
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # Lengths are checked against the positions: tokenizers' own limits are often wrong.
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
                    ["input_ids"])

    def _check_beginning(self, text: str, name: str, max_tokens: int | None, why: str) -> None:
        """Refuse a text whose beginning has too many tokens: a megabyte takes seconds."""
        if max_tokens is None:
            return
        length = _CHARACTERS * (max_tokens + _CUT_TOKENS)
        while length < len(text):
            tokens = len(self._ids(text[:length], False))
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

    def check_lengths(self, requests: Sequence[Request], new_tokens: int | Mapping[int, int]
                      ) -> None:
        """Check that prompts and new tokens, of all or by request key, fit the positions."""
        longest: dict[int, Request] = {}  # by new tokens
        for request in requests:
            new = new_tokens if isinstance(new_tokens, int) else new_tokens[request.key]
            if new not in longest or len(request.prompt) > len(longest[new].prompt):
                longest[new] = request
        for new, request in longest.items():
            self._check_length(request.prompt, request.key, new)

    def _check_length(self, ids: Sequence[int], name: int | str, new_tokens: int) -> None:
        check_length(self._config, self._h2o, prompt=f"prompt {name}", length=len(ids),
                     new_tokens=new_tokens)


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
    """Return a plain config with the values that AutoTokenizer needs.

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
