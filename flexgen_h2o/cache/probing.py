"""A stand-in for the cache that hands attention to a function: to see what a model attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flexgen_h2o.h2o.batch_layout import Seats, Span
from flexgen_h2o.kernels.rotary import apply_rope_


class ProbedCache:
    """Stands in for `KVCache` in prefills of one sequence each; nothing stays.

    Parameters
    ----------
    attend : callable (layer, number, q, k, v) -> Tensor like q
        q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]: q and k rotated.
    numbers : sequence of int
        What to call the sequence of each block, in the order in which blocks begin.
    """

    attends_on_host = False

    def __init__(self, attend: Callable[..., torch.Tensor], numbers: Sequence[int]):
        self._attend = attend
        self._numbers = iter(numbers)

    def begin(self, batches: Sequence[Seats]) -> None:
        """Start a new block, of the next sequence."""
        self._number = next(self._numbers)

    def load(self, layer: int, batch: int, sweep: int) -> None:
        """Nothing is anywhere."""

    store = load

    def nbytes(self) -> int:
        """Bytes of what is cached: none."""
        return 0

    def attend_prompt(self, layer: int, batch: int, q, k, v, *, spans: Sequence[Span], rope):
        """As `KVCache.attend_prompt`, of one whole prompt."""
        if rope is not None:
            for x in (q, k):
                apply_rope_(x, *rope)
        return self._attend(layer, self._number, q, k, v)
