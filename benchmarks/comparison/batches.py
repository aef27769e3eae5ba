"""A system's own best batch: double it until memory ends or it no longer pays."""

from __future__ import annotations

from collections.abc import Callable


def best_batch(rate: Callable[[int], float | None], *, first: int, most: int) -> int | None:
    """The batch of the highest rate.

    It is doubled from `first` until memory is too small, or two in a row bring nothing. If `first`
    itself is too large, it is halved until it fits.

    Parameters
    ----------
    rate : callable
        Tokens per second at a batch; None where it could not be measured.
    first, most : int
        Sequences to begin with, and at most.

    Returns
    -------
    int or None
        None: not a single sequence could be measured.
    """
    best: tuple[float, int] | None = None
    batch, idle = first, 0
    while batch <= most and idle < 2:
        found = rate(batch)
        if found is None:
            break
        if best is None or found > best[0]:
            best, idle = (found, batch), 0
        else:
            idle += 1
        batch *= 2
    batch = first // 2
    while best is None and batch >= 1:
        found = rate(batch)
        best = None if found is None else (found, batch)
        batch //= 2
    return None if best is None else best[1]
