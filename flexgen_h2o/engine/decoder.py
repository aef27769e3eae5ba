"""Compute of the units: embedding, decoder layers and logits, in prefill and decode."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from flexgen_h2o.cache.recurrent_state import RecurrentStates, Rule
from flexgen_h2o.cache.token_attention import PendingAttention
from flexgen_h2o.config.limits import CHUNK_ROWS, DRAFT_CHUNK, LOGIT_ROWS
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.engine.blocks import GPUBatch, RowChunk
from flexgen_h2o.engine.captured_step import CapturedLayers
from flexgen_h2o.engine.experts import ROUTING, ExpertLayers
from flexgen_h2o.engine.schedule import Action, num_units
from flexgen_h2o.engine.weight_files import Weight, attention_sinks
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import BlockCache, Workspace
from flexgen_h2o.h2o.batch_layout import PromptSpan
from flexgen_h2o.kernels import ops
from flexgen_h2o.models import family
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.rope import RopeTables, all_tables
from flexgen_h2o.storage.transfer import Transfers

TRIAL_STEPS = 4
"""Decode steps with prefetch, and as many without, that the autotune compares."""


class PrefetchAutotune:
    """Measures decode steps with and without speculative prefetch, and keeps the faster one.

    A prefetch costs a matmul, a selection, and reads of tokens that are then not used; it saves
    waiting for reads. Whether it pays depends on the model, the disk and the processor. The
    generated tokens do not depend on it. The first step fills the hot set and is not counted.

    Attributes
    ----------
    enabled : bool
        Whether the current step prefetches.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._seconds: list[float] = []

    def record(self, seconds: float) -> None:
        """Add the time of a step, and decide about the next one."""
        if len(self._seconds) > 2 * TRIAL_STEPS:
            return
        self._seconds.append(seconds)
        self.enabled = len(self._seconds) % 2 == 0
        if len(self._seconds) > 2 * TRIAL_STEPS:
            without, prefetched = self._seconds[1::2], self._seconds[2::2]
            self.enabled = statistics.median(prefetched) < statistics.median(without)


class DecoderLayers:
    """Computes embedding, decoder layers and head for the batches of a block, one unit per call.

    Parameters
    ----------
    weights : WeightStore
        Loaded. The executor fetches the weights of a unit before its compute.
    workspace : Workspace
        Memory of the block. The executor has called its cache's `begin` or `resume`.
    policy : Policy
        `overlap` and `sep_layer` are used.
    stage : Stage
        Layers of this rank.
    experts : ExpertLayers or None
        The experts of a mixture; None for a dense model. A mixture needs `sep_layer`, and may
        have layers without experts.

    Attributes
    ----------
    units : range
        Numbers of this rank's units.
    head_unit : int
        Number of the head's unit.
    chunk_rows : int
        The most rows of prompts that are computed together.
    prefetch : PrefetchAutotune
    """

    def __init__(self, config: ModelConfig, weights: WeightStore, workspace: Workspace, *,
                 policy: Policy, transfers: Transfers, stage: Stage,
                 experts: ExpertLayers | None):
        self._config = config
        self._family = family(config)
        self._weights = weights
        self._cache = workspace.cache
        self._states = workspace.states
        first, last = stage.first, stage.last
        self._recurrent = [config.is_recurrent(layer) for layer in range(first, last)]
        self._cache_layers = [self._recurrent[:layer].count(recurrent)
                              for layer, recurrent in enumerate(self._recurrent)]
        """Number of each of this rank's layers among the layers of its kind."""
        self._hidden = workspace.hidden
        self._operations = workspace.operations
        self._transfers = transfers
        self._dtype = workspace.dtype
        self._overlap = policy.overlap
        self.prefetch = PrefetchAutotune()
        self._sep_layer = policy.sep_layer
        self._stage = stage
        self.units = stage.units(policy.sep_layer)
        self.head_unit = num_units(config.num_layers, policy.sep_layer) - 1
        self._experts = experts
        self._captured = CapturedLayers(config, weights, workspace, policy=policy,
                                        device=transfers.device.torch_device)
        self._rope: dict[int, tuple[RopeTables, ...]] = {}
        self._batches: Sequence[GPUBatch] = ()
        self._pending_attention: dict[int, PendingAttention] = {}
        self.chunk_rows = CHUNK_ROWS[transfers.device.torch_device.type]

    def begin(self, batches: Sequence[GPUBatch], groups: int) -> None:
        """Begin a block. A pipeline computes its batches in `groups` groups; one rank has one."""
        self._batches = batches
        self._pending_attention.clear()
        self.prefetch = PrefetchAutotune()
        if self._experts is not None:
            self._experts.begin(batches, groups)

    def set_positions(self, action: Action, positions: torch.Tensor) -> None:
        """Prepare a batch's rows: RoPE tables, and inputs and rollbacks of replayed calls.

        `positions` is int64 [rows], on the host.
        """
        batch = self._batches[action.batch]
        rope_lengths = batch.rope_lengths(action.forward_pass)
        lengths = None if rope_lengths is None else torch.tensor(rope_lengths)
        if not (batch.layout.in_prefill(action.forward_pass) or batch.drafts):
            self._captured.prepare_replay(
                action.batch, positions, lengths, batch.token(action.forward_pass))
            if self._captured.complete:
                return
        device = self._transfers.device.torch_device
        self._rope[action.batch] = all_tables(
            self._config.ropes, positions.to(device), ops.table_dtype(device, self._dtype),
            None if lengths is None else lengths.to(device))

    def embed(self, action: Action) -> None:
        """Write the embeddings of a batch's tokens to its hidden states, and set its positions."""
        batch = self._batches[action.batch]
        weights = self._weights.get(action.unit)
        ids, positions = (torch.tensor(values) for values in batch.inputs(action.forward_pass))
        x = self._hidden.get(action.batch, len(ids), fresh=True)
        for rows in _row_chunks(len(ids), self.chunk_rows):
            x[rows] = self._family.embed(self._config, weights, self._weights.lookup,
                                         ids[rows], positions[rows])
        self.set_positions(action, positions)

    def logits(self, action: Action, selected: torch.Tensor
               ) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute the logits of selected rows of a batch (int64, on the host), chunk by chunk.

        Yield the index of the chunk's first row among `selected`, and logits [chunk_rows, vocab].
        """
        batch, weights, x = self._operands(action)
        if batch.has_shared_rows or len(selected) < len(x):
            x = x[selected.to(self._transfers.device.torch_device)]
        for rows in _row_chunks(len(x), LOGIT_ROWS):
            yield rows.start, self._family.head(self._config, weights, x[rows])

    def final_hidden(self, action: Action) -> Iterator[torch.Tensor]:
        """Yield a batch's hidden states [rows, hidden] after the final norm, in chunks of rows."""
        _, weights, x = self._operands(action)
        for rows in _row_chunks(len(x), DRAFT_CHUNK):
            yield self._family.final_hidden(self._config, weights, x[rows])

    def _operands(self, action: Action) -> tuple[GPUBatch, Mapping[str, Weight], torch.Tensor]:
        """Return the batch of a unit, its weights, and its hidden states [rows, hidden]."""
        batch = self._batches[action.batch]
        return batch, self._weights.get(action.unit), self._hidden.get(
            action.batch, batch.rows(action.forward_pass))

    def _layer(self, action: Action) -> int:
        """Return the index of a unit's decoder layer among this rank's layers."""
        return (action.unit - 1) // (2 if self._sep_layer else 1) - self._stage.first

    def cache_of(self, action: Action) -> tuple[BlockCache | RecurrentStates, int]:
        """Return the cache of a unit's decoder layer, and the layer's index in it."""
        layer = self._layer(action)
        cache = self._states if self._recurrent[layer] else self._cache
        assert cache is not None
        return cache, self._cache_layers[layer]

    def _cache_layer(self, action: Action) -> int:
        """Return the index of a unit's attention layer in this rank's KV cache."""
        return self._cache_layers[self._layer(action)]

    def _has_experts(self, action: Action) -> bool:
        """Return True if the decoder layer of a unit has experts."""
        return self._experts is not None and self._config.has_experts(
            self._stage.first + self._layer(action))

    def _rope_tables(self, action: Action) -> RopeTables | None:
        """Return the RoPE tables of a unit's rows; None for a model without RoPE."""
        tables = self._rope[action.batch]
        return tables[self._rope_number(action)] if tables else None

    def _rope_number(self, action: Action) -> int:
        return self._config.rope_number(self._stage.first + self._layer(action))

    def attend(self, action: Action) -> None:
        """Start the attention of a decode step ahead of its `compute`."""
        self._pending_attention[action.batch] = self._start_attention(action)

    def compute(self, action: Action) -> None:
        """Compute a decoder layer, or its attention or MLP."""
        batch = self._batches[action.batch]
        if self._sep_layer and action.unit % 2 == 0:
            self._mlp(action)
        elif self._recurrent[self._layer(action)]:
            self._recurrent_layer(action)
        elif batch.layout.in_prefill(action.forward_pass):
            self._prefill_layer(action)
        elif batch.drafts:
            self._verify_layer(action)
        elif action.unit in self._captured.units:
            self._captured.run(action, cache_layer=self._cache_layer(action),
                               rope_number=self._rope_number(action), rows=len(batch),
                               attend=self._attend_between_captures)
            if self._has_experts(action):
                self._route(action, *self._operands(action)[1:])
        else:
            self._decode_layer(action)

    def _prefill_layer(self, action: Action) -> None:
        batch, weights, x = self._operands(action)
        rope = self._rope_tables(action)
        attend = self._attend_shared_prompts if batch.has_shared_rows else self._attend_prompts
        for chunk in batch.chunks(action.forward_pass, self.chunk_rows):
            rows = slice(chunk.row, chunk.end)
            tables = None if rope is None else tuple(table[rows] for table in rope)
            if batch.hidden is not None:
                self._family.join_hidden(self._config, weights, x[rows], batch.hidden[rows],
                                         self._operations)
            qkv = self._family.attention_inputs(self._config, weights, x[rows], self._operations)
            sinks = attention_sinks(weights)
            attended = attend(action, chunk.spans, qkv, tables, sinks)
            self._finish_layer(action, weights, x[rows], attended, chunk.row,
                               list(chunk.prompt_starts(batch.layout.past)))

    def _recurrent_layer(self, action: Action) -> None:
        """Compute a recurrent layer in a prefill or in a decode step."""
        batch, weights, x = self._operands(action)
        forward_pass = action.forward_pass
        if batch.layout.in_prefill(forward_pass):
            for chunk in batch.chunks(forward_pass, self.chunk_rows):
                self._advance_rows(action, weights, x[chunk.row : chunk.end], chunk,
                                   list(chunk.prompt_starts(batch.layout.past)))
            return
        # A finished sequence repeats its newest token. Nothing reads its state any more.
        token = batch.token(forward_pass)
        lengths = [batch.layout.tokens(sequence, token) for sequence in range(len(batch))]
        spans = tuple(PromptSpan(sequence, length - 1, length)
                      for sequence, length in enumerate(lengths))
        self._advance_rows(action, weights, x, RowChunk(spans, 0, len(batch)))

    def _advance_rows(self, action: Action, weights: Mapping[str, Weight], x: torch.Tensor,
                      chunk: RowChunk, prompt_starts: Sequence[slice] | None = None) -> None:
        """Compute a recurrent layer for rows x [rows, hidden], and advance the states.

        Other arguments are as in `_finish_layer`.
        """
        states, layer = self._states, self._cache_layer(action)
        batch = self._batches[action.batch]
        assert states is not None

        def advance(rule: Rule, *rows: torch.Tensor) -> torch.Tensor:
            advance_spans = partial(states.advance, layer, action.batch, rule)
            if prompt_starts is None or not batch.has_shared_rows:
                return advance_spans(*rows, spans=chunk.spans)
            outputs, lengths = [], [len(span) for span in chunk.spans]
            for span, *parts in zip(chunk.spans, *(part.split(lengths) for part in rows),
                                    strict=True):
                outputs.append(advance_spans(*parts, spans=[span]))
                states.repeat(layer, action.batch, span.sequence, *batch.sharers(span))
            return torch.cat(outputs)

        self._family.recurrent(self._config, weights, x, advance, self._operations)
        self._finish_residual(action, weights, x, chunk.row, prompt_starts)

    def _attend_prompts(self, action: Action, spans: Sequence[PromptSpan], qkv,
                        rope, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend within prompts, and cache them; q, k and v are [rows, heads, head_dim]."""
        return self._cache.attend_prompt(self._cache_layer(action), action.batch, *qkv, spans=spans,
                                         rope=rope, sinks=sinks)

    def _attend_shared_prompts(self, action: Action, spans: Sequence[PromptSpan], qkv,
                               rope, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend within prompts that several sequences share, and copy the cache to each sequence.

        A span may be a part of a prompt: the cache is copied when the whole prompt is computed.
        """
        outputs, first = [], 0
        batch = self._batches[action.batch]
        for span in spans:  # one by one: the cache takes only adjacent sequences
            rows = slice(first, first + len(span))
            first = rows.stop
            outputs.append(self._attend_prompts(
                action, [span], [x[rows] for x in qkv],
                None if rope is None else [table[rows] for table in rope], sinks))
            if span.end == batch.layout.lengths[span.sequence]:
                self._cache.repeat(self._cache_layer(action), action.batch,
                                   *batch.duplicates[span.sequence])
        return torch.cat(outputs)

    def _decode_layer(self, action: Action) -> None:
        pending = self._pending_attention.pop(action.batch, None) or self._start_attention(action)
        _, weights, x = self._operands(action)
        self._finish_layer(action, weights, x, self._finish_attention(action, x, pending))

    def _verify_layer(self, action: Action) -> None:
        """Compute the rows of a new token and its drafts; attention takes them one by one."""
        batch, weights, x = self._operands(action)
        qkv = self._family.attention_inputs(self._config, weights, x, self._operations)
        tables, token = self._rope_tables(action), batch.token(action.forward_pass)
        attended = []
        for row in range(len(x)):  # each evicts before the next one attends
            q, k, v = (heads[row : row + 1] for heads in qkv)
            rope = None if tables is None else (tables[0][row : row + 1], tables[1][row : row + 1])
            attended.append(self._cache.attend_token(
                self._cache_layer(action), action.batch, q, k, v, token=token + row, rope=rope,
                sinks=attention_sinks(weights), drafted=row > 0).result(self._transfers))
        self._finish_layer(action, weights, x, torch.cat(attended))

    def _attend_between_captures(self, action: Action, x: torch.Tensor, *qkv: torch.Tensor
                                 ) -> torch.Tensor:
        """Attend between the two captured halves of a layer: see `CapturedLayers.run`."""
        return self._finish_attention(action, x, self._start_attention(action, *qkv))

    def _finish_attention(self, action: Action, x: torch.Tensor, pending: PendingAttention
                          ) -> torch.Tensor:
        """Wait for attention, return its output, and prefetch for the next layer.

        x [rows, hidden] is the layer's input.
        """
        attended = pending.result(self._transfers)
        if self._overlap and self._cache.supports_prefetch and self.prefetch.enabled:
            self._prefetch(action, x)
        return attended

    def _prefetch(self, action: Action, x: torch.Tensor) -> None:
        """Prefetch the tokens that the next layer is likely to recall.

        Its queries are predicted from this layer's input x [rows, hidden] (InfiniGen, arXiv
        2406.19707). Without resident weights of the next layer it is a no-op.
        """
        following = action._replace(unit=action.unit + (2 if self._sep_layer else 1))
        if (following.unit not in self.units or following.unit >= self.head_unit
                or self._recurrent[self._layer(following)]
                or not self._weights.is_resident(following.unit)):
            return
        weights = self._weights.get(following.unit)
        q, k, _ = self._family.attention_inputs(self._config, weights, x, self._operations)
        self._cache.prefetch_token(
            self._cache_layer(following), action.batch, q, k, rope=self._rope_tables(following),
            token=self._batches[action.batch].token(action.forward_pass),
            sinks=attention_sinks(weights))

    def _start_attention(self, action: Action, *qkv: torch.Tensor) -> PendingAttention:
        """Start the attention of new tokens; compute their queries, keys and values if not given.

        The queries, keys and values are overwritten.
        """
        batch, weights, x = self._operands(action)
        qkv = qkv or self._family.attention_inputs(self._config, weights, x, self._operations)
        return self._cache.attend_token(
            self._cache_layer(action), action.batch, *qkv, rope=self._rope_tables(action),
            token=batch.token(action.forward_pass), sinks=attention_sinks(weights))

    def _finish_layer(self, action: Action, weights: Mapping[str, Weight],
                      x: torch.Tensor, attended: torch.Tensor, row: int = 0,
                      prompt_starts: Sequence[slice] | None = None) -> None:
        """Compute the part of a unit after attention; x [rows, hidden] is updated.

        `row` is the index of x's first row in the batch. `prompt_starts` are the rows of x with the
        first chunk of a prompt.
        """
        self._family.attention_output(self._config, weights, x, attended, self._operations)
        self._finish_residual(action, weights, x, row, prompt_starts)

    def _finish_residual(self, action: Action, weights: Mapping[str, Weight], x: torch.Tensor,
                         row: int, prompt_starts: Sequence[slice] | None) -> None:
        """Compute the part of a unit after attention's residual; see `_finish_layer`."""
        if self._has_experts(action):
            self._route(action, weights, x, row, prompt_starts)
        elif not (self._sep_layer or self._config.parallel_residual):
            self._family.mlp(self._config, weights, x, self._operations)

    def _route(self, action: Action, weights: Mapping[str, Weight], x: torch.Tensor, row: int = 0,
               prompt_starts: Sequence[slice] | None = None) -> None:
        """Compute the router for rows x [rows, hidden]; other arguments as in `_finish_layer`."""
        self._experts.route(self._layer(action), weights, x, batch=action.batch,
                            forward_pass=action.forward_pass, row=row, prompt_starts=prompt_starts,
                            following=self._weights.resident_weights(
                                action.unit + 2, *weights.keys() & ROUTING))

    def _mlp(self, action: Action) -> None:
        _, weights, x = self._operands(action)
        if self._has_experts(action):
            self._experts.add_(weights, x, batch=action.batch, forward_pass=action.forward_pass)
        else:
            self._family.mlp(self._config, weights, x, self._operations)


def _row_chunks(rows: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, rows)) for start in range(0, rows, most))
