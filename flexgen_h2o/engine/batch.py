"""Requests, GPU batches and blocks: who is computed together, and which rows are whose. No torch.

In the prefill the sequences of a batch lie packed, one after the other, with no pads between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.h2o.batch_layout import BatchLayout, ContinuedSequence, PromptChunk, prefill_passes
from flexgen_h2o.outputs import TokenLogProb


@dataclass
class Request:
    """One prompt on its way: `key` is its place among the prompts of the call.

    `finish_reason` is empty until it has ended. `seed` is that of its random numbers, `log_probs`
    what is known of the generated tokens if that was asked for. `rope_length` is
    `RopeConfig.text_length` of its text; None: it rotates as all texts do. `params` are its
    sampling parameters.
    """

    key: int
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    finish_reason: str = ""
    seed: int = 0
    log_probs: list[TokenLogProb] = field(default_factory=list)
    rope_length: int | None = None
    params: SamplingParams = SamplingParams()

    def restart(self) -> None:
        """Forget what has been generated."""
        self.generated.clear()
        self.log_probs.clear()
        self.finish_reason = ""

    @property
    def shared(self) -> tuple[int | None, tuple[int, ...]]:
        """The text that is computed once for all requests that have the same."""
        return self.rope_length, tuple(self.prompt)

    @property
    def history(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.generated


class Batch:
    """The sequences computed together; `index` is the batch's place in its block.

    `batch_layout` says how their prompts are cut into forward passes and how many tokens may
    follow. With `shares`, a prompt that several sequences have goes through the network once, for
    the first of them, and is cached for each; with `shares_prefix`, so does what several prompts
    begin with, unless prompts come in chunks.
    """

    def __init__(self, index: int, requests: Sequence[Request], batch_layout: BatchLayout, *,
                 shares: bool = False, shares_prefix: bool = False):
        self.index = index
        self.requests = list(requests)
        self.batch_layout = batch_layout
        self.alike: dict[int, list[int]] = {}  # of each prompt: its first sequence to all of them
        first: dict[object, int] = {}
        for place, request in enumerate(requests):
            if batch_layout.origin(place) is not None:
                continue
            lead = first.setdefault(request.shared if shares else place, place)
            self.alike.setdefault(lead, []).append(place)
        alike: dict[object, list[int]] = {}
        shares_prefix = shares_prefix and not batch_layout.appends
        for lead in self.alike:
            length, prompt = self.requests[lead].shared
            # Others stand in their order, each by itself: one that is all beginning leaves nothing.
            begins = shares_prefix and len(prompt) > SHARED_PREFIX
            alike.setdefault((length, prompt[:SHARED_PREFIX]) if begins else lead, []).append(lead)
        # Sequences whose prompts stand together, and how many tokens these begin with alike.
        self._groups = [(leads, common_prefix([self.requests[lead].prompt for lead in leads]))
                        for leads in alike.values()]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def fresh(self) -> list[Request]:
        """The requests whose prompts come in this block."""
        return [request for sequence, request in enumerate(self.requests)
                if self.batch_layout.origin(sequence) is None]

    @property
    def finished(self) -> bool:
        """True if every sequence of the batch has ended."""
        return all(request.finish_reason for request in self.requests)

    @property
    def ended(self) -> int:
        """Sequences that have ended."""
        return sum(bool(request.finish_reason) for request in self.requests)

    def rows(self, forward_pass: int) -> int:
        """Rows of hidden states in a forward pass."""
        if not self.batch_layout.in_prefill(forward_pass):
            return len(self)
        return sum(map(len, self.spans(forward_pass)))

    @property
    def shares(self) -> bool:
        """True if some prompt, or what some begin with, stands for several sequences."""
        return any(prefix for _, prefix in self._groups) or any(
            len(places) > 1 for places in self.alike.values())

    def spans(self, forward_pass: int) -> Iterator[PromptChunk]:
        """The tokens of the prompts in a forward pass of the prefill, in its order.

        What several prompts begin with comes as a part of the first, then what each has beside it.
        """
        spans = list(self.batch_layout.spans(forward_pass))
        for leads, prefix in self._groups:
            if prefix:
                yield PromptChunk(leads[0], 0, prefix)
            yield from (replace(spans[lead], start=max(spans[lead].start, prefix))
                        for lead in leads)

    def sampled(self, forward_pass: int) -> list[Request]:
        """The requests that get a token from a forward pass: in the prefill, those of prompts."""
        return self.fresh if self.batch_layout.in_prefill(forward_pass) else self.requests

    def inputs(self, forward_pass: int) -> tuple[list[int], list[int]]:
        """Token ids and positions of the rows: of the prompts, or each sequence's newest token."""
        if not self.batch_layout.in_prefill(forward_pass):
            token = self.batch_layout.token(forward_pass)
            # A sequence that has ended repeats its last token; what comes of it is not used.
            ids = [request.generated[-1] for request in self.requests]
            return ids, [self.batch_layout.tokens(sequence, token) - 1
                         for sequence in range(len(self))]
        ids, positions = [], []
        for span in self.spans(forward_pass):
            prompt, past = self.requests[span.sequence].prompt, self.batch_layout.past
            ids += prompt[span.start - past : span.end - past]
            positions += range(span.start, span.end)
        return ids, positions

    def rope_lengths(self, forward_pass: int) -> list[int] | None:
        """The length by which each row's text rotates; None: all do as every text does."""
        lengths = [request.rope_length for request in self.requests
                   if request.rope_length is not None]
        if len(lengths) < len(self.requests):
            return None
        if not self.batch_layout.in_prefill(forward_pass):
            return lengths
        return [lengths[span.sequence] for span in self.spans(forward_pass)
                for _ in range(len(span))]

    def chunks(self, forward_pass: int, most_rows: int) -> Iterator[RowChunk]:
        """Cut the rows of a prefill between sequences so that a chunk has at most `most_rows`.

        A span longer than that is a chunk of its own.
        """
        spans: list[PromptChunk] = []
        row = rows = 0
        for span in self.spans(forward_pass):
            if not len(span):
                continue
            if spans and rows + len(span) > most_rows:
                yield RowChunk(tuple(spans), row, row + rows)
                spans, row, rows = [], row + rows, 0
            spans.append(span)
            rows += len(span)
        if spans:
            yield RowChunk(tuple(spans), row, row + rows)


@dataclass(frozen=True)
class RowChunk:
    """Spans of prompts that go through a layer together; their rows are row:end."""

    spans: tuple[PromptChunk, ...]
    row: int
    end: int

    def beginnings(self, past: int) -> Iterator[slice]:
        """The rows, among these, with which prompts begin that follow so many tokens of the past.
        """
        first = 0
        for span in self.spans:
            if span.start == past:
                yield slice(first, first + len(span))
            first += len(span)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all prompts begin, fewer than any of them has; 0 for one alone, or so few
    that sharing them does not pay."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)  # between these, in order, lie all others
    most = min(map(len, prompts)) - 1
    found = next((place for place in range(most) if first[place] != last[place]), most)
    return found if found >= SHARED_PREFIX else 0


def next_turn(request: Request, new: int, *, past: int, chunk: int) -> Batch:
    """A batch of one sequence that goes on: `past` of its tokens came in earlier runs.

    The request's prompt comes next, in chunks of `chunk` tokens, and then up to `new` tokens.
    """
    tokens = len(request.prompt)
    passes = prefill_passes(tokens, chunk)
    return Batch(0, [request],
                 BatchLayout((past + tokens,), new, chunk if passes > 1 else None, passes,
                                           past))


# The queue of a call's requests, and the blocks of batches that they come in. No torch.


@dataclass(frozen=True)
class BlockSize:
    """The most of a block: sequences of a batch, batches, and tokens of a prompt that are read at
    once (None: all). With `shares`, a batch computes equal prompts once, and with `shares_prefix`
    what several begin with."""

    gpu_batch_size: int
    num_gpu_batches: int
    prefill_chunk: int | None = None
    shares: bool = False
    shares_prefix: bool = False

    @property
    def sequences(self) -> int:
        """Those of all batches."""
        return self.gpu_batch_size * self.num_gpu_batches


class BlockQueue:
    """Requests on their way through blocks: those that wait, and those of the block before.

    They wait sorted by length, so that those of a batch are alike. The longest come first: what
    does not fit shows at once. Those that may go on for twice as long come before others. With
    `shares`, equal prompts come next to each other.

    Parameters
    ----------
    requests : sequence of Request
    new : int or mapping
        Up to so many tokens will be appended to each, or so many as it has by key.
    size : BlockSize

    Attributes
    ----------
    evicts : tuple of bool
        Layers in which some request loses tokens, which has to be told where blocks carry
        sequences; none: each batch is looked at alone.
    """

    def __init__(self, requests: Sequence[Request], new: int | Mapping[int, int], size: BlockSize):
        self._new = new if isinstance(new, Mapping) else {request.key: new for request in requests}
        self.size = size
        self.evicts: tuple[bool, ...] = ()
        first: dict[object, int] = {}
        if size.shares:
            for request in requests:
                first.setdefault(request.shared, request.key)
        self._waiting = deque(sorted(requests, key=lambda request: (
            -self._new[request.key].bit_length(), -len(request.prompt),
            first[request.shared] if size.shares else 0, request.key)))
        self._block: list[Batch] = []

    @property
    def left(self) -> bool:
        """True if some request has not ended."""
        return bool(self._waiting) or not all(batch.finished for batch in self._block)

    def next(self) -> list[Batch]:
        """The next block: what has not ended in the block before, and others in free places.

        The last block may be partial.
        """
        continued = {request.key: ContinuedSequence(batch.index, sequence, len(request.generated))
                   for batch in self._block for sequence, request in enumerate(batch.requests)
                   if not request.finish_reason}
        requests = [request for batch in self._block for request in batch.requests
                    if request.key in continued]
        fresh = [self._waiting.popleft()
                 for _ in range(min(len(self._waiting), self.size.sequences - len(requests)))]
        passes, chunk = 0, self.size.prefill_chunk
        if fresh:
            passes = prefill_passes(max(len(request.prompt) for request in fresh), chunk)
        new = max(self._new[request.key] - max(0, len(request.generated) - 1)
                  for request in requests + fresh)
        self._block = []
        for group in _groups(requests + fresh, self.size.gpu_batch_size):
            batch_layout = BatchLayout(
                tuple(len(request.prompt) for request in group), new, chunk if passes > 1 else None,
                passes, limits=tuple(self._new[request.key] for request in group),
                continued=tuple(continued.get(request.key) for request in group),
                evicts=self.evicts)
            self._block.append(Batch(len(self._block), group, batch_layout,
                                     shares=self.size.shares,
                                     shares_prefix=self.size.shares_prefix))
        return self._block

    def halve(self) -> list[Request] | None:
        """Put the last block's requests back in front, for blocks of half as many sequences.

        Returns them, to be begun anew; None where a block has one sequence only.
        """
        requests = [request for batch in self._block for request in batch.requests]
        self._waiting.extendleft(reversed(requests))
        self._block = []
        sequences, batches = self.batches()
        if sequences > 1:
            self.size = replace(self.size, gpu_batch_size=sequences // 2)
        elif batches > 1:
            self.size = replace(self.size, num_gpu_batches=batches // 2)
        else:
            return None
        return requests

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Prompt lengths of what waits, with the tokens that may be appended."""
        return {(len(request.prompt), self._new[request.key]) for request in self._waiting}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that waits."""
        return max(len(request.prompt) for request in self._waiting)

    def batches(self) -> tuple[int, int]:
        """The most sequences of a batch, and batches of a block, that what waits can fill."""
        sequences = min(len(self._waiting), self.size.gpu_batch_size)
        return sequences, min(self.size.num_gpu_batches, -(-len(self._waiting) // sequences))

    def rows(self) -> int:
        """The most rows of a batch in a forward pass: of prompts that stand together in the queue,
        and of new tokens."""
        limit = self.size.prefill_chunk or self.longest
        lengths = [min(len(request.prompt), limit) for request in self._waiting]
        prompts = [request.shared for request in self._waiting]
        # What equal prompts add to a batch that holds the one before.
        added = [0 if self.size.shares and place and prompts[place] == prompts[place - 1]
                 else length for place, length in enumerate(lengths)]
        sums = [0, *accumulate(added)]
        sequences, _ = self.batches()
        return max(sequences, max(
            sums[min(start + sequences, len(lengths))] - sums[start] + length - added[start]
            for start, length in enumerate(lengths)))


def _groups(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    return (requests[start : start + size] for start in range(0, len(requests), size))
