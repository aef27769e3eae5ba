"""The measured cost of recall on a CPU, in memory: see `RecallRates`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import torch

from flexgen_h2o.config.index_layout import IndexLayout
from flexgen_h2o.kernels import native_recall, ops
from flexgen_h2o.kernels.program import Program
from flexgen_h2o.planning.clock import Clock
from flexgen_h2o.planning.hardware import Compute, HostAttentionRates, RecallRates
from flexgen_h2o.planning.rates import Sizes
from flexgen_h2o.planning.recall_cost import RecalledTokens, fitted
from flexgen_h2o.storage.tiers import Device, typed

GROUP = 4
"""Query heads of a KV head."""

INDEX_BITS = 4


@dataclass(frozen=True)
class _RandomCache:
    """A layer's keys and values [2, sequences, kv_heads, slots, head_dim], random, in engine memory
    (huge pages), and the index of the keys."""

    slots: torch.Tensor
    index: torch.Tensor

    @classmethod
    def make(cls, block: torch.Tensor) -> _RandomCache:
        layout = IndexLayout(block.shape[-1], INDEX_BITS)
        _, sequences, kv_heads, tokens, _ = block.shape
        shape = (sequences, kv_heads, layout.tiles(tokens), layout.tile_bytes)
        device = Device()
        slots = typed(device.empty(block.nbytes), 0, block.shape, block.dtype).copy_(block)
        index = typed(device.empty(torch.Size(shape).numel()), 0, shape, torch.uint8)
        native_recall.index_keys(slots[0], index, _spans(sequences, 0, tokens), layout=layout,
                                 records=None)
        return cls(slots, index)

    def bound(self, cached: int, chosen: int) -> Program:
        """A step's choice of so many of the first `cached` tokens, its attention, and its index."""
        _, sequences, kv_heads, _, head_dim = self.slots.shape
        layout, program = IndexLayout(head_dim, INDEX_BITS), Program()
        q, k, v = (torch.randn(sequences, heads, head_dim, dtype=self.slots.dtype)
                   for heads in (GROUP * kv_heads, kv_heads, kv_heads))
        metadata = torch.tensor([[cached], [chosen]], dtype=torch.int32).repeat(1, sequences)
        slots = native_recall.choose_keys(q, k, index=self.index, metadata=metadata, layout=layout,
                                          most=chosen, steps=program)
        native_recall.attend_recalled(q, k, v, slots=self.slots, chosen=slots, metadata=metadata,
                                      layout=None, steps=program)
        native_recall.index_keys(self.slots[0], self.index, _spans(sequences, cached, 1),
                                 layout=layout, records=None, steps=program)
        return program


def _spans(sequences: int, first: int, count: int) -> torch.Tensor:
    return torch.tensor([[first], [first], [count]], dtype=torch.int32).repeat(1, sequences)


def recall_rates(rates: Compute | HostAttentionRates, dtype: torch.dtype, sizes: Sizes
                 ) -> RecallRates:
    """`Hardware.recall` of this machine's CPU.

    Parameters
    ----------
    rates : Compute or HostAttentionRates
        Of attention to a cache that is read in order, on the CPU.
    dtype : torch.dtype
        Of the cache.
    sizes : Sizes

    Returns
    -------
    RecallRates
        The default where the C++ kernels are missing.
    """
    if ops.plain_torch("cpu"):
        return RecallRates()
    few, many = sizes.recalled
    kv_heads = max(1, sizes.heads // GROUP)
    block = torch.randn(2, sizes.sequences, kv_heads, many + 1, sizes.head_dim, dtype=dtype)
    count = -(-sizes.rotated // block.nbytes)
    caches, clock = [_RandomCache.make(block) for _ in range(count)], Clock(Device(), sizes.seconds)
    heads = sizes.sequences * kv_heads
    record = block[:, 0, 0, 0].nbytes
    times = []
    for cached, chosen in ((few, few // 4), (many, few // 4), (many, many // 4)):
        programs = itertools.cycle([cache.bound(cached, chosen) for cache in caches])
        tokens = RecalledTokens(chosen, cached, heads, heads * record)
        times.append((tokens, clock.seconds(partial(_run_next, programs))))
    return fitted(rates, times, index=IndexLayout(sizes.head_dim, INDEX_BITS))


def _run_next(programs: itertools.cycle) -> None:
    next(programs).run()
