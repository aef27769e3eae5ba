"""Checks of single values, by the validator of `schema`: each a `UserError` that names the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from flexgen_h2o.config.schema import checked


def check_bool(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is True or False."""
    checked(bool, value, name)


def check_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> None:
    """Raise `UserError` unless `value` is a whole number (no bool) in low..high."""
    checked(Annotated[int, Meta(ge=low, le=high)], value, name)


def check_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> float:
    """`value`; raises `UserError` unless it is a finite number from `low`, or over `above`, to
    `high`.
    """
    bounds = Meta(ge=low, le=high) if above is None else Meta(gt=above, le=high)
    return checked(Annotated[float, bounds], value, name)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    checked(Literal[tuple(choices)], value, name)
