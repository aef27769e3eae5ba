"""Statistics of attention: sparsity, accumulated scores, overlap, token frequency.

The observations that the H2O paper rests on (arXiv 2306.14048, sections 3 and 4), as functions of
one layer's rotated queries and keys for one text: q [tokens, heads, head_dim] and
k [tokens, kv_heads, head_dim]. Query head h belongs to KV head h // group. Everything is float32,
and what exists of the attention matrix at one time is a block of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from flexgen_h2o.h2o.eviction import Cut, Eviction

ROWS = 128
"""Queries that are treated together: memory stays linear in the tokens."""

THRESHOLD = 0.01
"""An entry below this share of its row's maximum counts as zero (the paper's section 3.1)."""


def logit_blocks(q: Tensor, k: Tensor, *, begin: int = 0, stops: Sequence[int] = ()
                 ) -> Iterator[tuple[int, Tensor]]:
    """The rows of the attention matrix before softmax, block by block.

    Parameters
    ----------
    q, k : Tensor [tokens, heads, head_dim], [tokens, kv_heads, head_dim]
    begin : int
        The first row.
    stops : sequence of int
        Rows where a block has to end before, beside every `ROWS` rows.

    Yields
    ------
    start : int
        The block's first row.
    logits : float32 Tensor [kv_heads, group, rows, start + rows]
        -inf where the key comes after the query. The caller's to change.
    """
    tokens, kv_heads = len(q), k.shape[1]
    edges = sorted({*range(begin, tokens, ROWS), *(s for s in stops if begin < s < tokens), tokens})
    keys = k.float()
    for start, end in zip(edges, edges[1:], strict=False):
        queries = q[start:end].float().unflatten(1, (kv_heads, -1))
        logits = torch.einsum("rkgd,tkd->kgrt", queries, keys[:end]) * q.shape[-1] ** -0.5
        yield start, logits.masked_fill_(_future(start, end, q.device), float("-inf"))


def _future(start: int, end: int, device: torch.device) -> Tensor:
    """Bool [end - start, end]: the keys that come after each of some rows."""
    return torch.arange(end, device=device) > torch.arange(start, end, device=device)[:, None]


class Seen(NamedTuple):
    """Sums over all rows of one layer.

    Attributes
    ----------
    sparsity : float64 Tensor [heads]
        Share of the entries on and below the diagonal that are below `THRESHOLD` of the maximum of
        their row.
    scores : float32 Tensor [kv_heads, tokens]
        Attention that each key has received, summed over queries and the group's query heads.
    local : dict of int to float32 Tensor [kv_heads, t]
        For each stop t, the attention score of the first t keys from the first t queries alone.
    """

    sparsity: Tensor
    scores: Tensor
    local: dict[int, Tensor]


def observe(q: Tensor, k: Tensor, stops: Sequence[int] = ()) -> Seen:
    """Go through the rows once.

    `stops` are numbers of tokens, from 1 to all, at which the attention score so far is kept.
    """
    tokens, kv_heads = len(q), k.shape[1]
    scores = torch.zeros(kv_heads, tokens, device=q.device)
    small = torch.zeros(kv_heads, q.shape[1] // kv_heads, dtype=torch.int64, device=q.device)
    local = {}
    for _, logits in logit_blocks(q, k, stops=stops):
        rows, end = logits.shape[2:]
        probabilities = logits.softmax(-1)
        below = probabilities < THRESHOLD * probabilities.amax(-1, keepdim=True)
        # What a row cannot see is 0, and not an entry.
        small += below.sum((2, 3)) - rows * (rows - 1) // 2
        scores[:, :end] += probabilities.sum((1, 2))
        if end in stops:
            local[end] = scores[:, :end].clone()
    entries = tokens * (tokens + 1) // 2
    return Seen(small.flatten().double() / entries, scores, local)


def at_ranks(scores: Tensor, group: int, ranks: Sequence[float]) -> np.ndarray:
    """The accumulated score by rank, highest first: mean over heads, float64 [ranks].

    In units of the mean score, which is that of a token that receives as much as it gives: the
    scores [kv_heads, tokens] of a text over its `group` query heads per KV head. `ranks` are
    relative: r is the ceil(r * tokens)-th of all.
    """
    ordered = scores.double().sort(dim=1, descending=True).values / group
    places = np.ceil(np.asarray(ranks) * scores.shape[1] - 1e-9).astype(int).clip(min=1) - 1
    return ordered.mean(0).cpu().numpy()[places]


def power_law(ranks: Sequence[float], scores: Sequence[float]) -> tuple[float, float]:
    """Slope and R2 of the line through log score over log rank, by least squares.

    Scores of 0 have no logarithm and are left out; nan with less than three points, and R2 is nan
    where all scores are the same.
    """
    ranks, scores = np.asarray(ranks, float), np.asarray(scores, float)
    x, y = np.log(ranks[scores > 0]), np.log(scores[scores > 0])
    if len(x) < 3:
        return float("nan"), float("nan")
    slope, offset = np.polyfit(x, y, 1)
    total = ((y - y.mean()) ** 2).sum()
    left = ((y - slope * x - offset) ** 2).sum()
    return float(slope), float(1 - left / total) if total > 0 else float("nan")


def heaviest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` keys with the most scores [kv_heads, tokens]: int64 [kv_heads, count].

    Ascending; of equals the newer, as when a prompt is cut (`Eviction.select`).
    """
    return Eviction().select(scores, Cut(scores.shape[1], count, 0))


def share_of(percent: float, tokens: int) -> int:
    """So many percent of the tokens, in whole ones, at least 1 and at most all."""
    return min(max(int(percent / 100 * tokens), 1), tokens)


def overlap(local: Tensor, full: Tensor, count: int) -> float:
    """Share of the `count` heaviest keys by one attention score that are so by the other; mean over
    heads.

    Both accumulated scores are [kv_heads, tokens], of the same keys. Keys by chance: count /
    tokens.
    """
    one, other = (torch.zeros_like(scores, dtype=torch.bool).scatter_(1, heaviest(scores, count),
                                                                      True)
                  for scores in (local, full))
    return ((one & other).sum() / (count * len(full))).item()


def correlations(ids: Sequence[int], scores: Tensor) -> tuple[float, float]:
    """Pearson's and Spearman's correlation of a token's count in the text with its mean score.

    Parameters
    ----------
    ids : sequence of int
        Token ids of the text.
    scores : Tensor [kv_heads, tokens]
        Accumulated scores. A token id's score is the mean over its occurrences and the heads.

    Returns
    -------
    pearson, spearman : float
        nan where counts or scores are all the same.
    """
    _, which, counts = np.unique(np.asarray(ids), return_inverse=True, return_counts=True)
    means_of_heads = scores.double().mean(0).cpu().numpy()
    means = np.bincount(which, means_of_heads) / counts
    return _pearson(counts, means), _pearson(rankdata(counts), rankdata(means))


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / scale) if scale > 0 else float("nan")
