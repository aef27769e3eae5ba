"""The measured cost of fetching a cache from disk, beside its bytes."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flexgen_h2o.cache.layout import Capacity, SlotLayout
from flexgen_h2o.cache.tiers import FetchedPart, SlotUpdate
from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.config.limits import WRITE_BACK_TOKENS
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.metrics.trace import LinkStats, Trace
from flexgen_h2o.planning.compute_rates import MIN_SECONDS, Sizes, Timer
from flexgen_h2o.planning.hardware import ComputeRates, HostAttentionRates, RecallRates
from flexgen_h2o.planning.recall_cost import RecalledTokens, fit_recall_rates
from flexgen_h2o.storage.tiers import Device, typed
from flexgen_h2o.storage.transfer import Transfers

KV_HEADS, WIDTH, SLOTS = 32, 8, 16
"""Of a cache whose bytes are few beside what else a fetch takes."""

SEQUENCES = (1, 33)
"""Of two caches, whose difference tells what each sequence takes."""

ROUNDS = 6
"""Times `WRITE_BACK_TOKENS` steps."""


def fetch_rates(device: Device, file: Path) -> tuple[float, float]:
    """`Hardware.fetch_seconds` and `Hardware.fetch_head_seconds`, of all processors together.

    Parameters
    ----------
    device : Device
        Without memory of its own.
    file : Path
        Is written over; large enough for the cache.
    """
    few, many = SEQUENCES
    short, long = (_fetch_seconds(device, file, sequences) for sequences in SEQUENCES)
    each = max((long - short) / (many - few), 0.0)
    return max(short - few * each, MIN_SECONDS), max(each / KV_HEADS, MIN_SECONDS)


def _fetch_seconds(device: Device, file: Path, sequences: int) -> float:
    """Seconds of a decode step of one layer."""
    transfers = Transfers(device, links=LinkStats(), trace=Trace(enabled=False))
    try:
        part = FetchedPart(SlotLayout(KV_HEADS, WIDTH, torch.bfloat16), 0, sequences,
                           capacity=Capacity(1, (SLOTS,)), transfers=transfers, path=file)
        part.begin(0, [(sequences, SLOTS)])
        part.load(0, 0, fetch=False)
        part.get(0, 0).zero_()
        part.store(0, 0, None)

        def steps() -> None:
            for step in range(WRITE_BACK_TOKENS):
                part.load(0, 0, fetch=True)
                slots = torch.full((sequences, KV_HEADS), step)
                part.store(0, 0, SlotUpdate.gather(part.get(0, 0), slots))
            part.synchronize()

        steps()
        began = time.process_time()
        for _ in range(ROUNDS):
            steps()
        return (time.process_time() - began) / (ROUNDS * WRITE_BACK_TOKENS)
    finally:
        transfers.close()


# The measured cost of recall on a CPU, in memory: see `RecallRates`.


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

    def bound(self, cached: int, chosen: int) -> CapturedCalls:
        """A step's choice of so many of the first `cached` tokens, its attention, and its index."""
        _, sequences, kv_heads, _, head_dim = self.slots.shape
        layout, program = IndexLayout(head_dim, INDEX_BITS), CapturedCalls()
        q, k, v = (torch.randn(sequences, heads, head_dim, dtype=self.slots.dtype)
                   for heads in (GROUP * kv_heads, kv_heads, kv_heads))
        metadata = torch.tensor([[cached], [chosen]], dtype=torch.int32).repeat(1, sequences)
        slots = native_recall.choose_keys(q, k, index=self.index, metadata=metadata, layout=layout,
                                          most=chosen, capture=program)
        native_recall.attend_recalled(q, k, v, slots=self.slots, chosen=slots, metadata=metadata,
                                      layout=None, capture=program)
        native_recall.index_keys(self.slots[0], self.index, _spans(sequences, cached, 1),
                                 layout=layout, records=None, capture=program)
        return program


def _spans(sequences: int, first: int, count: int) -> torch.Tensor:
    return torch.tensor([[first], [first], [count]], dtype=torch.int32).repeat(1, sequences)


def recall_rates(rates: ComputeRates | HostAttentionRates, dtype: torch.dtype, sizes: Sizes
                 ) -> RecallRates:
    """`Hardware.recall` of this machine's CPU.

    Parameters
    ----------
    rates : ComputeRates or HostAttentionRates
        Of attention to a cache that is read in order, on the CPU.
    dtype : torch.dtype
        Of the cache.
    sizes : Sizes

    Returns
    -------
    RecallRates
        The default where the C++ kernels are missing.
    """
    if ops.uses_reference("cpu"):
        return RecallRates()
    few, many = sizes.recalled
    kv_heads = max(1, sizes.heads // GROUP)
    block = torch.randn(2, sizes.sequences, kv_heads, many + 1, sizes.head_dim, dtype=dtype)
    count = -(-sizes.rotated // block.nbytes)
    caches, clock = [_RandomCache.make(block) for _ in range(count)], Timer(Device(), sizes.seconds)
    heads = sizes.sequences * kv_heads
    record = block[:, 0, 0, 0].nbytes
    times = []
    for cached, chosen in ((few, few // 4), (many, few // 4), (many, many // 4)):
        programs = itertools.cycle([cache.bound(cached, chosen) for cache in caches])
        tokens = RecalledTokens(chosen, cached, heads, heads * record)
        times.append((tokens, clock.seconds(partial(_run_next, programs))))
    return fit_recall_rates(rates, times, index=IndexLayout(sizes.head_dim, INDEX_BITS))


def _run_next(programs: itertools.cycle) -> None:
    next(programs).run()
