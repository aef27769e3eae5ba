"""The tokens that fast memory holds of each KV head, and the slots that they lie in."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flexgen_h2o.kernels import ops


@dataclass
class RecallCounts:
    """Counts of tokens that decode steps have chosen, one for each KV head.

    Of those that rest on a slower tier `hits` were in fast memory when they were asked for, and
    `loads` had to be read then, with all that filled the fast set; `guesses` were read ahead,
    needed or not.
    `wait_seconds` is the time for which compute waited for reads.
    """

    hits: int = 0
    loads: int = 0
    guesses: int = 0
    wait_seconds: float = 0.0

    def since(self, before: RecallCounts) -> RecallCounts:
        """Counts of what came after another count."""
        return RecallCounts(*(getattr(self, each.name) - getattr(before, each.name)
                              for each in fields(self)))


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
    device : torch.device, optional
        What gives slots to tokens; without one the host does.

    Attributes
    ----------
    log_weights : int32 Tensor [heads, tokens]
        Those means, which whoever chooses brings up to date: see `reference_recall.note_weights`.
    """

    def __init__(self, heads: int, tokens: int, slots: int, newest: int, *,
                 device: torch.device | None = None):
        some = {"dtype": torch.int32, "device": device}
        self._slot_of = torch.full((heads, tokens), -1, **some)
        self._token_of = torch.full((heads, slots), -1, **some)
        self.log_weights = torch.zeros((heads, tokens), **some)
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

    def claim(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for all heads, where nothing waits to learn what is missing: see
        `reference_recall.claim_slots`."""
        return ops.claim_slots(chosen, slot_of=self._slot_of, token_of=self._token_of,
                               log_weights=self.log_weights)

    def forget(self, firsts: Tensor) -> None:
        """Give up the slots of tokens from a number on, int Tensor [heads]: others may come."""
        gone = self._token_of >= firsts[:, None]
        head, slot = gone.nonzero(as_tuple=True)
        self._slot_of[head, self._token_of[head, slot].long()] = -1
        self._token_of.masked_fill_(gone, -1)
        every = torch.arange(self.log_weights.shape[1], device=firsts.device)
        self.log_weights.masked_fill_(every >= firsts[:, None], 0)
