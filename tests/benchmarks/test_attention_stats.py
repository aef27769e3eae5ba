"""Attention statistics against the whole matrix in float64."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import scipy.stats
import torch
from attention_stats import (
    correlations,
    observe,
    power_law,
    share_of,
)
from helpers.attention_cases import cases, matrix, qkv
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


# --- ranks


@given(slope=st.floats(-3, 3), factor=st.floats(1e-3, 1e3), points=st.integers(3, 40))
def test_a_power_law_is_found(slope, factor, points):
    ranks = np.arange(1, points + 1) / points
    found, r2 = power_law(ranks, factor * ranks**slope)
    assert found == pytest.approx(slope, abs=1e-6)
    assert math.isnan(r2) or r2 == pytest.approx(1, abs=1e-6) or abs(slope) < 1e-6


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
