"""What eviction knows of the slots: scores, positions and ranks, kept where attention runs.

All of it is exact whatever the cache's dtype, and small beside keys and values, so it stays in
compute memory on every tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from flexgen_h2o.cache.budget import budget, cached
from flexgen_h2o.cache.eviction import EMPTY, Eviction
from flexgen_h2o.cache.seats import Seats
from flexgen_h2o.config import H2OConfig


@dataclass(frozen=True)
class Turn:
    """What a new token finds: the same for all layers of one budget. Tensors are [sequences].

    Attributes
    ----------
    before : int64
        Tokens that each sequence has cached before the new one.
    tokens : int64
        All tokens of each sequence so far, the new one and evicted ones included.
    recent : int64
        Newest tokens that are safe.
    full : bool
        Whose new token needs a victim.
    span : int
        Slots to look at: none behind them holds a token.
    filled : bool [sequences, span] or None
        Which of them hold one; None: all do.
    """

    before: torch.Tensor
    tokens: torch.Tensor
    recent: torch.Tensor
    full: torch.Tensor
    span: int
    filled: torch.Tensor | None
    any_full: bool
    all_full: bool

    @classmethod
    def of(cls, seats: Seats, sequences: slice, h2o: H2OConfig | None, *, layer: int, token: int,
           appended: bool, device: torch.device) -> Turn:
        """The turn of new token number `token` (from 1) for some sequences of a batch.

        appended: the token goes to its slot before attention, and counts as filled.
        """
        lengths = seats.lengths[sequences]
        before = [cached(h2o, layer, length, token - 1) for length in lengths]
        budgets = [budget(h2o, layer, length) for length in lengths]
        full = [b is not None and h2o.evict_generated and count >= b.total
                for b, count in zip(budgets, before, strict=True)]
        span, filled = max(before) + appended, None
        if min(before) < max(before):
            ends = torch.tensor(before)[:, None] + appended
            filled = (torch.arange(span) < ends).to(device)
        make = partial(torch.tensor, device=device)
        return cls(before=make(before), tokens=make([length + token for length in lengths]),
                   recent=make([0 if b is None else b.recent for b in budgets]),
                   full=make(full), span=span, filled=filled, any_full=any(full),
                   all_full=all(full))


class Book:
    """Scores, positions and ranks of the slots of some sequences of one (layer, batch).

    Attributes
    ----------
    mass : float32 [sequences, kv_heads, slots]
        Attention that each cached key has received.
    positions : int32, the same shape
        Of the token in each slot; `EMPTY` where there is none.
    ranks : int32, the same shape, or None
        With rolling positions, each token's place among the cached ones.
    """

    def __init__(self, shape: tuple[int, int, int], *, rolling: bool, device: torch.device):
        self.mass = torch.zeros(shape, dtype=torch.float32, device=device)
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
        self.ranks = torch.zeros_like(self.positions) if rolling else None

    def keep(self, sequence: int, positions: torch.Tensor, mass: torch.Tensor | None) -> None:
        """Note what is left of a prompt: positions and mass [kv_heads, kept], in slot order."""
        kept = positions.shape[-1]
        self.positions[sequence, :, :kept] = positions
        if mass is not None:
            self.mass[sequence, :, :kept] = mass
        if self.ranks is not None:
            self.ranks[sequence, :, :kept] = torch.arange(kept, device=positions.device)

    def add(self, turn: Turn, mass: torch.Tensor, *, eviction: Eviction, sinks: int
            ) -> torch.Tensor:
        """Add a new token's attention row and give the token a slot, a victim's if need be.

        mass is float32 [sequences, kv_heads, span + 1], the new token's own share last. Returns
        the slots, int64 [sequences, kv_heads].
        """
        seen = self.mass[..., : turn.span]
        if eviction.decay != 1.0:
            seen.mul_(eviction.decay)
        seen.add_(mass[..., :-1])
        slots = turn.before[:, None].expand(self.mass.shape[:2])
        if turn.any_full:
            victims = eviction.victims(self.mass, self.positions, tokens=turn.tokens,
                                       recent=turn.recent, sinks=sinks)
            slots = victims if turn.all_full else torch.where(turn.full[:, None], victims, slots)
        place = slots[..., None]
        self.mass.scatter_(-1, place, mass[..., -1:])
        if self.ranks is not None:
            self._move_up(turn, place)
        newest = (turn.tokens - 1).to(torch.int32)[:, None, None]
        self.positions.scatter_(-1, place, newest.expand(place.shape))
        return slots

    def _move_up(self, turn: Turn, place: torch.Tensor) -> None:
        """Close the gap that each victim leaves among the ranks; the new token is the last."""
        full = turn.full[:, None, None]
        if turn.any_full:
            gone = self.ranks.gather(-1, place)
            self.ranks.sub_(((self.ranks > gone) & full).to(torch.int32))
        last = (turn.before[:, None, None] - full.long()).to(torch.int32)
        self.ranks.scatter_(-1, place, last.expand(place.shape))
