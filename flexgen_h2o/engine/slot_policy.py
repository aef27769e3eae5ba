"""Eviction policy of expert slots: selects the expert to evict from fast memory. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from heapq import heappop, heappush, heapreplace

from flexgen_h2o.config.layers import ExpertKey

DECAY = 0.9
"""Factor on the score of an expert for each pass of its layer."""

_STEP = -math.log(DECAY)


class SlotPolicy:
    """Eviction policy for expert slots: LRFU (Lee et al., 2001) with the layer's passes as clock.

    The score of an expert is the number of its uses, each multiplied by `DECAY` for every later
    pass of its layer. The expert with the lowest score is evicted, where a score counts half if the
    layer has just been used, and fully if it comes next. Layers are used in a cycle, so plain LRU
    would evict the experts that are needed next.

    The rank of an expert is the logarithm of its score, as if its layer had had no passes since the
    beginning: only uses change it, and it orders the experts of a layer.

    Parameters
    ----------
    layers : int
        Decoder layers up to the last one with experts.
    """

    def __init__(self, slots: int, layers: int):
        self._free = list(range(slots))[::-1]
        self._slots: dict[ExpertKey, int] = {}
        self._passes = [0] * layers
        self._ranks: dict[ExpertKey, float] = {}
        self._pinned: set[ExpertKey] = set()
        # Of each layer, experts that may be evicted. Ranks are updated when they come to the top.
        self._heaps: list[list[tuple[float, ExpertKey]]] = [[] for _ in range(layers)]
        self._queued: set[ExpertKey] = set()  # in heaps
        self._waits = [math.log(1 + distance / layers) for distance in range(layers)]
        self._layer = 0

    def begin(self, layer: int) -> None:
        """Begin a pass of a layer."""
        self._layer = layer
        self._passes[layer] += 1

    def use(self, key: ExpertKey, uses: float = 1.0) -> None:
        """Count uses of an expert in the current pass of its layer."""
        self._ranks[key] = math.log(self.score(key) + uses) + _STEP * self._passes[key[0]]

    def score(self, key: ExpertKey) -> float:
        """Return the decayed number of uses of an expert."""
        return math.exp(self._ranks.get(key, -math.inf) - _STEP * self._passes[key[0]])

    def slot(self, key: ExpertKey) -> int | None:
        """Return the slot of an expert, or None."""
        return self._slots.get(key)

    def pin(self, key: ExpertKey) -> None:
        """Protect an expert from eviction until `unpin`."""
        self._pinned.add(key)

    def unpin(self, key: ExpertKey) -> None:
        """Allow the eviction of an expert."""
        self._pinned.discard(key)
        self._queue(key)

    @property
    def cached(self) -> Collection[ExpertKey]:
        """The experts that have slots."""
        return self._slots.keys()

    def allocate(self, key: ExpertKey) -> int | None:
        """Assign a slot to an expert without one; evict another expert if no slot is free.

        Return None if all experts with slots are pinned.
        """
        if not self._free:
            victim = self.victim()
            if victim is None:
                return None
            self.evict(victim)
        slot = self._slots[key] = self._free.pop()
        self._queue(key)
        return slot

    def evict(self, key: ExpertKey) -> None:
        """Free the slot of an expert."""
        self._free.append(self._slots.pop(key))
        self._pinned.discard(key)

    def victim(self) -> ExpertKey | None:
        """Return the expert to evict next, or None if all are pinned."""
        candidates = []
        for layer, heap in enumerate(self._heaps):
            if heap and (lowest := self._lowest(heap)) is not None:
                wait = self._waits[layer - self._layer - 1]
                candidates.append((lowest[0] - _STEP * self._passes[layer] - wait, -wait,
                                   lowest[1]))
        return min(candidates)[2] if candidates else None

    def _queue(self, key: ExpertKey) -> None:
        """Put an expert with a slot into the heap of its layer, unless it is there."""
        if key in self._slots and key not in self._queued:
            self._queued.add(key)
            heappush(self._heaps[key[0]], (self._ranks.get(key, -math.inf), key))

    def _lowest(self, heap: list[tuple[float, ExpertKey]]) -> tuple[float, ExpertKey] | None:
        """Return the lowest rank of a layer's experts that may be evicted, and the expert."""
        while heap:
            rank, key = heap[0]
            if key in self._pinned or key not in self._slots:
                heappop(heap)
                self._queued.discard(key)
            elif rank < (current := self._ranks.get(key, -math.inf)):
                heapreplace(heap, (current, key))
            else:
                return rank, key
        return None
