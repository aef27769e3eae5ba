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


@dataclass
class Prepared:
    """A request that can run: its place in the input, its prompts in tokens, and its answers.

    `outputs` are of the choices that have ended, until all have; then it is `answered`.
    """

    place: int
    request: JobRequest
    prompts: list[list[int]]
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
        return max(map(len, self.prompts)) + self.request.params.max_new_tokens

    def sequences(self) -> Iterator[tuple[list[int], SamplingParams]]:
        """The prompt of each choice and its sampling parameters."""
        for choice in range(self.choices):
            yield self.prompts[choice // self.request.n], self.request.choice_params(choice)


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
            prompts = self._prompts(request, number)
            if (request.chat and request.params.eos_token_id is None
                    and (ends := self._encoder.chat_end_tokens)):
                request = replace(request, params=replace(request.params, eos_token_id=ends))
            return Prepared(place, request, prompts)
        except BadRequest as error:
            return Failed(place, custom_id, error)

    def _prompts(self, request: JobRequest, number: int) -> list[list[int]]:
        texts: Sequence[str | list[int]] = request.prompts
        if self._encoder.tokenizer is None and (request.stops or request.chat):
            name = "messages" if request.chat else "stop"
            raise BadRequest(f"the model has no tokenizer here, and {name} are text: give "
                             "token ids as prompt", param=name)
        try:
            if request.chat:
                if self._renderer is None:
                    self._renderer = ChatRenderer(self._encoder.tokenizer, self._template)
                texts = [self._renderer.render(request.messages)]
            return [self._encoder.encode(text, name=f"of line {number}", special=not request.chat,
                                         new_tokens=request.params.max_new_tokens)
                    for text in texts]
        except UserError as error:
            raise BadRequest(str(error), param="messages" if request.chat else "prompt") from None


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
