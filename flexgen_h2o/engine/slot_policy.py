"""The choice of which expert gives up its slot in fast memory: a pure policy. No torch.

Experts are used in the order of the layers, over and over. What was used longest ago is then what
is needed next, so that plain "least recently used" keeps nothing when there are fewer slots than
experts. Here an expert is worth how often it was chosen, of late: a use counts 1 and fades by
`FADE` with each pass of the expert's own layer. What is worth least goes; among equals the one
whose layer comes last. (LRFU, Lee et al., 2001, with the layers' passes as the clock.)
"""

from __future__ import annotations

from collections.abc import Collection

from flexgen_h2o.config.expert_choices import Key

FADE = 0.9


class SlotPolicy:
    """Experts and the slots that they have.

    Parameters
    ----------
    slots, layers : int
        Slots in all, and decoder layers, the last that has experts being the last of them.
    """

    def __init__(self, slots: int, layers: int):
        self._layers = layers
        self._free = list(range(slots))[::-1]
        self._slots: dict[Key, int] = {}
        self._held: list[set[Key]] = [set() for _ in range(layers)]
        self._passes = [0] * layers
        self._worth: dict[Key, tuple[float, int]] = {}
        self._pinned: set[Key] = set()
        self._lowest: dict[int, tuple[float, Key] | None] = {}
        self._layer = 0

    def begin(self, layer: int) -> None:
        """A pass of a layer begins."""
        self._layer = layer
        self._passes[layer] += 1
        self._lowest.pop(layer, None)

    def use(self, key: Key) -> None:
        """Count a use of an expert in the pass of its layer."""
        self._worth[key] = (self.worth(key) + 1, self._passes[key[0]])
        self._lowest.pop(key[0], None)

    def worth(self, key: Key) -> float:
        """The uses of an expert, faded with its passes."""
        worth, seen = self._worth.get(key, (0.0, 0))
        return worth * FADE ** (self._passes[key[0]] - seen)

    def slot(self, key: Key) -> int | None:
        """The slot that an expert has; None if it has none."""
        return self._slots.get(key)

    def pin(self, key: Key) -> None:
        """Let an expert keep its slot until `unpin`."""
        self._pinned.add(key)
        self._lowest.pop(key[0], None)

    def unpin(self, key: Key) -> None:
        """Let an expert give up its slot, if it has one, to another."""
        self._pinned.discard(key)
        self._lowest.pop(key[0], None)

    @property
    def held(self) -> Collection[Key]:
        """The experts that have slots."""
        return self._slots.keys()

    def take(self, key: Key) -> int | None:
        """Give an expert, which has none, a slot; None if all are of pinned experts.

        A free slot if there is one, else that of `victim`, which has none then.
        """
        if self._free:
            slot = self._free.pop()
        else:
            victim = self.victim()
            if victim is None:
                return None
            slot = self._slots[victim]
            self.forget(victim)
            self._free.pop()
        self._slots[key] = slot
        self._held[key[0]].add(key)
        self._lowest.pop(key[0], None)
        return slot

    def forget(self, key: Key) -> None:
        """Take an expert's slot from it."""
        self._free.append(self._slots.pop(key))
        self._held[key[0]].discard(key)
        self.unpin(key)

    def victim(self) -> Key | None:
        """The expert to give up its slot next; None if all are pinned or there is none."""
        found = []
        for layer, held in enumerate(self._held):
            if held and layer not in self._lowest:
                self._lowest[layer] = min(((self.worth(key), key) for key in held
                                           if key not in self._pinned), default=None)
            lowest = self._lowest.get(layer) if held else None
            if lowest is not None:
                ahead = (layer - self._layer - 1) % self._layers
                found.append((lowest[0], -ahead, lowest[1]))
        return min(found)[2] if found else None
