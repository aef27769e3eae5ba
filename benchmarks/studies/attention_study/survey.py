"""The attention of many texts, layer by layer, as rows of CSV files: see `commands.analyze`.

A `Survey` looks on while `LLM.probe` runs, and keeps a few numbers per layer and text. Its rows
are by column name, one list for each of `PARTS`, and means over the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attention_study.columns import FIT, PARTS, RANKS, SEEN
from attention_study.misses import POLICIES, miss_rates, sizes
from attention_study.stats import (
    at_ranks,
    correlations,
    observe,
    overlap,
    power_law,
    share_of,
)
from flexgen_h2o.kernels import ops


class Survey:
    """Statistics of the attention of texts.

    Parameters
    ----------
    parts : sequence of str
        Those of `PARTS` to find.
    ids : sequence of sequence of int
        Token ids of each text, whose attention `attend` will get.
    contexts : sequence of int
        Tokens of the first half of each.
    percents : sequence of float
        Budgets, percent of the tokens there are (local) or of the first half (misses).
    """

    def __init__(self, parts: Sequence[str], ids: Sequence[Sequence[int]],
                 contexts: Sequence[int], percents: Sequence[float]):
        self._parts = tuple(parts)
        self._ids, self._contexts, self._percents = ids, contexts, tuple(percents)
        self._found: dict[str, dict[int, list]] = {part: {} for part in parts}

    def attend(self, layer: int, pair: int, q, k, v) -> torch.Tensor:
        """Look on, and do the usual attention: as `LLM.probe` wants it."""
        if set(self._parts) - {"misses"}:
            self._look(layer, pair, q, k)
        if "misses" in self._parts:
            rates = miss_rates(q, k, context=self._contexts[pair], percents=self._percents)
            self._keep("misses", layer, rates.numpy())
        return ops.prefill_attention(q, k, v, [len(q)])

    def _look(self, layer: int, pair: int, q, k) -> None:
        tokens, group = len(q), q.shape[1] // k.shape[1]
        stops = [share_of(seen, tokens) for seen in SEEN] if "local" in self._parts else []
        seen = observe(q, k, stops)
        if "sparsity" in self._parts:
            self._keep("sparsity", layer, seen.sparsity.cpu().numpy())
        if "scores" in self._parts:
            self._keep("scores", layer, at_ranks(seen.scores, group, RANKS))
        if "local" in self._parts:
            self._keep("local", layer, [
                [self._overlap(seen, stop, percent) for percent in self._percents]
                for stop in stops])
        if "frequency" in self._parts:
            self._keep("frequency", layer, correlations(self._ids[pair], seen.scores))

    def _overlap(self, seen, stop: int, percent: float) -> tuple[float, float]:
        """The overlap, and what it is by chance."""
        count = share_of(percent, stop)
        return overlap(seen.local[stop], seen.scores[:, :stop], count), count / stop

    def _keep(self, part: str, layer: int, values) -> None:
        self._found[part].setdefault(layer, []).append(values)

    def rows(self, part: str) -> list[dict[str, object]]:
        """The rows of one part, by its columns in `PARTS`."""
        make = {"sparsity": self._sparsity, "scores": self._scores, "local": self._local,
                "frequency": self._frequency, "misses": self._misses}[part]
        return [dict(zip(PARTS[part], values, strict=True))
                for layer, found in sorted(self._found[part].items())
                for values in make(layer, np.asarray(found, float))]

    def _sparsity(self, layer: int, found: np.ndarray):
        for head, value in enumerate(found.mean(0).tolist()):
            yield layer, head, value

    def _scores(self, layer: int, found: np.ndarray):
        scores = found.mean(0)
        ranks = np.asarray(RANKS)
        within = (ranks >= FIT[0]) & (ranks <= FIT[1])
        fit = [None if np.isnan(value) else value
               for value in power_law(ranks[within], scores[within])]
        for rank, score in zip(RANKS, scores.tolist(), strict=True):
            yield layer, rank, score, *fit

    def _local(self, layer: int, found: np.ndarray):
        for seen, by_percent in zip(SEEN, found.mean(0).tolist(), strict=True):
            for percent, values in zip(self._percents, by_percent, strict=True):
                yield layer, seen, percent, *values

    def _frequency(self, layer: int, found: np.ndarray):
        known = found[~np.isnan(found).any(1)]
        yield layer, *(known.mean(0).tolist() if len(known) else [None, None]), len(known)

    def _misses(self, layer: int, found: np.ndarray):
        for policy, by_percent in zip(POLICIES, found.mean(0).tolist(), strict=True):
            for percent, value in zip(self._percents, by_percent, strict=True):
                held = np.mean([sizes(policy, percent, context).total
                                for context in self._contexts])
                yield layer, policy, percent, float(held), value
