"""Attention lost to eviction: a policy's cache run on the true attention of a text.

The first half of the text is the prompt, which is cut to the budget; each query of the second half
then attends and one token is evicted. What is lost of a query is the share of its exact attention
that lies on tokens that are not cached (arXiv 2306.14048). Scores are those that the engine would
have: each query's attention over what is cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from quality_study.configurations import Configuration
from torch import Tensor

from attention_study.stats import logit_blocks, observe
from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.budget import Budget
from flexgen_h2o.h2o.eviction import Cut, Eviction

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
        for row, one in enumerate(logits.unbind(2)):
            for policy, cache in enumerate(caches):
                missed[policy] += cache.step(one[..., : start + row + 1])
        missed[-1] += _best(logits, start, totals)
    return missed.cpu() / ((len(q) - context) * q.shape[1])


def _best(logits: Tensor, start: int, totals: Sequence[int]) -> Tensor:
    """The least that rows lose, summed over rows and heads: float64 [totals].

    A row of t tokens before it attends over min(t, total) of them and itself.
    """
    rows, tokens = logits.shape[2:]
    most = min(max(totals) + 1, tokens)
    held = logits.softmax(-1).topk(most, dim=-1).values.double().cumsum(-1)
    before = torch.arange(start, start + rows, device=logits.device)
    lost = []
    for total in totals:
        place = before.clamp(max=total).clamp(max=most - 1)
        last = place[:, None].expand(*logits.shape[:3], 1)
        lost.append((1 - held.gather(-1, last)).clamp(min=0).sum())
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
        for budget, positions, held in zip(budgets, self.positions, self._scores, strict=True):
            index = self._eviction.select(scores, Cut(length, budget.heavy, budget.recent))
            positions[:, : index.shape[1]] = index.to(torch.int32)
            held[:, : index.shape[1]] = scores.gather(1, index)

    def step(self, row: Tensor) -> Tensor:
        """Attend from one more token, cache it, evict where the cache is over its budget.

        `row` is [kv_heads, group, tokens], the logits of its query for all tokens up to itself.
        Returns what it loses, summed over the query heads: float64 [budgets].
        """
        empty = self.positions == EMPTY
        places = self.positions.masked_fill(empty, 0).long()[:, :, None]
        every = row.expand(len(places), -1, -1, -1)
        held = every.gather(-1, places.expand(*every.shape[:3], -1))
        held = held.masked_fill(empty[:, :, None], float("-inf"))
        attended = torch.cat([held, every[..., -1:]], dim=-1)
        kept = attended.logsumexp(-1) - row.logsumexp(-1)  # the log of its share
        received = attended.softmax(-1).sum(2)
        self._scores += received[..., :-1]
        self._cache(received[..., -1:])
        return -kept.double().clamp(max=0).expm1().sum((1, 2))

    def _cache(self, own: Tensor) -> None:
        """Put the new token, which has the attention score `own` [budgets, kv_heads, 1], into its
        slot."""
        new, self._tokens = self._tokens, self._tokens + 1
        taken = self._eviction.victims(
            self._scores, self.positions, tokens=torch.full_like(self._recent, self._tokens),
            recent=self._recent)
        # Where all tokens so far fit in, nothing was evicted and they stand in order.
        taken = taken.where((self._total < self._tokens)[:, None], new)[..., None]
        self._scores.scatter_(-1, taken, own)
        self.positions.scatter_(-1, taken, torch.full_like(taken, new, dtype=torch.int32))
