"""Requests, GPU batches, and the queue that forms blocks of batches. No torch.

In the prefill the sequences of a batch are packed one after the other, without padding.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.h2o.batch_layout import BatchLayout, ContinuedSequence, PromptSpan, prefill_passes
from flexgen_h2o.outputs import TokenLogProb

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Request:
    """A prompt and its continuation so far.

    Attributes
    ----------
    key : int
        Its index among the prompts of the call.
    prompt, generated : list of int
        Token ids.
    finish_reason : str
        Empty until the request has finished.
    seed : int
        Seed of the request's random numbers.
    log_probs : list of TokenLogProb
        Log-probabilities of generated tokens, if the sampling parameters request them.
    rope_length : int or None
        `RopeConfig.text_length` of the text; None if RoPE does not depend on it.
    params : SamplingParams
    priority : int
        In an `OpenQueue`, requests of a higher priority come first.
    """

    key: int
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    finish_reason: str = ""
    seed: int = 0
    log_probs: list[TokenLogProb] = field(default_factory=list)
    rope_length: int | None = None
    params: SamplingParams = SamplingParams()
    priority: int = 0

    def restart(self) -> None:
        """Discard the generated tokens."""
        self.generated.clear()
        self.log_probs.clear()
        self.finish_reason = ""

    @property
    def shared(self) -> tuple[int | None, tuple[int, ...]]:
        """Key under which equal prompts are computed once: RoPE length and tokens."""
        return self.rope_length, tuple(self.prompt)

    @property
    def history(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.generated


class GPUBatch:
    """Sequences that are computed together.

    Parameters
    ----------
    index : int
        Index of the batch in its block.
    layout : BatchLayout
        Lengths of the prompts, their forward passes, and the maximum number of new tokens.
    share_prompts : bool
        Compute equal prompts once, and copy their cache.
    share_prefixes : bool
        Also compute common prefixes once, unless prompts come in chunks.

    Attributes
    ----------
    duplicates : dict of int to list of int
        Sequences with equal prompts, by the first of them.
    drafts : list of int
        Drafted tokens that the next decode step verifies, after the newest token of the only
        sequence.
    hidden : Tensor [rows, hidden] or None
        Hidden states that a layer for multi-token prediction joins to the embeddings of a prefill
        in one forward pass: see `Decoder.join_hidden`.
    """

    def __init__(self, index: int, requests: Sequence[Request], layout: BatchLayout, *,
                 share_prompts: bool = False, share_prefixes: bool = False):
        self.index = index
        self.requests = list(requests)
        self.layout = layout
        self.drafts: list[int] = []
        self.hidden: Tensor | None = None
        self.duplicates: dict[int, list[int]] = {}
        first: dict[object, int] = {}
        for sequence, request in enumerate(requests):
            if layout.origin(sequence) is not None:
                continue
            lead = first.setdefault(request.shared if share_prompts else sequence, sequence)
            self.duplicates.setdefault(lead, []).append(sequence)
        by_prefix: dict[object, list[int]] = {}
        share_prefixes = share_prefixes and not layout.appends
        for lead in self.duplicates:
            length, prompt = self.requests[lead].shared
            # A prompt that is no longer than the prefix would not have a row.
            has_prefix = share_prefixes and len(prompt) > SHARED_PREFIX
            key = (length, prompt[:SHARED_PREFIX]) if has_prefix else lead
            by_prefix.setdefault(key, []).append(lead)
        # Sequences whose prompts have a common prefix, and the length of the prefix.
        self._groups = [(leads, common_prefix([self.requests[lead].prompt for lead in leads]))
                        for leads in by_prefix.values()]

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def fresh(self) -> list[Request]:
        """Requests whose prompts are computed in this block."""
        return [request for sequence, request in enumerate(self.requests)
                if self.layout.origin(sequence) is None]

    @property
    def finished(self) -> bool:
        """True if every sequence has finished."""
        return all(request.finish_reason for request in self.requests)

    @property
    def ended(self) -> int:
        """The number of finished sequences."""
        return sum(bool(request.finish_reason) for request in self.requests)

    def rows(self, forward_pass: int) -> int:
        """Return the rows of hidden states in a forward pass."""
        if not self.layout.in_prefill(forward_pass):
            return len(self) + len(self.drafts)
        return sum(map(len, self.spans(forward_pass)))

    def token(self, forward_pass: int) -> int:
        """Return the number of the first new token of a forward pass: see `BatchLayout.token`."""
        if len(self) > 1 or self.layout.in_prefill(forward_pass):
            return self.layout.token(forward_pass)
        # With speculation, a forward pass may have appended several tokens.
        origin = self.layout.origin(0)
        return len(self.requests[0].generated) - (0 if origin is None else origin.generated - 1)

    @property
    def has_shared_rows(self) -> bool:
        """True if several sequences share a prompt or a prefix."""
        return any(prefix for _, prefix in self._groups) or any(
            len(sequences) > 1 for sequences in self.duplicates.values())

    def sharers(self, span: PromptSpan) -> list[int]:
        """Return the other sequences that begin with the tokens up to the end of a span.

        These are sequences with an equal prompt or, for a common prefix, the first of each equal
        prompts.
        """
        if span.end == self.layout.lengths[span.sequence]:
            return self.duplicates[span.sequence][1:]
        return next((leads[1:] for leads, prefix in self._groups
                     if leads[0] == span.sequence and span.end == prefix), [])

    def spans(self, forward_pass: int) -> Iterator[PromptSpan]:
        """Yield the parts of prompts in a forward pass of the prefill, in the order of rows.

        A common prefix comes once, as a part of the first prompt; then come the parts after it.
        """
        spans = list(self.layout.spans(forward_pass))
        for leads, prefix in self._groups:
            if prefix:
                yield PromptSpan(leads[0], 0, prefix)
            yield from (replace(spans[lead], start=max(spans[lead].start, prefix))
                        for lead in leads)

    def sampled(self, forward_pass: int) -> list[Request]:
        """Return the requests that get a token in a forward pass: in a prefill, the fresh ones."""
        return self.fresh if self.layout.in_prefill(forward_pass) else self.requests

    def inputs(self, forward_pass: int) -> tuple[list[int], list[int]]:
        """Return token ids and positions of the rows: of prompts, or of the newest tokens."""
        if not self.layout.in_prefill(forward_pass):
            token = self.token(forward_pass)
            # A finished sequence repeats its last token; the result is not used.
            ids = [request.generated[-1] for request in self.requests]
            positions = [self.layout.tokens(sequence, token) - 1
                         for sequence in range(len(self))]
            first = positions[-1] + 1
            return ids + self.drafts, [*positions, *range(first, first + len(self.drafts))]
        ids, positions = [], []
        for span in self.spans(forward_pass):
            prompt, past = self.requests[span.sequence].prompt, self.layout.past
            ids += prompt[span.start - past : span.end - past]
            positions += range(span.start, span.end)
        return ids, positions

    def rope_lengths(self, forward_pass: int) -> list[int] | None:
        """Return the RoPE length of each row; None if RoPE does not depend on it."""
        lengths = [request.rope_length for request in self.requests
                   if request.rope_length is not None]
        if len(lengths) < len(self.requests):
            return None
        if not self.layout.in_prefill(forward_pass):
            return lengths + lengths * len(self.drafts)
        return [lengths[span.sequence] for span in self.spans(forward_pass)
                for _ in range(len(span))]

    def chunks(self, forward_pass: int, max_rows: int) -> Iterator[RowChunk]:
        """Yield the rows of a prefill in chunks of whole spans, with at most `max_rows` rows.

        A longer span is its own chunk.
        """
        spans: list[PromptSpan] = []
        row = rows = 0
        for span in self.spans(forward_pass):
            if not len(span):
                continue
            if spans and rows + len(span) > max_rows:
                yield RowChunk(tuple(spans), row, row + rows)
                spans, row, rows = [], row + rows, 0
            spans.append(span)
            rows += len(span)
        if spans:
            yield RowChunk(tuple(spans), row, row + rows)


@dataclass(frozen=True)
class RowChunk:
    """Parts of prompts that are computed together: rows row:end of a batch."""

    spans: tuple[PromptSpan, ...]
    row: int
    end: int

    def prompt_starts(self, past: int) -> Iterator[slice]:
        """Yield the rows of each span that begins a prompt, after `past` tokens of earlier runs."""
        first = 0
        for span in self.spans:
            if span.start == past:
                yield slice(first, first + len(span))
            first += len(span)


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """Return the length of the common prefix, shorter than each prompt.

    It is 0 for one prompt, and if it is shorter than `SHARED_PREFIX`.
    """
    if len(prompts) < 2:
        return 0
    length = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
    return length if length >= SHARED_PREFIX else 0


def batch_of_one(request: Request, new: int, *, past: int, chunk: int) -> GPUBatch:
    """Return a batch of one sequence that continues after `past` tokens of earlier runs.

    The request's prompt comes in chunks of `chunk` tokens; up to `new` tokens follow.
    """
    tokens = len(request.prompt)
    passes = prefill_passes(tokens, chunk)
    return GPUBatch(0, [request], BatchLayout(
        (past + tokens,), new, chunk if passes > 1 else None, passes, past))


@dataclass(frozen=True)
class BlockSize:
    """The limits of a block.

    Attributes
    ----------
    gpu_batch_size, num_gpu_batches : int
        Sequences of a batch, and batches.
    prefill_chunk : int or None
        Tokens of a prompt in a forward pass; None: all.
    share_prompts, share_prefixes : bool
        See `GPUBatch`.
    draft_tokens : int
        The most drafted tokens of a sequence in a forward pass.
    """

    gpu_batch_size: int
    num_gpu_batches: int
    prefill_chunk: int | None = None
    share_prompts: bool = False
    share_prefixes: bool = False
    draft_tokens: int = 0

    @property
    def sequences(self) -> int:
        """Sequences of all batches."""
        return self.gpu_batch_size * self.num_gpu_batches


class BlockQueue:
    """Waiting requests, and the requests of the current block.

    They are sorted: first by the power of two of the tokens to generate, then by prompt length,
    longest first. So a batch has similar lengths, and a block that does not fit in memory comes
    first. With `share_prompts`, equal prompts are adjacent.

    Parameters
    ----------
    new : int or mapping
        Maximum number of tokens appended: to every request, or to each by its key.

    Attributes
    ----------
    evicts : tuple of bool
        By layer, whether any request exceeds its budget. Blocks with continued sequences need it.
        Empty: each batch decides by its own sequences.
    """

    def __init__(self, requests: Sequence[Request], new: int | Mapping[int, int], size: BlockSize):
        self._new = (dict(new) if isinstance(new, Mapping)
                     else {request.key: new for request in requests})
        self.size = size
        self.evicts: tuple[bool, ...] = ()
        first: dict[object, int] = {}
        if size.share_prompts:
            for request in requests:
                first.setdefault(request.shared, request.key)
        self._waiting = deque(sorted(requests, key=lambda request: (
            -self._new[request.key].bit_length(), -len(request.prompt),
            first[request.shared] if size.share_prompts else 0, request.key)))
        self._block: list[GPUBatch] = []

    @property
    def left(self) -> bool:
        """True if some request has not finished."""
        return bool(self._waiting) or not all(batch.finished for batch in self._block)

    def next(self) -> list[GPUBatch]:
        """Form the next block: unfinished requests of the last one, and waiting requests.

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
            layout = BatchLayout(
                tuple(len(request.prompt) for request in group), new, chunk if passes > 1 else None,
                passes, limits=tuple(self._new[request.key] for request in group),
                continued=tuple(continued.get(request.key) for request in group),
                evicts=self.evicts, draft_tokens=self.size.draft_tokens)
            self._block.append(GPUBatch(len(self._block), group, layout,
                                        share_prompts=self.size.share_prompts,
                                        share_prefixes=self.size.share_prefixes))
        return self._block

    def halve(self) -> bool:
        """Halve the block size. Return False if a block has only one sequence."""
        sequences, batches = self.batches()
        if sequences > 1:
            self.size = replace(self.size, gpu_batch_size=sequences // 2)
        elif batches > 1:
            self.size = replace(self.size, num_gpu_batches=batches // 2)
        else:
            return False
        return True

    def requeue(self) -> list[Request]:
        """Return the block's requests to the front of the queue; the caller restarts them."""
        requests = [request for batch in self._block for request in batch.requests]
        self._waiting.extendleft(reversed(requests))
        self._block = []
        return requests

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Pairs (prompt length, maximum number of appended tokens) of waiting requests."""
        return {(len(request.prompt), self._new[request.key]) for request in self._waiting}

    @property
    def longest(self) -> int:
        """Length of the longest waiting prompt."""
        return max(len(request.prompt) for request in self._waiting)

    def batches(self) -> tuple[int, int]:
        """Return the maximum sequences per batch and batches per block of waiting requests."""
        sequences = min(len(self._waiting), self.size.gpu_batch_size)
        return sequences, min(self.size.num_gpu_batches, -(-len(self._waiting) // sequences))

    def rows(self) -> int:
        """Return the maximum rows of a batch of adjacent waiting requests in a forward pass."""
        limit = self.size.prefill_chunk or self.longest
        lengths = [min(len(request.prompt), limit) for request in self._waiting]
        prompts = [request.shared for request in self._waiting]
        # Rows that each prompt adds to a batch with the one before it: none if they are equal.
        added = [0 if self.size.share_prompts and index and prompts[index] == prompts[index - 1]
                 else length for index, length in enumerate(lengths)]
        sums = [0, *accumulate(added)]
        sequences, _ = self.batches()
        return max(sequences + self.size.draft_tokens, max(
            sums[min(start + sequences, len(lengths))] - sums[start] + length - added[start]
            for start, length in enumerate(lengths)))


class OpenQueue(BlockQueue):
    """A queue that takes requests between blocks, in the order of priority and key.

    Parameters
    ----------
    max_len : int
        Maximum number of tokens of a prompt and its continuation.
    size : BlockSize
        Blocks may have this size for any number of requests.
    """

    def __init__(self, max_len: int, size: BlockSize):
        super().__init__([], {}, size)
        self._max_len = max_len

    def add(self, request: Request, new: int) -> None:
        """Add a request to which up to `new` tokens are appended."""
        self._new[request.key] = new
        later: list[Request] = []
        while self._waiting and _order(self._waiting[-1]) > _order(request):
            later.append(self._waiting.pop())
        self._waiting += [request, *reversed(later)]

    def discard(self, request: Request) -> None:
        """Drop a request that has finished or is to end: the next block is formed without it."""
        self._new.pop(request.key, None)
        if request in self._waiting:
            self._waiting.remove(request)
        request.finish_reason = request.finish_reason or "abort"

    def preempt(self) -> list[Request]:
        """Make room for waiting requests of a higher priority than unfinished ones of the block.

        Returns
        -------
        list of Request
            The last of the lowest priority. They wait again, and the caller restarts them.
        """
        running = sorted(((request, batch, sequence) for batch in self._block
                          for sequence, request in enumerate(batch.requests)
                          if not request.finish_reason), key=lambda item: _order(item[0]))
        preempted = []
        for waiting in islice(self._waiting, self.size.sequences - len(running), None):
            if not running or running[-1][0].priority >= waiting.priority:
                break
            request, batch, sequence = running.pop()
            batch.requests[sequence] = Request(request.key, [], finish_reason="preempted")
            preempted.append(request)
        for request in preempted:
            self.add(request, self._new[request.key])
        return preempted

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """The sizes that may need the most slots: the longest prompt, and the shortest."""
        return {(self._max_len - 1, 1), (1, self._max_len - 1)}

    @property
    def longest(self) -> int:
        """Maximum length of a prompt."""
        return self._max_len - 1

    def batches(self) -> tuple[int, int]:
        """Return the sequences per batch and batches per block."""
        return self.size.gpu_batch_size, self.size.num_gpu_batches

    def rows(self) -> int:
        """Return the maximum rows of a batch in a forward pass."""
        sequences = self.size.gpu_batch_size
        prompt_rows = min(self.size.prefill_chunk or self.longest, self.longest)
        return sequences * max(1 + self.size.draft_tokens, prompt_rows)


def _order(request: Request) -> tuple[int, int]:
    return -request.priority, request.key


def _groups(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    return (requests[start : start + size] for start in range(0, len(requests), size))
