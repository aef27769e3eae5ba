"""Confidence intervals. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 10_000


def bootstrap_interval(differences: Sequence[float], tokens: Sequence[int], *, seed: int = 0
                       ) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean difference per token, resampling articles.

    `differences`: sum over the tokens of each article, in nats. `tokens`: tokens of each article.
    """
    sums, counts = np.asarray(differences, float), np.asarray(tokens, float)
    picks = np.random.default_rng(seed).integers(len(sums), size=(_RESAMPLES, len(sums)))
    with np.errstate(invalid="ignore"):  # infinite differences give nan
        low, high = np.percentile(sums[picks].sum(1) / counts[picks].sum(1), (2.5, 97.5))
    return float(low), float(high)
