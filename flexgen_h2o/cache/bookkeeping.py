"""What decode tells the kernels of a batch's sequences: whose turn it is, and eviction's book."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexgen_h2o.cache.budget import budget, cached
from flexgen_h2o.cache.seats import Seats
from flexgen_h2o.config import H2OConfig
from flexgen_h2o.kernels.eviction import EMPTY, Book, Eviction


def eviction_of(h2o: H2OConfig | None) -> Eviction:
    """The policy of a configuration; its sizes come with each sequence."""
    if h2o is None:
        return Eviction()
    return Eviction(mean=h2o.score == "mean", sinks=h2o.sink_tokens,
                    decay=float(h2o.decay) if h2o.score == "decay" else 1.0)


def turn_of(seats: Seats, sequences: slice, h2o: H2OConfig | None, *, layer: int, token: int,
            device: torch.device) -> torch.Tensor:
    """What new token number `token` (from 1) finds: the same for all layers of one budget.

    Returns int32 [4, sequences], the `turn` of `reference.decode_attention`.
    """
    rows = []
    for length in seats.lengths[sequences]:
        size = budget(h2o, layer, length)
        before = cached(h2o, layer, length, token - 1)
        full = size is not None and h2o.evict_generated and before >= size.total
        rows.append((before, length + token, size.recent if size else 0, int(full)))
    return torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)


def new_book(shape: tuple[int, int, int], eviction: Eviction, *,
             rope: tuple[torch.Tensor, torch.Tensor] | None, device: torch.device) -> Book:
    """A book of [sequences, kv_heads, slots], all empty.

    It is exact whatever the cache's dtype, and small beside keys and values, so it stays where
    attention runs on every tier. With rotations by rank, positions roll.
    """
    mass = torch.zeros(shape, dtype=torch.float32, device=device)
    positions = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
    ranks = None if rope is None else torch.zeros_like(positions)
    return Book(eviction, mass, positions, ranks, rope)


def narrowed(book: Book, sequences: slice) -> Book:
    """The same book for some of its sequences."""
    return replace(book, mass=book.mass[sequences], positions=book.positions[sequences],
                   ranks=None if book.ranks is None else book.ranks[sequences])
