"""The part of a cache that stays in host memory, of which a GPU reads what it recalls in place."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_h2o.cache.fetched import FetchedPart
from flexgen_h2o.cache.parts import Grid, Records
from flexgen_h2o.storage.tiers import typed
from flexgen_h2o.storage.transfer import Transfers


class MappedPart(FetchedPart):
    """A part in page-locked host memory beside a GPU whose kernels read and write it in place
    (zero-copy).

    Prompts come and go by whole layers, as in any part that is fetched. In a decode step attention
    reads over the link the tokens that it has chosen, and no others; the new token is written the
    same way.

    Parameters
    ----------
    recalled : sequence of bool
        Layers in which steps choose. The others are fetched whole.
    """

    def __init__(self, records: Records, first: int, last: int, *, grid: Grid,
                 transfers: Transfers, recalled: Sequence[bool]):
        super().__init__(records, first, last, grid=grid, transfers=transfers, path=None)
        self._recalled = recalled

    def recalls(self, layer):
        return self._recalled[layer]

    def load(self, layer, batch, *, fetch, keys_only=False, cached=None):
        if self._recalled[layer]:
            # Decode steps write where nothing grows, and what they wrote is to be there.
            cached = None
            self._stores[layer, batch].busy.append(self._device.mark())
        super().load(layer, batch, fetch=fetch, keys_only=keys_only, cached=cached)

    def recalled(self, layer, batch, rows):
        if not self._recalled[layer]:
            return super().recalled(layer, batch, rows)
        store = self._stores[layer, batch]
        for handle in store.busy:
            self._transfers.ready(handle)
        store.busy = []
        return typed(store.host, 0, self._shape(layer, batch, store.slots),
                     self.records.dtype)[:, rows]
