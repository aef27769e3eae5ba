"""The loop of a job: tokenize requests, run them in windows, and write result lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.errors import InsufficientMemory, NonFiniteLogits, PromptError
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.fields import BadRequest
from flexgen_h2o.requests.input import RequestLines
from flexgen_h2o.requests.results import answer_line, failure_line, failure_reason
from flexgen_h2o.requests.tokenizing import FailedRequest, RequestTokenizer, TokenizedRequest

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_log = logging.getLogger(__name__)

_MAX_WINDOW_TOKENS = 1 << 21  # prompt tokens; a token id takes about 36 bytes
_MAX_STEP_TIMES = 1 << 16  # enough for percentiles


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
    source : RequestLines
        A `JobInput`, or a window of it.
    results, errors : ResultWriter
        For answers and for failures. They may be the same.
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
        self._answered = self._nonfinite = self._largest = 0
        self.stats: RunStats | None = None

    def run(self, indices: Iterable[int]) -> None:
        """Answer the requests at these indices of the input, until `should_end`.

        Raises `UserError` if a file cannot be read or written, or the model cannot run.
        """
        with RequestTokenizer(self._llm, self._options.defaults(),
                              self._options.template) as tokenizer:
            requests = (tokenizer.read(self._source, index) for index in indices)
            for ready, failed in windows(requests, self._options.window):
                self._write_failures(failed)
                if self._should_end():
                    return
                if ready and not self._answer(ready):
                    return

    def _write_failures(self, failed: Sequence[FailedRequest]) -> None:
        if failed:
            self._errors.add([
                failure_line(entry.error, key=int(self._source.keys[entry.index]),
                             number=int(self._source.numbers[entry.index]),
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
        if isinstance(error, NonFiniteLogits):
            self._nonfinite += 1
            if self._nonfinite > 1 and not self._answered:
                raise error
        self._write_failures([FailedRequest(bad.index, bad.request.custom_id,
                                            failure_reason(error))])
        return _reset(pending for pending in ready if not pending.answered and pending is not bad)

    def _answer_halves(self, ready: Sequence[TokenizedRequest], error: InsufficientMemory) -> bool:
        """Run requests that do not fit in memory together as two halves, by length.

        A request that does not fit alone fails. Raise the error instead if it is the first of the
        job, because no request may fit, and if one as large was answered, because other processes
        have the memory.
        """
        waiting = sorted((pending for pending in ready if not pending.answered),
                         key=TokenizedRequest.max_tokens)
        if len(waiting) == 1:
            if self.stats is None or waiting[0].max_tokens() <= self._largest:
                raise error
            bad = BadRequest(str(error), code="insufficient_memory")
            self._write_failures([FailedRequest(waiting[0].index, waiting[0].request.custom_id,
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
                choices = [entry.outputs.pop(index) for index in range(entry.choices)]
                entry.answered = True
                self._largest = max(self._largest, entry.max_tokens())
                tokens += sum(len(each.prompt_token_ids) for each in choices[::entry.request.n])
                lines.append(answer_line(
                    entry.request, choices, key=int(self._source.keys[entry.index]),
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
