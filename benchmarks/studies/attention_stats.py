"""Statistics of attention: sparsity, accumulated scores, overlap, token frequency.

The observations of the H2O paper (arXiv 2306.14048, sections 3 and 4), as functions of the rotated
queries and keys of one layer and one text: q [tokens, heads, head_dim] and
k [tokens, kv_heads, head_dim]. Query head h belongs to KV head h // group. Everything is float32.
The attention matrix is computed in blocks of rows, one at a time.
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
"""Queries per block. Memory is linear in the number of tokens."""

THRESHOLD = 0.01
"""Entries below this fraction of their row's maximum count as zero (section 3.1 of the paper)."""


def logit_blocks(q: Tensor, k: Tensor, *, begin: int = 0, stops: Sequence[int] = ()
                 ) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of the attention matrix before softmax, block by block.

    Parameters
    ----------
    q, k : Tensor [tokens, heads, head_dim], [tokens, kv_heads, head_dim]
    begin : int
        The first row.
    stops : sequence of int
        Additional rows before which a block must end; blocks also end after every `ROWS` rows.

    Yields
    ------
    start : int
        The block's first row.
    logits : float32 Tensor [kv_heads, group, rows, start + rows]
        -inf where the key is after the query. The caller may modify it.
    """
    tokens, kv_heads = len(q), k.shape[1]
    edges = sorted({*range(begin, tokens, ROWS), *(s for s in stops if begin < s < tokens), tokens})
    keys = k.float()
    for start, end in zip(edges, edges[1:], strict=False):
        queries = q[start:end].float().unflatten(1, (kv_heads, -1))
        logits = torch.einsum("rkgd,tkd->kgrt", queries, keys[:end]) * q.shape[-1] ** -0.5
        yield start, logits.masked_fill_(_future(start, end, q.device), float("-inf"))


def _future(start: int, end: int, device: torch.device) -> Tensor:
    """Return a bool mask [end - start, end] of the keys that are after the query of each row."""
    return torch.arange(end, device=device) > torch.arange(start, end, device=device)[:, None]


class Seen(NamedTuple):
    """Statistics over all rows of one layer.

    Attributes
    ----------
    sparsity : float64 Tensor [heads]
        Fraction of the entries on and below the diagonal that are below `THRESHOLD` times the
        maximum of their row.
    scores : float32 Tensor [kv_heads, tokens]
        Attention that each key has received, summed over queries and the query heads of its group.
    local : dict of int to float32 Tensor [kv_heads, t]
        For each stop t, the attention score of the first t keys from the first t queries.
    """

    sparsity: Tensor
    scores: Tensor
    local: dict[int, Tensor]


def observe(q: Tensor, k: Tensor, stops: Sequence[int] = ()) -> Seen:
    """Return the statistics of all rows, computed in one pass.

    `stops` are numbers of tokens, from 1 to all, at which the attention score is recorded.
    """
    tokens, kv_heads = len(q), k.shape[1]
    scores = torch.zeros(kv_heads, tokens, device=q.device)
    small = torch.zeros(kv_heads, q.shape[1] // kv_heads, dtype=torch.int64, device=q.device)
    local = {}
    for _, logits in logit_blocks(q, k, stops=stops):
        rows, end = logits.shape[2:]
        probabilities = logits.softmax(-1)
        below = probabilities < THRESHOLD * probabilities.amax(-1, keepdim=True)
        # Masked entries are 0 too, and are not counted.
        small += below.sum((2, 3)) - rows * (rows - 1) // 2
        scores[:, :end] += probabilities.sum((1, 2))
        if end in stops:
            local[end] = scores[:, :end].clone()
    entries = tokens * (tokens + 1) // 2
    return Seen(small.flatten().double() / entries, scores, local)


def at_ranks(scores: Tensor, group: int, ranks: Sequence[float]) -> np.ndarray:
    """Return the accumulated score by rank in descending order: mean over heads, float64 [ranks].

    The unit is the mean score: the score of a token that receives as much attention as it gives.
    The scores [kv_heads, tokens] are of a text with `group` query heads per KV head. `ranks` are
    relative: r is the ceil(r * tokens)-th highest score.
    """
    ordered = scores.double().sort(dim=1, descending=True).values / group
    places = np.ceil(np.asarray(ranks) * scores.shape[1] - 1e-9).astype(int).clip(min=1) - 1
    return ordered.mean(0).cpu().numpy()[places]


def power_law(ranks: Sequence[float], scores: Sequence[float]) -> tuple[float, float]:
    """Fit log score over log rank by least squares. Return the slope and R2.

    Scores of 0 are left out. The slope is nan with fewer than three points, and R2 is nan if all
    scores are equal.
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
    """Return the indices of the `count` keys with the highest scores: int64 [kv_heads, count].

    They are ascending. Ties are broken in favor of newer keys, as in `Eviction.select`.
    """
    return Eviction().select(scores, Cut(scores.shape[1], count, 0))


def share_of(percent: float, tokens: int) -> int:
    """Return a percentage of the tokens as an integer, at least 1 and at most all."""
    return min(max(int(percent / 100 * tokens), 1), tokens)


def overlap(local: Tensor, full: Tensor, count: int) -> float:
    """Return the fraction of the `count` heaviest keys that two attention scores have in common.

    It is a mean over heads. Both scores are [kv_heads, tokens], of the same keys. The expected
    overlap of random keys is count / tokens.
    """
    first, other = (torch.zeros_like(scores, dtype=torch.bool).scatter_(1, heaviest(scores, count),
                                                                        True)
                    for scores in (local, full))
    return ((first & other).sum() / (count * len(full))).item()


def correlations(ids: Sequence[int], scores: Tensor) -> tuple[float, float]:
    """Return Pearson's and Spearman's correlation of a token's count with its mean score.

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
"""`best` caches the tokens with the highest attention of each row, a bound for all policies."""


def sizes(policy: str, percent: float, prompt_len: int) -> Budget:
    """Return the budget of a policy for a prompt: the number of tokens that h2o keeps at `percent`.

    ``sink-window`` keeps at least its sinks and one recent token.
    """
    h2o = Configuration("h2o", percent).sizes(prompt_len)
    if policy == "h2o":
        return h2o
    sinks = SINK_WINDOW_SINKS if policy == "sink-window" else 0
    return Budget(heavy=0, recent=max(h2o.total - sinks, 1), sinks=sinks)


def miss_rates(q: Tensor, k: Tensor, *, context: int, percents: Sequence[float]) -> Tensor:
    """Return the mean attention that rows from `context` on lose, because keys are not cached.

    Parameters
    ----------
    q, k : Tensor [tokens, heads, head_dim], [tokens, kv_heads, head_dim]
        Rotated queries and keys.
    context : int
        Tokens of the prompt, at least 2 and fewer than all.
    percents : sequence of float
        Budgets, in percent of the prompt.

    Returns
    -------
    float64 Tensor [policies, percents], on the CPU
        One row for each of `POLICIES`; means over rows and query heads.
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
    """Return the minimum loss of the rows, summed over rows and heads: float64 [totals].

    A row with t earlier tokens attends to min(t, total) of them and to itself.
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
    """The tokens that one policy keeps in one layer of a text, at several budgets at once.

    `Eviction` selects what is evicted. There are no keys and values: the attention is given.

    Parameters
    ----------
    budgets : sequence of Budget
        Budgets with equal sinks.
    scores : float32 Tensor [kv_heads, prompt_len]
        Attention scores after the whole prompt.

    Attributes
    ----------
    positions : int32 Tensor [budgets, kv_heads, slots]
        Positions of the cached tokens; `EMPTY` in empty slots.
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
        """Attend from one more token, cache it, and evict where the cache exceeds its budget.

        `row` is [kv_heads, group, tokens]: the logits of its query for all tokens up to itself.
        Return the attention that it loses, summed over the query heads: float64 [budgets].
        """
        empty = self.positions == EMPTY
        places = self.positions.masked_fill(empty, 0).long()[:, :, None]
        all_heads = row.expand(len(places), -1, -1, -1)
        cached_logits = all_heads.gather(-1, places.expand(*all_heads.shape[:3], -1))
        cached_logits = cached_logits.masked_fill(empty[:, :, None], float("-inf"))
        attended = torch.cat([cached_logits, all_heads[..., -1:]], dim=-1)
        log_share = attended.logsumexp(-1) - row.logsumexp(-1)  # of the attention that is kept
        received = attended.softmax(-1).sum(2)
        self._scores += received[..., :-1]
        self._cache(received[..., -1:])
        return -log_share.double().clamp(max=0).expm1().sum((1, 2))

    def _cache(self, new_scores: Tensor) -> None:
        """Cache the new token, with its attention score `new_scores` [budgets, kv_heads, 1]."""
        new, self._tokens = self._tokens, self._tokens + 1
        victims = self._eviction.victims(
            self._scores, self.positions, tokens=torch.full_like(self._recent, self._tokens),
            recent=self._recent)
        # If all tokens so far fit, none was evicted, and token i is in slot i.
        victims = victims.where((self._total < self._tokens)[:, None], new)[..., None]
        self._scores.scatter_(-1, victims, new_scores)
        self.positions.scatter_(-1, victims, torch.full_like(victims, new, dtype=torch.int32))
