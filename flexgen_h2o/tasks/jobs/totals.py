"""A look at all requests before any is run: what they come to, and which cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.workload import Workload
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.tasks.jobs.flags import BatchOptions
from flexgen_h2o.tasks.jobs.job_input import JobInput
from flexgen_h2o.tasks.jobs.prepared import Encoder, Failed, Preparation, Prepared

if TYPE_CHECKING:
    from flexgen_h2o.cli.planner import Plan
    from flexgen_h2o.engine.tokenization import Prompts

SHOWN = 20
"""Failures that are told."""


class TokenizerAlone:
    """The tokenizer of a model and the limits of its prompts, without its weights."""

    def __init__(self, prompts: Prompts, vocab_size: int):
        self._prompts, self._vocab_size = prompts, vocab_size

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None where the model has none."""
        return self._prompts.tokenizer

    @property
    def chat_end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer of a chat."""
        return self._prompts.chat_end_tokens

    def encode(self, prompt: str | Sequence[int], *, name: int | str, new_tokens: int,
               special: bool) -> list[int]:
        """Token ids of a prompt, made and checked as `LLM.encode` does."""
        return self._prompts.fitting(prompt, name, new_tokens=new_tokens, special=special)

    def clamped(self, tokens: int, most: int) -> int:
        """New tokens that fit after a prompt, as `LLM.clamped` returns them."""
        return self._prompts.clamped(tokens, most)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocab_size


@dataclass
class Lengths:
    """Sums over sequences of like lengths, in tokens; `new` are the most that may come."""

    sequences: int = 0
    prompt: int = 0
    new: int = 0


@dataclass
class JobTotals:
    """The requests of an input, counted; lengths are tokens.

    `failed` are the first that cannot run, each as a line, of `failures`. `alike` has the sums of
    sequences by the binary digits of their new tokens.
    """

    requests: int = 0
    failures: int = 0
    failed: list[str] = field(default_factory=list)
    longest: int = 0
    most_new: int = 0
    alike: dict[int, Lengths] = field(default_factory=dict)

    @property
    def total(self) -> Lengths:
        """Sums over all sequences."""
        return Lengths(*(sum(getattr(each, name) for each in self.alike.values())
                         for name in ("sequences", "prompt", "new")))

    def add(self, one: Prepared | Failed, number: int) -> None:
        """Count the request of the line of this number."""
        self.requests += 1
        if isinstance(one, Failed):
            self.failures += 1
            if len(self.failed) < SHOWN:
                self.failed.append(f"line {number}: {one.error}")
            return
        for prompt, new in zip(one.prompts, one.limits, strict=True):
            sums = self.alike.setdefault(new.bit_length(), Lengths())
            sums.sequences += one.request.n
            sums.prompt += one.request.n * len(prompt)
            sums.new += one.request.n * new
            self.longest = max(self.longest, len(prompt))
            self.most_new = max(self.most_new, new)

    def text(self) -> str:
        """The counts, and the first of the failures, in lines."""
        sums = self.total
        rows = [("requests", f"{self.requests}, of which {self.failures} cannot run"),
                ("sequences", f"{sums.sequences}"),
                ("prompt tokens", f"{sums.prompt}, the longest prompt has {self.longest}"),
                ("new tokens", f"at most {sums.new}, {self.most_new} of one sequence")]
        more = [f"and {self.failures - SHOWN} more"] if self.failures > SHOWN else []
        return "\n".join([*(f"{name:<14} {text}" for name, text in rows), *self.failed, *more])


def encoder_of(config: RunConfig) -> TokenizerAlone:
    """The tokenizer of the model of a run. Loads torch; raises `UserError`."""
    from flexgen_h2o.engine.loader import find
    from flexgen_h2o.engine.progress import byte_bar
    from flexgen_h2o.engine.tokenization import Prompts
    from flexgen_h2o.storage.tiers import open_device

    with byte_bar("converting", off=None) as bar:
        found = find(config.model, path=config.path, dtype=config.dtype,
                     bits=config.resolved_weight_bits, device=open_device(config.device),
                     progress=bar)
    return TokenizerAlone(Prompts(found, config.model, config.h2o()), found.config.vocab_size)


def count(source: JobInput, encoder: Encoder, options: BatchOptions) -> JobTotals:
    """Read, check and tokenize every request."""
    found = JobTotals()
    with Preparation(source, encoder, options.defaults(), options.template) as preparation:
        for place in ProgressBar(range(len(source)), desc="checking", unit="line", disable=None):
            found.add(preparation.prepare(place), int(source.numbers[place]))
    return found


def planned(config: RunConfig, found: JobTotals) -> Plan:
    """The plan for the longest of the requests: the policy where it is ``--percent auto``.

    Raises `UserError` if they do not fit.
    """
    from flexgen_h2o.cli import planner  # only now: it loads scipy

    return planner.plan(config, largest_block(config, found), found.total.sequences)


def largest_block(config: RunConfig, found: JobTotals) -> Workload:
    """The workload of a block of the longest requests, to their most tokens."""
    return _load(config, max(1, found.longest), max(1, found.most_new),
                 max(1, found.total.sequences))


def predicted_seconds(config: RunConfig, found: JobTotals) -> float:
    """Seconds that a planned policy takes for all of the requests, each to its most tokens."""
    from flexgen_h2o.cli import planner

    seconds = 0.0
    for sums in found.alike.values():
        number = sums.sequences
        load = _load(config, -(-sums.prompt // number), -(-sums.new // number), number)
        seconds += planner.plan(config, load, number).best.seconds
    return seconds


def _load(config: RunConfig, prompt: int, new: int, sequences: int) -> Workload:
    """The workload of so many sequences of these lengths."""
    batch = min(config.resolved_gpu_batch_size, sequences)
    return Workload(prompt, new, batch,
                    min(config.resolved_num_gpu_batches, -(-sequences // batch)))
