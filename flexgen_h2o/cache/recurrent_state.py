"""The states of recurrent layers for a block's sequences: a cache of constant size over tiers.

A state is one slot of a cache: a vector of float32 (`RecurrentConfig`). The sequences of a batch
are split over the tiers as in the KV cache. Nothing is evicted. A forward pass changes every state,
so that whole states are fetched and stored.

A unit of the schedule is ``load``, then ``advance``, then ``store``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexgen_h2o.cache.disk_recall import make_tiers
from flexgen_h2o.cache.eviction_state import ContinuedEntries, copy_continued, write_continued
from flexgen_h2o.cache.layout import CacheSize, Capacity, SlotLayout
from flexgen_h2o.cache.tiers import CacheTier, FetchedTier, WriteBackLog
from flexgen_h2o.cache.token_attention import tiers_of
from flexgen_h2o.config.layers import RecurrentConfig
from flexgen_h2o.config.placement import split
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.h2o.batch_layout import BatchLayout, PromptSpan
from flexgen_h2o.storage.run_folder import RunFolder
from flexgen_h2o.storage.transfer import StagingBuffer, Transfers

Rule = Callable[..., Tensor]
"""``rule(*rows, states, sequences=..., lengths=...)``: advance some states by the rows of their
sequences, in place, and return the output rows. States are [sequences, state_size]."""


class _FetchedStates(FetchedTier):
    """States that are fetched before use, and stored whole: there are no updates of slots."""

    def _staging(self, nbytes: int, sequences: int) -> StagingBuffer:
        host = self._device.host_empty(nbytes)
        return StagingBuffer(self._device.empty(nbytes) if self._device.is_gpu else host, host)

    def _new_log(self, sequences: int) -> WriteBackLog:
        return WriteBackLog(torch.empty(0), torch.empty(0))


class RecurrentStates:
    """The states of one block of GPU batches, reused by the next block.

    Layers are the recurrent layers, counted from 0.

    Parameters
    ----------
    config : RecurrentConfig
    num_layers : int
    size : CacheSize
        Its sequences and batches are used.
    policy : Policy
        The cache's placement.
    transfers : Transfers
    run_folder : RunFolder
        For states on disk.
    """

    def __init__(self, config: RecurrentConfig, num_layers: int, size: CacheSize, policy: Policy, *,
                 transfers: Transfers, run_folder: RunFolder):
        self._layers = range(num_layers)
        self._batch_layouts: Sequence[BatchLayout] = ()
        self.tiers = make_tiers(
            SlotLayout(1, config.state_size, torch.float32, kinds=1),
            Capacity(size.batches, (1,) * num_layers), split(size.sequences, policy.cache),
            transfers=transfers, on_host=False, fetched=_FetchedStates,
            run_folder=run_folder, name="states.bin")

    @property
    def is_resident(self) -> bool:
        """True if `load` and `store` are no-ops."""
        return all(tier.is_resident for tier in self.tiers)

    def begin(self, batches: Sequence[BatchLayout]) -> None:
        """Start a block. Keep the states of continued sequences and discard the others."""
        continues = any(batch_layout.has_continued for batch_layout in batches)
        for tier in self.tiers:
            if continues:
                tier.synchronize()
            else:
                tier.reset()
        self._batch_layouts = batches
        for layer in self._layers:
            states: ContinuedEntries = {}
            if continues:
                states = copy_continued(layer, self.tiers, batches, states={}, h2o=None)
            for tier in self.tiers:
                tier.begin(layer, [(len(batch_layout), 1) for batch_layout in batches])
            for batch in range(len(batches)):
                for tier in self._tiers_of(batch):
                    continued = self._continued(batch, tier)
                    if any(continued):
                        tier.load(layer, batch, fetch=False)
                        write_continued(states, continued, tier.get(layer, batch), None)
                        tier.store(layer, batch, None)

    def _continued(self, batch: int, tier: CacheTier) -> Sequence:
        """Return the origins of the sequences of a tier; None: a new sequence."""
        return self._batch_layouts[batch].continued[tier.sequences(batch)]

    def resume(self, batches: Sequence[BatchLayout]) -> None:
        """Continue the sequences of `begin` in another run."""
        for tier in self.tiers:
            tier.synchronize()
        self._batch_layouts = batches

    def load(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start loading the states that compute of (layer, batch) needs."""
        cached = self._batch_layouts[batch].has_cached(forward_pass)
        for tier in self._tiers_of(batch):
            tier.load(layer, batch, fetch=cached or any(self._continued(batch, tier)))

    def store(self, layer: int, batch: int, forward_pass: int) -> None:
        """Start writing back the states that compute of (layer, batch) changed."""
        for tier in self._tiers_of(batch):
            tier.store(layer, batch, None)

    def advance(self, layer: int, batch: int, rule: Rule, *rows: Tensor,
                spans: Sequence[PromptSpan]) -> Tensor:
        """Advance the states of sequences by the next tokens of each.

        Parameters
        ----------
        rule : Rule
        *rows : Tensor [rows, ...]
            Its arguments: the rows of all spans, packed.
        spans : sequence of PromptSpan
            Of different sequences, in ascending order. A state is 0 before token 0.

        Returns
        -------
        Tensor [rows, ...]
        """
        outputs, first = [], 0
        for tier in self._tiers_of(batch):
            tier_spans = [span for span in spans if tier.first <= span.sequence < tier.last]
            if not tier_spans:
                continue
            states = _rows(tier.get(layer, batch))
            lengths = [len(span) for span in tier_spans]
            tier_rows = slice(first, first + sum(lengths))
            first = tier_rows.stop
            for span in tier_spans:
                if span.start == 0:
                    states[span.sequence - tier.first].zero_()
            outputs.append(rule(*(x[tier_rows] for x in rows), states, lengths=lengths,
                                sequences=[span.sequence - tier.first for span in tier_spans]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def repeat(self, layer: int, batch: int, source: int, *targets: int) -> None:
        """Copy the state of a sequence to others, which begin with the same tokens."""
        for target in targets:
            self._state(layer, batch, target).copy_(self._state(layer, batch, source))

    def _state(self, layer: int, batch: int, sequence: int) -> Tensor:
        tier = next(tier for tier in self.tiers if sequence < tier.last)
        return _rows(tier.get(layer, batch))[sequence - tier.first]

    def _tiers_of(self, batch: int) -> list[CacheTier]:
        return tiers_of(self.tiers, self._batch_layouts[batch])


def _rows(slots: Tensor) -> Tensor:
    """Return the states of a tier, [sequences, state_size]."""
    return slots[0, :, 0, 0]
