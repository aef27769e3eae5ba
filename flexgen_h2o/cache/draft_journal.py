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
    """What one drafted token has overwritten."""

    position: int
    slots: SlotUpdate  # that it took, with their contents before
    state: EvictionState
    before: list[Tensor]  # copies of the state's tensors


class DraftJournal:
    """The drafted tokens that are not verified yet, in each tier of a cache."""

    def __init__(self) -> None:
        self._tokens: dict[JournalKey, list[_DraftedToken]] = {}
        self._cache: Tensor  # copy of the slots before the next token

    def __contains__(self, key: JournalKey) -> bool:
        return key in self._tokens

    def attend(self, key: JournalKey, position: int, cache: Tensor, state: EvictionState,
               attend: Callable[..., tuple[Tensor, Tensor]], *qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``attend(*qkv)`` of a drafted token at a position, and record what it overwrites.

        All drafted tokens of one key come before those of the next key. `attend` attends, caches
        the token in `cache` [kinds, sequences, kv_heads, slots, width], evicts, and returns the
        output and the slots.
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
