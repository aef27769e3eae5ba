"""Checks of single values, each with one line for what is wrong."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

from flexgen_h2o.errors import UserError


def check_bool(name: str, value: object) -> None:
    """Raise `UserError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false, got {value!r}")


def check_int(name: str, value: object, *, low: int | None = None, high: int | None = None) -> None:
    """Raise `UserError` unless `value` is a whole number (no bool) in low..high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise UserError(f"{name} must be a whole number, got {value!r}")
    if low is not None and int(value) < low:
        raise UserError(f"{name} must be at least {low}, got {value}")
    if high is not None and int(value) > high:
        raise UserError(f"{name} must be at most {high}, got {value}")


def check_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> float:
    """`value`; raises `UserError` unless it is a finite number in low..high and over `above`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, got {value!r}")
    number = float(value)
    if above is not None and number <= above:
        raise UserError(f"{name} must be greater than {above:g}, got {value}")
    if low is not None and number < low:
        raise UserError(f"{name} must be at least {low:g}, got {value}")
    if high is not None and number > high:
        raise UserError(f"{name} must be at most {high:g}, got {value}")
    return number


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise `UserError` unless `value` is one of `choices`."""
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
