"""Products with the experts of a layer, summed up by token; and the same on the host beside a GPU.

Experts that few tokens chose are computed by one call of the C++ library where that can be, the
others one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from flexgen_h2o.config.experts import Key
from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.config.stage import groups_of
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine.batch import Batch
from flexgen_h2o.engine.expert_slots import ExpertSlots, put
from flexgen_h2o.engine.weight_files import Weight
from flexgen_h2o.kernels.cpu.experts import ExpertTable, experts, max_expert_rows
from flexgen_h2o.kernels.matrix import ShardedMatrix
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import Operations, activation
from flexgen_h2o.models.mixture import MixtureDecoder
from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.storage.tiers import typed
from flexgen_h2o.storage.transfer import D2H, EXPERTS, H2D, Handle, Lane, Transfers

SUMS = {torch.float32: torch.float64}
"""What experts' outputs are summed in, where it is not float32."""


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which outputs are summed: the order of terms must not show."""
    return SUMS.get(dtype, torch.float32)


class ExpertProducts:
    """Products with experts of the rows of a layer, summed up by row, on one device.

    Parameters
    ----------
    config : ModelConfig
    do : Operations
        Whose buffers the products are made in.
    options : WeightOptions
        Of the experts' matrices.
    """

    def __init__(self, config: ModelConfig, do: Operations, options: WeightOptions):
        self._config, self._do, self._options = config, do, options
        self._family = family(config)
        mine = config.experts
        self._function = (mine.gate_slope, mine.gate_limit) if mine.gate_limit else (
            activation(config.activation))
        self._arrived = ExpertTable(mine.count)

    def begin(self, x: Tensor, ids: Tensor, shares: Tensor, sums: Tensor, counts: Sequence[int]
              ) -> None:
        """Begin a layer.

        Parameters
        ----------
        x : Tensor [rows, hidden]
            Normed.
        ids, shares : Tensor [rows, experts of each]
            int64 and float32.
        sums : Tensor [rows, hidden], of `sums_dtype`
            What `add` adds to.
        counts : sequence of int
            The rows of each expert.
        """
        self._x, self._ids, self._shares, self._sums = x, ids, shares, sums
        self._counts = counts
        self._picks: Sequence[Tensor] | None = None
        same = (isinstance(self._function, tuple)
                or type(self._family).expert is MixtureDecoder.expert)
        fit = same and x.is_cpu and x.dtype == torch.bfloat16
        options = self._options
        self._most = min(max_expert_rows(bits, options.activation_bits)
                         for bits in options.shares) if fit else 0

    def add(self, group: Mapping[int, Mapping[str, Weight]],
            table: Callable[[], ExpertTable] | None = None) -> None:
        """Add what experts make of their rows.

        Parameters
        ----------
        group : mapping of number to weights
        table : callable, optional
            Gives a table that is kept, with all of these; the others that it has, no row chose.
        """
        parts = isinstance(next(iter(group.values()))["down"], ShardedMatrix)
        most = 0 if parts else self._most  # the C++ library takes whole matrices
        few = {number: w for number, w in group.items() if self._counts[number] <= most}
        if few:
            mine = self._arrived if table is None else table()
            if table is None:
                for number, w in few.items():
                    put(mine, number, w)
            experts(self._x, self._ids, self._shares, mine, self._sums,
                    function=self._function, most=self._most)
            if table is None:
                for number in few:
                    mine.drop(number)
        for number in group.keys() - few.keys():
            self._one(number, group[number])

    def _one(self, number: int, w: Mapping[str, Weight]) -> None:
        """Compute an expert by itself."""
        if self._picks is None:
            self._picks = self._ids.flatten().argsort(stable=True).split(list(self._counts))
        shares = self._shares.flatten()
        for chosen in self._picks[number].split(ROW_BLOCK):
            tokens = chosen // self._ids.shape[1]
            x = self._do.get("gathered", (len(tokens), self._x.shape[1]), self._x.dtype)
            torch.index_select(self._x, 0, tokens, out=x)
            out = self._family.expert(self._config, w, x, self._do)
            self._sums.index_add_(0, tokens, out.to(self._sums.dtype).mul_(shares[chosen, None]))


class HostExperts:
    """Experts in host memory that compute there, beside compute that is elsewhere.

    Jobs come one after the other on a lane of their own, and each waits for the copies of the one
    before: a buffer for what comes down and one for what goes up are enough.

    Parameters
    ----------
    config : ModelConfig
    slots : ExpertSlots
    transfers : Transfers
    """

    def __init__(self, config: ModelConfig, slots: ExpertSlots, transfers: Transfers):
        self._slots, self._transfers, self._count = slots, transfers, config.experts.count
        self._products = ExpertProducts(config, Operations("cpu"), slots.options)
        self._buffers: list[Tensor] = []

    def start(self, keys: Sequence[Key], x: Tensor, ids: Tensor, shares: Tensor
              ) -> tuple[Tensor, Tensor, Handle]:
        """Start what experts make of their rows.

        Parameters
        ----------
        keys : sequence of (layer, number)
            Chosen experts of one layer, in host memory.
        x : Tensor [rows, hidden], on the device
        ids, shares : Tensor [rows, experts of each], on the device

        Returns
        -------
        int64 Tensor [some rows], on the device
            The rows that chose any of them.
        Tensor [some rows, hidden], on the device
            Their sums, once the handle is done.
        Handle
        """
        numbers = torch.tensor([number for _, number in keys], device=ids.device)
        rows = torch.isin(ids, numbers).any(1).nonzero().flatten()
        packed = x[rows]
        chosen, parts = ids[rows].cpu(), shares[rows].cpu()
        out = torch.empty(packed.shape, dtype=sums_dtype(x.dtype), device=x.device)

        def job(lane: Lane) -> None:
            down, up = self._landing(packed, out)
            lane.copy(down, packed, D2H)
            lane.flush()
            counts = torch.bincount(chosen.flatten(), minlength=self._count)
            with self._transfers.host_span("experts", "cpu experts"):
                self._products.begin(down, chosen, parts, up.zero_(), counts.tolist())
                self._products.add(self._slots.on_host(keys),
                                   partial(self._slots.host_table, keys[0][0]))
            lane.copy(out, up, H2D)

        mark = self._transfers.device.mark()
        return rows, out, self._transfers.submit(EXPERTS, job, after=(mark,))

    def _landing(self, *tensors: Tensor) -> list[Tensor]:
        """A view like each tensor of a buffer on the host, which grows when it has to."""
        host_empty = self._transfers.device.host_empty
        # Each by itself: one of whole pages may have room for more rows than the other.
        if not self._buffers or any(buffer.nbytes < x.nbytes for buffer, x in zip(
                self._buffers, tensors, strict=True)):
            self._buffers = [host_empty(x.nbytes) for x in tensors]
        return [typed(buffer, 0, x.shape, x.dtype)
                for buffer, x in zip(self._buffers, tensors, strict=True)]


# The mixture of experts of a block: routing, gathering, products in order of arrival, sums.
#
# Tokens of all GPU batches choose first, then each expert that any of them chose computes once, for
# all of its tokens together. Sums are kept wider than their terms, so that the order in which
# experts
# arrive does not show.


GUESSED_ROWS = 64
"""The most rows of a block whose next experts are guessed: more choose nearly all of them."""

ROUTING = frozenset({"router_norm", "router", "router_bias"})
"""The weights of a layer by which its rows choose, by short names."""


class ExpertLayers:
    """The experts' part of the layer steps of one block.

    Parameters
    ----------
    config : ModelConfig
    slots : ExpertSlots
    do : Operations
        Whose buffers hold the inputs and sums of a block.
    transfers : Transfers
        With the host, where experts compute there beside a GPU.
    """

    def __init__(self, config: ModelConfig, slots: ExpertSlots, do: Operations,
                 transfers: Transfers):
        self._config, self._slots, self._do = config, slots, do
        self._family = family(config)
        self._layer = -1
        self._computed = True
        self._routed = slice(0, 0)
        self._likely: Counter[int] = Counter()
        self._products = ExpertProducts(config, do, slots.options)
        self._transfers = transfers
        self._host = HostExperts(config, slots, transfers)
        slots.reset()

    def begin(self, batches: Sequence[Batch], groups: int) -> None:
        """Start the block, whose batches go through the layers in so many groups."""
        self._batches = batches
        self._groups = groups_of(len(batches), groups)

    def _rows(self, batch: int, forward_pass: int) -> tuple[int, int]:
        """The rows of a forward pass in the batches of a batch's group that are before it, and in
        all of them."""
        mine = next(group for group in self._groups if batch in group)
        rows = {number: 0 if each.finished else each.rows(forward_pass)
                for number, each in enumerate(self._batches) if number in mine}
        return sum(rows[number] for number in rows if number < batch), sum(rows.values())

    def route(self, layer: int, w: Mapping[str, Weight], x: Tensor, *, batch: int,
              forward_pass: int, row: int = 0, beginnings: Sequence[slice] | None = None,
              following: Mapping[str, Weight] | None = None) -> None:
        """Let rows of a batch choose their experts, which begin to come; rows come in order.

        Parameters
        ----------
        layer : int
            The decoder layer.
        w : mapping
            Its weights: the norm before the experts, and the router.
        x : Tensor [some rows, hidden]
            After attention.
        batch, forward_pass : int
        row : int
            The first of these rows in the batch.
        beginnings : sequence of slice, optional
            The rows, among these, with which prompts begin; None if all are of new tokens.
        following : mapping, optional
            Norm and router of the next layer, for a guess at its experts.
        """
        before, rows = self._rows(batch, forward_pass)
        first = before + row
        if layer != self._layer or self._computed:
            self._begin_layer(layer, rows, x)
        place = slice(first, first + len(x))
        ids, shares = self._family.route(self._config, w, x, self._do, out=self._inputs[place])
        self._ids[place], self._shares[place] = ids, shares
        self._routed = place
        counts = torch.bincount(ids.flatten(), minlength=len(self._counts)).tolist()
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self._count_choices(layer, ids, counts, batch, beginnings)
        self._slots.want((layer, number) for number, count in enumerate(counts) if count)
        if following is not None and rows <= GUESSED_ROWS and self._slots.guesses:
            normed = self._do.get("guessed inputs", tuple(x.shape), x.dtype)
            guessed, _ = self._family.route(self._config, following, x, self._do, out=normed)
            self._likely.update(guessed.flatten().tolist())

    def _count_choices(self, layer: int, ids: Tensor, counts: Sequence[int], batch: int,
                       beginnings: Sequence[slice] | None) -> None:
        """Count choices [rows, experts of a token] of a batch, but not those of ended sequences."""
        requests = self._batches[batch].requests
        if beginnings is None and any(request.finish_reason for request in requests):
            living = [row for row, request in enumerate(requests) if not request.finish_reason]
            counts = torch.bincount(ids[living].flatten(), minlength=len(counts)).tolist()
        self._slots.choices.add(layer, ids, counts, beginnings or ())

    def _begin_layer(self, layer: int, rows: int, x: Tensor) -> None:
        self._layer, self._computed = layer, False
        mine = self._config.experts
        self._counts = [0] * mine.count
        self._likely.clear()
        self._slots.begin(layer)
        self._inputs = self._do.get("experts' inputs", (rows, x.shape[1]), x.dtype)
        self._sums = self._do.get("experts' sums", (rows, x.shape[1]), sums_dtype(x.dtype))
        self._ids = self._do.get("experts of rows", (rows, mine.per_token), torch.int64)
        self._shares = self._do.get("experts' shares", (rows, mine.per_token), torch.float32)

    def add_(self, w: Mapping[str, Weight], x: Tensor, *, batch: int, forward_pass: int) -> None:
        """Add what the experts make of a batch's rows, which `route` has had, to x [rows, hidden].

        w are the weights of the layer's second half: those of a shared expert, if there is one.
        """
        if not self._computed:
            self._compute()
            self._computed = True
        first, _ = self._rows(batch, forward_pass)
        place = slice(first, first + len(x))
        if self._config.experts.shared_ffn_size:
            for start in range(0, len(x), ROW_BLOCK):
                rows = slice(first + start, min(first + start + ROW_BLOCK, place.stop))
                self._sums[rows] += self._family.shared(
                    self._config, w, self._inputs[rows], self._do)
        x.add_(self._sums[place])

    def _compute(self) -> None:
        """Sum up every chosen expert's outputs, in the order in which the experts are there."""
        self._slots.guess((self._layer + 1, number) for number, _ in self._likely.most_common())
        rows = self._routed.stop  # a batch that has ended since the first one came has none
        chosen = self._inputs[:rows], self._ids[:rows], self._shares[:rows]
        sums, on_host = self._sums[:rows].zero_(), self._slots.wanted_on_host
        if on_host:
            places, found, handle = self._host.start(on_host, *chosen)
        self._products.begin(*chosen, sums, self._counts)
        for group, table in self._slots.arrivals():
            self._products.add({number: w for (_, number), w in group}, table)
        if on_host:
            self._transfers.ready(handle)
            sums.index_add_(0, places, found)
