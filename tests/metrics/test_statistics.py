"""Perplexity and bootstrap intervals."""

import math
import random

import pytest
from articles import perplexity

from flexgen_h2o.metrics.figures import bootstrap_interval


def test_perplexity_of_probability_0_is_infinite():
    assert perplexity([[-1.0], [-math.inf]]) == math.inf
    assert perplexity([[-1e6]]) == math.inf


def test_bootstrap_interval_is_deterministic():
    draw = random.Random(1)
    sums, tokens = [draw.gauss(30, 20) for _ in range(30)], [300] * 30
    low, high = bootstrap_interval(sums, tokens)
    assert (low, high) == bootstrap_interval(sums, tokens)
    assert (low, high) != bootstrap_interval(sums, tokens, seed=1)
    mean = sum(sums) / sum(tokens)
    error = math.sqrt(sum((value / 300 - mean) ** 2 for value in sums) / 30 / 30)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), rel=0.1)
