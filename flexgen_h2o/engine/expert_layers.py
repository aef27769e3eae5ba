"""The mixture of experts of a block: routing, gathering, products in order of arrival, sums.

Tokens of all GPU batches choose first, then each expert that any of them chose computes once, for
all of its tokens together. Sums are kept wider than their terms, so that the order in which experts
arrive does not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.config.stage import groups_of
from flexgen_h2o.engine.batch import Batch
from flexgen_h2o.engine.expert_products import ExpertProducts, HostExperts, sums_dtype
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.packs import Weight
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.spec import ModelConfig
from flexgen_h2o.storage.transfer import Transfers

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
