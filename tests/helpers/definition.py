"""H2O by its definition, in plain Python: what one KV head caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.h2o.budget import Budget


@dataclass
class Definition:
    """One KV head of one sequence: position and score of each token that it caches."""

    prompt_len: int
    size: Budget | None
    h2o: H2OConfig
    tokens: list[tuple[int, np.float32]] = field(default_factory=list)
    queries: int = 0

    @property
    def held(self) -> list[int]:
        return [p for p, _ in self.tokens]

    def step(self, row: np.ndarray) -> None:
        """Attend from the next token; row is its attention, in float32, by position."""
        h2o, size, query = self.h2o, self.size, self.queries
        self.queries += 1
        decay = np.float32(h2o.decay if h2o.score == "decay" else 1)
        self.tokens = [(p, score * decay + row[p])
                       for p, score in [*self.tokens, (query, np.float32(0))]]
        if query < self.prompt_len - 1 or size is None:
            return
        if h2o.evict_generated or query < self.prompt_len:
            excess = max(0, len(self.tokens) - size.total)
            others = [t for t in self.tokens if size.sinks <= t[0] <= query - size.recent]
            seen = {p: np.float32(query + 1 - p if h2o.score == "mean" else 1) for p in self.held}
            others.sort(key=lambda t: (t[1] / seen[t[0]], t[0]))  # the lowest, the oldest first
            self.tokens = [t for t in self.tokens if t not in others[:excess]]


def by_hand(h2o: H2OConfig, layer: int, prompt_len: int) -> Budget | None:
    """The budget, from what is documented of `H2OConfig`."""
    heavy, recent = (share[layer] if isinstance(share, tuple) else share
                     for share in (h2o.heavy_ratio, h2o.recent_ratio))
    if heavy is None and recent is None and h2o.heavy_tokens is h2o.recent_tokens is None:
        return None
    if h2o.recent_tokens is None and recent is None:
        if heavy == 1:
            return None
        recent, recent_tokens = heavy, h2o.heavy_tokens
    else:
        recent_tokens = h2o.recent_tokens
    if heavy == recent == 1:
        return None

    def count(ratio, tokens):
        # As it is typed, in decimals.
        return tokens or 0 if ratio is None else max(1, int(Fraction(str(ratio)) * prompt_len))

    return Budget(count(heavy, h2o.heavy_tokens), count(recent, recent_tokens), h2o.sink_tokens)
