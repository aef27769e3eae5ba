"""The tokens that fast memory holds of each KV head, and the slots that they lie in."""

from __future__ import annotations

import torch
from torch import Tensor


class FastSet:
    """A cache of tokens, of which each head has as many as it has slots: their numbers alone.

    A head is one KV head of one sequence. Of the tokens that are not wanted, the one that was
    wanted last the longest ago gives its slot up first.

    Parameters
    ----------
    heads : int
    tokens : int
        The most that a head ever has.
    slots : int
        Of each head.
    """

    def __init__(self, heads: int, tokens: int, slots: int):
        # Behind the last token and slot comes one that stands for none.
        self._no_token, self._no_slot = tokens, slots
        self._slot_of = torch.full((heads, tokens + 1), -1, dtype=torch.int32)
        self._slot_of[:, tokens] = slots
        self._token_of = torch.full((heads, slots + 1), tokens, dtype=torch.int32)
        self._wanted = torch.zeros((heads, slots + 1), dtype=torch.int32)
        self._step = 0

    def take(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Give each of these tokens a slot.

        Parameters
        ----------
        tokens : int Tensor [heads, n]
            Different ones of each head, at most as many as it has slots; -1 for none.

        Returns
        -------
        slots : int64 Tensor [heads, n]
            Where each token lies; for none, the number of slots.
        missing : bool Tensor [heads, n]
            The tokens that had no slot: what lies there is another's.
        """
        self._step += 1
        tokens = tokens.long()
        tokens = tokens.where(tokens >= 0, self._no_token)
        slots = self._slot_of.gather(1, tokens).long()
        missing = slots < 0
        most = int(missing.sum(1).max()) if missing.numel() else 0
        slots = slots.where(~missing, self._no_slot)
        self._wanted.scatter_(1, slots, self._step)
        if not most:
            return slots, missing
        # Those that are wanted now have the largest number, and are enough to leave the others.
        victims = self._wanted[:, : self._no_slot].topk(most, largest=False).indices
        number = (missing.cumsum(1) - 1).clamp_(min=0)
        slots = victims.gather(1, number).where(missing, slots)
        given = slots.where(missing, self._no_slot)
        gone = self._token_of.gather(1, given).long()
        self._slot_of.scatter_(1, gone, -1)
        self._slot_of.scatter_(1, tokens, slots.int())
        self._slot_of[:, self._no_token] = self._no_slot
        self._token_of.scatter_(1, slots, tokens.int())
        self._token_of[:, self._no_slot] = self._no_token
        self._wanted.scatter_(1, slots, self._step)
        return slots, missing

    def forget(self, firsts: Tensor) -> None:
        """Give up the slots of tokens from a number on, int Tensor [heads]."""
        gone = (self._token_of >= firsts[:, None]) & (self._token_of < self._no_token)
        tokens = self._token_of.where(gone, self._no_token).long()
        self._slot_of.scatter_(1, tokens, -1)
        self._slot_of[:, self._no_token] = self._no_slot
        self._token_of.masked_fill_(gone, self._no_token)
        self._wanted.masked_fill_(gone, 0)
