"""The generation loop: execute the steps of the schedule for one block of GPU batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.distributed.pipeline import Exchange
from flexgen_h2o.engine.batch import Batch
from flexgen_h2o.engine.decoder import DecoderLayers
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.experts import ExpertLayers
from flexgen_h2o.engine.sampling import LogitsConsumer
from flexgen_h2o.engine.schedule import Kind, LayerStep, schedule
from flexgen_h2o.engine.speculation import DraftAutotune, Drafter
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import Workspace
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.storage.transfer import Transfers


@dataclass
class Timing:
    """Wall-clock times of one block.

    Attributes
    ----------
    began : float
        `time.perf_counter` when the block began.
    prefill : float
        Seconds of the prefill.
    steps : list of float
        Seconds of each decode step.
    slots, idle_slots : int
        Sequences computed, summed over decode steps; and how many of them had finished.
    draft_tokens, accepted_tokens : int
        Drafted tokens that decode steps verified, and how many of them were generated.
    """

    began: float = 0.0
    prefill: float = 0.0
    steps: list[float] = field(default_factory=list)
    slots: int = 0
    idle_slots: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Executor:
    """Runs blocks through the model.

    Parameters
    ----------
    config : ModelConfig
    weights : WeightStore
        Loaded weights.
    workspace : Workspace
        Memory that is large enough for every block.
    transfers : Transfers
    policy : Policy
        `overlap`, `sep_layer` and `refill_share` are used. With `sep_layer`, `weights` must be
        separated into attention and MLP too.
    exchange : Exchange, optional
        Communication with the other ranks of a pipeline, which compute the same blocks.
    experts : ExpertSlots, optional
        Expert slots of a mixture of experts, which needs `sep_layer`.
    drafter : Drafter, optional
        Drafts tokens for speculative decoding. Batches must have one sequence each.
    draft_autotune : DraftAutotune, optional
        Chooses the length of drafts. Default: a new one.
    """

    def __init__(self, config: ModelConfig, weights: WeightStore, workspace: Workspace, *,
                 transfers: Transfers, policy: Policy,
                 exchange: Exchange | None = None, experts: ExpertSlots | None = None,
                 drafter: Drafter | None = None, draft_autotune: DraftAutotune | None = None):
        self._policy = policy
        self._drafter = drafter
        self._draft_autotune = draft_autotune or DraftAutotune(policy.num_speculative_tokens)
        self._weights = weights
        self._workspace, self._hidden = workspace, workspace.hidden
        self._transfers = transfers
        self._exchange = exchange
        self._no_ops = _no_ops(weights, workspace)
        self._stage = Stage.all_layers(config.num_layers) if exchange is None else exchange.stage
        self._layers = DecoderLayers(
            config, weights, workspace, policy=policy, transfers=transfers, stage=self._stage,
            experts=None if experts is None else ExpertLayers(
                config, experts, workspace.operations, transfers))
        self._first_step, self._head_step = self._layers.layer_steps[0], self._layers.head_step
        self._batches: list[Batch] = []
        self._values: dict[int, torch.Tensor] = {}
        """Reduced logits of each batch, to be sent to the other ranks."""
        self._ended: list[int] = []
        """Number of sequences that ended in each forward pass."""

    def run(self, batches: Sequence[Batch], consumer: LogitsConsumer, *, keep_cache: bool = False,
            on_compute: Callable[[LayerStep], None] = lambda step: None,
            should_end: Callable[[], bool] = lambda: False) -> Timing:
        """Run one block until the fraction `refill_share` of its sequences has ended.

        The last token of a sequence is never an input, so it is not cached.

        Parameters
        ----------
        batches : sequence of Batch
            The block.
        consumer : LogitsConsumer
            Turns logits into tokens or scores, which it appends to the requests.
        keep_cache : bool
            Continue with the contents of the cache, and keep them for the next block.
        on_compute : callable
            Called after each compute step.
        should_end : callable () -> bool
            Called after each forward pass that gives tokens. True ends the block; not in a
            pipeline, whose ranks must agree.

        Returns
        -------
        Timing
        """
        groups = 1 if self._exchange is None else self._exchange.groups
        overlap, stage = self._policy.overlap, self._stage
        ends_pass = self._layers.layer_steps[-1], len(batches) - 1
        self._batches = list(batches)
        self._layers.begin(self._batches, groups)
        self._consumer = consumer
        self._weights.reset()
        self._hidden.reset()
        self._workspace.begin([batch.batch_layout for batch in batches], keep_cache=keep_cache)
        if self._exchange is not None:
            self._exchange.begin(len(batches))
        self._timing = timing = Timing()
        self._draft_autotune.begin()
        self._before_pass = 0, 0, 0  # sequences computed, drafted tokens, accepted tokens
        batch_layout = batches[0].batch_layout
        passes = batch_layout.prefill_passes + batch_layout.new
        self._ended = [0] * passes
        began = timing.began = time.perf_counter()
        for step in schedule(
                passes, stage.num_layers, len(batches), overlap=overlap,
                sep_layer=self._policy.sep_layer, keep_cache=keep_cache, stage=stage, groups=groups,
                attend_early_from=(batch_layout.prefill_passes
                            if self._workspace.cache.attends_on_host else None),
                no_ops=self._no_ops):
            if step.batch is None or self._has_rows(step):
                self._ACTIONS[step.kind](self, step)
            if step.kind is not Kind.COMPUTE:
                if not overlap:
                    self._transfers.drain()
                continue
            on_compute(step)
            if (step.layer, step.batch) == ends_pass:
                began = self._end_pass(timing, step.forward_pass, began)
                if (self._enough_ended(step.forward_pass + 1)
                        or batch_layout.token(step.forward_pass) >= 0 and should_end()):
                    self._send_last(step)
                    break
        self._end_exchange(timing, began)
        return timing

    def _enough_ended(self, forward_pass: int) -> bool:
        """Return True if enough sequences ended before a forward pass for the block to end.

        In a pipeline, tokens of the previous pass are not counted, so that no rank waits for them.
        """
        known = forward_pass if self._exchange is None else forward_pass - 1
        return sum(self._ended[:known]) >= self._policy.refill_share * sum(map(len, self._batches))

    def _has_rows(self, step: LayerStep) -> bool:
        """Return True if a batch has work in a step: short prompts have fewer chunks."""
        if step.kind in (Kind.TAKE_TOKENS, Kind.SEND_TOKENS):
            return True  # a no-op unless the batch was computed
        if step.kind is Kind.RECEIVE_HIDDEN and self._enough_ended(step.forward_pass):
            return False
        batch = self._batches[step.batch]
        return not batch.finished and batch.rows(step.forward_pass) > 0

    def _end_pass(self, timing: Timing, forward_pass: int, began: float) -> float:
        """Record the time of a forward pass. It has finished, as its tokens are on the host."""
        now = time.perf_counter()
        if self._batches[0].batch_layout.in_prefill(forward_pass):
            timing.prefill += now - began
            self._draft_autotune.record_prefill(
                now - began, sequences=sum(map(len, self._batches)),
                rows=sum(batch.rows(forward_pass) for batch in self._batches))
        else:
            timing.steps.append(now - began)
            self._layers.prefetch.record(now - began)
            self._record_drafts(timing, now - began)
        self._transfers.settle()
        return now

    def _record_drafts(self, timing: Timing, seconds: float) -> None:
        """Let the autotune choose the length of the next drafts."""
        totals = timing.slots, timing.draft_tokens, timing.accepted_tokens
        sequences, drafted, accepted = (
            total - before for total, before in zip(totals, self._before_pass, strict=True))
        self._before_pass = totals
        if self._drafter is not None and len(timing.steps) > 1:
            self._draft_autotune.record(seconds, sequences=sequences, drafted=drafted,
                                        accepted=accepted)

    def _send_last(self, step: LayerStep) -> None:
        """Send the last results to the other ranks if a block ends before its schedule does."""
        if self._exchange is None:
            return
        kind = Kind.SEND_TOKENS if self._stage.is_last_stage else Kind.SEND_HIDDEN
        if self._has_rows(step._replace(kind=kind)):
            self._ACTIONS[kind](self, step)

    def _end_exchange(self, timing: Timing, began: float) -> None:
        """Wait for all messages between ranks; the time counts for the last forward pass."""
        if self._exchange is None:
            return
        for batch, forward_pass in self._exchange.pending_tokens():
            self._take_tokens(batch, forward_pass)
        self._exchange.settle()
        seconds = time.perf_counter() - began
        if timing.steps:
            timing.steps[-1] += seconds
        else:
            timing.prefill += seconds

    def _attend(self, step: LayerStep) -> None:
        """Start the attention of a decoder layer, which overlaps the compute of other batches."""
        with self._transfers.compute_span(f"attention of layer {step.layer} batch {step.batch}"):
            self._layers.attend(step)

    def _compute(self, step: LayerStep) -> None:
        batch = self._batches[step.batch]
        if step.layer == self._first_step:
            self._begin_pass(step, batch)
        with self._transfers.compute_span(f"layer {step.layer} batch {step.batch}"):
            if step.layer == 0:
                self._layers.embed(step)
            elif step.layer == self._head_step:
                self._head(step, batch)
            else:
                self._layers.compute(step)

    def _begin_pass(self, step: LayerStep, batch: Batch) -> None:
        """Begin a forward pass of a batch: take the hidden states of the previous rank, if any."""
        if not batch.batch_layout.in_prefill(step.forward_pass):
            self._timing.slots += len(batch)
            self._timing.idle_slots += batch.ended
            if self._drafter is not None:
                batch.drafts = self._next_drafts(self._drafter, batch)
        if self._stage.is_first_stage:
            return
        _, positions = batch.inputs(step.forward_pass)
        x = self._hidden.get(step.batch, len(positions), fresh=True)
        self._exchange.take_hidden(step.batch, x)
        self._layers.set_positions(step, torch.tensor(positions))

    def _head(self, step: LayerStep, batch: Batch) -> None:
        """Compute the logits of a batch, and let the consumer append tokens or scores."""
        values = []
        if batch.drafts:
            self._verify(step, batch)
        else:
            rows = self._consumer.rows(batch, step.forward_pass)
            for row, logits in self._layers.logits(step, rows):
                values.append(self._consumer.reduce(batch, step.forward_pass, row, logits))
                self._apply(batch, step.forward_pass, row, values[-1])
        self._hidden.drop(step.batch)
        if values and self._exchange is not None:
            self._values[step.batch] = torch.cat(values)
        if self._drafter is not None:
            request, = batch.requests
            if request.finish_reason:
                self._drafter.forget(request)
            elif request.generated and batch.batch_layout.in_prefill(step.forward_pass):
                self._drafter.begin(request)

    def _verify(self, step: LayerStep, batch: Batch) -> None:
        """Sample a token for each row, until one differs from its draft or ends the sequence."""
        request, = batch.requests
        self._timing.draft_tokens += len(batch.drafts)
        for first, logits in self._layers.logits(step, torch.arange(1 + len(batch.drafts))):
            for row, row_logits in enumerate(logits.split(1), first):
                self._apply(batch, step.forward_pass, 0, self._consumer.reduce(
                    batch, step.forward_pass, 0, row_logits))
                # The last row has no draft: its slice is empty.
                if request.finish_reason or request.generated[-1:] != batch.drafts[row : row + 1]:
                    return
                self._timing.accepted_tokens += 1

    def _next_drafts(self, drafter: Drafter, batch: Batch) -> list[int]:
        """Return the drafts for a batch's next forward pass, within the sequence's limit."""
        request, layout = batch.requests[0], batch.batch_layout
        sequences = sum(not batch.finished for batch in self._batches)
        max_drafts = min(self._draft_autotune.length(sequences), layout.draft_tokens,
                   layout.limit(0) - len(request.generated))
        return drafter.draft(request, max_drafts) if max_drafts > 0 else []

    def _apply(self, batch: Batch, forward_pass: int, row: int, values: torch.Tensor) -> None:
        """Let the consumer apply reduced logits, of rows from index `row` on, to the requests."""
        before = batch.ended
        self._consumer.apply(batch, forward_pass, row, values)
        self._ended[forward_pass] += batch.ended - before

    def _take_tokens(self, batch: int, forward_pass: int) -> None:
        values = self._exchange.take_tokens(batch, forward_pass)
        if values is not None:
            self._apply(self._batches[batch], forward_pass, 0, values)

    def _receive_tokens(self, step: LayerStep) -> None:
        rows = len(self._consumer.rows(self._batches[step.batch], step.forward_pass))
        if rows:
            self._exchange.receive_tokens(step.batch, step.forward_pass,
                                          (rows, self._consumer.width))

    def _send_tokens(self, step: LayerStep) -> None:
        values = self._values.pop(step.batch, None)
        if values is not None:
            self._exchange.send_tokens(values)

    def _send_hidden(self, step: LayerStep) -> None:
        self._exchange.send_hidden(self._hidden.get(step.batch, self._rows(step)))
        self._hidden.drop(step.batch)

    def _weight_passes(self, step: LayerStep) -> int:
        """Return how often a layer step reads its weights: once per chunk of rows."""
        batch = self._batches[0]
        in_prefill = batch.batch_layout.in_prefill(step.forward_pass)
        if step.layer in (0, self._head_step) or not in_prefill:
            return 1
        return sum(1 for _ in batch.chunks(step.forward_pass, self._layers.chunk_rows))

    def _move_cache(self, step: LayerStep) -> None:
        """Start loading or storing the cache of a layer step."""
        cache, layer = self._layers.cache_of(step)
        move = cache.load if step.kind is Kind.LOAD_CACHE else cache.store
        move(layer, step.batch, step.forward_pass)

    def _rows(self, step: LayerStep) -> int:
        return self._batches[step.batch].rows(step.forward_pass)

    # A class attribute: bound methods would be reference cycles, which keep the cache in memory
    # until the garbage collector runs.
    _ACTIONS = {
        Kind.LOAD_WEIGHTS: lambda self, step: self._weights.fetch(
            step.layer, self._weight_passes(step)),
        Kind.RELEASE_WEIGHTS: lambda self, step: self._weights.release(step.layer),
        Kind.LOAD_CACHE: _move_cache,
        Kind.STORE_CACHE: _move_cache,
        Kind.LOAD_HIDDEN: lambda self, step: self._hidden.load(step.batch, self._rows(step)),
        Kind.STORE_HIDDEN: lambda self, step: self._hidden.store(step.batch, self._rows(step)),
        Kind.RECEIVE_HIDDEN: lambda self, step: self._exchange.receive_hidden(
            step.batch, self._rows(step)),
        Kind.SEND_HIDDEN: _send_hidden,
        Kind.RECEIVE_TOKENS: _receive_tokens,
        Kind.TAKE_TOKENS: lambda self, step: self._take_tokens(step.batch, step.forward_pass),
        Kind.SEND_TOKENS: _send_tokens,
        Kind.ATTEND: _attend,
        Kind.COMPUTE: _compute,
    }


def _no_ops(weights: WeightStore, workspace: Workspace) -> frozenset[Kind]:
    """Return the kinds of steps that are no-ops because the data is resident."""
    kinds: set[Kind] = set()
    if all(map(weights.is_resident, range(len(weights.units)))):
        kinds |= {Kind.LOAD_WEIGHTS, Kind.RELEASE_WEIGHTS}
    if all(cache.is_resident for cache in workspace.caches):
        kinds |= {Kind.LOAD_CACHE, Kind.STORE_CACHE}
    if workspace.hidden.is_resident:
        kinds |= {Kind.LOAD_HIDDEN, Kind.STORE_HIDDEN}
    return frozenset(kinds)
