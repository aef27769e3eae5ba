"""Requests made ready to run: read, in tokens, and held against what the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.outputs import Output
from flexgen_h2o.tasks.jobs.fields import BadRequest
from flexgen_h2o.tasks.jobs.job_input import DUPLICATE, MOST_BYTES, RequestLines
from flexgen_h2o.tasks.jobs.requests import Defaults, JobRequest, own_id, read_object, read_request

_MOST_TOKENS = 1 << 21  # of the prompts of a window: a token id takes some 36 bytes of memory


class Encoder(Protocol):
    """A model's tokenizer and the limits of its prompts: an `LLM`, or its `Prompts` alone."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None where the model has none."""

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of a chat."""

    def encode(self, prompt: str | Sequence[int], *, name: int | str, new_tokens: int,
               special: bool) -> list[int]:
        """Token ids of a prompt, as `LLM.encode` makes and checks them."""

    def clamped(self, tokens: int, most: int) -> int:
        """New tokens that fit after a prompt, as `LLM.clamped` returns them."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""


@dataclass
class Prepared:
    """A request that can run.

    Attributes
    ----------
    place : int
        In the input.
    request : JobRequest
    prompts : list of list of int
        Token ids of each prompt.
    limits : list of int
        The most tokens to generate after each prompt.
    outputs : dict of int to Output
        The outputs of choices that have ended, until all have.
    answered : bool
    """

    place: int
    request: JobRequest
    prompts: list[list[int]]
    limits: list[int]
    outputs: dict[int, Output] = field(default_factory=dict)
    answered: bool = False

    @property
    def choices(self) -> int:
        """Sequences that it takes."""
        return self.request.n * len(self.prompts)

    @property
    def done(self) -> bool:
        """True if every choice has ended."""
        return len(self.outputs) == self.choices

    def most_tokens(self) -> int:
        """The most tokens that a sequence of it may have."""
        return max(len(prompt) + limit
                   for prompt, limit in zip(self.prompts, self.limits, strict=True))

    def sequences(self) -> Iterator[tuple[list[int], SamplingParams]]:
        """The prompt of each choice and its sampling parameters."""
        for choice in range(self.choices):
            place = choice // self.request.n
            yield self.prompts[place], replace(self.request.choice_params(choice),
                                               max_new_tokens=self.limits[place])


@dataclass(frozen=True)
class Failed:
    """A request that can't run: its place in the input, its id if it has one, and why."""

    place: int
    custom_id: str | None
    error: BadRequest


class Preparation:
    """Reads requests of an input and puts them into tokens; a context manager.

    Parameters
    ----------
    source : RequestLines
        A `JobInput`, or a window of one.
    encoder : Encoder
    defaults : Defaults
    template : str or None
        The chat template to use instead of the tokenizer's.
    """

    def __init__(self, source: RequestLines, encoder: Encoder, defaults: Defaults,
                 template: str | None = None):
        self._source, self._encoder, self._defaults = source, encoder, defaults
        self._template = template
        self._renderer: ChatRenderer | None = None

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def prepare(self, place: int) -> Prepared | Failed:
        """The request of a line of the input. Raises `UserError` if the input has been changed."""
        source, custom_id = self._source, None
        line, number = source.line(place), int(source.numbers[place])
        try:
            if len(line) >= MOST_BYTES:
                raise BadRequest(f"the line is longer than {MOST_BYTES >> 20} MiB",
                                 code="invalid_json_line")
            custom_id = own_id(read_object(line), number)
            if source.kinds[place] == DUPLICATE:
                raise BadRequest(f"{custom_id!r:.80} is the id of an earlier line",
                                 param="custom_id", code="duplicate_custom_id")
            request = read_request(line, number, self._defaults)
            return self._prepared(place, request, number)
        except BadRequest as error:
            return Failed(place, custom_id, error)

    def _prepared(self, place: int, request: JobRequest, number: int) -> Prepared:
        """The request in tokens. Raises `BadRequest` for what the model does not take."""
        encoder, params = self._encoder, request.params
        if request.chat and params.eos_token_id is None and (ends := encoder.chat_end_tokens):
            params = replace(params, eos_token_id=ends)
            request = replace(request, params=params)
        for name, token in (*(("stop_token_ids", token) for token in params.stop_token_ids),
                            *(("logit_bias", token) for token in dict(params.logit_bias))):
            if token >= encoder.vocab_size:
                raise BadRequest(f"{name}: token id {token} is not below the vocabulary's "
                                 f"{encoder.vocab_size}", param=name)
        if encoder.tokenizer is None:
            for name, given in (("messages", request.chat), ("stop", request.stops),
                                ("echo", request.echo)):
                if given:
                    raise BadRequest(f"the model has no tokenizer here, and {name} are text: give "
                                     "token ids as prompt", param=name)
        most = params.max_new_tokens
        try:
            if request.chat:
                if self._renderer is None:
                    self._renderer = ChatRenderer(encoder.tokenizer, self._template)
                texts: Sequence[str | list[int]] = [
                    self._renderer.render(request.messages, request.template_arguments)]
            else:
                texts = request.prompts
            prompts = [encoder.encode(text, name=f"of line {number}", special=request.special,
                                      new_tokens=1 if request.clamps else most)
                       for text in texts]
        except UserError as error:
            raise BadRequest(str(error), param="messages" if request.chat else "prompt") from None
        limits = [encoder.clamped(len(prompt), most) if request.clamps else most
                  for prompt in prompts]
        if (params.min_new_tokens or 0) > min(limits):
            raise BadRequest(f"min_tokens {params.min_new_tokens} is more than the {min(limits)} "
                             "new tokens for which the model has positions", param="min_tokens")
        if request.echo:
            request = replace(request, prompts=tuple(
                text if isinstance(text, str) else encoder.tokenizer.decode(text)
                for text in texts))
        return Prepared(place, request, prompts, limits)


def windows(found: Iterator[Prepared | Failed], most: int
            ) -> Iterator[tuple[list[Prepared], list[Failed]]]:
    """Requests in groups of at most `most` sequences or so: those that can run, and the others."""
    ready: list[Prepared] = []
    failed: list[Failed] = []
    sequences = tokens = 0
    for each in found:
        if isinstance(each, Failed):
            failed.append(each)
        else:
            ready.append(each)
            sequences += each.choices
            tokens += each.request.n * sum(map(len, each.prompts))
        if sequences >= most or len(failed) >= most or tokens >= _MOST_TOKENS:
            yield ready, failed
            ready, failed, sequences, tokens = [], [], 0, 0
    if ready or failed:
        yield ready, failed
