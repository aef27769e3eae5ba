"""Attention statistics of many texts by layer, as rows of CSV files: see `analyze.py`.

A `Survey` observes `LLM.probe` and keeps a few numbers per layer and text. Its rows are means over
the texts, by column name, in one list for each of `PARTS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attention_report import FIT, PARTS, RANKS, SEEN
from attention_stats import (
    POLICIES,
    at_ranks,
    correlations,
    heaviest,
    logit_blocks,
    miss_rates,
    observe,
    overlap,
    power_law,
    share_of,
    sizes,
)
from torch import Tensor

from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS
from flexgen_h2o.kernels import ops


class Survey:
    """Statistics of the attention of texts.

    Parameters
    ----------
    parts : sequence of str
        Members of `PARTS` to measure.
    ids : sequence of sequence of int
        Token ids of each text that `attend` gets.
    contexts : sequence of int
        Tokens of the first half of each text.
    percents : sequence of float
        Budgets, in percent of the tokens so far (local) or of the first half (misses).
    """

    def __init__(self, parts: Sequence[str], ids: Sequence[Sequence[int]],
                 contexts: Sequence[int], percents: Sequence[float]):
        self._parts = tuple(parts)
        self._ids, self._contexts, self._percents = ids, contexts, tuple(percents)
        self._values: dict[str, dict[int, list]] = {part: {} for part in parts}

    def attend(self, layer: int, pair: int, q, k, v) -> torch.Tensor:
        """Record statistics, and compute ordinary attention: the callback of `LLM.probe`."""
        if set(self._parts) - {"misses"}:
            self._look(layer, pair, q, k)
        if "misses" in self._parts:
            rates = miss_rates(q, k, context=self._contexts[pair], percents=self._percents)
            self._keep("misses", layer, rates.numpy())
        return ops.prefill_attention(q, k, v, [len(q)])

    def _look(self, layer: int, pair: int, q, k) -> None:
        tokens, group = len(q), q.shape[1] // k.shape[1]
        stops = [share_of(observed, tokens) for observed in SEEN] if "local" in self._parts else []
        observed = observe(q, k, stops)
        if "sparsity" in self._parts:
            self._keep("sparsity", layer, observed.sparsity.cpu().numpy())
        if "scores" in self._parts:
            self._keep("scores", layer, at_ranks(observed.scores, group, RANKS))
        if "local" in self._parts:
            self._keep("local", layer, [
                [self._overlap(observed, stop, percent) for percent in self._percents]
                for stop in stops])
        if "frequency" in self._parts:
            self._keep("frequency", layer, correlations(self._ids[pair], observed.scores))

    def _overlap(self, observed, stop: int, percent: float) -> tuple[float, float]:
        """Return rows of the overlap and of its expected value for random keys."""
        count = share_of(percent, stop)
        return overlap(observed.local[stop], observed.scores[:, :stop], count), count / stop

    def _keep(self, part: str, layer: int, values) -> None:
        self._values[part].setdefault(layer, []).append(values)

    def rows(self, part: str) -> list[dict[str, object]]:
        """Return the rows of one part, by its columns in `PARTS`."""
        make = {"sparsity": self._sparsity, "scores": self._scores, "local": self._local,
                "frequency": self._frequency, "misses": self._misses}[part]
        return [dict(zip(PARTS[part], values, strict=True))
                for layer, layer_values in sorted(self._values[part].items())
                for values in make(layer, np.asarray(layer_values, float))]

    def _sparsity(self, layer: int, layer_values: np.ndarray):
        for head, value in enumerate(layer_values.mean(0).tolist()):
            yield layer, head, value

    def _scores(self, layer: int, layer_values: np.ndarray):
        scores = layer_values.mean(0)
        ranks = np.asarray(RANKS)
        within = (ranks >= FIT[0]) & (ranks <= FIT[1])
        fit = [None if np.isnan(value) else value
               for value in power_law(ranks[within], scores[within])]
        for rank, score in zip(RANKS, scores.tolist(), strict=True):
            yield layer, rank, score, *fit

    def _local(self, layer: int, layer_values: np.ndarray):
        for seen, by_percent in zip(SEEN, layer_values.mean(0).tolist(), strict=True):
            for percent, values in zip(self._percents, by_percent, strict=True):
                yield layer, seen, percent, *values

    def _frequency(self, layer: int, layer_values: np.ndarray):
        known = layer_values[~np.isnan(layer_values).any(1)]
        yield layer, *(known.mean(0).tolist() if len(known) else [None, None]), len(known)

    def _misses(self, layer: int, layer_values: np.ndarray):
        for policy, by_percent in zip(POLICIES, layer_values.mean(0).tolist(), strict=True):
            for percent, value in zip(self._percents, by_percent, strict=True):
                cached = np.mean([sizes(policy, percent, context).total
                                  for context in self._contexts])
                yield layer, policy, percent, float(cached), value


KINDS = ("heavy", "heavy but sinks", "random", "lowest")


def chosen_keys(kind: str, scores: Tensor, count: int, *, seed: int = 0) -> Tensor:
    """Return `count` keys of each KV head to remove: int64 [kv_heads, count].

    Parameters
    ----------
    kind : str
        One of `KINDS`. Of equal scores the newer key is heavier; `seed` determines random keys;
        sinks are selected last by "heavy but sinks".
    scores : Tensor [kv_heads, tokens]
        Accumulated scores.
    count : int
        At most the number of tokens.
    """
    if kind == "heavy":
        return heaviest(scores, count)
    if kind == "heavy but sinks":
        scores = scores.clone()
        scores[:, :SINK_WINDOW_SINKS] = -1  # below any accumulated attention
        return heaviest(scores, count)
    if kind == "lowest":
        return scores.argsort(dim=1, stable=True)[:, :count]
    generator = torch.Generator().manual_seed(seed)  # on the CPU: equal on every device
    draws = torch.rand(scores.shape, generator=generator)
    return draws.argsort(dim=1)[:, :count].to(scores.device)


def attend_without(q: Tensor, k: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """Compute causal attention in which later queries do not see some of the first keys.

    Parameters
    ----------
    q : Tensor [tokens, heads, head_dim]
    k, v : Tensor [tokens, kv_heads, head_dim]
    evicted : bool Tensor [kv_heads, context]
        True for keys that queries from `context` on do not see.

    Returns
    -------
    Tensor like q
    """
    context, values = evicted.shape[1], v.float()
    out = torch.empty_like(q)
    out[:context] = ops.prefill_attention(q[:context], k[:context], v[:context], [context])
    for start, logits in logit_blocks(q, k, begin=context):
        logits[..., :context].masked_fill_(evicted[:, None, None], float("-inf"))
        rows, seen = logits.shape[2:]
        attended = torch.einsum("kgrt,tkd->rkgd", logits.softmax(-1), values[:seen])
        out[start : start + rows] = attended.flatten(1, 2).to(q.dtype)
    return out


class Without:
    """Attention for `LLM.probe` that removes `counts[pair]` keys of the first half.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    contexts, counts : list of int
        For each pair, the tokens of its first half, and the number of removed keys.
    """

    def __init__(self, kind: str, contexts: list[int], counts: list[int]):
        self._kind, self._contexts, self._counts = kind, contexts, counts

    def __call__(self, layer: int, pair: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention for `LLM.probe`."""
        context = self._contexts[pair]
        scores = observe(q[:context], k[:context]).scores
        keys = chosen_keys(self._kind, scores, self._counts[pair], seed=pair << 16 | layer)
        evicted = torch.zeros(scores.shape, dtype=torch.bool, device=q.device)
        evicted.scatter_(1, keys, True)
        return attend_without(q, k, v, evicted)
