"""The statistics of attention: each against the whole matrix in float64, and where it is known."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import scipy.stats
import torch
from attention_stats import (
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
from helpers.attention_cases import GROUP, KV_HEADS, cases, matrix, qkv
from hypothesis import given, settings
from hypothesis import strategies as st

# --- what all rows add up to


@cases
@settings(max_examples=30)
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
    assert seen.scores[0].tolist() == pytest.approx(by_hand, rel=1e-5)


def test_where_all_look_at_the_first_token_all_else_is_small():
    tokens = ROWS + 9
    q, k = torch.ones(tokens, 2, 4), torch.zeros(tokens, 1, 4)
    k[0] = 20
    seen = observe(q, k)
    # Row i has i + 1 entries, and all but one are small.
    assert seen.sparsity.tolist() == pytest.approx([(tokens - 1) / (tokens + 1)] * 2)
    assert seen.scores[0, 0] == pytest.approx(2 * tokens)


# --- ranks


def test_scores_by_rank_by_hand():
    scores = torch.tensor([[1.0, 8.0, 2.0, 5.0], [4.0, 4.0, 4.0, 4.0]])
    assert at_ranks(scores, 2, [0.1, 0.25, 0.5, 0.51, 1.0]).tolist() == [3.0, 3.0, 2.25, 1.5, 1.25]


def test_the_mean_score_is_one():
    q, k, _ = qkv(200)
    every = [(rank + 1) / 200 for rank in range(200)]
    scores = at_ranks(observe(q, k).scores, GROUP, every)
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
        assert overlap(local, seen.scores[:, :stop], 1) == 1
        assert heaviest(local, 1).tolist() == [[3], [3]]


@pytest.mark.parametrize(("percent", "tokens", "share"),
                         [(10, 50, 5), (1, 50, 1), (20, 9, 1), (100, 9, 9), (50, 1, 1)])
def test_a_share_is_whole_tokens_and_one_at_least(percent, tokens, share):
    assert share_of(percent, tokens) == share


# --- token frequency


@given(ids=st.lists(st.integers(0, 9), min_size=3, max_size=60), seed=st.integers(0, 99))
def test_correlations_are_scipys(ids, seed):
    scores = torch.rand(2, len(ids), generator=torch.Generator().manual_seed(seed))
    by_token = defaultdict(list)
    for token, score in zip(ids, scores.double().mean(0).tolist(), strict=True):
        by_token[token].append(score)
    counts = [len(values) for values in by_token.values()]
    means = [sum(values) / len(values) for values in by_token.values()]
    found = correlations(ids, scores)
    if len(set(counts)) == 1:
        assert all(map(math.isnan, found))
    else:
        expected = (scipy.stats.pearsonr(counts, means)[0], scipy.stats.spearmanr(counts, means)[0])
        assert found == pytest.approx(expected, abs=1e-9)


def test_correlation_by_hand():
    scores = torch.tensor([[1.0, 3.0, 2.0, 4.0, 4.0, 4.0]])  # 7: 2.0 twice, 8: 2.0, 9: 4.0 thrice
    assert correlations([7, 7, 8, 9, 9, 9], scores) == pytest.approx((math.sqrt(3) / 2,) * 2)
    assert all(map(math.isnan, correlations([1, 2, 3], scores[:, :3])))
