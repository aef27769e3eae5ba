"""The mixture of experts of a block: routing, expert matmuls, and the weighted sums of outputs.

The tokens of all GPU batches are routed first. Then each chosen expert computes once, for all of
its tokens together, in the order in which experts are loaded. Outputs are summed in a wider dtype,
so that this order hardly affects the result. For batch invariance they are kept instead, and summed
in the order of the router's choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flexgen_h2o.config.layers import ExpertKey
from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.config.parallel import split_batches
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine.blocks import GPUBatch
from flexgen_h2o.engine.expert_slots import ExpertSlots, put
from flexgen_h2o.engine.weight_files import Weight
from flexgen_h2o.kernels import dispatch
from flexgen_h2o.kernels.arguments import ShardedMatrix
from flexgen_h2o.kernels.cpu.experts import ExpertTable, experts, max_expert_rows
from flexgen_h2o.models import family
from flexgen_h2o.models.decoder import row_blocks
from flexgen_h2o.models.layers import Operations, activation
from flexgen_h2o.models.mixture import MixtureDecoder
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.storage.transfer import D2H, EXPERTS, H2D, Handle, TransferQueue, Transfers

PREFETCH_ROWS = 64
"""Prefetch experts only for blocks of at most this many rows: more rows choose nearly all."""

ROUTING = frozenset({"router_norm", "router_norm_bias", "router", "router_bias",
                     "router_correction", "router_scale", "router_expert_scale"})
"""Local names of the weights that route rows to experts."""


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which outputs of experts are summed."""
    return torch.float64 if dtype == torch.float32 else torch.float32


class ExpertMatmuls:
    """Computes experts of one layer on one device.

    Experts with few rows are computed by one call of the C++ library where it supports them, the
    others one by one, and so are all for batch invariance.

    Parameters
    ----------
    options : WeightOptions
        Formats of the experts' matrices.
    """

    def __init__(self, config: ModelConfig, operations: Operations, options: WeightOptions):
        self._config, self._operations, self._options = config, operations, options
        self._family = family(config)
        mixture = config.experts
        self._activation = (mixture.gate_slope, mixture.gate_limit) if mixture.gate_limit else (
            activation(config.activation))
        self._group_table = ExpertTable(mixture.count)

    def begin(self, x: Tensor, ids: Tensor, routing_weights: Tensor, sums: Tensor,
              counts: Sequence[int]) -> None:
        """Begin a layer.

        Parameters
        ----------
        x : Tensor [rows, hidden]
            Normalized inputs.
        ids : int64 Tensor [rows, experts per token]
        routing_weights : float32 Tensor [rows, experts per token]
            Weight of each expert's output.
        sums : Tensor [rows, hidden] of `sums_dtype`
            The sums that `add` updates. For batch invariance, [rows, experts per token, hidden] of
            x's dtype: `add` writes each output to its place, without its weight.
        counts : sequence of int
            Rows of each expert.
        """
        if self._config.experts.scale_inputs:
            x = torch.mul(x, routing_weights, out=self._operations.get(
                "scaled inputs", tuple(x.shape), x.dtype))
            routing_weights = torch.ones_like(routing_weights)
        self._x, self._ids, self._routing_weights, self._sums = x, ids, routing_weights, sums
        self._counts = counts
        self._picks: Sequence[Tensor] | None = None
        fusible = (isinstance(self._activation, tuple)
                   or type(self._family).expert is MixtureDecoder.expert)
        self._max_fused_rows = 0
        if (fusible and x.is_cpu and x.dtype == torch.bfloat16
                and not dispatch.is_batch_invariant()):
            self._max_fused_rows = min(max_expert_rows(bits, self._options.activation_bits)
                                       for bits in self._options.shares)

    def add(self, group: Mapping[int, Mapping[str, Weight]],
            table: Callable[[], ExpertTable] | None = None) -> None:
        """Add the weighted outputs of some experts to the sums.

        Parameters
        ----------
        group : mapping of int to mapping of str to Weight
            The weights of each expert by number.
        table : callable, optional
            Returns a table with all of these experts; no row chose any other expert in it.
        """
        sharded = isinstance(next(iter(group.values()))["down"], ShardedMatrix)
        max_rows = 0 if sharded else self._max_fused_rows
        fused = {number: w for number, w in group.items() if self._counts[number] <= max_rows}
        if fused:
            fused_table = self._group_table if table is None else table()
            if table is None:
                for number, w in fused.items():
                    put(fused_table, number, w)
            experts(self._x, self._ids, self._routing_weights, fused_table, self._sums,
                    function=self._activation, max_rows=self._max_fused_rows)
            if table is None:
                for number in fused:
                    fused_table.drop(number)
        for number in group.keys() - fused.keys():
            self._add_one(number, group[number])

    def _add_one(self, number: int, w: Mapping[str, Weight]) -> None:
        if self._picks is None:
            self._picks = self._ids.flatten().argsort(stable=True).split(list(self._counts))
        routing_weights = self._routing_weights.flatten()
        for picks in self._picks[number].split(ROW_BLOCK):
            rows = picks // self._ids.shape[1]
            x = self._operations.get("gathered", (len(rows), self._x.shape[1]), self._x.dtype)
            torch.index_select(self._x, 0, rows, out=x)
            out = self._family.expert(self._config, w, x, self._operations)
            if dispatch.is_batch_invariant():
                self._sums.flatten(0, 1).index_copy_(0, picks, out)
                continue
            out = out.to(self._sums.dtype).mul_(routing_weights[picks, None])
            self._sums.index_add_(0, rows, out)


class HostExperts:
    """Experts that are computed in host memory, beside compute on a GPU, one job at a time."""

    def __init__(self, config: ModelConfig, slots: ExpertSlots, transfers: Transfers):
        self._slots, self._transfers, self._count = slots, transfers, config.experts.count
        self._matmuls = ExpertMatmuls(config, Operations("cpu"), slots.options)

    def start(self, keys: Sequence[ExpertKey], x: Tensor, ids: Tensor, routing_weights: Tensor
              ) -> tuple[Tensor, Tensor, Handle]:
        """Start the computation of chosen experts (layer, number) of one layer, in host memory.

        x [rows, hidden], ids and routing_weights [rows, experts per token] are on the GPU, and so
        are the results: the n rows that chose any of these experts, int64, and their weighted sums
        [n, hidden] of `sums_dtype`, valid once the handle is done.
        """
        numbers = torch.tensor([number for _, number in keys], device=ids.device)
        rows = torch.isin(ids, numbers).any(1).nonzero().flatten()
        inputs = x[rows]
        host_ids, host_weights = ids[rows].cpu(), routing_weights[rows].cpu()
        sums = torch.empty(inputs.shape, dtype=sums_dtype(x.dtype), device=x.device)

        def job(queue: TransferQueue) -> None:
            host_inputs, host_sums = queue.host_like(inputs, sums)
            queue.copy(host_inputs, inputs, D2H)
            queue.flush()
            counts = torch.bincount(host_ids.flatten(), minlength=self._count)
            with self._transfers.trace.span("experts", "cpu experts"):
                self._matmuls.begin(host_inputs, host_ids, host_weights, host_sums.zero_(),
                                    counts.tolist())
                self._matmuls.add(self._slots.host_weights(keys),
                                  partial(self._slots.host_table, keys[0][0]))
            queue.copy(sums, host_sums, H2D)

        mark = self._transfers.device.record_event()
        return rows, sums, self._transfers.submit(EXPERTS, job, after=(mark,))


class ExpertLayers:
    """The experts of a block's decoder layers.

    Parameters
    ----------
    operations : Operations
        Its buffers hold the inputs and sums of a block.
    """

    def __init__(self, config: ModelConfig, slots: ExpertSlots, operations: Operations,
                 transfers: Transfers):
        self._config, self._slots, self._operations = config, slots, operations
        self._family = family(config)
        self._layer = -1
        self._computed = True
        self._inputs: Tensor
        self._ids: Tensor
        self._routing_weights: Tensor
        self._counts: list[int]
        self._routed = slice(0, 0)  # the rows that `route` was last called with
        self._predicted: Counter[int] = Counter()
        self._matmuls = ExpertMatmuls(config, operations, slots.options)
        self._transfers = transfers
        self._host = HostExperts(config, slots, transfers)
        slots.reset()

    def begin(self, batches: Sequence[GPUBatch], groups: int) -> None:
        """Begin a block whose batches go through the layers in a number of groups."""
        self._batches = batches
        self._groups = split_batches(len(batches), groups)

    def _rows(self, batch: int, forward_pass: int) -> tuple[int, int]:
        """Return the first row of a batch among the rows of its group, and the group's rows."""
        group = next(group for group in self._groups if batch in group)
        rows = [0 if self._batches[number].finished else self._batches[number].rows(forward_pass)
                for number in group]
        return sum(rows[: batch - group.start]), sum(rows)

    def route(self, layer: int, w: Mapping[str, Weight], x: Tensor, *, batch: int,
              forward_pass: int, row: int = 0, prompt_starts: Sequence[slice] | None = None,
              following: Mapping[str, Weight] | None = None) -> None:
        """Choose the experts of some rows of a batch and request them. Rows come in order.

        Parameters
        ----------
        layer : int
            Decoder layer.
        w : mapping of str to Weight
            Weights of the layer: the norm before the experts, and the router.
        x : Tensor [rows, hidden]
            Hidden states after attention.
        row : int
            Number of the first row in the batch.
        prompt_starts : sequence of slice, optional
            The rows that begin each prompt; None if all rows are of new tokens.
        following : mapping of str to Weight, optional
            Norm and router of the next layer, to predict its experts.
        """
        before, rows = self._rows(batch, forward_pass)
        first = before + row
        if layer != self._layer or self._computed:
            self._begin_layer(layer, rows, x)
        routed = slice(first, first + len(x))
        ids, routing_weights = self._family.route(self._config, w, x, self._operations,
                                                  out=self._inputs[routed])
        self._ids[routed], self._routing_weights[routed] = ids, routing_weights
        self._routed = routed
        counts = torch.bincount(ids.flatten(), minlength=len(self._counts)).tolist()
        self._counts = [total + new for total, new in zip(self._counts, counts, strict=True)]
        self._count_choices(layer, ids, counts, batch, prompt_starts)
        self._slots.request({(layer, number): count
                             for number, count in enumerate(counts) if count})
        if following is not None and rows <= PREFETCH_ROWS and self._slots.prefetches:
            normed = self._operations.get("predicted inputs", tuple(x.shape), x.dtype)
            predicted, _ = self._family.route(self._config, following, x, self._operations,
                                              out=normed)
            self._predicted.update(predicted.flatten().tolist())

    def _count_choices(self, layer: int, ids: Tensor, counts: Sequence[int], batch: int,
                       prompt_starts: Sequence[slice] | None) -> None:
        """Count choices [rows, experts per token], except for finished sequences."""
        requests = self._batches[batch].requests
        if prompt_starts is None and any(request.finish_reason for request in requests):
            running = [row for row, request in enumerate(requests) if not request.finish_reason]
            counts = torch.bincount(ids[running].flatten(), minlength=len(counts)).tolist()
        self._slots.choices.add(layer, ids, counts, prompt_starts or ())

    def _begin_layer(self, layer: int, rows: int, x: Tensor) -> None:
        self._layer, self._computed = layer, False
        mixture, get = self._config.experts, self._operations.get
        self._counts = [0] * mixture.count
        self._predicted.clear()
        self._slots.begin(layer, rows)
        self._inputs = get("experts' inputs", (rows, x.shape[1]), x.dtype)
        self._sums = (
            get("experts' outputs", (rows, mixture.per_token, x.shape[1]), x.dtype)
            if dispatch.is_batch_invariant()
            else get("experts' sums", (rows, x.shape[1]), sums_dtype(x.dtype)))
        self._ids = get("experts of rows", (rows, mixture.per_token), torch.int64)
        self._routing_weights = get("experts' shares", (rows, mixture.per_token), torch.float32)

    def add_(self, w: Mapping[str, Weight], x: Tensor, *, batch: int, forward_pass: int) -> None:
        """Add the outputs of the experts to the rows of a batch that `route` was called with.

        Parameters
        ----------
        w : mapping of str to Weight
            Weights of the layer's MLP unit: of a shared expert, and of a norm of the output.
        x : Tensor [rows, hidden]
            Updated in place.
        """
        if not self._computed:
            self._compute()
            self._computed = True
        first, _ = self._rows(batch, forward_pass)
        for rows in row_blocks(len(x)):
            block = slice(first + rows.start, first + rows.stop)
            sums = (self._sums_by_choice(block) if dispatch.is_batch_invariant()
                    else self._sums[block])
            self._family.add_experts(self._config, w, x[rows], self._inputs[block], sums,
                                     self._operations)

    def _sums_by_choice(self, rows: slice) -> Tensor:
        """Return the weighted sums of rows' outputs, added in the order of the router's choices."""
        outputs, routing_weights = self._sums[rows], self._routing_weights[rows]
        shape, dtype = (len(outputs), outputs.shape[2]), sums_dtype(outputs.dtype)
        sums = self._operations.get("experts' sums", shape, dtype).zero_()
        for choice in range(outputs.shape[1]):
            out = outputs[:, choice].to(dtype)
            if not self._config.experts.scale_inputs:
                out.mul_(routing_weights[:, choice, None])
            sums += out
        return sums

    def _compute(self) -> None:
        """Sum the outputs of all chosen experts, in the order in which experts are ready."""
        self._slots.prefetch((self._layer + 1, number)
                             for number, _ in self._predicted.most_common())
        rows = self._routed.stop  # fewer than planned if a batch has finished in between
        inputs, ids = self._inputs[:rows], self._ids[:rows]
        routing_weights = self._routing_weights[:rows]
        sums, on_host = self._sums[:rows], self._slots.requested_on_host
        if not dispatch.is_batch_invariant():
            sums.zero_()
        if on_host:
            host_rows, host_sums, handle = self._host.start(on_host, inputs, ids, routing_weights)
        self._matmuls.begin(inputs, ids, routing_weights, sums, self._counts)
        for group, table in self._slots.arrivals():
            self._matmuls.add({number: w for (_, number), w in group}, table)
        if on_host:
            self._transfers.ready(handle)
            sums.index_add_(0, host_rows, host_sums)
