"""Percentages to places: which tensor, and which sequence, lives on which tier. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

from flexgen_h2o.config.limits import MATRIX_TILE, MIN_SHARD_BYTES, SHARDS_PER_LAYER
from flexgen_h2o.config.placement import TIERS, Placement

Name = TypeVar("Name", bound=Hashable)


def assign(sizes: Iterable[tuple[Name, int]], placement: Placement) -> dict[Name, str]:
    """Give every tensor a tier so that each tier's bytes match `placement`.

    Each tensor goes to the tier that is furthest behind its share of the bytes so far. The
    shortfall is then never more than 5/6 of the largest tensor, over any stretch from the start,
    so that consecutive layers carry about the same offloaded bytes (FlexGen rounds per layer).

    Parameters
    ----------
    sizes : iterable of (name, bytes)
        In the order in which the run uses the tensors.
    placement : Placement
        Percentages for gpu, cpu, disk.

    Returns
    -------
    dict
        Name to ``"gpu"``, ``"cpu"`` or ``"disk"``.
    """
    fractions = placement.fractions()
    behind = [0.0, 0.0, 0.0]
    tiers = {}
    for name, nbytes in sizes:
        behind = [owed + share * nbytes for owed, share in zip(behind, fractions, strict=True)]
        # A tier with no share is never behind, but rounding could make it seem so.
        best = max((t for t in range(3) if fractions[t] > 0), key=lambda t: behind[t])
        behind[best] -= nbytes
        tiers[name] = TIERS[best]
    return tiers


def fill(sizes: Iterable[tuple[Name, int]], placement: Placement) -> dict[Name, str]:
    """Give the first tensors to the fastest tier until its share of the bytes is full, the next
    ones to the second, and so on.

    Parameters and result are those of `assign`, which spreads the tiers; what is to be on the
    fastest one comes first here. No tier has more, or less, than its share by more than the largest
    tensor.
    """
    sizes = list(sizes)
    total, before, tiers = sum(nbytes for _, nbytes in sizes), 0.0, {}
    ends = list(accumulate(share * total for share in placement.fractions()))
    last = max(tier for tier, share in enumerate(placement.fractions()) if share > 0)
    for name, nbytes in sizes:
        middle = before + nbytes / 2
        tiers[name] = TIERS[next((tier for tier in range(last) if middle < ends[tier]), last)]
        before += nbytes
    return tiers


def compute_tiers(has_gpu: bool) -> tuple[str, ...]:
    """The tiers from which compute takes weights as they lie: without a GPU host memory is one."""
    return TIERS[:1] if has_gpu else TIERS[:2]


def place_first(nbytes: int, total: int, placement: Placement, tiers: Sequence[str]
              ) -> tuple[str | None, Placement]:
    """Put `nbytes` of `total` bytes onto the first of `tiers` whose share has room for them.

    Returns
    -------
    tier : str or None
        None where no share has room.
    rest : Placement
        Of the other bytes, so that all of them together are placed as `placement` says.
    """
    for tier in tiers:
        room = getattr(placement, tier) / 100 * total
        if nbytes <= room and 0 < nbytes < total:
            shares = (getattr(placement, each) * total - 100 * nbytes * (each == tier)
                      for each in TIERS)
            return tier, Placement(*(max(0.0, share) / (total - nbytes) for share in shares))
    return None, placement


def shard_rows(outputs: int, nbytes: int, layer: int) -> int:
    """Outputs in each chunk of a matrix of so many bytes, of a model whose layers have `layer`: a
    multiple of the tile that quantized outputs lie in, or all."""
    most = max(layer // SHARDS_PER_LAYER, MIN_SHARD_BYTES)
    rows = -(-outputs // -(-nbytes // most))
    return min(outputs, -(-rows // MATRIX_TILE) * MATRIX_TILE)


def place_experts(others: int, experts: int, placement: Placement, given: Placement | None
                  ) -> tuple[Placement, Placement]:
    """The placements of so many bytes of `others` and of so many bytes of `experts`.

    Parameters
    ----------
    placement : Placement
        Of the others if the experts' is `given`. If not, of both together: what every token needs
        gets the fastest memory first, and the experts what is left.
    """
    if given is not None or experts == 0:
        return placement, given or placement
    room, parts = [share * (others + experts) for share in placement.fractions()], []
    for nbytes in (others, experts):
        taken, left = [], float(nbytes)
        for tier, free in enumerate(room):
            taken.append(min(free, left))
            left -= taken[-1]
            room[tier] -= taken[-1]
        parts.append(Placement(*(100 * each / max(sum(taken), 1) for each in taken))
                     if nbytes else placement)
    return parts[0], parts[1]


def split(count: int, placement: Placement) -> tuple[int, int, int]:
    """Split `count` sequences (or rows) over (gpu, cpu, disk) by largest remainder."""
    exact = [fraction * count for fraction in placement.fractions()]
    parts = [int(share + 1e-9) for share in exact]
    by_remainder: Sequence[int] = sorted(range(3), key=lambda t: parts[t] - exact[t])
    for tier in by_remainder[: count - sum(parts)]:
        parts[tier] += 1
    return parts[0], parts[1], parts[2]
