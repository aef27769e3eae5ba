"""Articles to score, and figures of their log-probabilities. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from flexgen_h2o.cli.values import flag
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import read_json_texts, strip_prompt
from flexgen_h2o.metrics.figures import bootstrap_interval

Pair = tuple[list[int], list[int]]
"""Token ids of the halves of an article."""


def articles_flag() -> Any:
    """Return the field ``--input-path`` of options that take articles."""
    return flag("path", None, shown="none", metavar="FILE.jsonl",
                help="articles, a JSON object per line: the text in `article`")


def read_articles(path: str) -> list[str]:
    """Read the text of each article, in the order of the file; blank lines are skipped.

    Raises `UserError`, with the line number, if the file is missing, empty or not UTF-8, or if a
    line is not JSON or has no text under `article`.
    """
    return read_json_texts("--input-path", path, "article", clean=strip_prompt,
                           if_empty="holds no articles: write one JSON object a line")


def select_articles(texts: Iterable[str], encode: Callable[[str], Sequence[int]], *, articles: int,
                    min_tokens: int, max_tokens: int) -> list[list[int]]:
    """Return the token ids of the first `articles` texts of at least `min_tokens` tokens.

    Each is cut to `max_tokens`; `encode` tokenizes a text. Raises `UserError` if there are too few.
    """
    selected: list[list[int]] = []
    for text in texts:
        ids = list(encode(text))
        if len(ids) >= min_tokens:
            selected.append(ids[:max_tokens])
            if len(selected) == articles:
                return selected
    raise UserError(f"--input-path has {len(selected)} articles of at least {min_tokens} tokens "
                    f"and {articles} are needed: lower --articles or --min-tokens")


def split_halves(articles: Iterable[Sequence[int]]) -> list[Pair]:
    """Split the tokens (at least 2) of each article into halves; the second may be one longer."""
    return [(list(ids[: len(ids) // 2]), list(ids[len(ids) // 2 :])) for ids in articles]


def perplexity(log_probs: Iterable[Sequence[float]]) -> float:
    """Return exp of the mean negative log-likelihood over all tokens of all articles."""
    values = [value for article in log_probs for value in article]
    with np.errstate(over="ignore"):  # a token of probability 0 makes it infinite
        return float(np.exp(-fmean(values)))


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
