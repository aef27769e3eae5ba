"""Columns of the files of the analyze task, and where on their axes it looks. No torch."""

from __future__ import annotations

from flexgen_h2o.metrics.provenance import ORIGIN

RUN = (*ORIGIN, "device", "model", "dtype", "articles", "tokens_mean")
"""First columns of every row."""

PARTS: dict[str, tuple[str, ...]] = {
    "sparsity": ("layer", "head", "sparsity"),
    "scores": ("layer", "relative_rank", "score", "slope", "r2"),
    "local": ("layer", "seen_percent", "budget_percent", "overlap", "chance"),
    "frequency": ("layer", "pearson", "spearman", "articles_with_correlation"),
    "misses": ("layer", "policy", "budget_percent", "cached_tokens_mean", "miss_rate"),
}
"""Figures of each layer, the columns of its file. Layers and heads count from 0."""

EVICTED = ("evicted", "evicted_percent", "evicted_tokens_mean", "scored_tokens", "perplexity",
           "perplexity_over_full", "delta_nats", "delta_nats_low", "delta_nats_high")
"""Columns of the perplexities without some keys; the row ``none`` is the model as it is."""

NAMES = (*PARTS, "evicted")

RANKS = tuple(2 ** (-8 + step / 4) for step in range(33))
"""Relative ranks, from 1/256 to 1, at which accumulated scores are given."""

FIT = (0.01, 0.5)
"""Relative ranks from and to which the power law is fitted: beyond, the scores of the newest keys,
which few queries have seen, fall off."""

SEEN = (10, 20, 30, 40, 50, 60, 70, 80, 90)
"""Percent of a text after which local statistics are taken."""
