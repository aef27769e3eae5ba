"""Requests as token ids, which an `LLM` computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.input import DUPLICATE, MAX_LINE_BYTES, RequestLines
from flexgen_h2o.requests.request import (
    BadRequest,
    Defaults,
    JobRequest,
    read_object,
    read_request,
    request_id,
)


class Encoder(Protocol):
    """A model's tokenizer and the limits of its prompts: an `LLM`, or its `InputProcessor`."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None if the model has none."""

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """Token ids that end an answer in a chat."""

    def encode(self, prompt: str | Sequence[int], *, name: int | str, new_tokens: int,
               add_special_tokens: bool) -> list[int]:
        """Return the token ids of a prompt, as `LLM.encode` does."""

    def clamp_new_tokens(self, tokens: int, max_tokens: int) -> int:
        """Return how many new tokens fit after a prompt, as `LLM.clamp_new_tokens` does."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of token ids."""


@dataclass
class TokenizedRequest:
    """A request that can run."""

    index: int  # index in the input
    request: JobRequest
    prompts: list[list[int]]  # token ids of each prompt
    limits: list[int]  # maximum number of new tokens of each prompt
    outputs: dict[int, Output] = field(default_factory=dict)
    """Outputs of finished choices, until all are finished."""
    answered: bool = False

    @property
    def choices(self) -> int:
        """Number of sequences."""
        return self.request.n * len(self.prompts)

    @property
    def finished(self) -> bool:
        """Whether every choice is finished."""
        return len(self.outputs) == self.choices

    def max_tokens(self) -> int:
        """Return the maximum length of its sequences."""
        return max(len(prompt) + limit
                   for prompt, limit in zip(self.prompts, self.limits, strict=True))

    def sequences(self) -> Iterator[tuple[list[int], SamplingParams]]:
        """Yield the prompt of each choice and its sampling parameters."""
        for choice in range(self.choices):
            index = choice // self.request.n
            yield self.prompts[index], replace(self.request.choice_params(choice),
                                               max_new_tokens=self.limits[index])


@dataclass(frozen=True)
class FailedRequest:
    """A request that cannot run: its index in the input, its id if it has one, and the error."""

    index: int
    custom_id: str | None
    error: BadRequest


class RequestTokenizer:
    """Reads and tokenizes requests, from several threads one by one; a context manager.

    `template`: chat template that replaces the tokenizer's. `max_model_len`: maximum number of
    tokens of a prompt and its continuation, if fewer than the model's positions.
    """

    def __init__(self, encoder: Encoder, defaults: Defaults, template: str | None = None, *,
                 max_model_len: int = sys.maxsize):
        self._encoder, self._defaults, self._template = encoder, defaults, template
        self._max_len = max_model_len
        self._renderer: ChatRenderer | None = None
        self._lock = threading.Lock()  # fast tokenizers refuse a second thread

    def __enter__(self) -> RequestTokenizer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def start(self) -> None:
        """Start the process that renders chats, if there is a template: the first chat waits less.
        """
        if self._encoder.tokenizer is not None:
            with suppress(UserError), self._lock:  # without a template, chats are refused
                self._chat_renderer().start()

    def _chat_renderer(self) -> ChatRenderer:
        if self._renderer is None:
            self._renderer = ChatRenderer(self._encoder.tokenizer, self._template)
        return self._renderer

    def read(self, source: RequestLines, index: int) -> TokenizedRequest | FailedRequest:
        """Return the request of a line. Raises `UserError` if the input has changed."""
        custom_id = None
        line, number = source.line(index), int(source.numbers[index])
        try:
            if len(line) >= MAX_LINE_BYTES:
                raise BadRequest(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                                 code="invalid_json_line")
            custom_id = request_id(read_object(line), number)
            if source.kinds[index] == DUPLICATE:
                raise BadRequest(f"{custom_id!r:.80} is the id of an earlier line",
                                 param="custom_id", code="duplicate_custom_id")
            return self.tokenize(read_request(line, number, self._defaults),
                                 name=f"of line {number}", index=index)
        except BadRequest as error:
            return FailedRequest(index, custom_id, error)

    def tokenize(self, request: JobRequest, *, name: str, index: int = 0) -> TokenizedRequest:
        """Return a request with its token ids; errors call its prompts "prompt NAME".

        Raises `BadRequest` for values that the model does not support.
        """
        with self._lock:
            return self._tokenize(request, name, index)

    def _tokenize(self, request: JobRequest, name: str, index: int) -> TokenizedRequest:
        encoder, params = self._encoder, request.params
        if request.chat and params.eos_token_id is None and (ends := encoder.chat_end_tokens):
            params = replace(params, eos_token_id=ends)
            request = replace(request, params=params)
        for param, token in (*(("stop_token_ids", token) for token in params.stop_token_ids),
                             *(("logit_bias", token) for token in dict(params.logit_bias))):
            if token >= encoder.vocab_size:
                raise BadRequest(f"{param}: token id {token} is not below the vocabulary's "
                                 f"{encoder.vocab_size}", param=param)
        if encoder.tokenizer is None:
            for param, value in (("messages", request.chat), ("stop", request.stops),
                                 ("echo", request.echo),
                                 ("structured_outputs", params.structured_outputs)):
                if value:
                    raise BadRequest(f"the model has no tokenizer here, and {param} are text: give "
                                     "token ids as prompt", param=param)
        if params.structured_outputs and not encoder.tokenizer.is_fast:
            raise BadRequest("structured outputs need a fast tokenizer of Hugging Face, and the "
                             "model's is slow", param="structured_outputs",
                             code="unsupported_parameter")
        limit = params.max_new_tokens
        try:
            texts: Sequence[str | list[int]] = request.prompts
            if request.chat:
                texts = [self._chat_renderer().render(request.messages,
                                                      request.template_arguments)]
            new = 1 if request.clamp_new_tokens else limit
            prompts = [encoder.encode(text, name=name, new_tokens=new,
                                      add_special_tokens=request.add_special_tokens)
                       for text in texts]
            for prompt in prompts:
                if len(prompt) + new > self._max_len:
                    raise UserError(f"prompt {name} of {len(prompt)} tokens and {new} new ones "
                                    f"exceed the server's --max-model-len {self._max_len}")
        except UserError as error:
            raise BadRequest(str(error), param="messages" if request.chat else "prompt") from None
        limits = [limit] * len(prompts)
        if request.clamp_new_tokens:
            limits = [encoder.clamp_new_tokens(len(prompt), min(limit, self._max_len - len(prompt)))
                      for prompt in prompts]
        if (params.min_new_tokens or 0) > min(limits):
            raise BadRequest(f"min_tokens {params.min_new_tokens} is more than the {min(limits)} "
                             "new tokens for which the model has positions", param="min_tokens")
        if request.echo:
            request = replace(request, prompts=tuple(
                text if isinstance(text, str) else encoder.tokenizer.decode(text)
                for text in texts))
        return TokenizedRequest(index, request, prompts, limits)
