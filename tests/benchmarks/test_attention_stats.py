"""Statistics of attention against the whole matrix in float64, and key by key."""

from __future__ import annotations

import pytest
import torch
from attention_stats import (
    EVICTING,
    POLICIES,
    ROWS,
    Caches,
    logit_blocks,
    miss_rates,
    observe,
    share_of,
    sizes,
)
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.h2o.budget import Budget
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, EvictionState
from flexgen_h2o.kernels.reference import attention as reference

KV_HEADS, GROUP, DIM = 2, 3, 8


def qkv(tokens: int, *, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Fresh random queries, keys and values, with grouped heads."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, DIM, generator=generator) * scale
                 for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS))


def matrix(q, k) -> torch.Tensor:
    """All probabilities at once: float64 [kv_heads, group, tokens, tokens]."""
    queries = q.double().unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("rkgd,tkd->kgrt", queries, k.double()) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return logits.masked_fill(future, float("-inf")).softmax(-1)


@given(tokens=st.one_of(st.integers(1, 40), st.integers(ROWS - 1, 2 * ROWS + 2)),
       seed=st.integers(0, 99), scale=st.sampled_from([0.3, 1.0, 2.0]))
@settings(max_examples=examples(30))
def test_sparsity_and_scores_are_those_of_the_whole_matrix(tokens, seed, scale):
    q, k, _ = qkv(tokens, seed=seed, scale=scale)
    stops = [share_of(percent, tokens) for percent in (10, 50, 100)]
    seen, full = observe(q, k, stops), matrix(q, k)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    small = (full < 0.01 * full.amax(-1, keepdim=True)) & visible
    assert seen.sparsity == pytest.approx(
        (small.sum((2, 3)) / visible.sum()).flatten().numpy(), abs=1e-6)
    torch.testing.assert_close(seen.scores, full.sum((1, 2)).float(), rtol=1e-4, atol=1e-5)
    assert sorted(seen.local) == sorted(set(stops))
    for stop, local in seen.local.items():
        torch.testing.assert_close(local, full[:, :, :stop, :stop].sum((1, 2)).float(),
                                   rtol=1e-4, atol=1e-5)


def naive_misses(full, context: int, size: Budget) -> float:
    """One policy, key by key: sets of tokens, scores as they would be without the others."""
    kv_heads, group, tokens, _ = full.shape
    missed = []
    for probabilities in full:
        scores = probabilities[:, :context, :context].sum((0, 1)).tolist()
        held = list(range(context))
        excess = context - size.total
        free = held[size.sinks : context - size.recent]
        for key in sorted(free, key=lambda i: (scores[i], i))[: max(excess, 0)]:
            held.remove(key)
        for t in range(context, tokens):
            held.append(t)
            scores.append(0.0)
            rows = probabilities[:, t, held]
            missed += (1 - rows.sum(-1)).tolist()
            for key, value in zip(held, (rows / rows.sum(-1, keepdim=True)).sum(0).tolist(),
                                  strict=True):
                scores[key] += value
            if len(held) > size.total:
                free = [i for i in held if size.sinks <= i < t + 1 - size.recent]
                held.remove(min(free, key=lambda i: (scores[i], i)))
    assert len(missed) == kv_heads * group * (tokens - context)
    return sum(missed) / len(missed)


@given(context=st.integers(2, 40), more=st.integers(1, 40), seed=st.integers(0, 99),
       percents=st.lists(st.sampled_from([5, 10, 20, 50, 80, 100]), min_size=1, max_size=3))
@settings(max_examples=examples(25))
def test_misses_are_those_of_tokens_kept_one_by_one(context, more, seed, percents):
    q, k, _ = qkv(context + more, seed=seed)
    full, found = matrix(q, k), miss_rates(q, k, context=context, percents=percents)
    assert found.shape == (len(POLICIES), len(percents))
    for policy, rates in zip(EVICTING, found.tolist(), strict=False):
        expected = [naive_misses(full, context, sizes(policy, percent, context))
                    for percent in percents]
        assert rates == pytest.approx(expected, abs=1e-4)
    for percent, rate in zip(percents, found[-1].tolist(), strict=True):
        total = sizes("best", percent, context).total
        lost = [1 - full[:, :, t].topk(min(total, t) + 1).values.sum(-1)
                for t in range(context, context + more)]
        assert rate == pytest.approx(torch.stack(lost).mean().item(), abs=1e-5)


@pytest.mark.parametrize("size", [Budget(5, 1, 2), Budget(0, 6)])
def test_what_is_cached_is_what_the_engine_caches(size):
    """Token by token, against the operations that the engine is held to."""
    context, tokens = 24, 60
    q, k, v = qkv(tokens, seed=3)
    eviction = Eviction(sinks=size.sinks)
    scores = torch.zeros(KV_HEADS, context)
    reference.prefill_attention(q[:context], k[:context], v[:context], [context], scores=scores)
    caches = Caches([size, Budget(1, 2, size.sinks)], observe(q[:context], k[:context]).scores)
    slots = torch.zeros(2, 1, KV_HEADS, size.total, DIM)
    shape = (1, KV_HEADS, size.total)
    state = EvictionState(eviction, torch.zeros(shape), torch.full(shape, EMPTY, dtype=torch.int32))
    cut = Cut(context, size.heavy, size.recent)
    reference.select_heavy_hitters(k[:context], v[:context], scores, cuts=[cut], slots=slots,
                                   state=state)
    cached = eviction.num_cached(cut)
    rows = [row for _, block in logit_blocks(q, k, begin=context) for row in block.unbind(2)]
    for t, row in enumerate(rows, context):
        metadata = torch.tensor([[cached], [t + 1], [size.recent], [int(cached == size.total)]],
                                dtype=torch.int32)
        reference.decode_attention(q[t : t + 1], k[t : t + 1], v[t : t + 1], slots=slots,
                                   metadata=metadata, state=state)
        cached = min(cached + 1, size.total)
        caches.step(row[..., : t + 1])
        assert torch.equal(caches.positions[0, :, : size.total], state.positions[0])
    assert (caches.positions[1] != EMPTY).sum(-1).tolist() == [3 + size.sinks] * KV_HEADS
