"""Placement of data over the three tiers: percentages, and the tier of each tensor. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from flexgen_h2o.config.limits import MATRIX_TILE, MIN_SHARD_BYTES, SHARDS_PER_LAYER
from flexgen_h2o.config.validation import check_number
from flexgen_h2o.errors import UserError

TIERS = ("gpu", "cpu", "disk")
PLACED = ("weights", "cache", "activations")

# Tolerance of a sum of typed percentages: 33.3 + 66.7 counts as 100.
_PERCENT_SLACK = 1e-6


@dataclass(frozen=True)
class Placement:
    """Placement of one kind of data: percentages of the three tiers, which sum to 100.

    Raises `UserError` for a percentage that is negative or not a number, or for another sum.
    """

    gpu: float
    cpu: float
    disk: float

    def __post_init__(self) -> None:
        for tier in TIERS:
            check_number(f"the {tier} percentage", getattr(self, tier), ge=0, le=100)
        total = self.gpu + self.cpu + self.disk
        if abs(total - 100) > _PERCENT_SLACK:
            raise UserError(f"percentages of gpu, cpu and disk must sum to 100, got {total:g}")

    def fractions(self) -> tuple[float, float, float]:
        """Return the fractions of (gpu, cpu, disk), which sum to 1."""
        return self.gpu / 100, self.cpu / 100, self.disk / 100


def parse_percent(values: Sequence[object], name: str = "--percent"
                  ) -> tuple[Placement, Placement, Placement]:
    """Parse FlexGen's ``--percent``: percentages of gpu and cpu; the rest is on disk.

    Raises `UserError` for a wrong count, a text that is no number, a percentage out of 0..100, or a
    sum over 100.

    `values`: weights gpu, cpu; cache gpu, cpu; activations gpu, cpu (default 100 0), in percent.
    `name`: name of the value in error messages.

    Returns
    -------
    tuple of Placement
        For weights, cache, activations.
    """
    if len(values) not in (4, 6):
        raise UserError(
            f"{name} takes 4 or 6 numbers (weights gpu cpu, cache gpu cpu, "
            f"activations gpu cpu; the rest is disk), got {len(values)}"
        )
    shares = [_percentage(name, value) for value in values]
    shares += [100.0, 0.0][: 6 - len(shares)]
    placements = []
    for index, kind in enumerate(PLACED):
        gpu, cpu = shares[2 * index : 2 * index + 2]
        if gpu + cpu > 100 + _PERCENT_SLACK:
            raise UserError(
                f"{name} gives the {kind} {gpu:g} + {cpu:g} = {gpu + cpu:g} %: "
                "make each pair sum to at most 100"
            )
        placements.append(Placement(gpu, cpu, max(0.0, 100 - gpu - cpu)))
    weights, cache, activations = placements
    return weights, cache, activations


def parse_shares(values: Sequence[object], name: str) -> Placement:
    """Parse percentages of gpu, cpu and disk, which sum to 100.

    Raises `UserError`, which names the value `name`, for a wrong count or sum, and for a percentage
    that is not a number or out of 0..100.
    """
    if len(values) != len(TIERS):
        raise UserError(f"{name} takes 3 numbers (gpu cpu disk), got {len(values)}")
    shares = [_percentage(name, value) for value in values]
    if abs(sum(shares) - 100) > _PERCENT_SLACK:
        raise UserError(f"{name} must sum to 100, got {sum(shares):g}")
    return Placement(*shares)


def _percentage(name: str, value: object) -> float:
    """Return one number of ``--percent``, from a number or its text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"{name} takes numbers from 0 to 100, got {value!r}") from None
    return check_number(f"each number of {name}", value, ge=0, le=100)


Name = TypeVar("Name", bound=Hashable)


def assign(sizes: Iterable[tuple[Name, int]], placement: Placement) -> dict[Name, str]:
    """Return a tier for each tensor, so that the bytes of each tier match a placement.

    Each tensor goes to the tier that is furthest behind its share of the bytes so far. For every
    prefix of the tensors, no tier is short by more than 5/6 of the largest tensor. Consecutive
    layers therefore have about the same offloaded bytes (FlexGen rounds per layer). `sizes` are
    (name, bytes) in the order in which the run uses the tensors.
    """
    fractions = placement.fractions()
    behind = [0.0, 0.0, 0.0]
    tiers = {}
    for name, nbytes in sizes:
        behind = [owed + share * nbytes for owed, share in zip(behind, fractions, strict=True)]
        # Rounding must not select a tier without a share.
        best = max((t for t in range(3) if fractions[t] > 0), key=lambda t: behind[t])
        behind[best] -= nbytes
        tiers[name] = TIERS[best]
    return tiers


def fill(sizes: Iterable[tuple[Name, int]], placement: Placement) -> dict[Name, str]:
    """Return a tier for each tensor: the first ones go to the fastest tier until its share of the
    bytes is full, the next ones to the second, and so on.

    Parameters and result are as in `assign`. No tier differs from its share by more than the
    largest tensor.
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
    """Return the tiers that compute reads in place: without a GPU, host memory is one of them."""
    return TIERS[:1] if has_gpu else TIERS[:2]


def place_first(nbytes: int, total: int, placement: Placement, tiers: Sequence[str]
              ) -> tuple[str | None, Placement]:
    """Place one tensor of `nbytes`, of `total` bytes, on the first of `tiers` whose share suffices.

    Return that tier, or None, and the placement of the other bytes, so that all bytes together
    match `placement`.
    """
    for tier in tiers:
        capacity = getattr(placement, tier) / 100 * total
        if nbytes <= capacity and 0 < nbytes < total:
            shares = (getattr(placement, name) * total - 100 * nbytes * (name == tier)
                      for name in TIERS)
            return tier, Placement(*(max(0.0, share) / (total - nbytes) for share in shares))
    return None, placement


def shard_rows(outputs: int, nbytes: int, layer: int) -> int:
    """Return the rows of each shard of a matrix: a multiple of `MATRIX_TILE`, or all.

    The matrix has `outputs` rows and `nbytes` bytes, a decoder layer `layer` bytes.
    """
    max_bytes = max(layer // SHARDS_PER_LAYER, MIN_SHARD_BYTES)
    rows = -(-outputs // -(-nbytes // max_bytes))
    return min(outputs, -(-rows // MATRIX_TILE) * MATRIX_TILE)


def place_experts(dense_bytes: int, experts: int, placement: Placement,
                  expert_placement: Placement | None) -> tuple[Placement, Placement]:
    """Return the placements of the dense weights (in bytes) and of the experts (in bytes).

    Without `expert_placement`, `placement` is of all weights together. Dense weights then get the
    fastest memory first, because every token needs them.
    """
    if expert_placement is not None or experts == 0:
        return placement, expert_placement or placement
    capacity, parts = [share * (dense_bytes + experts) for share in placement.fractions()], []
    for nbytes in (dense_bytes, experts):
        amounts, remaining = [], float(nbytes)
        for tier, free in enumerate(capacity):
            amounts.append(min(free, remaining))
            remaining -= amounts[-1]
            capacity[tier] -= amounts[-1]
        parts.append(Placement(*(100 * share / max(sum(amounts), 1) for share in amounts))
                     if nbytes else placement)
    return parts[0], parts[1]


def pool_experts(placement: Placement, has_gpu: bool) -> tuple[Placement, float]:
    """Return where experts are stored, and the share of them that compute memory has slots for.

    Experts on disk and in compute memory are one pool: all are stored on disk, and slots for the
    share in memory keep those that the text needs. Beside a GPU, experts in host memory would lose
    by that: they take the place of others in slots, which would then be read from disk again.
    """
    if placement.disk == 0 or has_gpu and placement.cpu > 0:
        return placement, 0.0
    return Placement(0, 0, 100), 1 - placement.fractions()[2]


def split(count: int, placement: Placement) -> tuple[int, int, int]:
    """Split a number of sequences or rows into (gpu, cpu, disk) by largest remainder."""
    exact = [fraction * count for fraction in placement.fractions()]
    parts = [int(share + 1e-9) for share in exact]
    by_remainder: Sequence[int] = sorted(range(3), key=lambda t: parts[t] - exact[t])
    for tier in by_remainder[: count - sum(parts)]:
        parts[tier] += 1
    return parts[0], parts[1], parts[2]
