"""The mixture of experts of a block: routing, gathering, products in order of arrival, sums.

Tokens of all GPU batches choose first, then each expert that any of them chose computes once, for
all of its tokens together. Sums are kept wider than their terms, so that the order in which experts
arrive does not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from flexgen_h2o.config.limits import ROW_BLOCK
from flexgen_h2o.engine.expert_slots import ExpertSlots
from flexgen_h2o.engine.packs import Weight
from flexgen_h2o.models import family
from flexgen_h2o.models.layers import Operations
from flexgen_h2o.models.spec import ModelConfig

GUESSED_ROWS = 64
"""The most rows of a block whose next experts are guessed: more choose nearly all of them."""

SUMS = {torch.float32: torch.float64}
"""What experts' outputs are summed in, where it is not float32."""

ROUTING = frozenset({"ln2", "router", "router_bias"})
"""The weights of a layer by which its rows choose, by short names."""


class ExpertLayers:
    """The experts' part of the layer steps of one block.

    Parameters
    ----------
    config : ModelConfig
    slots : ExpertSlots
    do : Operations
        Whose buffers hold the inputs and sums of a block.
    """

    def __init__(self, config: ModelConfig, slots: ExpertSlots, do: Operations):
        self._config, self._slots, self._do = config, slots, do
        self._family = family(config)
        self._layer = -1
        self._computed = True
        self._chosen: list[tuple[slice, Tensor, Tensor]] = []
        self._likely: Counter[int] = Counter()
        slots.reset()

    def route(self, layer: int, w: Mapping[str, Weight], x: Tensor, *, first: int, rows: int,
              following: Mapping[str, Weight] | None = None) -> None:
        """Let rows of a block choose their experts, which begin to come.

        Parameters
        ----------
        layer : int
            The decoder layer.
        w : mapping
            Its weights: the norm before the experts, and the router.
        x : Tensor [some rows, hidden]
            After attention.
        first, rows : int
            Where these rows stand in the block, and how many that has.
        following : mapping, optional
            Norm and router of the next layer, for a guess at its experts.
        """
        if layer != self._layer or self._computed:
            self._begin(layer, rows, x)
        experts = self._config.experts
        place = slice(first, first + len(x))
        ids, shares = self._family.route(self._config, w, x, self._do, out=self._inputs[place])
        self._chosen.append((place, ids, shares))
        self._slots.want((layer, number) for number in _used(ids, experts.count))
        if following is not None and rows <= GUESSED_ROWS and self._slots.guesses:
            normed = self._do.get("guessed inputs", tuple(x.shape), x.dtype)
            guessed, _ = self._family.route(self._config, following, x, self._do, out=normed)
            self._likely.update(guessed.flatten().tolist())

    def _begin(self, layer: int, rows: int, x: Tensor) -> None:
        self._layer, self._computed = layer, False
        self._chosen.clear()
        self._likely.clear()
        self._slots.begin(layer)
        self._inputs = self._do.get("experts' inputs", (rows, x.shape[1]), x.dtype)
        self._sums = self._do.get("experts' sums", (rows, x.shape[1]),
                                  SUMS.get(x.dtype, torch.float32))

    def add_(self, w: Mapping[str, Weight], x: Tensor, *, first: int) -> None:
        """Add what the experts make of rows, which `route` has had, to x [rows, hidden].

        w are the weights of the layer's second half: those of a shared expert, if there is one.
        """
        if not self._computed:
            self._compute()
            self._computed = True
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
        sums = self._sums.zero_()
        rows = torch.cat([torch.arange(place.start, place.stop) for place, *_ in self._chosen])
        ids = torch.cat([ids for _, ids, _ in self._chosen])
        shares = torch.cat([shares for *_, shares in self._chosen]).flatten()
        each = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self._config.experts.count).tolist()
        ends = torch.tensor(counts).cumsum(0).tolist()
        rows = rows.to(ids.device)
        for (_, number), w in self._slots.arrivals():
            picked = order[ends[number] - counts[number] : ends[number]]
            for chosen in picked.split(ROW_BLOCK):
                tokens = rows[chosen // each]
                x = self._gathered(tokens)
                out = self._family.expert(self._config, w, x, self._do)
                sums.index_add_(0, tokens, out.to(sums.dtype).mul_(shares[chosen, None]))

    def _gathered(self, tokens: Tensor) -> Tensor:
        out = self._do.get("gathered", (len(tokens), self._inputs.shape[1]), self._inputs.dtype)
        return torch.index_select(self._inputs, 0, tokens, out=out)


def _used(ids: Tensor, count: int) -> list[int]:
    """The experts that any row chose; ids [rows, each]."""
    return torch.bincount(ids.flatten(), minlength=count).nonzero().flatten().tolist()
