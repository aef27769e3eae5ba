"""KV retrieval: quantized key indices by which new tokens select the tokens they attend to.

See `h2o.recall`. The cache keeps every token. An index is in the memory where attention
runs, for a cache on any tier, and follows the keys that are put into slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexgen_h2o.cache.layout import CacheShape, CacheSize
from flexgen_h2o.cache.tiers import CacheTier, SelectedTokens
from flexgen_h2o.config.cache_layout import GroupLayout, IndexLayout, split_slots
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o import budget
from flexgen_h2o.h2o.batch_layout import BatchLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import VariantArguments
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.storage.device import PAGE, Device, round_up


@dataclass(frozen=True)
class RecallStep:
    """The metadata of a decode step of a tier's sequences, for all layers of one budget.

    Attributes
    ----------
    tokens : list of int
        Tokens of each sequence, the new one included.
    metadata : int32 Tensor [2, sequences]
        Tokens before the new one, and how many of them it attends to.
    top_k : int
        The largest number of tokens that a sequence attends to.
    spans : int32 Tensor [3, sequences], on the host
        The span of the new token's key, as in `ops.index_keys`.
    """

    tokens: list[int]
    metadata: Tensor
    top_k: int
    spans: Tensor

    def narrow(self, rows: slice) -> RecallStep:
        """Return the metadata of some of the sequences."""
        return replace(self, tokens=self.tokens[rows], spans=self.spans[:, rows].contiguous(),
                       metadata=self.metadata[:, rows].contiguous())

    def widen(self, counts: Sequence[int]) -> RecallStep:
        """Return the same step with at least `counts` tokens selected, if there are as many."""
        if not any(counts):
            return self
        cached, selected = self.metadata
        wide = torch.maximum(torch.tensor(counts).to(selected), selected).minimum(cached)
        return replace(self, metadata=torch.stack((cached, wide)), top_k=int(wide.max()))


class Recall:
    """The quantized key indices of a block, reused by the next block.

    Parameters
    ----------
    shape : CacheShape
    size : CacheSize
    h2o : H2OConfig
        With `recall`.
    tiers : sequence of CacheTier
        Tiers of the cache.
    device : Device

    Attributes
    ----------
    budget_layers : tuple of int
        One layer of each budget, of the layers that select tokens.
    """

    def __init__(self, shape: CacheShape, size: CacheSize, h2o: H2OConfig, *,
                 tiers: Sequence[CacheTier], device: Device):
        self._shape = shape
        self._h2o = h2o
        self._layout = IndexLayout(shape.head_dim, h2o.index_bits)
        self._slots = [slots if budget.num_selected(h2o, layer, 1) is not None else 0
                       for layer, slots in enumerate(size.slots)]
        self._buffers, self._starts = {}, {}
        for tier in tiers:
            sizes = [round_up((tier.last - tier.first) * shape.kv_heads
                              * self._layout.nbytes(slots), PAGE) for slots in self._slots]
            starts = [0, *accumulate(nbytes * size.batches for nbytes in sizes)]
            empty = device.host_empty if tier.on_host else device.empty
            self._buffers[tier.first] = empty(starts[-1])
            self._starts[tier.first] = [
                [start + batch * nbytes for batch in range(size.batches)]
                for start, nbytes in zip(starts, sizes, strict=False)]
        self.budget_layers = tuple({h2o.ratios(layer): layer for layer, slots
                                    in enumerate(self._slots) if slots}.values())
        self._captured = False
        self._batch_layouts: list[BatchLayout] = []
        self._steps: dict[tuple, RecallStep] = {}
        self._selected: dict[tuple[int, int], Tensor] = {}

    @property
    def _key_groups(self) -> GroupLayout | None:
        """The quantized groups of a cached key; None: keys are plain vectors."""
        return None if self._shape.layout is None else self._shape.layout.keys

    def _keys(self, slots: Tensor) -> Tensor:
        return split_slots(slots, self._shape.layout)[0]

    def begin(self, batches: Sequence[BatchLayout], *, captured: bool) -> None:
        """Start a block, or continue its sequences.

        If attention is `captured`, later steps overwrite the metadata that replays read.
        """
        self._batch_layouts = list(batches)
        self._captured = captured
        self._steps.clear()
        self._selected.clear()

    def index(self, layer: int, batch: int, tier: CacheTier) -> Tensor | None:
        """Return the index of a tier's sequences, uint8 [sequences, kv_heads, tiles, tile_bytes].

        None in layers that attend to all cached tokens.
        """
        if not self._slots[layer]:
            return None
        sequences = tier.sequences(batch)
        start = self._starts[tier.first][layer][batch]
        shape = (sequences.stop - sequences.start, self._shape.kv_heads,
                 self._layout.tiles(self._slots[layer]), self._layout.tile_bytes)
        nbytes = torch.Size(shape).numel()
        return self._buffers[tier.first][start : start + nbytes].view(shape)

    def on_prompt_cached(self, layer: int, batch: int, tier: CacheTier, *,
                         tokens: Sequence[tuple[int, int, int]]) -> None:
        """Index prompts that have been put into their slots, and notify the tier.

        `tokens` are (sequence of the batch, first, end) of neighbouring sequences.
        """
        index = self.index(layer, batch, tier)
        if index is not None:
            rows = slice(tokens[0][0] - tier.first, tokens[-1][0] - tier.first + 1)
            firsts = [first for _, first, _ in tokens]
            counts = [end - first for _, first, end in tokens]
            ops.index_keys(self._keys(tier.get(layer, batch)[:, rows]), index[rows],
                           torch.tensor([firsts, firsts, counts], dtype=torch.int32),
                           layout=self._layout, key_layout=self._key_groups)
        tier.on_prompt_cached(layer, batch, tokens)

    def step(self, layer: int, batch: int, tier: CacheTier, *, tokens: Sequence[int],
             device: torch.device) -> RecallStep | None:
        """Return the metadata of a step; `tokens` are as in `RecallStep`.

        None in layers that attend to all cached tokens.
        """
        if not self._slots[layer]:
            return None
        key = self._step_key(layer, batch, tier)
        step = self._steps.get(key)
        if step is None or step.tokens != list(tokens):
            lengths = self._batch_layouts[batch].lengths[tier.sequences(batch)]
            counts = [self._num_selected(layer, length, count)
                      for length, count in zip(lengths, tokens, strict=True)]
            cached = [count - 1 for count in tokens]
            metadata = torch.tensor([cached, counts], dtype=torch.int32)
            spans = torch.tensor([cached, cached, [1] * len(cached)], dtype=torch.int32)
            if step is not None and self._captured:
                metadata, spans = step.metadata.copy_(metadata), step.spans.copy_(spans)
            step = self._steps[key] = RecallStep(list(tokens), metadata.to(device), max(counts),
                                                 spans)
        return step

    def _step_key(self, layer: int, batch: int, tier: CacheTier) -> tuple:
        return batch, tier.first, self._h2o.ratios(layer)

    def _num_selected(self, layer: int, length: int, tokens: int) -> int:
        """Return how many cached tokens the last of a sequence's `tokens` attends to."""
        return min(tokens - 1, budget.num_selected(self._h2o, layer, length, tokens - length))

    def select(self, q: Tensor, k: Tensor, *, index: Tensor, step: RecallStep, **options: Any
               ) -> SelectedTokens:
        """Return the tokens that new tokens attend to, by their queries and keys; see `attend`."""
        slots = ops.select_keys(q, k, index=index, metadata=step.metadata, layout=self._layout,
                                top_k=step.top_k, **options)
        return SelectedTokens(slots, step.metadata, step.spans)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, tier: CacheTier, where: tuple[int, int],
               step: RecallStep, **options: Any) -> tuple[Tensor, Tensor]:
        """Attend from one new token of each sequence to the tokens that it selects.

        Cache the new tokens, and index their keys.

        Parameters
        ----------
        q : Tensor [sequences, heads, head_dim]
        k, v : Tensor [sequences, kv_heads, head_dim]
        tier : CacheTier
            Tier that holds these sequences.
        **options
            The variant of attention.

        Returns
        -------
        out : Tensor [sequences, heads, elements of a value]
        slots : int64 Tensor [sequences, kv_heads]
            The slot of each new token.
        """
        def narrowed_options(rows: slice) -> dict[str, Any]:
            offsets = options.get("offsets")
            return options if offsets is None else options | {"offsets": offsets[rows]}

        index = self.index(*where, tier)
        groups = tier.fetch_groups(where[0], len(q))
        fetches = [tier.fetch_selected(*where, rows, self.select(
            q[rows], k[rows], index=index[rows],
            step=step if len(groups) == 1 else step.narrow(rows),
            log_weights=tier.log_weights(*where, rows), **narrowed_options(rows)))
            for rows in groups]
        results = []
        for rows, selected in zip(groups, fetches, strict=True):
            entries = tier.selected_entries(*where, rows)
            results.append(ops.recall_attention(
                q[rows], k[rows], v[rows], slots=entries, selected=selected.slots,
                metadata=selected.metadata, layout=self._shape.layout, **narrowed_options(rows)))
            ops.index_keys(self._keys(entries), index[rows], selected.spans, layout=self._layout,
                           key_layout=self._key_groups)
        if len(results) == 1:
            return results[0]
        out, slots = zip(*results, strict=True)
        return torch.cat(out), torch.cat(slots)

    def capture(self, q: Tensor, k: Tensor, v: Tensor, *, tier: CacheTier, where: tuple[int, int],
                variant: VariantArguments, out: Tensor, capture: cpu_library.CapturedCalls) -> None:
        """Capture `attend` with the metadata of the newest `step`.

        Parameters and shapes are as in `attend`; `out` is like q. The tier is resident.
        """
        layer, batch = where
        index, step = self.index(*where, tier), self._steps[self._step_key(layer, batch, tier)]
        slots = tier.get(*where)
        top_k = max(self._num_selected(layer, length, length + new)
                    for length, new in self._batch_layouts[batch].sizes)
        # One buffer for all layers: it is free after attention.
        selected = self._selected.setdefault(
            (len(q), top_k),
            step.metadata.new_empty((len(q), self._shape.kv_heads, top_k)))
        native_recall.select_keys(q, k, index=index, metadata=step.metadata, layout=self._layout,
                                  top_k=top_k, variant=variant, out=selected, capture=capture)
        values, kernel_slots, layout = ops.kernel_values(k, v, slots, self._shape.layout)
        native_recall.recall_attention(q, k, values, slots=kernel_slots, selected=selected,
                                       metadata=step.metadata, layout=layout,
                                       variant=variant, out=out, capture=capture)
        native_recall.index_keys(self._keys(slots), index, step.spans, layout=self._layout,
                                 key_layout=self._key_groups, capture=capture)
