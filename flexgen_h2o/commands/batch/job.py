"""The loop of a job: windows of requests, blocks of sequences, lines of results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.input import RequestLines
from flexgen_h2o.commands.batch.preparation import Failed, Preparation, Prepared, windows
from flexgen_h2o.commands.batch.requests import BadRequest
from flexgen_h2o.commands.batch.responses import answer, failure
from flexgen_h2o.engine.detokenization import ReasoningParser
from flexgen_h2o.errors import InsufficientMemory, NonFiniteLogits
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.outputs import Output

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM

_log = logging.getLogger(__name__)

_MOST_STEPS = 1 << 16


class Lines(Protocol):
    """Takes lines of results: a `ResultsFile`, or what a replica sends back."""

    def add(self, lines: Sequence[bytes]) -> None:
        """Add lines, each without its end."""


class Counts(Protocol):
    """Counts what a job has done: a `JobProgress`, or what a replica sends back."""

    def add(self, *, answered: int, failed: int = 0, prompt_tokens: int = 0,
            generated_tokens: int = 0, device_bytes: int = 0) -> None:
        """Count requests whose lines are added."""


class Job:
    """Requests on their way through a model.

    Parameters
    ----------
    llm : LLM
    source : RequestLines
        A `JobInput`, or a window of one.
    options : BatchOptions
    results, errors : Lines
        For lines of answers, and of requests that failed; they may be the same.
    progress : Counts
    should_end : callable () -> bool
        Asked after each block: True to stop there.

    Attributes
    ----------
    stats : RunStats or None
        The figures of all calls so far.
    """

    def __init__(self, llm: LLM, source: RequestLines, options: BatchOptions, *, results: Lines,
                 errors: Lines, progress: Counts, should_end: Callable[[], bool]):
        self._llm, self._source, self._options = llm, source, options
        self._results, self._errors, self._progress = results, errors, progress
        self._should_end = should_end
        self._parser = None if llm.tokenizer is None else ReasoningParser(llm.tokenizer)
        self._warned = False
        self._answered = self._not_finite = 0
        self.stats: RunStats | None = None

    def run(self, places: Iterable[int]) -> None:
        """Answer the requests of these places in the input, until all are or it is to end.

        Raises `UserError` if a file cannot be read or written, or the model cannot run.
        """
        with Preparation(self._source, self._llm, self._options.defaults(),
                         self._options.template) as preparation:
            found = map(preparation.prepare, places)
            for ready, failed in windows(found, self._options.window):
                self._fail(failed)
                if self._should_end():
                    return
                if ready and not self._answer(ready):
                    return

    def _fail(self, failed: Sequence[Failed]) -> None:
        """Write the lines of requests that can't run."""
        if failed:
            self._errors.add([
                failure(each.error, key=int(self._source.keys[each.place]),
                        number=int(self._source.numbers[each.place]), custom_id=each.custom_id)
                for each in failed])
            self._progress.add(answered=len(failed), failed=len(failed))

    def _answer(self, ready: Sequence[Prepared]) -> bool:
        """Run requests, without those that turn out not to run. False if the job is to end there.
        """
        while ready:
            try:
                return self._run(ready)
            except NonFiniteLogits as error:
                ready = self._without(_sequences(ready)[error.key][0], ready, error)
                if self._should_end():
                    return False
            except InsufficientMemory as error:
                return self._in_halves(ready, error)
        return True

    def _without(self, bad: Prepared, ready: Sequence[Prepared], error: NonFiniteLogits
                 ) -> list[Prepared]:
        """Fail a request whose logits are not finite; returns those that are still to be answered.

        If it is the second one before any answer, then it is the model: the error is raised.
        """
        self._not_finite += 1
        if self._not_finite > 1 and not self._answered:
            raise error
        self._fail([Failed(bad.place, bad.request.custom_id, BadRequest(
            "the model's logits are not finite for this request: try another --dtype",
            code="logits_not_finite"))])
        return _anew(one for one in ready if not one.answered and one is not bad)

    def _in_halves(self, ready: Sequence[Prepared], error: InsufficientMemory) -> bool:
        """Run requests that do not fit in memory together, the larger ones apart.

        One that does not fit alone fails, unless the job has run nothing yet: then none may fit.
        """
        waiting = sorted((one for one in ready if not one.answered), key=Prepared.most_tokens)
        if len(waiting) == 1:
            if self.stats is None:
                raise error
            bad = BadRequest(str(error), code="insufficient_memory")
            self._fail([Failed(waiting[0].place, waiting[0].request.custom_id, bad)])
            return not self._should_end()
        if not self._warned:
            _log.warning("%d requests do not fit in memory together, and run in smaller groups "
                         "(%s)", len(waiting), error)
            self._warned = True
        waiting, half = _anew(waiting), len(waiting) // 2
        return self._answer(waiting[:half]) and self._answer(waiting[half:])

    def _run(self, ready: Sequence[Prepared]) -> bool:
        """Run requests, and write lines after each block. False if the job is to end there."""
        owners = _sequences(ready)
        prompts, params = zip(*(sequence for one in ready for sequence in one.sequences()),
                              strict=True)
        before = self._llm.stats
        try:
            for outputs in self._llm.generate_in_blocks(list(prompts), list(params)):
                self._write(outputs, owners)
                if self._should_end():
                    return False
        finally:
            stats = self._llm.stats
            if stats is not None and stats is not before:
                self.stats = stats if self.stats is None else _thinned(
                    self.stats.followed_by(stats))
        return True

    def _write(self, outputs: Mapping[int, Output], owners: Sequence[tuple[Prepared, int]]) -> None:
        """Write the lines of requests all of whose choices have ended with this block."""
        lines, tokens = [], 0
        for key, output in outputs.items():
            one, choice = owners[key]
            one.outputs[choice] = output
            if one.done:
                ended = [one.outputs.pop(place) for place in range(one.choices)]
                one.answered = True
                tokens += sum(len(each.prompt_token_ids) for each in ended[::one.request.n])
                lines.append(answer(one.request, ended, key=int(self._source.keys[one.place]),
                                    model=self._options.run.model, created=int(time.time()),
                                    parser=self._parser))
        self._results.add(lines)
        self._answered += len(lines)
        stats = self._llm.stats
        self._progress.add(
            answered=len(lines), prompt_tokens=tokens,
            generated_tokens=sum(len(output.token_ids) for output in outputs.values()),
            device_bytes=0 if stats is None else stats.peak_device_bytes)


def _sequences(ready: Sequence[Prepared]) -> list[tuple[Prepared, int]]:
    """The request and the choice of each sequence, in the order in which they run."""
    return [(one, choice) for one in ready for choice in range(one.choices)]


def _anew(waiting: Iterable[Prepared]) -> list[Prepared]:
    """Requests without what had ended of them."""
    found = list(waiting)
    for one in found:
        one.outputs.clear()
    return found


def _thinned(stats: RunStats) -> RunStats:
    """The figures with half of the decode steps, if there are more than percentiles need."""
    if len(stats.step_seconds) <= _MOST_STEPS:
        return stats
    return replace(stats, step_seconds=stats.step_seconds[::2])
