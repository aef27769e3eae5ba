"""The loop of a job: tokenize requests, run them in windows, write result lines, show progress."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import psutil

from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.errors import InsufficientMemory, NonFiniteLogits, PromptError
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.files.writing import catch_write_errors, open_atomic
from flexgen_h2o.metrics.figures import COLOURS, new_figure, save
from flexgen_h2o.metrics.run_stats import RunStats, ratio
from flexgen_h2o.metrics.trace import GB
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests.input import RequestLines
from flexgen_h2o.requests.request import BadRequest
from flexgen_h2o.requests.results import answer_line, failure_line, failure_reason
from flexgen_h2o.requests.tokenizing import FailedRequest, RequestTokenizer, TokenizedRequest

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM


_MAX_SAMPLES = 4096
_MAX_POINTS = 60  # of the rate in the plot, to smooth the differences between blocks


@dataclass(frozen=True)
class JobSample:
    """Seconds since a job's start, and the tokens generated and bytes used by then.

    `device_bytes` is the peak memory of the GPU; 0 without a GPU.
    """

    seconds: float
    generated: int
    process_bytes: int
    device_bytes: int


class JobProgress:
    """Progress of a job.

    Parameters
    ----------
    total, answered, failed : int
        All requests, requests answered by earlier runs, and how many of the answers are failures.
    path : str or None
        The ``--progress-file``.
    clock : callable, optional
        Monotonic time in seconds.
    shown : bool
        Show a bar on a terminal.

    Attributes
    ----------
    answered, failed : int
        Requests answered so far. Failed ones are included in `answered`.
    prompt_tokens, generated_tokens : int
        Tokens of this run.
    samples : list of JobSample
        Samples at the start and after each block. A long list is halved repeatedly.
    """

    def __init__(self, total: int, answered: int, failed: int, path: str | None, *,
                 clock: Callable[[], float] = time.monotonic, shown: bool = True):
        self.total, self.answered, self.failed = total, answered, failed
        self._answered_before, self._path, self._clock = answered, path, clock
        self._began = self._loaded = clock()
        self.prompt_tokens = self.generated_tokens = self._device_bytes = 0
        self.samples: list[JobSample] = []
        self._bar = ProgressBar(total=total, initial=answered, unit="request",
                                disable=None if shown else True)
        self._process = psutil.Process()
        self._update("running")

    def begin(self) -> None:
        """Mark the model as loaded: rates are measured from here."""
        self._loaded = self._clock()
        self._update("running")

    def is_over(self, hours: float | None) -> bool:
        """Return whether `hours` have passed, if not None, and the run has answered a request.

        So a job that is restarted repeatedly makes progress.
        """
        return (hours is not None and self.seconds >= 3600 * hours
                and self.answered > self._answered_before)

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including the loading of the model."""
        return self._clock() - self._began

    @property
    def left(self) -> int:
        """Requests without an answer."""
        return self.total - self.answered

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second since the model was loaded; None if no time has passed."""
        return ratio(self.generated_tokens, self._clock() - self._loaded)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds for the remaining requests; None before the first answer."""
        answered = self.answered - self._answered_before
        return self.left * (self._clock() - self._loaded) / answered if answered else None

    def add(self, *, answered: int, failed: int = 0, prompt_tokens: int = 0,
            generated_tokens: int = 0, device_bytes: int = 0) -> None:
        """Count requests whose lines are written, and update the bar and the file."""
        self._device_bytes = max(self._device_bytes, device_bytes)
        self.answered += answered
        self.failed += failed
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        self._bar.set_postfix_str(f"{self.tokens_per_second or 0:.4g} tokens/s, "
                                  f"{self.failed} failed", refresh=False)
        self._bar.update(answered)
        self._update("running")

    def end(self) -> None:
        """Close the bar, and write the final state to the file."""
        self._bar.close()
        self._update("stopped" if self.left else "finished")

    def _update(self, state: str) -> None:
        """Take a sample, and rewrite the file."""
        sample = JobSample(self.seconds, self.generated_tokens, self._process.memory_info().rss,
                           self._device_bytes)
        self.samples.append(sample)
        if len(self.samples) > _MAX_SAMPLES:
            self.samples = self.samples[::2]
        if self._path is None:
            return
        with catch_write_errors("--progress-file", self._path), open_atomic(
                self._path, durable=False) as file:
            json.dump({
                "state": state, "requests": self.total, "answered": self.answered,
                "failed": self.failed, "left": self.left, "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.generated_tokens, "seconds": sample.seconds,
                "tokens_per_second": self.tokens_per_second, "seconds_left": self.seconds_left,
                "process_bytes": sample.process_bytes,
                "device_bytes": sample.device_bytes, "updated": int(time.time())}, file)

    def text(self) -> str:
        """Summarize the run in a line."""
        state = (f"stopped, {self.left} left: run the same command to resume" if self.left
                 else "finished")
        rate = self.tokens_per_second
        return (f"{state}; {self.answered} of {self.total} requests answered, {self.failed} of "
                f"them failed; {self.generated_tokens} tokens in {self.seconds:.1f} s"
                + (f", {rate:.4g} tokens/s" if rate else ""))


def draw(samples: Sequence[JobSample], path: str, *, title: str) -> None:
    """Draw tokens/s and memory over a job into a file, atomically.

    Raises OSError if the file cannot be written.
    """
    figure = new_figure(8, 5.5)
    rate, memory = figure.subplots(2, 1, sharex=True)
    step = max(1, len(samples) // _MAX_POINTS)
    points = [*samples[::step], samples[-1]]
    spans = [(first, last) for first, last in zip(points, points[1:], strict=False)
             if last.seconds > first.seconds]
    rate.stairs([(last.generated - first.generated) / (last.seconds - first.seconds)
                 for first, last in spans],
                [*(first.seconds for first, _ in spans), samples[-1].seconds],
                color=COLOURS["blue"])
    rate.set(ylabel="generated tokens/s", ylim=(0, None))
    seconds = [sample.seconds for sample in samples]
    memory.plot(seconds, [sample.process_bytes / GB for sample in samples], label="process",
                color=COLOURS["vermillion"])
    if samples[-1].device_bytes:
        memory.plot(seconds, [sample.device_bytes / GB for sample in samples], label="GPU, at most",
                    color=COLOURS["green"], linestyle="--")
    memory.legend(frameon=False, fontsize=9)
    memory.set(ylabel="memory, GB", xlabel="seconds of the job", ylim=(0, None))
    for axes in (rate, memory):
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


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
                tokens += sum(len(choice.prompt_token_ids) for choice in choices[::entry.request.n])
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
