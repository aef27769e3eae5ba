"""The decode metadata of the batches of a block, each made once for all layers that share it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgen_h2o.cache.parts import CachePart
from flexgen_h2o.cache.shape import LayerCachePlan
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.h2o.decode_metadata import decode_metadata


class StepMetadata:
    """The newest metadata by batch, part and budgets.

    Parameters
    ----------
    batch_layouts : sequence of BatchLayout
    plans : sequence of sequences of LayerCachePlan
        Of each batch, by layer.
    h2o : H2OConfig or None
    stays : bool
        A new token's metadata is written over the last one's, where what is bound reads it.
    """

    def __init__(self, batch_layouts: Sequence[BatchLayout],
                 plans: Sequence[Sequence[LayerCachePlan]], h2o: H2OConfig | None, *, stays: bool):
        self._batch_layouts = batch_layouts
        self._plans = plans
        self._h2o = h2o
        self._stays = stays
        self._made: dict[tuple, tuple[int, torch.Tensor]] = {}

    def new(self, layer: int, batch: int, part: CachePart, *, token: int, place: torch.device
            ) -> torch.Tensor:
        """The metadata of new token `token` (from 1): int32 [4, sequences of the part]."""
        key = self._key(layer, batch, part)
        made, metadata = self._made.get(key, (0, None))
        if made != token:
            prompts = self._batch_layouts[batch].lengths[part.sequences(batch)]
            found = decode_metadata(prompts, self.tokens(batch, part, token), self._h2o, layer)
            if metadata is None or not self._stays:
                metadata = found.to(place)
            else:
                metadata.copy_(found)
            self._made[key] = (token, metadata)
        return metadata

    def newest(self, layer: int, batch: int, part: CachePart) -> torch.Tensor:
        """The result of the last `new`."""
        return self._made[self._key(layer, batch, part)][1]

    def tokens(self, batch: int, part: CachePart, token: int) -> list[int]:
        """Tokens of each sequence of a part, new token `token` included."""
        mine, batch_layout = part.sequences(batch), self._batch_layouts[batch]
        return [batch_layout.tokens(sequence, token) for sequence in range(mine.start, mine.stop)]

    def _key(self, layer: int, batch: int, part: CachePart) -> tuple[int, int, int]:
        return batch, part.first, self._plans[batch][layer].like
