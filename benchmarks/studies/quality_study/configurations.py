"""The caches that the quality task compares: policies over budgets, and variants of one. No torch.

A variant may have quantized weights too, and is compared with the full cache and exact weights.
A budget is a percentage of each sequence's own prompt, or of its text so far: all that stays cached
of it, but for the sinks of ``sink-window``, which come on top, since 4 tokens are another share of
every sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from flexgen_h2o.config.h2o import SINK_WINDOW_SINKS, H2OConfig
from flexgen_h2o.h2o import budget as cache_budget

POLICIES = ("full", "h2o", "window", "sink-window")  # in the words of --eviction
RECALL, SPARSE = "recall", "sparse-values"
# What --only picks from: the policies, the variants of h2o by what they vary, recall and its own
# variants, sparse values, quantized weights.
GROUPS = (*POLICIES, RECALL, SPARSE, "text", "score", "positions", "chunks", "bits", "weights")
VARIED = (5, 20)  # percent: a tight and a usual budget
CHUNKS = (16, 64)  # tokens of a prompt after each of which eviction acts in it, too
USUAL = 20


@dataclass(frozen=True)
class Configuration:
    """One cache. `budget` is in percent of what `budget_of` says (100 for the full cache).

    Bits are 16 (as the run's dtype), 8 or 4. The policy may be ``recall``: nothing is evicted, and
    `index_bits` are those of the index. Or it is ``sparse-values``: all keys are read, and the
    budget is a share of the values.
    """

    policy: str
    budget: float
    score: str = "sum"
    positions: str = "original"
    cache_bits: int = 16
    weight_bits: int = 16
    activation_bits: int = 16
    prompt_chunk: int | None = None
    budget_of: str = "prompt"
    index_bits: int = 4

    @property
    def variant(self) -> str:
        """The difference from the plain policy, in words; empty for that itself.

        Such as ``4-bit``, ``chunks of 64`` (eviction inside the prompt), ``4-bit weights`` or
        ``4-bit, 4-bit weights``: the cache's, the weights'.
        """
        return ", ".join(filter(None, (self._of_cache(), self._of_weights())))

    @property
    def name(self) -> str:
        """Such as ``h2o 20 % 4-bit`` or ``h2o 20 % 4-bit, 4-bit weights``."""
        plain = "full" if self.policy == "full" else f"{self.policy} {self.budget:g} %"
        cache = f"{plain} {self._of_cache()}".strip()
        return ", ".join(filter(None, (cache, self._of_weights())))

    def _of_cache(self) -> str:
        if self.cache_bits != 16:
            return f"{self.cache_bits}-bit"
        if self.score != "sum":
            return self.score
        if self.budget_of != "prompt":
            return f"of the {self.budget_of}"
        if self.index_bits != 4:
            return f"{self.index_bits}-bit index"
        if self.prompt_chunk is not None:
            return f"chunks of {self.prompt_chunk}"
        return self.positions if self.positions != "original" else ""

    def _of_weights(self) -> str:
        if self.weight_bits == 16:
            return ""
        rounded = f" and {self.activation_bits}-bit activations"
        return f"{self.weight_bits}-bit weights{rounded if self.activation_bits != 16 else ''}"

    @property
    def group(self) -> str:
        """The one of `GROUPS` that it belongs to."""
        if self.weight_bits != 16:
            return "weights"
        if self.policy == RECALL:
            return RECALL
        if self.cache_bits != 16:
            return "bits"
        if self.score != "sum":
            return "score"
        if self.budget_of != "prompt":
            return "text"
        if self.prompt_chunk is not None:
            return "chunks"
        return "positions" if self.positions != "original" else self.policy

    def h2o(self) -> H2OConfig | None:
        """The cache's sizes and scores in `LLM`'s words; None for the full cache."""
        share = self.budget / 100
        if self.policy in ("full", SPARSE):
            return None
        if self.policy == "h2o":
            return H2OConfig(heavy_ratio=share / 2, recent_ratio=share / 2, score=self.score,
                             positions=self.positions, prompt_chunk=self.prompt_chunk,
                             budget_of=self.budget_of)
        if self.policy == RECALL:
            return H2OConfig(heavy_ratio=share / 2, recent_ratio=share / 2, recall=True,
                             budget_of=self.budget_of, index_bits=self.index_bits)
        sinks = SINK_WINDOW_SINKS if self.policy == "sink-window" else 0
        return H2OConfig(heavy_tokens=0, recent_ratio=share, sink_tokens=sinks,
                         positions=self.positions)

    def arguments(self) -> dict[str, object]:
        """Keywords of `LLM` that set this cache, and the weights."""
        values = {"attn_sparsity": self.budget / 100} if self.policy == SPARSE else {}
        values |= {"activation_bits": self.activation_bits} if self.activation_bits != 16 else {}
        return {"h2o": self.h2o(), "cache_bits": self.cache_bits, "weight_bits": self.weight_bits,
                **values}

    def sizes(self, prompt_len: int) -> cache_budget.Budget | None:
        """Tokens kept of a prompt, alike in all layers. None where all are."""
        return cache_budget.budget(self.h2o(), 0, prompt_len)

    def cached(self, prompt_len: int, new_tokens: int) -> float:
        """Tokens that are cached after a decode step, mean over the steps of `new_tokens`.

        The first new token comes from the prefill and the last is never cached, so there is a
        step less than new tokens.
        """
        steps = range(1, new_tokens) or [0]
        h2o = self.h2o()
        return fmean(cache_budget.cached(h2o, 0, prompt_len, step) for step in steps)


def configurations(budgets: Iterable[float], only: Iterable[str] | None = None
                   ) -> list[Configuration]:
    """All caches to measure, the plain full one first: what the others are compared with.

    Parameters
    ----------
    budgets : iterable of float
        Percent of the prompt. Recall, sparse values and variants of h2o are measured at those of
        `VARIED` that are among them, fewer bits, of the index too, at `USUAL` alone; quantized
        weights with the full cache too.
    only : iterable of str, optional
        Those of `GROUPS` to measure beside the full cache. Default: all.
    """
    budgets = sorted(set(budgets))
    found = [Configuration("full", 100)]
    found += [Configuration(policy, budget) for policy in POLICIES[1:] for budget in budgets]
    for budget in (budget for budget in VARIED if budget in budgets):
        plain = Configuration("h2o", budget)
        found += [replace(plain, budget_of="text"), replace(plain, score="mean"),
                  replace(plain, score="decay"), replace(plain, score="caote"),
                  replace(plain, positions="rolling")]
        found += [replace(plain, prompt_chunk=chunk) for chunk in CHUNKS]
        recall = Configuration(RECALL, budget)
        found += [recall, replace(recall, budget_of="text"), Configuration(SPARSE, budget)]
    if USUAL in budgets:
        found += [Configuration(RECALL, USUAL, index_bits=2)]
        found += [Configuration("h2o", USUAL, cache_bits=bits) for bits in (8, 4)]
    found += [replace(found[0], weight_bits=bits, activation_bits=activations)
              for bits, activations in ((12, 16), (8, 16), (8, 8), (4, 16), (4, 8))]
    if USUAL in budgets:
        found += [Configuration("h2o", USUAL, cache_bits=bits, weight_bits=4) for bits in (16, 4)]
    wanted = set(GROUPS if only is None else only) | {"full"}
    return [one for one in found if one.group in wanted]
