"""Attention that eviction loses, and attention without some keys; the memory of it all."""

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
    sizes,
)
from attention_survey import KINDS, Without, attend_without, chosen_keys
from helpers.attention_cases import DIM, KV_HEADS, cases, matrix, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flexgen_h2o.h2o.budget import Budget
from flexgen_h2o.h2o.eviction import EMPTY, Cut, Eviction, EvictionState
from flexgen_h2o.kernels.reference import attention as reference

# --- misses


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
@settings(max_examples=25)
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


def test_misses_over_more_than_one_block():
    context, more = 20, ROWS + 30
    q, k, _ = qkv(context + more)
    full, found = matrix(q, k), miss_rates(q, k, context=context, percents=[20, 50])
    for policy, rates in zip(EVICTING, found.tolist(), strict=False):
        assert rates == pytest.approx([naive_misses(full, context, sizes(policy, percent, context))
                                       for percent in (20, 50)], abs=1e-4)
    assert (found[-1] < found[:-1]).all()


def test_what_is_lost_of_uniform_attention():
    q, k, _ = qkv(60)
    found = miss_rates(torch.zeros_like(q), k, context=40, percents=[20, 50])
    for column, total in zip(found.T, (8, 20), strict=True):
        lost = [1 - (total + 1) / (t + 1) for t in range(40, 60)]
        assert column.tolist() == pytest.approx([sum(lost) / 20] * len(POLICIES), abs=1e-5)


def test_the_sizes_are_those_of_the_engine_and_alike():
    assert sizes("h2o", 20, 105) == Budget(10, 10)
    assert sizes("window", 20, 105) == sizes("best", 20, 105) == Budget(0, 20)
    assert sizes("sink-window", 20, 105) == Budget(0, 16, 4)
    assert sizes("sink-window", 1, 105) == Budget(0, 1, 4)


@pytest.mark.parametrize("size", [Budget(3, 4), Budget(5, 1, 2), Budget(0, 6), Budget(30, 2)])
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


# --- without some keys


def test_which_keys_are_taken_away():
    scores = torch.tensor([[5.0, 1.0, 4.0, 1.0, 3.0]])
    assert chosen_keys("heavy", scores, 2).tolist() == [[0, 2]]
    many = torch.tensor([[9.0, 8, 7, 6, 1, 3, 2]])
    assert chosen_keys("heavy but sinks", many, 2).tolist() == [[5, 6]]
    assert chosen_keys("heavy but sinks", many, 4).tolist() == [[3, 4, 5, 6]]
    assert chosen_keys("lowest", scores, 2).tolist() == [[1, 3]]
    draws = [chosen_keys("random", scores.expand(3, 5), 2, seed=seed).tolist()
             for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(set(keys)) == 2 and set(keys) < set(range(5)) for keys in draws[0])
    many = chosen_keys("random", torch.zeros(400, 5), 2)
    assert torch.bincount(many.flatten(), minlength=5).tolist() == pytest.approx([160] * 5, abs=30)


@cases
@settings(max_examples=25)
def test_attention_without_keys_is_that_of_a_masked_matrix(tokens, seed, scale):
    q, k, v = qkv(tokens, seed=seed, scale=scale)
    context = (tokens + 1) // 2
    gone = torch.rand(KV_HEADS, context, generator=torch.Generator().manual_seed(seed)) < 0.5
    full = matrix(q, k)
    full[:, :, context:, :context] *= ~gone[:, None, None]
    full /= full.sum(-1, keepdim=True)
    expected = torch.einsum("kgrt,tkd->rkgd", full, v.double()).flatten(1, 2)
    torch.testing.assert_close(attend_without(q, k, v, gone).double(), expected,
                               rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_for_the_engine_takes_away_as_many_as_it_should(kind):
    q, k, v = qkv(90)
    scores = observe(q[:40], k[:40]).scores
    keys = chosen_keys(kind, scores, 7, seed=1 << 16 | 2)
    gone = torch.zeros(KV_HEADS, 40, dtype=torch.bool).scatter_(1, keys, True)
    assert gone.sum(1).tolist() == [7, 7]
    attend = Without(kind, [12, 40], [3, 7])
    assert torch.equal(attend(2, 1, q, k, v), attend_without(q, k, v, gone))
    plain = reference.prefill_attention(q, k, v, [90])
    torch.testing.assert_close(attend(2, 1, q, k, v)[:40], plain[:40], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(attend(2, 1, q, k, v)[40:], plain[40:], atol=1e-3)


# --- memory


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def work(name: str, q, k, v):
    half = len(q) // 2
    if name == "observe":
        return observe(q, k, [half])
    if name == "misses":
        return miss_rates(q, k, context=half, percents=[20])
    return Without("heavy", [half], [half // 5])(0, 0, q, k, v)


@pytest.mark.parametrize("name", ["observe", "misses", "without"])
def test_no_tensor_grows_with_the_square_of_the_tokens(name):
    q, k, v = (x[:, :1] for x in qkv(1024))
    with Largest() as largest:
        work(name, q, k, v)
    assert ROWS * 900 < largest.elements <= ROWS * 1024  # a block of the one head's matrix


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["observe", "misses", "without"])
def test_half_precision_is_widened_before_anything_is_summed(name, dtype):
    given = [x.to(dtype) for x in qkv(150)]
    found, wide = work(name, *given), work(name, *(x.float() for x in given))
    if name == "without":
        assert found.dtype == dtype
        torch.testing.assert_close(found[75:], wide[75:].to(dtype))
    elif name == "misses":
        assert torch.equal(found, wide)
    else:
        assert torch.equal(found.scores, wide.scores) and torch.equal(found.sparsity, wide.sparsity)
