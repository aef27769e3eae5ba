"""A job before it runs: which requests can run, their tokens, the plan, and the predicted time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.requests.input import JobInput
from flexgen_h2o.requests.tokenizing import (
    Encoder,
    FailedRequest,
    RequestTokenizer,
    TokenizedRequest,
)

if TYPE_CHECKING:
    from flexgen_h2o.cli.planner import Plan
    from flexgen_h2o.engine.tokenizer import InputProcessor

MAX_SHOWN_FAILURES = 20


@dataclass
class TokenCounts:
    """Sums over sequences. `new` is the sum of their maximum numbers of new tokens."""

    sequences: int = 0
    prompt: int = 0
    new: int = 0


@dataclass
class InputStats:
    """Counts of the requests of an input. Lengths are in tokens."""

    # All requests, and requests that cannot run.
    requests: int = 0
    failures: int = 0
    messages: list[str] = field(default_factory=list)  # errors of the first failures
    longest: int = 0  # length of the longest prompt
    most_new: int = 0  # largest number of new tokens of a sequence
    by_length: dict[int, TokenCounts] = field(default_factory=dict)
    """Sums over the sequences whose number of new tokens has this bit length."""

    @property
    def total(self) -> TokenCounts:
        """Sums over all sequences."""
        return TokenCounts(*(sum(getattr(counts, name) for counts in self.by_length.values())
                             for name in ("sequences", "prompt", "new")))

    def add(self, request: TokenizedRequest | FailedRequest, number: int) -> None:
        """Count the request of line `number`."""
        self.requests += 1
        if isinstance(request, FailedRequest):
            self.failures += 1
            if len(self.messages) < MAX_SHOWN_FAILURES:
                self.messages.append(f"line {number}: {request.error}")
            return
        n = request.request.n
        for prompt, new in zip(request.prompts, request.limits, strict=True):
            counts = self.by_length.setdefault(new.bit_length(), TokenCounts())
            counts.sequences += n
            counts.prompt += n * len(prompt)
            counts.new += n * new
            self.longest = max(self.longest, len(prompt))
            self.most_new = max(self.most_new, new)

    def text(self) -> str:
        """Format the counts and the first failures, a line each."""
        total = self.total
        rows = [("requests", f"{self.requests}, of which {self.failures} cannot run"),
                ("sequences", f"{total.sequences}"),
                ("prompt tokens", f"{total.prompt}, the longest prompt has {self.longest}"),
                ("new tokens", f"at most {total.new}, {self.most_new} of one sequence")]
        hidden = self.failures - len(self.messages)
        return "\n".join([*(f"{name:<14} {text}" for name, text in rows), *self.messages,
                          *([f"and {hidden} more"] if hidden else [])])


def load_tokenizer(config: RunConfig) -> InputProcessor:
    """Find a run's model, for its tokenizer and limits. Imports torch; raises `UserError`."""
    from flexgen_h2o.engine.args import EngineArgs
    from flexgen_h2o.engine.source import find_model
    from flexgen_h2o.engine.tokenizer import InputProcessor
    from flexgen_h2o.storage.device import open_device

    model = find_model(EngineArgs(
        model=config.model, path=config.path, dtype=config.dtype,
        weight_bits=config.resolved_weight_bits), open_device(config.device))
    return InputProcessor(model, config.model, config.h2o())


def scan_input(source: JobInput, encoder: Encoder, options: BatchOptions) -> InputStats:
    """Read, check and tokenize every request, and count them."""
    stats = InputStats()
    with RequestTokenizer(encoder, options.defaults(), options.template) as tokenizer:
        for index in ProgressBar(range(len(source)), desc="checking", unit="line", disable=None):
            stats.add(tokenizer.read(source, index), int(source.numbers[index]))
    return stats


def plan_job(config: RunConfig, stats: InputStats) -> Plan:
    """Plan for the longest requests; choose the policy for ``--percent auto``.

    Raises `UserError` if they do not fit.
    """
    from flexgen_h2o.cli import planner  # imports scipy, which is slow

    return planner.plan(config, largest_block(config, stats), stats.total.sequences)


def largest_block(config: RunConfig, stats: InputStats) -> Workload:
    """Return the workload of a block of the longest requests with the most new tokens."""
    return _workload(config, max(1, stats.longest), max(1, stats.most_new),
                     max(1, stats.total.sequences))


def predict_seconds(config: RunConfig, stats: InputStats) -> float:
    """Predict the time of all requests, each with its maximum number of new tokens."""
    from flexgen_h2o.cli import planner

    seconds = 0.0
    for counts in stats.by_length.values():
        number = counts.sequences
        load = _workload(config, -(-counts.prompt // number), -(-counts.new // number), number)
        seconds += planner.plan(config, load, number).best.seconds
    return seconds


def _workload(config: RunConfig, prompt: int, new: int, sequences: int) -> Workload:
    """Return the workload of a block of `sequences` sequences, or of as many as fit in one."""
    batch = min(config.resolved_gpu_batch_size, sequences)
    return Workload(prompt, new, batch,
                    min(config.resolved_num_gpu_batches, -(-sequences // batch)))
