"""The tokens that fast memory holds of each KV head, and the slots that they lie in."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_h2o.kernels import ops


class FastSet:
    """A cache of tokens, of which each head has as many as it has slots: their numbers alone.

    A head is one KV head of one sequence. Of the tokens that are not chosen now, those give their
    slots up first whose weights were the least, by the running mean of their logarithms: choices go
    by weight, and tokens that were nearly chosen soon are.

    Parameters
    ----------
    heads : int
    tokens : int
        The most that a head ever has.
    slots : int
        Of each head.
    newest : int
        Places of the newest tokens behind them, whose number alone says where they lie.

    Attributes
    ----------
    log_weights : int32 Tensor [heads, tokens]
        Those means, which whoever chooses brings up to date: see `reference_recall.note_weights`.
    """

    def __init__(self, heads: int, tokens: int, slots: int, newest: int):
        self._slot_of = torch.full((heads, tokens), -1, dtype=torch.int32)
        self._token_of = torch.full((heads, slots), -1, dtype=torch.int32)
        self.log_weights = torch.zeros((heads, tokens), dtype=torch.int32)
        self._newest = newest

    def take(self, chosen: Tensor, firsts: Tensor, *, head: int = 0) -> tuple[Tensor, Tensor, int]:
        """Give each token that heads from number `head` on have chosen a slot: see
        `reference_recall.take_slots`. What is missing names heads by their numbers here."""
        heads = slice(head, head + chosen.shape[0] * chosen.shape[1])
        slots, missing, held = ops.take_slots(
            chosen, firsts, slot_of=self._slot_of[heads], token_of=self._token_of[heads],
            log_weights=self.log_weights[heads], newest=self._newest)
        missing[0] += head
        return slots, missing, held

    def forget(self, firsts: Tensor) -> None:
        """Give up the slots of tokens from a number on, int Tensor [heads]: others may come."""
        gone = self._token_of >= firsts[:, None]
        head, slot = gone.nonzero(as_tuple=True)
        self._slot_of[head, self._token_of[head, slot].long()] = -1
        self._token_of.masked_fill_(gone, -1)
        self.log_weights.masked_fill_(
            torch.arange(self.log_weights.shape[1]) >= firsts[:, None], 0)
