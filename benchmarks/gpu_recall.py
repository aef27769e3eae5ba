"""GPU checks and timings of recall: the key index, the selection, and selective attention.

The cache is in GPU memory or in page-locked host memory, which kernels read in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from gpu_kernels import BF16, BOUND, FP16, FP32, GPU, error
from torch import Tensor

from flexgen_h2o.config.cache_layout import CacheLayout, IndexLayout, split_slots
from flexgen_h2o.config.layers import DEFAULT_VARIANT
from flexgen_h2o.h2o.recall import index_weights, select_tokens
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.kernels.reference import recall as reference_recall


class RecallCase(NamedTuple):
    """A cache to recall from."""

    dtype: torch.dtype
    dim: int
    group: int
    bits: int
    index_bits: int
    tokens: int
    on_host: bool


# Every value of each field, not every tuple.
RECALLS = [
    RecallCase(FP16, 128, 4, 16, 4, 8192, False), RecallCase(BF16, 64, 1, 16, 4, 3000, True),
    RecallCase(FP16, 80, 1, 4, 4, 700, True), RecallCase(BF16, 96, 8, 8, 2, 20000, False),
    RecallCase(FP32, 256, 1, 16, 4, 999, True), RecallCase(BF16, 128, 8, 4, 2, 40000, True),
]
SEQUENCES, KV_HEADS = 4, 8
LENGTH = 8192
"""Timed shape: LLaMA-8B's attention."""


class Recalled(NamedTuple):
    """An indexed cache of random tokens, and a new token of each sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    index: Tensor
    layout: IndexLayout
    cache_layout: CacheLayout | None


def make_cache(case: RecallCase, sequences: int, kv_heads: int) -> Recalled:
    """Make a cache with one empty slot for the new token."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=GPU).to(case.dtype)

    cache_layout = CacheLayout.from_bits(case.dim, case.bits)
    slots = normal(2, sequences, kv_heads, case.tokens + 1, case.dim)
    slots = reference.pack_slots(slots, cache_layout)
    slots[:, :, :, -1] = float("nan") if cache_layout is None else 255
    layout = IndexLayout(case.dim, case.index_bits)
    index = torch.full((sequences, kv_heads, layout.tiles(case.tokens + 1), layout.tile_bytes),
                       255, dtype=torch.uint8, device=GPU)
    if case.on_host:
        slots = slots.cpu().pin_memory()
    spans = torch.tensor([[0] * sequences, [0] * sequences, [case.tokens] * sequences])
    ops.index_keys(split_slots(slots, cache_layout)[0], index, spans.int(), layout=layout,
                   key_layout=cache_layout and cache_layout.keys)
    heads = kv_heads * case.group
    return Recalled(normal(sequences, heads, case.dim), normal(sequences, kv_heads, case.dim),
                    normal(sequences, kv_heads, case.dim), slots, index, layout, cache_layout)


def metadata_of(tokens: int, count: int, sequences: int) -> Tensor:
    """Return a step's metadata: `count` of `tokens` cached tokens are selected."""
    return torch.tensor([[tokens], [count]], device=GPU).int().repeat(1, sequences)


def step(cache: Recalled, metadata: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the selected tokens and the attention output."""
    selected = ops.select_keys(cache.q, cache.k, index=cache.index, metadata=metadata,
                               layout=cache.layout, top_k=top_k)
    return selected, ops.recall_attention(cache.q, cache.k, cache.v, slots=cache.slots,
                                          selected=selected,
                                          metadata=metadata, layout=cache.cache_layout)[0]


def check_recall(rows, case: RecallCase) -> None:
    """Check the index, that the heaviest tokens are selected, and the attention output."""
    cache = make_cache(case, 2, 3)
    shape = (f"d {case.dim}, group {case.group}, {case.bits} bits, index {case.index_bits}, "
             f"{case.tokens} tokens{', host' if case.on_host else ''}")
    before = cache.slots.to(GPU)
    right = torch.full_like(cache.index, 255)
    spans = torch.tensor([[0, 0], [0, 0], [case.tokens] * 2]).int()
    reference_recall.index_keys(split_slots(before, cache.cache_layout)[0], right, spans,
                                layout=cache.layout,
                                key_layout=cache.cache_layout and cache.cache_layout.keys)
    rows.add("check", "index", shape, case.dtype, (right != cache.index).sum().item(),
             "differences", limit=0)
    count = case.tokens // 5
    metadata = metadata_of(case.tokens, count, 2)
    selected, out = step(cache, metadata, count + 3)
    expected, _ = reference_recall.recall_attention(
        cache.q, cache.k, cache.v, slots=before, selected=selected, metadata=metadata,
        layout=cache.cache_layout)
    same = torch.equal(before, cache.slots.to(GPU)) and bool((selected[..., count:] == -1).all())
    rows.add("check", "recall", shape, case.dtype,
             error(out, expected) if same else float("nan"), "error", limit=BOUND[case.dtype])
    weights = index_weights(
        cache.q.unflatten(1, (3, -1)), cache.k,
        reference_recall.indexed_keys(right, cache.layout)[:, :, : case.tokens],
        layout=cache.layout, variant=DEFAULT_VARIANT,
        hidden=torch.zeros(case.tokens, dtype=torch.bool, device=GPU), sinks=None)
    best = select_tokens(weights, metadata[1], cached=metadata[0])
    selected_mask = torch.zeros_like(best).scatter_(-1, selected[..., :count].long(), True)
    lost = 1 - weights.where(selected_mask, 0).sum() / weights.where(best, 0).sum()
    rows.add("check", "choice", shape, case.dtype, lost.item(), "weight lost", limit=1e-5)


def claims(heads: int, tokens: int, slots: int) -> dict[str, Tensor]:
    """Return an empty hot set of `slots` slots a head on the GPU."""
    return {"slot_of": torch.full((heads, tokens), -1, dtype=torch.int32, device=GPU),
            "token_of": torch.full((heads, slots), -1, dtype=torch.int32, device=GPU),
            "log_weights": torch.zeros((heads, tokens), dtype=torch.int32, device=GPU)}


def check_claims(rows) -> None:
    """Check the slots of successive steps, and the data copied to them from host memory."""
    for tokens, slots, top_k in ((8192, 3276, 1638), (20000, 2000, 2000), (300, 64, 15)):
        ours = claims(6, tokens, slots)
        theirs = {name: x.cpu().clone() for name, x in ours.items()}
        host_cache = torch.randn(2, 2, 3, tokens, 128).half().pin_memory()
        fast = torch.full((2, 2, 3, slots, 128), float("nan"), device=GPU).half()
        wrong = 0
        for step in range(4):
            weights = torch.randint(50 if step % 2 else 2**30, (6, tokens)).int()  # with ties
            selected = torch.rand(6, tokens).argsort(-1)[:, :top_k].sort(-1).values.int()
            selected = selected.view(2, 3, top_k)
            ours["log_weights"].copy_(weights)
            theirs["log_weights"].copy_(weights)
            token_slots, moves, counts = ops.claim_slots(selected.to(GPU), **ours)
            right, _, expected_counts = reference_recall.claim_slots(selected, **theirs)
            ops.copy_tokens(host_cache, fast, moves, counts)
            wrong += (token_slots.cpu() != right).sum().item()
            wrong += (counts.cpu() != expected_counts).sum().item()
            place = token_slots.long()[None, ..., None].expand(2, -1, -1, -1, 128)
            origin = selected.long()[None, ..., None].expand(2, -1, -1, -1, 128)
            wrong += (fast.gather(3, place).cpu() != host_cache.gather(3, origin)).sum().item()
        wrong += sum((x.cpu() != theirs[name]).sum().item() for name, x in ours.items())
        rows.add("check", "fast set", f"{top_k} of {tokens} tokens, {slots} slots", FP16, wrong,
                 "differences", limit=0)


class FastSteps:
    """Decode steps over a cache in host memory with a hot set on the GPU.

    Queries of successive steps correlate by 0.97, as in a text.
    """

    def __init__(self, cache: Recalled, count: int, slots: int):
        self._cache, self._count = cache, count
        sequences, kv_heads = cache.k.shape[:2]
        self._metadata = metadata_of(LENGTH, count, sequences)
        self._places = torch.stack((torch.full_like(self._metadata[0], slots), self._metadata[1]))
        self._set = claims(sequences * kv_heads, LENGTH, slots)
        self._fast = torch.empty((2, sequences, kv_heads, slots + 1, 128), dtype=FP16, device=GPU)
        self._query = cache.q.float()
        self.loads: list[Tensor] = []

    def __call__(self) -> None:
        cache = self._cache
        self._query = 0.97 * self._query + 0.243 * torch.randn_like(self._query)
        q = self._query.half()
        log_weights = self._set["log_weights"].view(*cache.k.shape[:2], -1)
        selected = ops.select_keys(q, cache.k, index=cache.index, metadata=self._metadata,
                                   layout=cache.layout, top_k=self._count, log_weights=log_weights)
        token_slots, moves, counts = ops.claim_slots(selected, **self._set)
        ops.copy_tokens(cache.slots, self._fast, moves, counts)
        ops.recall_attention(q, cache.k, cache.v, slots=self._fast, selected=token_slots,
                             metadata=self._places)
        self.loads.append(counts.sum())

    def hits(self) -> float:
        """Return the hit rate of the hot set in later steps."""
        loads = torch.stack(self.loads[len(self.loads) // 2 :]).float().mean().item()
        return 1 - loads / (self._count * self._cache.k.shape[0] * self._cache.k.shape[1])


def time_recall(rows, timed: Callable[..., float], rate: float) -> None:
    """Time attention by recall and over the full cache, with the cache on the GPU and the host."""
    shape = f"batch {SEQUENCES}, {KV_HEADS} KV heads of 4, d 128, {LENGTH} tokens"
    caches = {place: [make_cache(RecallCase(FP16, 128, 4, 16, 4, LENGTH, place == "host"),
                                 SEQUENCES, KV_HEADS) for _ in range(2)]
              for place in ("device", "host")}
    metadata = torch.tensor([[LENGTH], [LENGTH + 1], [0], [0]], device=GPU).int().repeat(
        1, SEQUENCES)
    cache_sample = caches["device"][0]
    landing = torch.empty_like(cache_sample.slots)
    link = timed([lambda: landing.copy_(caches["host"][0].slots, non_blocking=True)], 7)
    rows.add("time", "link", "host to device", FP16, landing.nbytes / link / 1e6, "GB/s")

    def full(cache: Recalled) -> Tensor:
        held = cache.slots
        if not held.is_cuda:
            held = landing.copy_(held, non_blocking=True)
        return ops.decode_attention(cache.q, cache.k, cache.v, slots=held, metadata=metadata)[0]

    for place, of_place in caches.items():
        there = landing.nbytes / rate * 1e3 if place == "device" else link
        rows.add("time", "decode", f"{shape}, {place}", FP16,
                 timed([partial(full, cache) for cache in of_place], 15), "ms",
                 roofline_ms=there)
        for share in (0.2, 0.05):
            count = round(share * LENGTH)
            selected = metadata_of(LENGTH, count, SEQUENCES)
            rows.add("time", "recall", f"{shape}, {place}, {share:.0%}", FP16,
                     timed([partial(step, cache, selected, count) for cache in of_place], 15),
                     "ms", roofline_ms=cache_sample.index.nbytes / rate * 1e3 + share * there)
            if place == "host":
                steps = FastSteps(of_place[0], count, 2 * count)
                seconds = timed([steps], 21)
                least = (1 - steps.hits()) * share * link + (
                    cache_sample.index.nbytes + share * landing.nbytes) / rate * 1e3
                rows.add("time", "fast set",
                         f"{shape}, {place}, {share:.0%}, {steps.hits():.1%} held", FP16, seconds,
                         "ms", roofline_ms=least)
