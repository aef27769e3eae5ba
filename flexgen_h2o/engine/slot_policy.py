"""Eviction policy of expert slots: selects the expert to evict from fast memory. No torch."""

from __future__ import annotations

from collections.abc import Collection

from flexgen_h2o.config.layers import ExpertKey

DECAY = 0.9
"""Factor on the score of an expert for each pass of its layer."""


class SlotPolicy:
    """Eviction policy for expert slots: LRFU (Lee et al., 2001) with the layer's passes as clock.

    Layers are used in a cycle, so plain LRU would evict the experts that are needed next. Here the
    score of an expert is the number of its uses, each multiplied by `DECAY` for every later pass of
    its layer. The expert with the lowest score is evicted; of equal scores, the one whose layer
    comes last.

    Parameters
    ----------
    slots : int
    layers : int
        Decoder layers up to the last one with experts.
    """

    def __init__(self, slots: int, layers: int):
        self._layers = layers
        self._free = list(range(slots))[::-1]
        self._slots: dict[ExpertKey, int] = {}
        self._cached: list[set[ExpertKey]] = [set() for _ in range(layers)]
        self._passes = [0] * layers
        self._scores: dict[ExpertKey, tuple[float, int]] = {}
        self._pinned: set[ExpertKey] = set()
        self._lowest: dict[int,
                           tuple[float, ExpertKey] | None] = {}  # of each layer, if still valid
        self._layer = 0

    def begin(self, layer: int) -> None:
        """Begin a pass of a layer."""
        self._layer = layer
        self._passes[layer] += 1
        self._lowest.pop(layer, None)

    def use(self, key: ExpertKey) -> None:
        """Count a use of an expert in the current pass of its layer."""
        self._scores[key] = (self.score(key) + 1, self._passes[key[0]])
        self._lowest.pop(key[0], None)

    def score(self, key: ExpertKey) -> float:
        """Return the decayed number of uses of an expert."""
        score, updated = self._scores.get(key, (0.0, 0))
        return score * DECAY ** (self._passes[key[0]] - updated)

    def slot(self, key: ExpertKey) -> int | None:
        """Return the slot of an expert, or None."""
        return self._slots.get(key)

    def pin(self, key: ExpertKey) -> None:
        """Protect an expert from eviction until `unpin`."""
        self._pinned.add(key)
        self._lowest.pop(key[0], None)

    def unpin(self, key: ExpertKey) -> None:
        """Allow the eviction of an expert."""
        self._pinned.discard(key)
        self._lowest.pop(key[0], None)

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
        self._cached[key[0]].add(key)
        self._lowest.pop(key[0], None)
        return slot

    def evict(self, key: ExpertKey) -> None:
        """Free the slot of an expert."""
        self._free.append(self._slots.pop(key))
        self._cached[key[0]].discard(key)
        self.unpin(key)

    def victim(self) -> ExpertKey | None:
        """Return the expert to evict next, or None if all are pinned."""
        candidates = []
        for layer, cached in enumerate(self._cached):
            if cached and layer not in self._lowest:
                self._lowest[layer] = min(((self.score(key), key) for key in cached
                                           if key not in self._pinned), default=None)
            lowest = self._lowest.get(layer) if cached else None
            if lowest is not None:
                distance = (layer - self._layer - 1) % self._layers
                candidates.append((lowest[0], -distance, lowest[1]))
        return min(candidates)[2] if candidates else None
