"""Progress of a job: a bar, a JSON file for other programs, and a plot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.files.writing import catch_write_errors, open_atomic
from flexgen_h2o.metrics.figures import COLOURS, new_figure, save
from flexgen_h2o.metrics.run_stats import ratio
from flexgen_h2o.metrics.trace import GB

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
