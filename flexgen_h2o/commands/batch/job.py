"""The loop of a job: tokenize requests, run them in windows, and write result lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.input import DUPLICATE, MAX_LINE_BYTES, RequestLines
from flexgen_h2o.commands.batch.requests import (
    BadRequest,
    Defaults,
    JobRequest,
    read_object,
    read_request,
    request_id,
)
from flexgen_h2o.commands.batch.results import answer_line, failure_line
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.errors import InsufficientMemory, NonFiniteLogits, PromptError, UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Output

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_log = logging.getLogger(__name__)

_MAX_WINDOW_TOKENS = 1 << 21  # prompt tokens; a token id takes about 36 bytes
_MAX_STEP_TIMES = 1 << 16  # enough for percentiles


class Encoder(Protocol):
    """A model's tokenizer and the limits of its prompts: an `LLM`, or a `TokenizerOnly`."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None if the model has none."""

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """Token ids that end an answer in a chat."""

    def encode(self, prompt: str | Sequence[int], *, name: int | str, new_tokens: int,
               special: bool) -> list[int]:
        """Return the token ids of a prompt, as `LLM.encode` does."""

    def clamped(self, tokens: int, max_tokens: int) -> int:
        """Return how many new tokens fit after a prompt, as `LLM.clamped` does."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of token ids."""


@dataclass
class TokenizedRequest:
    """A request that can run.

    Attributes
    ----------
    place : int
        Place in the input.
    request : JobRequest
    prompts : list of list of int
        Token ids of each prompt.
    limits : list of int
        Maximum number of new tokens of each prompt.
    outputs : dict of int to Output
        Outputs of finished choices, until all are finished.
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
            place = choice // self.request.n
            yield self.prompts[place], replace(self.request.choice_params(choice),
                                               max_new_tokens=self.limits[place])


@dataclass(frozen=True)
class FailedRequest:
    """A request that cannot run: its place in the input, its id if it has one, and the error."""

    place: int
    custom_id: str | None
    error: BadRequest


class RequestTokenizer:
    """Reads and tokenizes requests of an input; a context manager.

    Parameters
    ----------
    source : RequestLines
    encoder : Encoder
    defaults : Defaults
    template : str, optional
        Chat template that replaces the tokenizer's.
    """

    def __init__(self, source: RequestLines, encoder: Encoder, defaults: Defaults,
                 template: str | None = None):
        self._source, self._encoder, self._defaults = source, encoder, defaults
        self._template = template
        self._renderer: ChatRenderer | None = None

    def __enter__(self) -> RequestTokenizer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def read(self, place: int) -> TokenizedRequest | FailedRequest:
        """Return the request of a line. Raises `UserError` if the input has changed."""
        source, custom_id = self._source, None
        line, number = source.line(place), int(source.numbers[place])
        try:
            if len(line) >= MAX_LINE_BYTES:
                raise BadRequest(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                                 code="invalid_json_line")
            custom_id = request_id(read_object(line), number)
            if source.kinds[place] == DUPLICATE:
                raise BadRequest(f"{custom_id!r:.80} is the id of an earlier line",
                                 param="custom_id", code="duplicate_custom_id")
            return self._tokenize(place, read_request(line, number, self._defaults), number)
        except BadRequest as error:
            return FailedRequest(place, custom_id, error)

    def _tokenize(self, place: int, request: JobRequest, number: int) -> TokenizedRequest:
        """Raises `BadRequest` for values that the model does not support."""
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
            for name, value in (("messages", request.chat), ("stop", request.stops),
                                ("echo", request.echo),
                                ("structured_outputs", params.structured_outputs)):
                if value:
                    raise BadRequest(f"the model has no tokenizer here, and {name} are text: give "
                                     "token ids as prompt", param=name)
        if params.structured_outputs and not encoder.tokenizer.is_fast:
            raise BadRequest("structured outputs need a fast tokenizer of Hugging Face, and the "
                             "model's is slow", param="structured_outputs",
                             code="unsupported_parameter")
        limit = params.max_new_tokens
        try:
            texts: Sequence[str | list[int]] = request.prompts
            if request.chat:
                if self._renderer is None:
                    self._renderer = ChatRenderer(encoder.tokenizer, self._template)
                texts = [self._renderer.render(request.messages, request.template_arguments)]
            prompts = [encoder.encode(text, name=f"of line {number}", special=request.special,
                                      new_tokens=1 if request.clamps else limit)
                       for text in texts]
        except UserError as error:
            raise BadRequest(str(error), param="messages" if request.chat else "prompt") from None
        limits = [encoder.clamped(len(prompt), limit) if request.clamps else limit
                  for prompt in prompts]
        if (params.min_new_tokens or 0) > min(limits):
            raise BadRequest(f"min_tokens {params.min_new_tokens} is more than the {min(limits)} "
                             "new tokens for which the model has positions", param="min_tokens")
        if request.echo:
            request = replace(request, prompts=tuple(
                text if isinstance(text, str) else encoder.tokenizer.decode(text)
                for text in texts))
        return TokenizedRequest(place, request, prompts, limits)


def windows(requests: Iterable[TokenizedRequest | FailedRequest], size: int
            ) -> Iterator[tuple[list[TokenizedRequest], list[FailedRequest]]]:
    """Group requests into windows of about `size` sequences; separate those that cannot run."""
    ready: list[TokenizedRequest] = []
    failed: list[FailedRequest] = []
    sequences = tokens = 0
    for request in requests:
        if isinstance(request, FailedRequest):
            failed.append(request)
        else:
            ready.append(request)
            sequences += request.choices
            tokens += request.request.n * sum(map(len, request.prompts))
        if sequences >= size or len(failed) >= size or tokens >= _MAX_WINDOW_TOKENS:
            yield ready, failed
            ready, failed, sequences, tokens = [], [], 0, 0
    if ready or failed:
        yield ready, failed


class ResultWriter(Protocol):
    """Consumer of result lines: a `ResultsFile`, or a list that a replica sends back."""

    def add(self, lines: Sequence[bytes]) -> None:
        """Add lines without line ends."""


class ProgressCounter(Protocol):
    """Consumer of counts: a `JobProgress`, or sums that a replica sends back."""

    def add(self, *, answered: int, failed: int = 0, prompt_tokens: int = 0,
            generated_tokens: int = 0, device_bytes: int = 0) -> None:
        """Count requests whose result lines are written."""


class Job:
    """Runs requests through a model.

    Parameters
    ----------
    llm : LLM
    source : RequestLines
        A `JobInput`, or a window of it.
    options : BatchOptions
    results, errors : ResultWriter
        For answers and for failures. They may be the same.
    progress : ProgressCounter
    should_end : callable () -> bool
        Called after each block. True stops the job.

    Attributes
    ----------
    stats : RunStats or None
        Figures of all calls so far.
    """

    def __init__(self, llm: LLM, source: RequestLines, options: BatchOptions, *,
                 results: ResultWriter, errors: ResultWriter, progress: ProgressCounter,
                 should_end: Callable[[], bool]):
        self._llm, self._source, self._options = llm, source, options
        self._results, self._errors, self._progress = results, errors, progress
        self._should_end = should_end
        self._parser = None if llm.tokenizer is None else ReasoningParser(llm.tokenizer)
        self._warned = False
        self._answered = self._nonfinite = 0
        self.stats: RunStats | None = None

    def run(self, places: Iterable[int]) -> None:
        """Answer the requests at these places of the input, until `should_end`.

        Raises `UserError` if a file cannot be read or written, or the model cannot run.
        """
        with RequestTokenizer(self._source, self._llm, self._options.defaults(),
                              self._options.template) as tokenizer:
            for ready, failed in windows(map(tokenizer.read, places), self._options.window):
                self._write_failures(failed)
                if self._should_end():
                    return
                if ready and not self._answer(ready):
                    return

    def _write_failures(self, failed: Sequence[FailedRequest]) -> None:
        if failed:
            self._errors.add([
                failure_line(entry.error, key=int(self._source.keys[entry.place]),
                             number=int(self._source.numbers[entry.place]),
                             custom_id=entry.custom_id)
                for entry in failed])
            self._progress.add(answered=len(failed), failed=len(failed))

    def _answer(self, ready: Sequence[TokenizedRequest]) -> bool:
        """Run requests, and fail those that turn out not to run. Return False to end the job."""
        while ready:
            try:
                return self._run(ready)
            except PromptError as error:
                ready = self._fail_one(_sequences(ready)[error.key][0], ready, error)
                if self._should_end():
                    return False
            except InsufficientMemory as error:
                return self._answer_halves(ready, error)
        return True

    def _fail_one(self, bad: TokenizedRequest, ready: Sequence[TokenizedRequest],
                  error: PromptError) -> list[TokenizedRequest]:
        """Fail a request that cannot go on, and return the unanswered others.

        Two requests with logits that are not finite, before any answer, mean that the model is at
        fault: raise the error.
        """
        reason = BadRequest(str(error).removeprefix(f"prompt {error.key} "),
                            param="structured_outputs")
        if isinstance(error, NonFiniteLogits):
            self._nonfinite += 1
            if self._nonfinite > 1 and not self._answered:
                raise error
            reason = BadRequest("the model's logits are not finite for this request: try another "
                                "--dtype", code="logits_not_finite")
        self._write_failures([FailedRequest(bad.place, bad.request.custom_id, reason)])
        return _reset(pending for pending in ready if not pending.answered and pending is not bad)

    def _answer_halves(self, ready: Sequence[TokenizedRequest], error: InsufficientMemory) -> bool:
        """Run requests that do not fit in memory together as two halves, by length.

        A request that does not fit alone fails. If it is the first of the job, raise the error
        instead, because no request may fit.
        """
        waiting = sorted((pending for pending in ready if not pending.answered),
                         key=TokenizedRequest.max_tokens)
        if len(waiting) == 1:
            if self.stats is None:
                raise error
            bad = BadRequest(str(error), code="insufficient_memory")
            self._write_failures([FailedRequest(waiting[0].place, waiting[0].request.custom_id,
                                                bad)])
            return not self._should_end()
        if not self._warned:
            _log.warning("%d requests do not fit in memory together, and run in smaller groups "
                         "(%s)", len(waiting), error)
            self._warned = True
        waiting, half = _reset(waiting), len(waiting) // 2
        return self._answer(waiting[:half]) and self._answer(waiting[half:])

    def _run(self, ready: Sequence[TokenizedRequest]) -> bool:
        """Run requests, and write lines after each block. Return False to end the job."""
        owners = _sequences(ready)
        prompts, params = zip(*(sequence for pending in ready for sequence in pending.sequences()),
                              strict=True)
        before = self._llm.stats
        try:
            for outputs in self._llm.generate_in_blocks(list(prompts), list(params)):
                self._write_answers(outputs, owners)
                if self._should_end():
                    return False
        finally:
            stats = self._llm.stats
            if stats is not None and stats is not before:
                if self.stats is not None:
                    stats = self.stats.merge(stats)
                    if len(stats.step_seconds) > _MAX_STEP_TIMES:
                        stats = replace(stats, step_seconds=stats.step_seconds[::2])
                self.stats = stats
        return True

    def _write_answers(self, outputs: Mapping[int, Output],
                       owners: Sequence[tuple[TokenizedRequest, int]]) -> None:
        """Write the lines of the requests that a block has finished."""
        lines, tokens = [], 0
        for key, output in outputs.items():
            entry, choice = owners[key]
            entry.outputs[choice] = output
            if entry.finished:
                choices = [entry.outputs.pop(place) for place in range(entry.choices)]
                entry.answered = True
                tokens += sum(len(each.prompt_token_ids) for each in choices[::entry.request.n])
                lines.append(answer_line(
                    entry.request, choices, key=int(self._source.keys[entry.place]),
                    model=self._options.run.model, created=int(time.time()), parser=self._parser))
        self._results.add(lines)
        self._answered += len(lines)
        stats = self._llm.stats
        self._progress.add(
            answered=len(lines), prompt_tokens=tokens,
            generated_tokens=sum(len(output.token_ids) for output in outputs.values()),
            device_bytes=0 if stats is None else stats.peak_device_bytes)


def _sequences(ready: Sequence[TokenizedRequest]) -> list[tuple[TokenizedRequest, int]]:
    """Return the request and the choice of each sequence, in the order in which they run."""
    return [(pending, choice) for pending in ready for choice in range(pending.choices)]


def _reset(waiting: Iterable[TokenizedRequest]) -> list[TokenizedRequest]:
    """Drop the outputs of requests that will run again."""
    requests = list(waiting)
    for request in requests:
        request.outputs.clear()
    return requests
