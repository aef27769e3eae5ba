"""Placement of data over the three tiers, and FlexGen's ``--percent``. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
