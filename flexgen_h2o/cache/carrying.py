"""Moving sequences out of one block's cache into the next one's, a layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexgen_h2o.cache.parts import CachePart
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.batch_layout import BatchLayout, Carried
from flexgen_h2o.h2o.budget import cached
from flexgen_h2o.h2o.eviction import EvictionState

Moved = dict[tuple[int, int], list[torch.Tensor]]
"""Of each sequence, by the batch and place that it had: the records of its tokens [kinds, kv_heads,
tokens, width], and what their eviction state holds, [kv_heads, tokens] each."""


def take(layer: int, parts: Sequence[CachePart], batches: Sequence[BatchLayout], *,
         states: Mapping[tuple[int, int], EvictionState], h2o: H2OConfig | None) -> Moved:
    """Copies of what the last block holds in a layer of the sequences that are carried.

    Parameters
    ----------
    parts : sequence of CachePart
        As the last block left them, all that was under way done.
    batches : sequence of BatchLayout
        The next block.
    states : mapping
        Eviction states of the layer by batch and the part's first sequence, where it evicts.
    h2o : H2OConfig or None
    """
    found: Moved = {}
    carried = [(one, length) for batch_layout in batches
               for one, length in zip(batch_layout.carried, batch_layout.lengths, strict=True)
               if one is not None]
    for batch in sorted({one.batch for one, _ in carried}):
        for part in parts:
            mine = [(one, length) for one, length in carried
                    if one.batch == batch and part.first <= one.sequence < part.last]
            if not mine:
                continue
            part.load(layer, batch, fetch=True, cached=0)
            held, state = part.get(layer, batch), states.get((batch, part.first))
            for one, length in mine:
                row, count = one.sequence - part.first, cached(h2o, layer, length,
                                                               one.generated - 1)
                found[batch, one.sequence] = [
                    held[:, row, :, :count].clone(),
                    *(x[row, :, :count].clone() for x in (state.tensors if state else ()))]
    return found


def put(moved: Moved, carried: Sequence[Carried | None], held: torch.Tensor,
        state: EvictionState | None) -> None:
    """Fill the first slots of sequences with what was moved of them.

    Parameters
    ----------
    moved : Moved
    carried : sequence of (Carried or None)
        The sequences of a part; None: its prompt is yet to come.
    held : Tensor [kinds, sequences, kv_heads, slots, width]
    state : EvictionState or None
        Of the part's sequences.
    """
    for row, one in enumerate(carried):
        if one is None:
            continue
        records, *others = moved[one.batch, one.sequence]
        held[:, row, :, : records.shape[2]] = records
        for target, values in zip(state.tensors if state else (), others, strict=True):
            target[row, :, : values.shape[1]] = values
