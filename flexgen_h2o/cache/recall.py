"""The index by which a new token recalls what it attends to, over a cache that keeps everything.

See `h2o.recall`. An index lies where attention runs, whatever the cache's tier, and is a function
of the keys that are cached: it is brought up to date when a new token is about to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.parts import CachePart
from flexgen_h2o.cache.shape import CacheShape, CacheSize
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.index_layout import IndexLayout
from flexgen_h2o.h2o import budget
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.tiers import PAGE, Device, round_up


class Recall:
    """The indexes of a block, reused by the next.

    Parameters
    ----------
    shape : CacheShape
    size : CacheSize
    h2o : H2OConfig
        With `recall`.
    parts : sequence of CachePart
        Those of the cache.
    device : Device
    """

    def __init__(self, shape: CacheShape, size: CacheSize, h2o: H2OConfig, *,
                 parts: Sequence[CachePart], device: Device):
        self._shape = shape
        self._h2o = h2o
        self._layout = IndexLayout(shape.head_dim, h2o.index_bits)
        self._slots = [slots if budget.recalled(h2o, layer, 1) is not None else 0
                       for layer, slots in enumerate(size.slots)]
        self._buffers, self._starts = {}, {}
        for part in parts:
            sizes = [round_up((part.last - part.first) * shape.kv_heads
                              * self._layout.nbytes(slots), PAGE) for slots in self._slots]
            starts = [0, *accumulate(nbytes * size.batches for nbytes in sizes)]
            make = device.host_empty if part.on_host else device.empty
            self._buffers[part.first] = make(starts[-1])
            self._starts[part.first] = [
                [start + batch * nbytes for batch in range(size.batches)]
                for start, nbytes in zip(starts, sizes, strict=False)]
        self._batch_layouts: list[BatchLayout] = []
        self._indexed: dict[tuple[int, int, int], list[int]] = {}
        self._made: dict[tuple, tuple[list[int], Tensor, int]] = {}

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block: nothing is indexed, carried sequences neither."""
        self._batch_layouts = list(batches)
        self._indexed.clear()
        self._made.clear()

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Go on with the same sequences. What came after `BatchLayout.past` comes anew."""
        self._batch_layouts = list(batches)
        self._made.clear()
        for (_, batch, _), counts in self._indexed.items():
            counts[:] = [min(count, batches[batch].past) for count in counts]

    def metadata(self, layer: int, batch: int, part: CachePart, *, tokens: Sequence[int],
                 place: torch.device) -> tuple[Tensor, int] | None:
        """The metadata of a step of a part's sequences, int32 [2, sequences], and the most that
        one of them chooses.

        `tokens` are those of each sequence, the new one included. Rows are the tokens before it,
        and how many of them it attends to. None: all of every sequence.
        """
        if not self._slots[layer]:
            return None
        key = batch, part.first, self._h2o.ratios(layer)
        made, metadata, most = self._made.get(key, ([], None, 0))
        if made != list(tokens):
            lengths = self._batch_layouts[batch].lengths[part.sequences(batch)]
            counts = [min(count - 1, budget.recalled(self._h2o, layer, length, count - length))
                      for length, count in zip(lengths, tokens, strict=True)]
            some = any(count < all_ - 1 for count, all_ in zip(counts, tokens, strict=True))
            most = max(counts) if some else 0
            metadata = torch.tensor([[count - 1 for count in tokens], counts],
                                    dtype=torch.int32).to(place)
            self._made[key] = list(tokens), metadata, most
        return (metadata, most) if most else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, index: Tensor, spans: Tensor,
               held: Tensor, metadata: Tensor, most: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Attend from one new token of each sequence to what it recalls, and cache it.

        Parameters
        ----------
        q : Tensor [sequences, heads, head_dim]
        k, v : Tensor [sequences, kv_heads, head_dim]
        index, spans : Tensor
            From `prepare`.
        held : Tensor [2, sequences, kv_heads, slots, width]
            All that is cached, token i in slot i.
        metadata, most : Tensor, int
            From `metadata`.
        **options
            The form of attention.

        Returns
        -------
        out : Tensor like q
        taken : int64 Tensor [sequences, kv_heads]
            The slot that each new token got.
        """
        records = self._shape.layout
        ops.index_keys(held[0], index, spans, layout=self._layout, records=records)
        chosen = ops.choose_keys(q, k, index=index, metadata=metadata, layout=self._layout,
                                 most=most, **options)
        return ops.attend_recalled(q, k, v, slots=held, chosen=chosen, metadata=metadata,
                                   layout=records, **options)

    def prepare(self, layer: int, batch: int, part: CachePart, *, tokens: Sequence[int]
                ) -> tuple[Tensor, Tensor]:
        """The index of a part's sequences, uint8 [sequences, kv_heads, tiles, tile_bytes], and the
        spans of keys that it will have once it is up to date (`ops.index_keys`)."""
        counts = self._indexed.setdefault((layer, batch, part.first), [0] * len(tokens))
        # A sequence that has ended computes its newest token again.
        spans = [(first := min(done, now - 2), first, now - 1 - first)
                 for done, now in zip(counts, tokens, strict=True)]
        counts[:] = [now - 1 for now in tokens]
        start = self._starts[part.first][layer][batch]
        shape = (len(tokens), self._shape.kv_heads, self._layout.tiles(self._slots[layer]),
                 self._layout.tile_bytes)
        nbytes = torch.Size(shape).numel()
        index = self._buffers[part.first][start : start + nbytes].view(shape)
        return index, torch.tensor(spans, dtype=torch.int32).T.contiguous()
