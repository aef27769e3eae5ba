"""Which tokens stay cached: the policy of H2O alone, no storage (arXiv 2306.14048, algorithm 1).

Whoever attends accumulates the *mass* of every cached key, the attention that it received: a new
key starts at 0, and each query does ``mass = mass * decay + row``, its own key included.
"""

from __future__ import annotations

import torch

from flexgen_h2o.cache.budget import Budget
from flexgen_h2o.config import H2OConfig

EMPTY = 2**31 - 1
"""The position of a slot that holds no token: later than all, so it is never a victim."""


class Eviction:
    """Picks what stays of a prompt and whose slot a new token takes.

    All of it is exact on every device: no choice depends on the order in which ties are seen.

    Parameters
    ----------
    h2o : H2OConfig
        Its `score` and `decay`; the sizes come with each call.

    Attributes
    ----------
    decay : float
        The factor per query on the accumulated mass; 1.0 unless the score is ``"decay"``.
    """

    def __init__(self, h2o: H2OConfig):
        self.decay = float(h2o.decay) if h2o.score == "decay" else 1.0
        self._mean = h2o.score == "mean"

    def select(self, mass: torch.Tensor, budget: Budget) -> torch.Tensor:
        """The tokens of a prompt that stay: sinks, the last recent, the heaviest of the rest.

        Of equal scores the newer stays.

        Parameters
        ----------
        mass : float32 [kv_heads, tokens]
            Of every key of the prompt, all queries done; any finite values if ``heavy`` is 0.
        budget : Budget

        Returns
        -------
        int64 [kv_heads, min(tokens, budget.total)]
            Indices of tokens, ascending.
        """
        heads, tokens = mass.shape
        index = torch.arange(tokens, device=mass.device)
        if tokens <= budget.total:
            return index.repeat(heads, 1)
        first, last = budget.sinks, tokens - budget.recent
        score = self._score(mass, index, tokens)[:, first:last]
        # Sorted from new to old: a stable sort then leaves the newer of equals in front.
        order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
        heavy = (last - 1 - order[:, : budget.heavy]).sort(dim=-1).values
        sinks, recent = (part.expand(heads, -1) for part in (index[:first], index[last:]))
        return torch.cat([sinks, heavy, recent], dim=-1)

    def victims(self, mass: torch.Tensor, positions: torch.Tensor, *, tokens: torch.Tensor,
                recent: torch.Tensor, sinks: int) -> torch.Tensor:
        """The slot with the lowest score outside the sinks and the recent tokens.

        Of equal scores the oldest goes. Where nothing can go, the index means nothing.

        Parameters
        ----------
        mass : float32 [sequences, kv_heads, slots]
            The new token's query included.
        positions : int32 [sequences, kv_heads, slots]
            Of the token in each slot, or `EMPTY`. The new token may be among them or not: it is
            recent.
        tokens : int [sequences]
            Tokens so far, the new one included.
        recent : int [sequences]
            The budget's, at least 1.
        sinks : int

        Returns
        -------
        int64 [sequences, kv_heads]
        """
        tokens, recent = tokens[:, None, None], recent[:, None, None]
        evictable = (positions >= sinks) & (positions < tokens - recent)
        score = self._score(mass, positions, tokens).masked_fill(~evictable, torch.inf)
        lowest = score.amin(dim=-1, keepdim=True)
        # Positions differ, so the oldest of equals is one slot on every device.
        return positions.masked_fill(~evictable | (score > lowest), EMPTY).argmin(dim=-1)

    def _score(self, mass: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor | int
               ) -> torch.Tensor:
        """Reduce the mass to the score. A key at p was seen by queries p to ``tokens - 1``."""
        if self._mean:
            return mass / (tokens - positions).clamp(min=1)  # an empty slot has no queries
        return mass
