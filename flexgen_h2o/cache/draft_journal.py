"""The rollback of rejected drafts: what drafted tokens overwrite in a cache that evicts.

A cache without eviction needs none: the next token takes the slot of the first rejected one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flexgen_h2o.cache.tiers import SlotUpdate
from flexgen_h2o.h2o.eviction import EvictionState

JournalKey = tuple[int, int, int]
"""A tier of a cache in a layer: layer, batch, and the first sequence of the tier."""


@dataclass(frozen=True)
class _DraftedToken:
    """What one drafted token has overwritten.

    Attributes
    ----------
    position : int
    slots : SlotUpdate
        The slots that it took, with their contents before.
    state : EvictionState
        The state, which the token has changed.
    before : list of Tensor
        Copies of the state's tensors before the token.
    """

    position: int
    slots: SlotUpdate
    state: EvictionState
    before: list[Tensor]


class DraftJournal:
    """The drafted tokens that are not verified yet, in each tier of a cache."""

    def __init__(self) -> None:
        self._tokens: dict[JournalKey, list[_DraftedToken]] = {}
        self._cache: Tensor  # copy of the slots before the next token

    def __contains__(self, key: JournalKey) -> bool:
        return key in self._tokens

    def attend(self, key: JournalKey, position: int, cache: Tensor, state: EvictionState,
               attend: Callable[..., tuple[Tensor, Tensor]], *qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``attend(*qkv)``, and record what that overwrites.

        Parameters
        ----------
        key : tuple of int
            Layer, batch and first sequence. Call for all drafted tokens of one key before
            the next key.
        position : int
            Position of the drafted token.
        cache : Tensor [kinds, sequences, kv_heads, slots, width]
        state : EvictionState
        attend : callable (q, k, v) -> (output, slots)
            Attend, cache the token and evict.
        """
        if key not in self._tokens:
            self._tokens[key] = []
            self._cache = cache.clone()  # the slot to be taken is not known before
        before = [x.clone() for x in state.tensors]
        out, slots = attend(*qkv)
        self._tokens[key].append(_DraftedToken(
            position, SlotUpdate.gather(self._cache, slots), state, before))
        SlotUpdate.gather(cache, slots).write(self._cache)
        return out, slots

    def roll_back(self, key: JournalKey, cached: int, cache: Tensor) -> bool:
        """Undo the tokens from position `cached` on, and forget the others, which are accepted.

        Return whether any was undone. `cache` is as in `attend`.
        """
        rejected = [token for token in self._tokens.pop(key) if token.position >= cached]
        for token in reversed(rejected):
            token.slots.write(cache)
        for token in rejected[:1]:
            for target, before in zip(token.state.tensors, token.before, strict=True):
                target.copy_(before)
        return bool(rejected)

    def clear(self) -> None:
        """Forget all tokens."""
        self._tokens.clear()
