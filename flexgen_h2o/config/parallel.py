"""Pipeline stages: the layers of each rank, and the groups of a block's batches. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from flexgen_h2o.config.h2o import H2OConfig, WindowedH2O
from flexgen_h2o.errors import UserError


@dataclass(frozen=True)
class Stage:
    """The layers that one rank of a pipeline computes.

    The first stage includes the embedding, and the last stage the head.

    Attributes
    ----------
    first, last : int
        The decoder layers first:last.
    num_layers : int
        Decoder layers of the model.
    rank, ranks : int
    """

    first: int
    last: int
    num_layers: int
    rank: int = 0
    ranks: int = 1

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """Return the stage of a single rank."""
        return cls(0, num_layers, num_layers)

    @classmethod
    def for_rank(cls, rank: int, bounds: Sequence[int]) -> Stage:
        """Return the stage of a rank.

        Parameters
        ----------
        rank : int
        bounds : sequence of int
            The first layer of each rank, and the number of layers.

        Raises
        ------
        UserError
            A rank has no decoder layer.
        """
        if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"a pipeline's layers must begin at 0 and ascend, got {list(bounds)}")
        return cls(bounds[rank], bounds[rank + 1], bounds[-1], rank, len(bounds) - 1)

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def is_first_stage(self) -> bool:
        """True if the stage includes the embedding."""
        return self.first == 0

    @property
    def is_last_stage(self) -> bool:
        """True if the stage includes the head."""
        return self.last == self.num_layers

    def layer_steps(self, sep_layer: bool) -> range:
        """Return the layer steps of the stage in a forward pass (`engine.schedule`)."""
        steps = 2 if sep_layer else 1
        return range(0 if self.is_first_stage else self.first * steps + 1,
                     self.last * steps + (2 if self.is_last_stage else 1))

    def h2o(self, h2o: H2OConfig | None) -> H2OConfig | None:
        """Return an H2O configuration for the layers of the stage."""
        if h2o is None:
            return None
        ratios = {name: value[self.first : self.last] for name in ("heavy_ratio", "recent_ratio")
                  if isinstance(value := getattr(h2o, name), tuple)}
        if ratios and h2o.prompt_chunk is not None and replace(
                h2o, prompt_chunk=None, **ratios).is_full:
            ratios["prompt_chunk"] = None  # it has no effect on a full cache
        if isinstance(h2o, WindowedH2O):
            return replace(h2o, windows=h2o.windows[self.first : self.last], **ratios)
        return replace(h2o, **ratios)


def split_batches(num_batches: int, groups: int) -> list[range]:
    """Split the GPU batches of a block into groups of similar size, at most one for each batch."""
    groups = max(1, min(groups, num_batches))
    bounds = [number * num_batches // groups for number in range(groups + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def num_batch_groups(ranks: int, *, fetched: bool) -> int:
    """Return the groups into which a pipeline splits the batches of a block, if there are enough.

    With one group for each rank, no rank waits. Twice as many also hide the latency of messages,
    but weights that are `fetched` are fetched again for each group.
    """
    return ranks if fetched else 2 * ranks


def balance_layers(seconds: Sequence[float], ranks: int) -> list[int]:
    """Return the bounds (see `Stage.for_rank`) that minimize the time of the slowest rank.

    Among equally good bounds, the first ranks get more layers.

    Parameters
    ----------
    seconds : sequence of float
        Time of each decoder layer, with embedding and head in the first and the last.
    ranks : int
        At most the number of layers; each rank gets at least one.
    """
    sums = [0.0, *accumulate(seconds)]

    @cache
    def least(begin: int, left: int) -> float:
        if left == 1:
            return sums[-1] - sums[begin]
        return min(max(sums[end] - sums[begin], least(end, left - 1))
                   for end in range(begin + 1, len(seconds) - left + 2))

    bounds, most = [0], least(0, ranks)
    for left in range(ranks - 1, 0, -1):
        begin = bounds[-1]
        bounds.append(max(end for end in range(begin + 1, len(seconds) - left + 1)
                          if sums[end] - sums[begin] <= most and least(end, left) <= most))
    return [*bounds, len(seconds)]
