"""Putting a chunk of new tokens onto what is cached of a sequence, and evicting down to the budget.

This is how a prompt of any length goes through a cache of fixed size, and how a new turn comes onto
a conversation. A chunk of one token does what a decode step does; one of the whole prompt what the
cut of a prompt does (arXiv 2306.14048, algorithm 1, by chunks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen_h2o.config.formats import GroupLayout
from flexgen_h2o.h2o.eviction import Book, Cut
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.rotary import rotated


@dataclass(frozen=True)
class Standing:
    """What is there of a sequence before a chunk comes.

    Attributes
    ----------
    cached : int
        Its first slots, which hold a token each.
    tokens : int
        Its tokens so far, the evicted ones included.
    heavy, recent : int
        Of the budget; sinks come on top. They mean nothing where nothing is evicted.
    scored : bool
        Whether scores decide what stays.
    """

    cached: int
    tokens: int
    heavy: int = 0
    recent: int = 0
    scored: bool = False


def append(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, held: torch.Tensor,
           standing: Standing, book: Book | None, layout: GroupLayout | None) -> torch.Tensor:
    """Attend from a chunk of one sequence over its slots and itself; cache it, evict what is over.

    Parameters
    ----------
    q : Tensor [rows, heads, head_dim]
    k, v : Tensor [rows, kv_heads, head_dim]
        The chunk's. Where positions roll (`book.ranks`) q and k come before rotation.
    held : Tensor [2, kv_heads, slots, width]
        Slots of keys and values, maybe in another memory than q: vectors, or records of `layout`.
        Without a book they have room for the chunk. Written in place.
    standing : Standing
    book : Book or None
        Of the sequence alone, [1, kv_heads, slots]; None: nothing is evicted, and the slots are in
        the order of positions. Where positions roll its rotations reach over slots and chunk.
    layout : GroupLayout or None

    Returns
    -------
    Tensor [rows, heads, head_dim]
    """
    fresh = torch.stack((k, v)).transpose(1, 2)  # [2, kv_heads, rows, head_dim]
    packed = (fresh if layout is None else ops.quantize_groups(fresh, layout)).to(held.device)
    if book is None:
        return _attend_in_place(q, fresh, packed, held=held, cached=standing.cached, layout=layout)
    old = _in_order(held, book, standing.cached)
    exact = torch.cat((_vectors(old.records, layout, like=q), fresh), dim=2)
    mass = None
    if standing.scored:
        new = old.mass.new_zeros((len(old.mass), len(k)))
        mass = torch.cat((old.mass, new), dim=1).to(q.device)
    keys, values = exact
    if book.ranks is not None:
        cos, sin = (table.to(q.device) for table in book.rope)
        keys = rotated(keys, cos[: keys.shape[1]], sin[: keys.shape[1]])
        mine = slice(standing.cached, standing.cached + len(q))
        q = rotated(q, cos[mine, None], sin[mine, None])
    out = _attend(q, keys, values, mass=mass, decay=book.eviction.decay)
    if mass is None:
        mass = old.mass.new_zeros((len(old.mass), keys.shape[1]))
    _keep(torch.cat((old.records, packed), dim=2), mass.to(held.device), old.positions,
          held=held, standing=standing, book=book)
    return out


def _attend_in_place(q, fresh, packed, *, held, cached, layout) -> torch.Tensor:
    """`append` where everything stays: the chunk takes the next slots."""
    end = cached + len(q)
    held[:, :, cached:end] = packed
    if layout is None:
        keys, values = held[:, :, :end].to(q.device)
    else:  # the chunk's own vectors are exact, as a new token's are in a decode step
        keys, values = torch.cat((_vectors(held[:, :, :cached], layout, like=q), fresh), dim=2)
    return _attend(q, keys, values, mass=None, decay=1.0)


def _attend(q, keys, values, *, mass, decay) -> torch.Tensor:
    """Attention of the last tokens over [kv_heads, tokens, head_dim]."""
    return ops.prefill_attention(q, keys.transpose(0, 1), values.transpose(0, 1), [len(q)],
                                 key_lengths=[keys.shape[1]], mass=mass, decay=decay)


@dataclass(frozen=True)
class _Old:
    """What was cached, by position: records [2, kv_heads, cached, width]; [kv_heads, cached]."""

    records: torch.Tensor
    mass: torch.Tensor
    positions: torch.Tensor


def _in_order(held: torch.Tensor, book: Book, cached: int) -> _Old:
    """Copies of the filled slots in the order of their positions: decode leaves them in any."""
    positions, order = book.positions[0, :, :cached].sort(dim=-1)
    place = order[None, ..., None].expand(2, -1, -1, held.shape[-1])
    return _Old(held.gather(2, place), book.mass[0].gather(1, order), positions)


def _vectors(records: torch.Tensor, layout: GroupLayout | None, *, like: torch.Tensor
             ) -> torch.Tensor:
    """Records as vectors of the dtype and in the memory of `like`."""
    if layout is not None:
        records = ops.dequantize_groups(records, layout)
    return records.to(like)


def _keep(records: torch.Tensor, mass: torch.Tensor, before: torch.Tensor, *,
          held: torch.Tensor, standing: Standing, book: Book) -> None:
    """Put what stays of old and new into the first slots, by position, and into the book.

    records [2, kv_heads, tokens, width], mass [kv_heads, tokens]; `before` are the positions of
    the old ones.
    """
    heads, tokens = mass.shape
    new = torch.arange(standing.tokens, standing.tokens + tokens - before.shape[1],
                       dtype=before.dtype, device=before.device)
    positions = torch.cat((before, new.expand(heads, -1)), dim=1)
    index = book.eviction.select(mass, Cut(tokens, standing.heavy, standing.recent), positions)
    kept = index.shape[1]
    held[:, :, :kept] = records.gather(
        2, index[None, ..., None].expand(2, -1, -1, records.shape[-1]))
    book.mass[0, :, :kept] = mass.gather(1, index)
    book.positions[0, :, :kept] = positions.gather(1, index)
    if book.ranks is not None:
        book.ranks[0, :, :kept] = torch.arange(kept, device=index.device)
