"""Perplexities and confidence intervals, from log-probabilities of the same tokens. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np


def perplexity(log_probs: Iterable[Sequence[float]]) -> float:
    """Return exp of the mean negative log-likelihood over all tokens of all articles."""
    values = [value for article in log_probs for value in article]
    with np.errstate(over="ignore"):  # a token of probability 0 makes it infinite
        return float(np.exp(-fmean(values)))


def bootstrap_interval(differences: Sequence[float], tokens: Sequence[int], *, draws: int = 10_000,
                       seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean difference per token, resampling articles.

    Parameters
    ----------
    differences : sequence of float
        Sum over the tokens of each article, in nats.
    tokens : sequence of int
        Tokens of each article.
    draws : int
        Number of resamples.
    """
    sums, counts = np.asarray(differences, float), np.asarray(tokens, float)
    picks = np.random.default_rng(seed).integers(len(sums), size=(draws, len(sums)))
    with np.errstate(invalid="ignore"):  # infinite differences give nan
        low, high = np.percentile(sums[picks].sum(1) / counts[picks].sum(1), (2.5, 97.5))
    return float(low), float(high)


def compare_to_full(log_probs: Sequence[Sequence[float]], full: Sequence[Sequence[float]]
                    ) -> dict[str, float]:
    """Compare log-probabilities of articles to those with the full cache; return figures by column.

    Nats are of the mean negative log-likelihood per token: more is worse.
    """
    tokens = [len(article) for article in full]
    differences = [math.fsum(b - a for a, b in zip(value, full_value, strict=True))
                   for value, full_value in zip(log_probs, full, strict=True)]
    low, high = bootstrap_interval(differences, tokens)
    value, full_value = perplexity(log_probs), perplexity(full)
    return {"perplexity": value, "perplexity_over_full": value / full_value,
            "delta_nats": math.fsum(differences) / sum(tokens),
            "delta_nats_low": low, "delta_nats_high": high}
