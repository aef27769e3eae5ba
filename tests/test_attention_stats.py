"""The statistics of attention: each against the whole matrix in float64, and where it is known."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flexgen_h2o.cache.budget import Budget
from flexgen_h2o.kernels import reference
from flexgen_h2o.kernels.eviction import EMPTY, Book, Cut, Eviction
from flexgen_h2o.tasks.attention_misses import EVICTING, POLICIES, Caches, miss_rates, sizes
from flexgen_h2o.tasks.attention_stats import (
    ROWS,
    at_ranks,
    correlations,
    heaviest,
    logit_blocks,
    observe,
    overlap,
    power_law,
    share_of,
)
from flexgen_h2o.tasks.evicted_keys import KINDS, Without, attend_without, chosen_keys

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


cases = given(tokens=st.one_of(st.integers(1, 40), st.integers(ROWS - 1, 2 * ROWS + 2)),
              seed=st.integers(0, 99), scale=st.sampled_from([0.3, 1.0, 2.0]))


# --- what all rows add up to


@cases
@settings(max_examples=30)
def test_sparsity_and_mass_are_those_of_the_whole_matrix(tokens, seed, scale):
    q, k, _ = qkv(tokens, seed=seed, scale=scale)
    stops = [share_of(percent, tokens) for percent in (10, 50, 100)]
    seen, full = observe(q, k, stops), matrix(q, k)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    small = (full < 0.01 * full.amax(-1, keepdim=True)) & visible
    assert seen.sparsity == pytest.approx(
        (small.sum((2, 3)) / visible.sum()).flatten().numpy(), abs=1e-6)
    torch.testing.assert_close(seen.mass, full.sum((1, 2)).float(), rtol=1e-4, atol=1e-5)
    assert sorted(seen.local) == sorted(set(stops))
    for stop, local in seen.local.items():
        torch.testing.assert_close(local, full[:, :, :stop, :stop].sum((1, 2)).float(),
                                   rtol=1e-4, atol=1e-5)


def test_blocks_are_the_rows_of_the_whole_in_order():
    q, k, _ = qkv(2 * ROWS + 5)
    blocks = list(logit_blocks(q, k, begin=7, stops=[20, 7, 3, ROWS]))
    assert [start for start, _ in blocks] == [7, 20, ROWS, ROWS + 7]
    assert sum(block.shape[2] for _, block in blocks) == 2 * ROWS + 5 - 7
    full = matrix(q, k)
    for start, block in blocks:
        end = block.shape[-1]
        torch.testing.assert_close(block.softmax(-1), full[:, :, start:end, :end].float())


def test_uniform_attention_has_no_small_entry():
    tokens = ROWS + 9
    q, k, _ = qkv(tokens)
    seen = observe(torch.zeros_like(q), k)
    assert seen.sparsity.tolist() == [0.0] * KV_HEADS * GROUP
    by_hand = [GROUP * sum(1 / (row + 1) for row in range(key, tokens)) for key in range(tokens)]
    assert seen.mass[0].tolist() == pytest.approx(by_hand, rel=1e-5)


def test_where_all_look_at_the_first_token_all_else_is_small():
    tokens = ROWS + 9
    q, k = torch.ones(tokens, 2, 4), torch.zeros(tokens, 1, 4)
    k[0] = 20
    seen = observe(q, k)
    # Row i has i + 1 entries, and all but one are small.
    assert seen.sparsity.tolist() == pytest.approx([(tokens - 1) / (tokens + 1)] * 2)
    assert seen.mass[0, 0] == pytest.approx(2 * tokens)


# --- ranks


def test_scores_by_rank_by_hand():
    mass = torch.tensor([[1.0, 8.0, 2.0, 5.0], [4.0, 4.0, 4.0, 4.0]])
    assert at_ranks(mass, 2, [0.1, 0.25, 0.5, 0.51, 1.0]).tolist() == [3.0, 3.0, 2.25, 1.5, 1.25]


def test_the_mean_score_is_one():
    q, k, _ = qkv(200)
    every = [(rank + 1) / 200 for rank in range(200)]
    scores = at_ranks(observe(q, k).mass, GROUP, every)
    assert scores.mean() == pytest.approx(1, rel=1e-5)
    assert (np.diff(scores) <= 0).all()
    by_hand = matrix(q, k).sum((1, 2)).sort(dim=1, descending=True).values.mean(0) / GROUP
    assert scores == pytest.approx(by_hand.numpy(), rel=1e-4)


@given(slope=st.floats(-3, 3), factor=st.floats(1e-3, 1e3), points=st.integers(3, 40))
def test_a_power_law_is_found(slope, factor, points):
    ranks = np.arange(1, points + 1) / points
    found, r2 = power_law(ranks, factor * ranks**slope)
    assert found == pytest.approx(slope, abs=1e-6)
    assert math.isnan(r2) or r2 == pytest.approx(1, abs=1e-6) or abs(slope) < 1e-6


def test_a_fit_says_how_good_it_is():
    generator = np.random.default_rng(0)
    ranks = np.arange(1, 101) / 100
    scores = ranks**-0.5 * np.exp(generator.normal(0, 0.3, 100))
    line = scipy.stats.linregress(np.log(ranks), np.log(scores))
    assert power_law(ranks, scores) == pytest.approx((line.slope, line.rvalue**2))
    with_zeros = power_law([*ranks, 1.0], [*scores, 0.0])
    assert with_zeros == pytest.approx((line.slope, line.rvalue**2))
    assert all(map(math.isnan, power_law([0.1, 0.2, 0.3], [1.0, 0.0, 2.0])))


# --- local against full


def test_overlap_by_hand():
    one = torch.tensor([[9.0, 8.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    other = torch.tensor([[9.0, 0.0, 7.0, 2.0], [0.0, 5.0, 0.0, 5.0]])
    assert heaviest(one, 2).tolist() == [[0, 1], [2, 3]]  # of equals the newer
    assert overlap(one, one, 2) == 1
    assert overlap(one, other, 2) == 0.5  # each head has one in common: 0, and 3
    assert overlap(one[:1], -one[:1], 2) == 0
    assert overlap(one, other, 4) == 1


def test_a_key_that_dominates_is_a_heavy_hitter_from_the_start():
    q, k, _ = qkv(300)
    k[3] = 0
    q[..., 0], k[..., 0] = 6, 0
    k[3, :, 0] = 20
    seen = observe(q, k, [30, 150])
    for stop, local in seen.local.items():
        assert overlap(local, seen.mass[:, :stop], 1) == 1
        assert heaviest(local, 1).tolist() == [[3], [3]]


@pytest.mark.parametrize(("percent", "tokens", "share"),
                         [(10, 50, 5), (1, 50, 1), (20, 9, 1), (100, 9, 9), (50, 1, 1)])
def test_a_share_is_whole_tokens_and_one_at_least(percent, tokens, share):
    assert share_of(percent, tokens) == share


# --- token frequency


@given(ids=st.lists(st.integers(0, 9), min_size=3, max_size=60), seed=st.integers(0, 99))
def test_correlations_are_scipys(ids, seed):
    mass = torch.rand(2, len(ids), generator=torch.Generator().manual_seed(seed))
    scores = defaultdict(list)
    for token, score in zip(ids, mass.double().mean(0).tolist(), strict=True):
        scores[token].append(score)
    counts = [len(values) for values in scores.values()]
    means = [sum(values) / len(values) for values in scores.values()]
    found = correlations(ids, mass)
    if len(set(counts)) == 1:
        assert all(map(math.isnan, found))
    else:
        expected = (scipy.stats.pearsonr(counts, means)[0], scipy.stats.spearmanr(counts, means)[0])
        assert found == pytest.approx(expected, abs=1e-9)


def test_correlation_by_hand():
    mass = torch.tensor([[1.0, 3.0, 2.0, 4.0, 4.0, 4.0]])  # 7: 2.0 twice, 8: 2.0, 9: 4.0 thrice
    assert correlations([7, 7, 8, 9, 9, 9], mass) == pytest.approx((math.sqrt(3) / 2,) * 2)
    assert all(map(math.isnan, correlations([1, 2, 3], mass[:, :3])))


# --- misses


def naive_misses(full, context: int, size: Budget) -> float:
    """One policy, key by key: sets of tokens, scores as they would be without the others."""
    kv_heads, group, tokens, _ = full.shape
    missed = []
    for probabilities in full:
        mass = probabilities[:, :context, :context].sum((0, 1)).tolist()
        held = list(range(context))
        excess = context - size.total
        free = held[size.sinks : context - size.recent]
        for key in sorted(free, key=lambda i: (mass[i], i))[: max(excess, 0)]:
            held.remove(key)
        for t in range(context, tokens):
            held.append(t)
            mass.append(0.0)
            rows = probabilities[:, t, held]
            missed += (1 - rows.sum(-1)).tolist()
            for key, value in zip(held, (rows / rows.sum(-1, keepdim=True)).sum(0).tolist(),
                                  strict=True):
                mass[key] += value
            if len(held) > size.total:
                free = [i for i in held if size.sinks <= i < t + 1 - size.recent]
                held.remove(min(free, key=lambda i: (mass[i], i)))
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
    mass = torch.zeros(KV_HEADS, context)
    reference.prefill_attention(q[:context], k[:context], v[:context], [context], mass=mass)
    caches = Caches([size, Budget(1, 2, size.sinks)], observe(q[:context], k[:context]).mass)
    slots = torch.zeros(2, 1, KV_HEADS, size.total, DIM)
    shape = (1, KV_HEADS, size.total)
    book = Book(eviction, torch.zeros(shape), torch.full(shape, EMPTY, dtype=torch.int32))
    cut = Cut(context, size.heavy, size.recent)
    reference.select_heavy_hitters(k[:context], v[:context], mass, cuts=[cut], slots=slots,
                                   book=book)
    cached = eviction.kept(cut)
    rows = [row for _, block in logit_blocks(q, k, begin=context) for row in block.unbind(2)]
    for t, row in enumerate(rows, context):
        turn = torch.tensor([[cached], [t + 1], [size.recent], [int(cached == size.total)]],
                            dtype=torch.int32)
        reference.decode_attention(q[t : t + 1], k[t : t + 1], v[t : t + 1], slots=slots,
                                   turn=turn, book=book)
        cached = min(cached + 1, size.total)
        caches.step(row[..., : t + 1])
        assert torch.equal(caches.positions[0, :, : size.total], book.positions[0])
    assert (caches.positions[1] != EMPTY).sum(-1).tolist() == [3 + size.sinks] * KV_HEADS


# --- without some keys


def test_which_keys_are_taken_away():
    mass = torch.tensor([[5.0, 1.0, 4.0, 1.0, 3.0]])
    assert chosen_keys("heavy", mass, 2).tolist() == [[0, 2]]
    assert chosen_keys("lowest", mass, 2).tolist() == [[1, 3]]
    draws = [chosen_keys("random", mass.expand(3, 5), 2, seed=seed).tolist() for seed in (1, 1, 2)]
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
    mass = observe(q[:40], k[:40]).mass
    keys = chosen_keys(kind, mass, 7, seed=1 << 16 | 2)
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
