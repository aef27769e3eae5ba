"""Requests made ready to run: read, in tokens, and held against what the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.batch.flags import BatchOptions
from flexgen_h2o.commands.batch.input import DUPLICATE, MOST_BYTES, JobInput, RequestLines
from flexgen_h2o.commands.batch.requests import (
    BadRequest,
    Defaults,
    JobRequest,
    own_id,
    read_object,
    read_request,
)
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.outputs import Output

if TYPE_CHECKING:
    from flexgen_h2o.cli.planner import Plan
    from flexgen_h2o.engine.tokenizer import Prompts

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


# A look at all requests before any is run: what they come to, and which cannot run.


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
    from flexgen_h2o.engine.progress import byte_bar
    from flexgen_h2o.engine.source import find_model
    from flexgen_h2o.engine.tokenizer import Prompts
    from flexgen_h2o.storage.tiers import open_device

    with byte_bar("converting", off=None) as bar:
        found = find_model(config.model, path=config.path, dtype=config.dtype,
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
