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
from quality_study import Configuration
from scipy.stats import rankdata
from torch import Tensor

from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.budget import Budget
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
    residual = ((y - slope * x - offset) ** 2).sum()
    return float(slope), float(1 - residual / total) if total > 0 else float("nan")


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
    first, other = (torch.zeros_like(scores, dtype=torch.bool).scatter_(1, heaviest(scores, count),
                                                                        True)
                    for scores in (local, full))
    return ((first & other).sum() / (count * len(full))).item()


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


EVICTING = ("h2o", "window", "sink-window")
POLICIES = (*EVICTING, "best")
"""`best` is the most that so many tokens can hold of each row: no policy loses less."""


def sizes(policy: str, percent: float, prompt_len: int) -> Budget:
    """The budget of a policy for a prompt: all keep as many tokens as h2o does at this budget.

    But ``sink-window`` has its sinks and one recent token at least.
    """
    h2o = Configuration("h2o", percent).sizes(prompt_len)
    if policy == "h2o":
        return h2o
    sinks = SINK_WINDOW_SINKS if policy == "sink-window" else 0
    return Budget(heavy=0, recent=max(h2o.total - sinks, 1), sinks=sinks)


def miss_rates(q: Tensor, k: Tensor, *, context: int, percents: Sequence[float]) -> Tensor:
    """Mean share of the attention of the rows from `context` on that is not on cached tokens.

    Parameters
    ----------
    q, k : Tensor [tokens, heads, head_dim], [tokens, kv_heads, head_dim]
        Rotated.
    context : int
        Tokens of the prompt, at least 2 and less than all.
    percents : sequence of float
        Budgets, percent of the prompt.

    Returns
    -------
    float64 Tensor [policies, percents], on the CPU
        Of `POLICIES`, mean over rows and query heads.
    """
    scores = observe(q[:context], k[:context]).scores
    caches = [Caches([sizes(policy, percent, context) for percent in percents], scores)
              for policy in EVICTING]
    totals = [sizes("best", percent, context).total for percent in percents]
    missed = torch.zeros(len(POLICIES), len(percents), dtype=torch.float64, device=q.device)
    for start, logits in logit_blocks(q, k, begin=context):
        for row, query_logits in enumerate(logits.unbind(2)):
            for policy, cache in enumerate(caches):
                missed[policy] += cache.step(query_logits[..., : start + row + 1])
        missed[-1] += _best(logits, start, totals)
    return missed.cpu() / ((len(q) - context) * q.shape[1])


def _best(logits: Tensor, start: int, totals: Sequence[int]) -> Tensor:
    """The least that rows lose, summed over rows and heads: float64 [totals].

    A row of t tokens before it attends over min(t, total) of them and itself.
    """
    rows, tokens = logits.shape[2:]
    max_count = min(max(totals) + 1, tokens)
    mass = logits.softmax(-1).topk(max_count, dim=-1).values.double().cumsum(-1)
    before = torch.arange(start, start + rows, device=logits.device)
    lost = []
    for total in totals:
        place = before.clamp(max=total).clamp(max=max_count - 1)
        last = place[:, None].expand(*logits.shape[:3], 1)
        lost.append((1 - mass.gather(-1, last)).clamp(min=0).sum())
    return torch.stack(lost)


class Caches:
    """The tokens that one policy holds of one layer of a text, at several budgets at once.

    What goes is `Eviction`'s to say. There are no keys and values: the attention is given.

    Parameters
    ----------
    budgets : sequence of Budget
        All with the same sinks.
    scores : float32 Tensor [kv_heads, prompt_len]
        Of the prompt, all its queries done.

    Attributes
    ----------
    positions : int32 Tensor [budgets, kv_heads, slots]
        Of the tokens held; `EMPTY` where there is none.
    """

    def __init__(self, budgets: Sequence[Budget], scores: Tensor):
        kv_heads, length = scores.shape
        shape = (len(budgets), kv_heads, max(budget.total for budget in budgets))
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=scores.device)
        self._scores = torch.zeros(shape, device=scores.device)
        (sinks,) = {budget.sinks for budget in budgets}
        self._eviction = Eviction(sinks=sinks)
        self._total, self._recent = torch.tensor(
            [(budget.total, budget.recent) for budget in budgets], device=scores.device).T
        self._tokens = length
        for budget, positions, cached_scores in zip(budgets, self.positions, self._scores,
                                                    strict=True):
            index = self._eviction.select(scores, Cut(length, budget.heavy, budget.recent))
            positions[:, : index.shape[1]] = index.to(torch.int32)
            cached_scores[:, : index.shape[1]] = scores.gather(1, index)

    def step(self, row: Tensor) -> Tensor:
        """Attend from one more token, cache it, evict where the cache is over its budget.

        `row` is [kv_heads, group, tokens], the logits of its query for all tokens up to itself.
        Returns what it loses, summed over the query heads: float64 [budgets].
        """
        empty = self.positions == EMPTY
        places = self.positions.masked_fill(empty, 0).long()[:, :, None]
        all_heads = row.expand(len(places), -1, -1, -1)
        cached_logits = all_heads.gather(-1, places.expand(*all_heads.shape[:3], -1))
        cached_logits = cached_logits.masked_fill(empty[:, :, None], float("-inf"))
        attended = torch.cat([cached_logits, all_heads[..., -1:]], dim=-1)
        log_share = attended.logsumexp(-1) - row.logsumexp(-1)  # the log of its share
        received = attended.softmax(-1).sum(2)
        self._scores += received[..., :-1]
        self._cache(received[..., -1:])
        return -log_share.double().clamp(max=0).expm1().sum((1, 2))

    def _cache(self, new_scores: Tensor) -> None:
        """Put the new token with attention score `new_scores` [budgets, kv_heads, 1] into its
        slot."""
        new, self._tokens = self._tokens, self._tokens + 1
        victims = self._eviction.victims(
            self._scores, self.positions, tokens=torch.full_like(self._recent, self._tokens),
            recent=self._recent)
        # Where all tokens so far fit in, nothing was evicted and they stand in order.
        victims = victims.where((self._total < self._tokens)[:, None], new)[..., None]
        self._scores.scatter_(-1, victims, new_scores)
        self.positions.scatter_(-1, victims, torch.full_like(victims, new, dtype=torch.int32))
