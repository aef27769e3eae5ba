"""The generation loop: execute the actions of the schedule for one block of GPU batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.distributed.pipeline import Exchange
from flexgen_h2o.engine.blocks import GPUBatch
from flexgen_h2o.engine.decoder import DecoderLayers
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.experts import ExpertLayers
from flexgen_h2o.engine.sampling import LogitsConsumer
from flexgen_h2o.engine.schedule import Action, Op, schedule
from flexgen_h2o.engine.speculation import DraftAutotune, Drafter
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import Workspace
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.metrics.trace import PHASES
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.storage.transfer import Transfers


class Executor:
    """Runs blocks through the model.

    Parameters
    ----------
    weights : WeightStore
        Loaded weights.
    workspace : Workspace
        Memory that is large enough for every block.
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
        self._first_unit, self._head_unit = self._layers.units[0], self._layers.head_unit
        self._batches: list[GPUBatch] = []
        self._values: dict[int, torch.Tensor] = {}
        """Reduced logits of each batch, to be sent to the other ranks."""
        self._ended: list[int] = []
        """Number of sequences that ended in each forward pass."""

    def run(self, batches: Sequence[GPUBatch], consumer: LogitsConsumer, stats: RunStats, *,
            keep_cache: bool = False, on_compute: Callable[[Action], None] = lambda action: None,
            should_end: Callable[[], bool] = lambda: False) -> None:
        """Run one block until the fraction `refill_share` of its sequences has ended.

        The last token of a sequence is never an input, so it is not cached.

        Parameters
        ----------
        batches : sequence of GPUBatch
            The block.
        consumer : LogitsConsumer
            Turns logits into tokens or scores, which it appends to the requests.
        stats : RunStats
            Gets the times of prefill and decode steps, their slots, and the counts of drafts.
        keep_cache : bool
            Continue with the contents of the cache, and keep them for the next block.
        on_compute : callable
            Called after each compute.
        should_end : callable () -> bool
            Called after each forward pass that gives tokens. True ends the block; not in a
            pipeline, whose ranks must agree.
        """
        groups = 1 if self._exchange is None else self._exchange.groups
        overlap, stage = self._policy.overlap, self._stage
        ends_pass = self._layers.units[-1], len(batches) - 1
        self._batches = list(batches)
        self._layers.begin(self._batches, groups)
        self._consumer = consumer
        self._weights.reset()
        self._hidden.reset()
        self._workspace.begin([batch.layout for batch in batches], keep_cache=keep_cache)
        if self._exchange is not None:
            self._exchange.begin(len(batches))
        self._stats = stats
        self._draft_autotune.begin()
        self._before_pass = 0, 0, 0  # sequences computed, drafted tokens, accepted tokens
        layout = batches[0].layout
        passes = layout.prefill_passes + layout.new
        self._ended = [0] * passes
        # Attention that starts early has its caches stored before the compute, which a recurrent
        # layer needs to advance its states.
        attends_early = self._workspace.cache.attends_on_host and self._workspace.states is None
        start = began = time.perf_counter()
        for action in schedule(
                passes, stage.num_layers, len(batches), overlap=overlap,
                sep_layer=self._policy.sep_layer, keep_cache=keep_cache, stage=stage, groups=groups,
                attend_early_from=layout.prefill_passes if attends_early else None,
                no_ops=self._no_ops):
            if action.batch is None or self._has_rows(action):
                self._METHODS[action.op](self, action)
            if action.op is not Op.COMPUTE:
                if not overlap:
                    self._transfers.drain()
                continue
            on_compute(action)
            if (action.unit, action.batch) == ends_pass:
                began = self._end_pass(action.forward_pass, began)
                if (self._enough_ended(action.forward_pass + 1)
                        or layout.token(action.forward_pass) >= 0 and should_end()):
                    self._send_last(action)
                    break
        self._end_exchange(began)
        stats.decode_seconds = sum(stats.step_seconds)
        decode = start + stats.prefill_seconds
        self._transfers.trace.add("prefill", PHASES, start, decode)
        self._transfers.trace.add("decode", PHASES, decode, decode + stats.decode_seconds)

    def _enough_ended(self, forward_pass: int) -> bool:
        """Return True if enough sequences ended before a forward pass for the block to end.

        In a pipeline, tokens of the previous pass are not counted, so that no rank waits for them.
        """
        known = forward_pass if self._exchange is None else forward_pass - 1
        return sum(self._ended[:known]) >= self._policy.refill_share * sum(map(len, self._batches))

    def _has_rows(self, action: Action) -> bool:
        """Return True if a batch has rows in an action: short prompts have fewer chunks."""
        if action.op in (Op.TAKE_TOKENS, Op.SEND_TOKENS):
            return True  # a no-op unless the batch was computed
        if action.op is Op.RECEIVE_HIDDEN and self._enough_ended(action.forward_pass):
            return False
        batch = self._batches[action.batch]
        return not batch.finished and batch.rows(action.forward_pass) > 0

    def _end_pass(self, forward_pass: int, began: float) -> float:
        """Record the time of a forward pass. It has finished, as its tokens are on the host."""
        now = time.perf_counter()
        if self._batches[0].layout.in_prefill(forward_pass):
            self._stats.prefill_seconds += now - began
            self._draft_autotune.record_prefill(
                now - began, sequences=sum(map(len, self._batches)),
                rows=sum(batch.rows(forward_pass) for batch in self._batches))
        else:
            self._stats.step_seconds.append(now - began)
            self._layers.prefetch.record(now - began)
            self._record_drafts(now - began)
        self._transfers.record_finished()
        return now

    def _record_drafts(self, seconds: float) -> None:
        """Let the autotune choose the length of the next drafts."""
        stats = self._stats
        totals = stats.decode_slots, stats.draft_tokens, stats.accepted_tokens
        sequences, drafted, accepted = (
            total - before for total, before in zip(totals, self._before_pass, strict=True))
        self._before_pass = totals
        if self._drafter is not None and len(stats.step_seconds) > 1:
            self._draft_autotune.record(seconds, sequences=sequences, drafted=drafted,
                                        accepted=accepted)

    def _send_last(self, action: Action) -> None:
        """Send the last results to the other ranks if a block ends before its schedule does."""
        if self._exchange is None:
            return
        op = Op.SEND_TOKENS if self._stage.is_last_stage else Op.SEND_HIDDEN
        if self._has_rows(action._replace(op=op)):
            self._METHODS[op](self, action)

    def _end_exchange(self, began: float) -> None:
        """Wait for all messages between ranks; the time counts for the last forward pass."""
        if self._exchange is None:
            return
        for batch, forward_pass in self._exchange.pending_tokens():
            self._take_tokens(batch, forward_pass)
        self._exchange.finish_sends()
        seconds = time.perf_counter() - began
        if self._stats.step_seconds:
            self._stats.step_seconds[-1] += seconds
        else:
            self._stats.prefill_seconds += seconds

    def _attend(self, action: Action) -> None:
        """Start the attention of a decoder layer, which overlaps the compute of other batches."""
        with self._transfers.compute_span(f"attention of layer {action.unit} batch {action.batch}"):
            self._layers.attend(action)

    def _compute(self, action: Action) -> None:
        batch = self._batches[action.batch]
        if action.unit == self._first_unit:
            self._begin_pass(action, batch)
        with self._transfers.compute_span(f"layer {action.unit} batch {action.batch}"):
            if action.unit == 0:
                self._layers.embed(action)
            elif action.unit == self._head_unit:
                self._head(action, batch)
            else:
                self._layers.compute(action)

    def _begin_pass(self, action: Action, batch: GPUBatch) -> None:
        """Begin a forward pass of a batch: take the hidden states of the previous rank, if any."""
        if not batch.layout.in_prefill(action.forward_pass):
            self._stats.decode_slots += len(batch)
            self._stats.idle_slots += batch.ended
            if self._drafter is not None:
                batch.drafts = self._next_drafts(self._drafter, batch)
        if self._stage.is_first_stage:
            return
        _, positions = batch.inputs(action.forward_pass)
        x = self._hidden.get(action.batch, len(positions), fresh=True)
        self._exchange.take_hidden(action.batch, x)
        self._layers.set_positions(action, torch.tensor(positions))

    def _head(self, action: Action, batch: GPUBatch) -> None:
        """Compute the logits of a batch, and let the consumer append tokens or scores."""
        values = []
        if batch.drafts:
            self._verify(action, batch)
        else:
            rows = self._consumer.rows(batch, action.forward_pass)
            for row, logits in self._layers.logits(action, rows):
                values.append(self._consumer.reduce(batch, action.forward_pass, row, logits))
                self._apply(batch, action.forward_pass, row, values[-1])
        if self._drafter is not None:
            self._inform(self._drafter, action, batch)
        self._hidden.drop(action.batch)
        if values and self._exchange is not None:
            self._values[action.batch] = torch.cat(values)

    def _inform(self, drafter: Drafter, action: Action, batch: GPUBatch) -> None:
        """Let a drafter read the results of a forward pass."""
        request, = batch.requests
        if request.finish_reason:
            drafter.forget(request)
            return
        drafter.read_hidden(request, self._layers.final_hidden(action))
        if request.generated and batch.layout.in_prefill(action.forward_pass):
            drafter.begin(request)

    def _verify(self, action: Action, batch: GPUBatch) -> None:
        """Sample a token for each row, until one differs from its draft or ends the sequence."""
        request, = batch.requests
        self._stats.draft_tokens += len(batch.drafts)
        for first, logits in self._layers.logits(action, torch.arange(1 + len(batch.drafts))):
            for row, row_logits in enumerate(logits.split(1), first):
                self._apply(batch, action.forward_pass, 0, self._consumer.reduce(
                    batch, action.forward_pass, 0, row_logits))
                # The last row has no draft: its slice is empty.
                if request.finish_reason or request.generated[-1:] != batch.drafts[row : row + 1]:
                    return
                self._stats.accepted_tokens += 1

    def _next_drafts(self, drafter: Drafter, batch: GPUBatch) -> list[int]:
        """Return the drafts for a batch's next forward pass, within the sequence's limit."""
        request, layout = batch.requests[0], batch.layout
        sequences = sum(not batch.finished for batch in self._batches)
        max_drafts = min(self._draft_autotune.length(sequences), layout.draft_tokens,
                         layout.limit(0) - len(request.generated))
        return drafter.draft(request, max_drafts) if max_drafts > 0 else []

    def _apply(self, batch: GPUBatch, forward_pass: int, row: int, values: torch.Tensor) -> None:
        """Let the consumer apply reduced logits, of rows from index `row` on, to the requests."""
        before = batch.ended
        self._consumer.apply(batch, forward_pass, row, values)
        self._ended[forward_pass] += batch.ended - before

    def _take_tokens(self, batch: int, forward_pass: int) -> None:
        values = self._exchange.take_tokens(batch, forward_pass)
        if values is not None:
            self._apply(self._batches[batch], forward_pass, 0, values)

    def _receive_tokens(self, action: Action) -> None:
        rows = len(self._consumer.rows(self._batches[action.batch], action.forward_pass))
        if rows:
            self._exchange.receive_tokens(action.batch, action.forward_pass,
                                          (rows, self._consumer.width))

    def _send_tokens(self, action: Action) -> None:
        values = self._values.pop(action.batch, None)
        if values is not None:
            self._exchange.send_tokens(values)

    def _send_hidden(self, action: Action) -> None:
        self._exchange.send_hidden(self._hidden.get(action.batch, self._rows(action)))
        self._hidden.drop(action.batch)

    def _weight_passes(self, action: Action) -> int:
        """Return how often a unit reads its weights: once per chunk of rows."""
        batch = self._batches[0]
        in_prefill = batch.layout.in_prefill(action.forward_pass)
        if action.unit in (0, self._head_unit) or not in_prefill:
            return 1
        return sum(1 for _ in batch.chunks(action.forward_pass, self._layers.chunk_rows))

    def _move_cache(self, action: Action) -> None:
        """Start loading or storing the cache of a unit."""
        cache, layer = self._layers.cache_of(action)
        move = cache.load if action.op is Op.LOAD_CACHE else cache.store
        move(layer, action.batch, action.forward_pass)

    def _rows(self, action: Action) -> int:
        return self._batches[action.batch].rows(action.forward_pass)

    # A class attribute: bound methods would be reference cycles, which keep the cache in memory
    # until the garbage collector runs.
    _METHODS = {
        Op.LOAD_WEIGHTS: lambda self, action: self._weights.fetch(
            action.unit, self._weight_passes(action)),
        Op.RELEASE_WEIGHTS: lambda self, action: self._weights.release(action.unit),
        Op.LOAD_CACHE: _move_cache,
        Op.STORE_CACHE: _move_cache,
        Op.LOAD_HIDDEN: lambda self, action: self._hidden.load(action.batch, self._rows(action)),
        Op.STORE_HIDDEN: lambda self, action: self._hidden.store(action.batch, self._rows(action)),
        Op.RECEIVE_HIDDEN: lambda self, action: self._exchange.receive_hidden(
            action.batch, self._rows(action)),
        Op.SEND_HIDDEN: _send_hidden,
        Op.RECEIVE_TOKENS: _receive_tokens,
        Op.TAKE_TOKENS: lambda self, action: self._take_tokens(action.batch, action.forward_pass),
        Op.SEND_TOKENS: _send_tokens,
        Op.ATTEND: _attend,
        Op.COMPUTE: _compute,
    }


def _no_ops(weights: WeightStore, workspace: Workspace) -> frozenset[Op]:
    """Return the ops that are no-ops because the data is resident."""
    ops: set[Op] = set()
    if all(map(weights.is_resident, range(len(weights.units)))):
        ops |= {Op.LOAD_WEIGHTS, Op.RELEASE_WEIGHTS}
    if all(cache.is_resident for cache in workspace.caches):
        ops |= {Op.LOAD_CACHE, Op.STORE_CACHE}
    if workspace.hidden.is_resident:
        ops |= {Op.LOAD_HIDDEN, Op.STORE_HIDDEN}
    return frozenset(ops)
