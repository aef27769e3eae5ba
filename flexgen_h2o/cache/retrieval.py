"""The index by which a new token recalls what it attends to, over a cache that keeps everything.

See `h2o.recall`. An index lies where attention runs, whatever the cache's tier. It is a function of
the keys that are cached, and comes up to date with whatever is put into their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.layout import CacheShape, CacheSize
from flexgen_h2o.cache.tiers import CachePart, SelectedTokens, gather_slots
from flexgen_h2o.config.cache_layout import GroupLayout, IndexLayout, split_slots
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o import budget
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import FormArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.storage.tiers import PAGE, Device, round_up
from flexgen_h2o.storage.transfer import D2H, H2D, Transfers


@dataclass(frozen=True)
class RecallStep:
    """The metadata of a decode step of a part's sequences, for all layers of one budget.

    Attributes
    ----------
    tokens : list of int
        Those of each sequence, the new one included.
    metadata : int32 Tensor [2, sequences]
        The tokens before it, and how many of them it attends to.
    most : int
        No sequence attends to more.
    spans : int32 Tensor [3, sequences], on the host
        The new token's key, as `ops.index_keys` is told of it.
    """

    tokens: list[int]
    metadata: Tensor
    most: int
    spans: Tensor

    def of(self, rows: slice) -> RecallStep:
        """That of some of the sequences."""
        return replace(self, tokens=self.tokens[rows], spans=self.spans[:, rows].contiguous(),
                       metadata=self.metadata[:, rows].contiguous())

    def widened(self, counts: Sequence[int]) -> RecallStep:
        """The same with at least so many chosen of each sequence, if there are as many."""
        if not any(counts):
            return self
        before, least = self.metadata
        wide = torch.maximum(torch.tensor(counts).to(least), least).minimum(before)
        return replace(self, metadata=torch.stack((before, wide)), most=int(wide.max()))


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
        self.distinct = tuple({h2o.ratios(layer): layer for layer, slots in enumerate(self._slots)
                               if slots}.values())
        """A layer of each budget of those that choose."""
        self._stays = False
        self._batch_layouts: list[BatchLayout] = []
        self._steps: dict[tuple, RecallStep] = {}
        self._chosen: dict[tuple[int, int], Tensor] = {}

    @property
    def _records(self) -> GroupLayout | None:
        """The layout of a cached key; None: a plain vector."""
        return None if self._shape.layout is None else self._shape.layout.keys

    def _keys(self, slots: Tensor) -> Tensor:
        """The keys in slots."""
        return split_slots(slots, self._shape.layout)[0]

    def begin(self, batches: Sequence[BatchLayout], *, stays: bool) -> None:
        """Start a block, or go on with its sequences.

        If a step's metadata `stays`, it is written over the last one's, where what is bound reads
        it.
        """
        self._batch_layouts = list(batches)
        self._stays = stays
        self._steps.clear()
        self._chosen.clear()

    def index(self, layer: int, batch: int, part: CachePart) -> Tensor | None:
        """The index of a part's sequences, uint8 [sequences, kv_heads, tiles, tile_bytes]; None in
        layers of which all that is cached is attended to."""
        if not self._slots[layer]:
            return None
        mine = part.sequences(batch)
        start = self._starts[part.first][layer][batch]
        shape = (mine.stop - mine.start, self._shape.kv_heads,
                 self._layout.tiles(self._slots[layer]), self._layout.tile_bytes)
        nbytes = torch.Size(shape).numel()
        return self._buffers[part.first][start : start + nbytes].view(shape)

    def cached(self, layer: int, batch: int, part: CachePart, *,
               tokens: Sequence[tuple[int, int, int]]) -> None:
        """Bring index and part up to date with prompts that have been put into their slots.

        `tokens` are (sequence of the batch, first, end), the sequences neighbours in the part.
        """
        index = self.index(layer, batch, part)
        if index is not None:
            mine = slice(tokens[0][0] - part.first, tokens[-1][0] - part.first + 1)
            firsts = [first for _, first, _ in tokens]
            counts = [end - first for _, first, end in tokens]
            ops.index_keys(self._keys(part.get(layer, batch)[:, mine]), index[mine],
                           torch.tensor([firsts, firsts, counts], dtype=torch.int32),
                           layout=self._layout, records=self._records)
        part.filled(layer, batch, tokens)

    def step(self, layer: int, batch: int, part: CachePart, *, tokens: Sequence[int],
             place: torch.device) -> RecallStep | None:
        """The metadata of a step. `tokens` are those of each sequence, the new one included.

        Returns None in layers of which all that is cached is attended to.
        """
        if not self._slots[layer]:
            return None
        key = self._key(layer, batch, part)
        found = self._steps.get(key)
        if found is None or found.tokens != list(tokens):
            lengths = self._batch_layouts[batch].lengths[part.sequences(batch)]
            counts = [self._count(layer, length, count)
                      for length, count in zip(lengths, tokens, strict=True)]
            before = [count - 1 for count in tokens]
            metadata = torch.tensor([before, counts], dtype=torch.int32)
            spans = torch.tensor([before, before, [1] * len(before)], dtype=torch.int32)
            if found is not None and self._stays:
                metadata, spans = found.metadata.copy_(metadata), found.spans.copy_(spans)
            found = self._steps[key] = RecallStep(list(tokens), metadata.to(place), max(counts),
                                                  spans)
        return found

    def _key(self, layer: int, batch: int, part: CachePart) -> tuple:
        return batch, part.first, self._h2o.ratios(layer)

    def _count(self, layer: int, length: int, tokens: int) -> int:
        """The number of tokens that the last of a sequence's `tokens` attends to beside itself."""
        return min(tokens - 1, budget.recalled(self._h2o, layer, length, tokens - length))

    def choose(self, q: Tensor, k: Tensor, *, index: Tensor, step: RecallStep, **options: Any
               ) -> SelectedTokens:
        """The tokens that a new one attends to, by its query and key; see `attend`."""
        slots = ops.choose_keys(q, k, index=index, metadata=step.metadata, layout=self._layout,
                                most=step.most, **options)
        return SelectedTokens(slots, step.metadata, step.spans)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, part: CachePart, where: tuple[int, int],
               step: RecallStep, **options: Any) -> tuple[Tensor, Tensor]:
        """Attend from one new token of each sequence to what it recalls; cache it, and index it.

        Parameters
        ----------
        q : Tensor [sequences, heads, head_dim]
        k, v : Tensor [sequences, kv_heads, head_dim]
        part : CachePart
            What they live in.
        where : (layer, batch)
        step : RecallStep
        **options
            The form of attention.

        Returns
        -------
        out : Tensor like q
        taken : int64 Tensor [sequences, kv_heads]
            The slot that each new token got.
        """
        def of(rows: slice) -> dict[str, Any]:
            offsets = options.get("offsets")
            return options if offsets is None else options | {"offsets": offsets[rows]}

        index = self.index(*where, part)
        turns = part.turns(where[0], len(q))
        asked = [part.ask(*where, rows, self.choose(
            q[rows], k[rows], index=index[rows], step=step if len(turns) == 1 else step.of(rows),
            log_weights=part.log_weights(*where, rows), **of(rows))) for rows in turns]
        attended = []
        for rows, chosen in zip(turns, asked, strict=True):
            held = part.recalled(*where, rows)
            attended.append(ops.attend_recalled(
                q[rows], k[rows], v[rows], slots=held, chosen=chosen.slots,
                metadata=chosen.metadata, layout=self._shape.layout, **of(rows)))
            ops.index_keys(self._keys(held), index[rows], chosen.spans, layout=self._layout,
                           records=self._records)
        if len(attended) == 1:
            return attended[0]
        out, taken = zip(*attended, strict=True)
        return torch.cat(out), torch.cat(taken)

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, part: CachePart, where: tuple[int, int],
             form: FormArguments, out: Tensor, capture: cpu_library.CapturedCalls) -> None:
        """Note `attend` among the steps of a program: attention to what the newest `step` says.

        Parameters and shapes are those of `attend`, `out` is like q, and the part in the memory
        that computes.
        """
        layer, batch = where
        index, step = self.index(*where, part), self._steps[self._key(layer, batch, part)]
        slots = part.get(*where)
        most = max(self._count(layer, length, length + new)
                   for length, new in self._batch_layouts[batch].sizes)
        # One buffer for all layers: nothing of it is needed after attention.
        chosen = self._chosen.setdefault(
            (len(q), most), step.metadata.new_empty((len(q), self._shape.kv_heads, most)))
        native_recall.choose_keys(q, k, index=index, metadata=step.metadata, layout=self._layout,
                                  most=most, form=form, out=chosen, capture=capture)
        native_recall.attend_recalled(q, k, v, slots=slots, chosen=chosen, metadata=step.metadata,
                                      layout=self._shape.layout, form=form, out=out,
                                      capture=capture)
        native_recall.index_keys(self._keys(slots), index, step.spans, layout=self._layout,
                                 records=self._records, capture=capture)


# Sparse attention of new tokens: all cached keys are read, and the values with large weights.


class SparseAttention:
    """Decode attention as FlexGen has it (arXiv 2303.06865, section 5).

    Parameters
    ----------
    shape : CacheShape
        With `attn_sparsity` below 1.
    transfers : Transfers
    """

    def __init__(self, shape: CacheShape, transfers: Transfers):
        self._shape = shape
        self._transfers = transfers

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, part: CachePart, where: tuple[int, int],
               most: int, metadata: Tensor, **attention: Any) -> tuple[Tensor, Tensor]:
        """Attend over a part, and cache the new tokens.

        Parameters
        ----------
        q : Tensor [sequences, heads, head_dim]
        k, v : Tensor [sequences, kv_heads, head_dim]
        where : (int, int)
            Layer and batch.
        most : int
            Tokens before the new one of the sequence that has most.
        metadata : Tensor
            As of `ops.decode_attention`.
        **attention
            The form of attention.

        Returns
        -------
        out : Tensor like q
        taken : int64 Tensor [sequences, kv_heads]
            The slot that each new token got.
        """
        held, layout = part.get(*where), self._shape.layout
        index, weights = ops.choose_values(q, k, keys=held[0, :, :, :most], metadata=metadata,
                                           sparsity=self._shape.attn_sparsity, layout=layout,
                                           **attention)
        if part.gathers_values:
            index = self._carry(index, "cpu", D2H)
            values = self._carry(part.gather(*where, index), self._transfers.device.torch, H2D)
        else:
            values = gather_slots(held[1], index)
        return ops.attend_chosen(k, v, slots=held, values=values, weights=weights,
                                 metadata=metadata, layout=layout)

    def _carry(self, x: Tensor, place, link: str) -> Tensor:
        """A copy in the other memory, waited for."""
        device = self._transfers.device
        began = device.stamp()
        there = x.to(place)
        self._transfers.moved(link, x.nbytes, began, device.stamp())
        return there
