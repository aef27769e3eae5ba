"""Compute of the layer steps: embedding, attention and MLP, logits; in prefill and decode."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from flexgen_h2o.cache.decode_attention import PendingAttention
from flexgen_h2o.cache.recurrent_state import RecurrentStates, Rule
from flexgen_h2o.config.limits import CHUNK_ROWS, LOGIT_ROWS
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.engine.batch import Batch, RowChunk
from flexgen_h2o.engine.captured_step import CapturedLayers
from flexgen_h2o.engine.experts import ROUTING, ExpertLayers
from flexgen_h2o.engine.schedule import LayerStep, num_layer_steps
from flexgen_h2o.engine.weight_files import Weight
from flexgen_h2o.engine.weights import WeightStore
from flexgen_h2o.engine.workspace import BlockCache, Workspace
from flexgen_h2o.h2o.batch_layout import PromptChunk
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
    """Computes embedding, decoder layers and head for the batches of a block, one step per call.

    Parameters
    ----------
    config : ModelConfig
    weights : WeightStore
        Loaded. The executor fetches a layer's weights before its step is computed.
    workspace : Workspace
        Memory of the block. The executor has called its cache's `begin` or `resume`.
    policy : Policy
        `overlap` and `sep_layer` are used.
    transfers : Transfers
    stage : Stage
        Layers of this rank.
    experts : ExpertLayers or None
        The experts of a mixture; None for a dense model. A mixture needs `sep_layer`, and may
        have layers without experts.

    Attributes
    ----------
    layer_steps : range
        Numbers of this rank's layer steps (see `LayerStep`).
    head_step : int
        Number of the layer step of the head.
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
        self.layer_steps = stage.layer_steps(policy.sep_layer)
        self.head_step = num_layer_steps(config.num_layers, policy.sep_layer) - 1
        self._experts = experts
        self._captured = CapturedLayers(
            config, weights, workspace, policy=policy, device=transfers.device.torch,
            dtype=workspace.dtype)
        self._rope: dict[int, tuple[RopeTables, ...]] = {}
        self._batches: Sequence[Batch] = ()
        self._pending_attention: dict[int, PendingAttention] = {}
        self.chunk_rows = CHUNK_ROWS[transfers.device.torch.type]

    def begin(self, batches: Sequence[Batch], groups: int) -> None:
        """Begin a block. A pipeline computes its batches in `groups` groups; one rank has one."""
        self._batches = batches
        self._pending_attention.clear()
        self.prefetch = PrefetchAutotune()
        if self._experts is not None:
            self._experts.begin(batches, groups)

    def set_positions(self, step: LayerStep, positions: torch.Tensor) -> None:
        """Prepare a batch's rows: RoPE tables, and what replayed calls read and roll back.

        `positions` is int64 [rows], on the host.
        """
        batch = self._batches[step.batch]
        rope_lengths = batch.rope_lengths(step.forward_pass)
        lengths = None if rope_lengths is None else torch.tensor(rope_lengths)
        if not (batch.batch_layout.in_prefill(step.forward_pass) or batch.drafts):
            self._captured.prepare_replay(
                step.batch, positions, lengths, batch.token(step.forward_pass))
            if self._captured.complete:
                return
        device = self._transfers.device.torch
        self._rope[step.batch] = all_tables(
            self._config.ropes, positions.to(device), ops.table_dtype(device, self._dtype),
            None if lengths is None else lengths.to(device))

    def embed(self, step: LayerStep) -> None:
        """Write the embeddings of a batch's tokens to its hidden states, and set its positions."""
        batch = self._batches[step.batch]
        weights = self._weights.get(step.layer)
        ids, positions = (torch.tensor(values) for values in batch.inputs(step.forward_pass))
        x = self._hidden.get(step.batch, len(ids), fresh=True)
        for rows in _row_chunks(len(ids), self.chunk_rows):
            x[rows] = self._family.embed(self._config, weights, self._weights.lookup,
                                         ids[rows], positions[rows])
        self.set_positions(step, positions)

    def logits(self, step: LayerStep, selected: torch.Tensor
               ) -> Iterator[tuple[int, torch.Tensor]]:
        """Compute the logits of selected rows of a batch, chunk by chunk.

        Parameters
        ----------
        selected : Tensor int64 [rows]
            On the host.

        Yields
        ------
        (int, Tensor float [chunk_rows, vocab])
            Index of the chunk's first row among `selected`, and the logits.
        """
        batch = self._batches[step.batch]
        weights = self._weights.get(step.layer)
        x = self._hidden.get(step.batch, batch.rows(step.forward_pass))
        if batch.has_shared_rows or len(selected) < len(x):
            x = x[selected.to(self._transfers.device.torch)]
        for rows in _row_chunks(len(x), LOGIT_ROWS):
            yield rows.start, self._family.head(self._config, weights, x[rows])

    def _layer(self, step: LayerStep) -> int:
        """Return the index of a layer step's decoder layer among this rank's layers."""
        return (step.layer - 1) // (2 if self._sep_layer else 1) - self._stage.first

    def cache_of(self, step: LayerStep) -> tuple[BlockCache | RecurrentStates, int]:
        """Return the cache of a layer step's decoder layer, and the layer's index in it."""
        layer = self._layer(step)
        cache = self._states if self._recurrent[layer] else self._cache
        assert cache is not None
        return cache, self._cache_layers[layer]

    def _cache_layer(self, step: LayerStep) -> int:
        """Return the index of a layer step's attention layer in this rank's KV cache."""
        return self._cache_layers[self._layer(step)]

    def _has_experts(self, step: LayerStep) -> bool:
        """Return True if the decoder layer of a layer step has experts."""
        return self._experts is not None and self._config.has_experts(
            self._stage.first + self._layer(step))

    def _rope_tables(self, step: LayerStep) -> RopeTables | None:
        """Return the RoPE tables of a layer step's rows; None for a model without RoPE."""
        tables = self._rope[step.batch]
        return tables[self._rope_number(step)] if tables else None

    def _rope_number(self, step: LayerStep) -> int:
        return self._config.rope_number(self._stage.first + self._layer(step))

    def attend(self, step: LayerStep) -> None:
        """Start the attention of a decode step ahead of its `compute`, if its layer has any."""
        if self._recurrent[self._layer(step)]:
            return
        self._pending_attention[step.batch] = self._start_attention(step)

    def compute(self, step: LayerStep) -> None:
        """Compute a layer step of a decoder layer: a whole layer, or attention or MLP."""
        batch = self._batches[step.batch]
        if self._sep_layer and step.layer % 2 == 0:
            self._mlp(step, batch)
        elif self._recurrent[self._layer(step)]:
            self._recurrent_layer(step, batch)
        elif batch.batch_layout.in_prefill(step.forward_pass):
            self._prefill_layer(step, batch)
        elif batch.drafts:
            self._verify_layer(step, batch)
        elif step.layer in self._captured.layer_steps:
            self._captured.run(step, cache_layer=self._cache_layer(step),
                               rope_number=self._rope_number(step), rows=len(batch),
                               attend=self._attend_between_captures)
            if self._has_experts(step):
                self._route(step, self._weights.get(step.layer),
                            self._hidden.get(step.batch, len(batch)))
        else:
            self._decode_layer(step, batch)

    def _prefill_layer(self, step: LayerStep, batch: Batch) -> None:
        weights = self._weights.get(step.layer)
        x = self._hidden.get(step.batch, batch.rows(step.forward_pass))
        rope = self._rope_tables(step)
        attend = self._attend_shared_prompts if batch.has_shared_rows else self._attend_prompts
        for chunk in batch.chunks(step.forward_pass, self.chunk_rows):
            rows = slice(chunk.row, chunk.end)
            tables = None if rope is None else tuple(table[rows] for table in rope)
            qkv = self._family.attention_inputs(self._config, weights, x[rows], self._operations)
            sinks: Any = weights.get("sinks")
            attended = attend(step, chunk.spans, qkv, tables, sinks)
            self._finish_layer(step, weights, x[rows], attended, chunk.row,
                               list(chunk.prompt_starts(batch.batch_layout.past)))

    def _recurrent_layer(self, step: LayerStep, batch: Batch) -> None:
        """Compute a recurrent layer in a prefill or in a decode step."""
        weights, forward_pass = self._weights.get(step.layer), step.forward_pass
        x = self._hidden.get(step.batch, batch.rows(forward_pass))
        if batch.batch_layout.in_prefill(forward_pass):
            for chunk in batch.chunks(forward_pass, self.chunk_rows):
                self._advance_rows(step, weights, x[chunk.row : chunk.end], chunk,
                                   list(chunk.prompt_starts(batch.batch_layout.past)))
            return
        # A finished sequence repeats its newest token. Nothing reads its state any more.
        token = batch.token(forward_pass)
        lengths = [batch.batch_layout.tokens(sequence, token) for sequence in range(len(batch))]
        spans = tuple(PromptChunk(sequence, length - 1, length)
                      for sequence, length in enumerate(lengths))
        self._advance_rows(step, weights, x, RowChunk(spans, 0, len(batch)))

    def _advance_rows(self, step: LayerStep, weights: Mapping[str, Weight], x: torch.Tensor,
                      chunk: RowChunk, prompt_starts: Sequence[slice] | None = None) -> None:
        """Compute a recurrent layer for rows x [rows, hidden], and advance the states.

        Other arguments are as in `_finish_layer`.
        """
        states, layer = self._states, self._cache_layer(step)
        batch = self._batches[step.batch]
        assert states is not None

        def advance(rule: Rule, *rows: torch.Tensor) -> torch.Tensor:
            advance_spans = partial(states.advance, layer, step.batch, rule)
            if prompt_starts is None or not batch.has_shared_rows:
                return advance_spans(*rows, spans=chunk.spans)
            outputs, lengths = [], [len(span) for span in chunk.spans]
            for span, *parts in zip(chunk.spans, *(part.split(lengths) for part in rows),
                                    strict=True):
                outputs.append(advance_spans(*parts, spans=[span]))
                states.repeat(layer, step.batch, span.sequence, *batch.sharers(span))
            return torch.cat(outputs)

        self._family.recurrent(self._config, weights, x, advance, self._operations)
        self._finish_residual(step, weights, x, chunk.row, prompt_starts)

    def _attend_prompts(self, step: LayerStep, spans: Sequence[PromptChunk], qkv,
                        rope, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend within prompts, and cache them; q, k and v are [rows, heads, head_dim]."""
        return self._cache.attend_prompt(self._cache_layer(step), step.batch, *qkv, spans=spans,
                                         rope=rope, sinks=sinks)

    def _attend_shared_prompts(self, step: LayerStep, spans: Sequence[PromptChunk], qkv,
                     rope, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend within prompts that several sequences share, and copy the cache to each sequence.

        A span may be a part of a prompt: the cache is copied when the whole prompt is computed.
        """
        outputs, first = [], 0
        batch = self._batches[step.batch]
        for span in spans:  # one by one: the cache takes only adjacent sequences
            rows = slice(first, first + len(span))
            first = rows.stop
            outputs.append(self._attend_prompts(
                step, [span], [x[rows] for x in qkv],
                None if rope is None else [table[rows] for table in rope], sinks))
            if span.end == batch.batch_layout.lengths[span.sequence]:
                self._cache.repeat(self._cache_layer(step), step.batch,
                                   *batch.duplicates[span.sequence])
        return torch.cat(outputs)

    def _decode_layer(self, step: LayerStep, batch: Batch) -> None:
        pending = self._pending_attention.pop(step.batch, None) or self._start_attention(step)
        weights = self._weights.get(step.layer)
        x = self._hidden.get(step.batch, batch.rows(step.forward_pass))
        self._finish_layer(step, weights, x, self._finish_attention(step, x, pending))

    def _verify_layer(self, step: LayerStep, batch: Batch) -> None:
        """Compute the rows of a new token and its drafts; attention takes them one by one."""
        weights = self._weights.get(step.layer)
        x = self._hidden.get(step.batch, batch.rows(step.forward_pass))
        qkv = self._family.attention_inputs(self._config, weights, x, self._operations)
        tables, token = self._rope_tables(step), batch.token(step.forward_pass)
        attended = []
        for row in range(len(x)):  # each evicts before the next one attends
            q, k, v = (each[row : row + 1] for each in qkv)
            rope = None if tables is None else (tables[0][row : row + 1], tables[1][row : row + 1])
            attended.append(self._cache.attend_token(
                self._cache_layer(step), step.batch, q, k, v, token=token + row, rope=rope,
                sinks=weights.get("sinks"), drafted=row > 0).result(self._transfers))
        self._finish_layer(step, weights, x, torch.cat(attended))

    def _attend_between_captures(self, step: LayerStep, x: torch.Tensor, *qkv: torch.Tensor
                                 ) -> torch.Tensor:
        """Attend between the two captured halves of a layer: see `CapturedLayers.run`."""
        return self._finish_attention(step, x, self._start_attention_with(step, *qkv))

    def _finish_attention(self, step: LayerStep, x: torch.Tensor, pending: PendingAttention
                          ) -> torch.Tensor:
        """Wait for attention, return its output, and prefetch for the next layer.

        x [rows, hidden] is the layer's input.
        """
        attended = pending.result(self._transfers)
        if self._overlap and self._cache.supports_prefetch and self.prefetch.enabled:
            self._prefetch(step, self._batches[step.batch], x)
        return attended

    def _prefetch(self, step: LayerStep, batch: Batch, x: torch.Tensor) -> None:
        """Prefetch the tokens that the next layer is likely to recall.

        Its queries are predicted from this layer's input x [rows, hidden] (InfiniGen, arXiv
        2406.19707). Without resident weights of the next layer it is a no-op.
        """
        following = step._replace(layer=step.layer + (2 if self._sep_layer else 1))
        if (following.layer not in self.layer_steps or following.layer >= self.head_step
                or self._recurrent[self._layer(following)]
                or not self._weights.is_resident(following.layer)):
            return
        weights = self._weights.get(following.layer)
        q, k, _ = self._family.attention_inputs(self._config, weights, x, self._operations)
        self._cache.prefetch_token(
            self._cache_layer(following), step.batch, q, k, rope=self._rope_tables(following),
            token=batch.token(step.forward_pass), sinks=weights.get("sinks"))

    def _start_attention(self, step: LayerStep) -> PendingAttention:
        """Compute queries, keys and values of new tokens, and start their attention."""
        batch = self._batches[step.batch]
        weights = self._weights.get(step.layer)
        x = self._hidden.get(step.batch, batch.rows(step.forward_pass))
        return self._start_attention_with(
            step, *self._family.attention_inputs(self._config, weights, x, self._operations))

    def _start_attention_with(self, step: LayerStep, *qkv: torch.Tensor) -> PendingAttention:
        """Start the attention of given queries, keys and values, which are overwritten."""
        return self._cache.attend_token(
            self._cache_layer(step), step.batch, *qkv, rope=self._rope_tables(step),
            token=self._batches[step.batch].token(step.forward_pass),
            sinks=self._weights.get(step.layer).get("sinks"))

    def _finish_layer(self, step: LayerStep, weights: Mapping[str, Weight],
                      x: torch.Tensor, attended: torch.Tensor, row: int = 0,
                      prompt_starts: Sequence[slice] | None = None) -> None:
        """Compute the part of a layer step after attention; x [rows, hidden] is updated.

        `row` is the index of x's first row in the batch. `prompt_starts` are the rows of x with the
        first chunk of a prompt.
        """
        self._family.attention_output(self._config, weights, x, attended, self._operations)
        self._finish_residual(step, weights, x, row, prompt_starts)

    def _finish_residual(self, step: LayerStep, weights: Mapping[str, Weight], x: torch.Tensor,
                         row: int, prompt_starts: Sequence[slice] | None) -> None:
        """Compute the part of a layer step after attention's residual; see `_finish_layer`."""
        if self._has_experts(step):
            self._route(step, weights, x, row, prompt_starts)
        elif not (self._sep_layer or self._config.parallel_residual):
            self._family.mlp(self._config, weights, x, self._operations)

    def _route(self, step: LayerStep, weights: Mapping[str, Weight], x: torch.Tensor, row: int = 0,
               prompt_starts: Sequence[slice] | None = None) -> None:
        """Compute the router for rows x [rows, hidden]; other arguments as in `_finish_layer`."""
        self._experts.route(self._layer(step), weights, x, batch=step.batch,
                            forward_pass=step.forward_pass, row=row, prompt_starts=prompt_starts,
                            following=self._weights.resident_weights(
                                step.layer + 2, *weights.keys() & ROUTING))

    def _mlp(self, step: LayerStep, batch: Batch) -> None:
        x = self._hidden.get(step.batch, batch.rows(step.forward_pass))
        weights = self._weights.get(step.layer)
        if self._has_experts(step):
            self._experts.add_(weights, x, batch=step.batch, forward_pass=step.forward_pass)
        else:
            self._family.mlp(self._config, weights, x, self._operations)


def _row_chunks(rows: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, rows)) for start in range(0, rows, most))
