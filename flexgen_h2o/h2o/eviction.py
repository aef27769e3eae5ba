"""The H2O policy alone, which decides what stays cached: no storage (arXiv 2306.14048, algorithm
1).

Attention accumulates the *attention score* of every cached key: a new
key starts at 0, and each query does ``scores = scores * decay + row``, its own key included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.budget import budget, cached
from flexgen_h2o.h2o.key_smoothing import KeySmoothing
from flexgen_h2o.h2o.policies import PolicyState, ScorePolicy, policy_named


class Cut(NamedTuple):
    """A prompt of `length` tokens, of which `heavy` and the newest `recent` stay beside sinks."""

    length: int
    heavy: int
    recent: int


@dataclass(frozen=True)
class Eviction:
    """Picks what stays of a prompt and whose slot a new token takes.

    All of it is exact on every device: no choice depends on the order in which ties are seen.

    Attributes
    ----------
    mean : bool
        The score is the accumulated attention score divided by the number of queries that could see
        the key.
    decay : float
        The factor per query on the accumulated scores.
    sinks : int
        The first tokens of a sequence that always stay.
    window : int
        A query sees the keys of the last so many positions, itself included, and what the next
        one does not see goes first: there is nothing that it could be kept for. 0: no window.
    policy : ScorePolicy or None
        A policy that the kernels don't know, in place of accumulated attention and its mean.
    """

    mean: bool = False
    decay: float = 1.0
    sinks: int = 0
    window: int = 0
    policy: ScorePolicy | None = None

    def kept(self, cut: Cut) -> int:
        """The tokens of a prompt that stay, counted."""
        return min(cut.length, cut.heavy + cut.recent + self.sinks)

    def select(self, scores: torch.Tensor, cut: Cut, positions: torch.Tensor | None = None,
               *, vectors: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens of a prompt that stay: sinks, the last recent, the heaviest of the rest.

        Of equal scores the newer stays.

        Parameters
        ----------
        scores : float32 [kv_heads, cut.length]
            Of every key of the prompt, all queries done; any finite values if ``heavy`` is 0.
        cut : Cut
        positions : int [kv_heads, cut.length], optional
            Of the tokens, ascending, where some between them have gone before, but no sink. None:
            from 0 on, without a gap.
        vectors : Tensor [2, kv_heads, cut.length, head_dim], optional
            Keys and values, for a policy that asks for them.

        Returns
        -------
        int64 [kv_heads, kept]
            Indices of tokens, ascending.
        """
        heads, tokens = scores.shape
        index = torch.arange(tokens, device=scores.device)
        if self.kept(cut) == tokens:
            return index.repeat(heads, 1)
        first, last = self.sinks, tokens - cut.recent
        positions = index if positions is None else positions
        tokens = positions[..., -1:] + 1
        score = self._score(PolicyState(scores, positions, tokens), vectors)
        if self.window:
            score = score.masked_fill(positions <= tokens - self.window, -torch.inf)
        score = score[:, first:last]
        # Sorted from new to old: a stable sort then leaves the newer of equals in front.
        order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
        heavy = (last - 1 - order[:, : cut.heavy]).sort(dim=-1).values
        sinks, recent = (part.expand(heads, -1) for part in (index[:first], index[last:]))
        return torch.cat([sinks, heavy, recent], dim=-1)

    def victims(self, scores: torch.Tensor, positions: torch.Tensor, *, tokens: torch.Tensor,
                recent: torch.Tensor, vectors: torch.Tensor | None = None) -> torch.Tensor:
        """The slot with the lowest score outside the sinks and the recent tokens, or one that has
        left the window.

        Of equal scores the oldest goes. Where nothing can go, the index means nothing.

        Parameters
        ----------
        scores : float32 [sequences, kv_heads, slots]
            The new token's query included.
        positions : int32 [sequences, kv_heads, slots]
            Of the token in each slot, or `EMPTY`. The new token may be among them or not: it is
            recent.
        tokens : int [sequences]
            Tokens so far, the new one included.
        recent : int [sequences]
            The budget's, at least 1.
        vectors : Tensor [2, sequences, kv_heads, slots, head_dim], optional
            Keys and values, for a policy that asks for them.

        Returns
        -------
        int64 [sequences, kv_heads]
        """
        tokens, recent = tokens[:, None, None], recent[:, None, None]
        evictable = (positions >= self.sinks) & (positions < tokens - recent)
        score = self._score(PolicyState(scores, positions, tokens), vectors)
        if self.window:
            score = score.masked_fill(positions <= tokens - self.window, -torch.inf)
        score = score.masked_fill(~evictable, torch.inf)
        lowest = score.amin(dim=-1, keepdim=True)
        # Positions differ, so the oldest of equals is one slot on every device.
        return positions.masked_fill(~evictable | (score > lowest), EMPTY).argmin(dim=-1)

    @property
    def needs(self) -> tuple[str, ...]:
        """Those of keys and values that the score looks at."""
        return () if self.policy is None else self.policy.needs

    def _score(self, state: PolicyState, vectors: torch.Tensor | None) -> torch.Tensor:
        """Turn accumulated scores into the score that decides."""
        policy = self.policy or policy_named("mean" if self.mean else "sum")
        return policy.scores(state, vectors)


@dataclass(frozen=True)
class EvictionState:
    """The eviction state of the slots of some sequences; the operations keep it up in place.

    Attributes
    ----------
    eviction : Eviction
    scores : float32 Tensor [sequences, kv_heads, slots]
        Attention that each cached key has received; 0 in empty slots.
    positions : int32 Tensor, the same shape
        Of the token in each slot; `EMPTY` where there is none.
    ranks : int32 Tensor, the same shape, or None
        With rolling positions, each token's place among the cached ones: keys are then cached
        unrotated, and a key's position is its rank. None: keys are cached rotated.
    rope : two float32 Tensors [positions, rotary_dim / 2], or None
        Cosines and sines by rank, the new token's included. With `ranks`.
    smoothing : KeySmoothing or None
        By which cached keys are smoothed. With `ranks`, the operations smooth and restore them.
    """

    eviction: Eviction
    scores: torch.Tensor
    positions: torch.Tensor
    ranks: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    smoothing: KeySmoothing | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Scores and positions, and ranks where there are any."""
        return [x for x in (self.scores, self.positions, self.ranks) if x is not None]


def eviction_of(h2o: H2OConfig | None) -> Eviction:
    """The policy of a configuration; its sizes come with each sequence."""
    if h2o is None:
        return Eviction()
    policy = policy_named(h2o.score)
    return Eviction(mean=h2o.score == "mean", sinks=h2o.sink_tokens,
                    decay=float(h2o.decay) if policy.fades else 1.0,
                    policy=None if policy.in_kernels else policy)


def new_state(shape: tuple[int, int, int], eviction: Eviction, *,
              rope: tuple[torch.Tensor, torch.Tensor] | None,
              device: torch.device, smoothing: KeySmoothing | None = None) -> EvictionState:
    """An eviction state of [sequences, kv_heads, slots], all empty.

    It is exact whatever the cache's dtype, and small beside keys and values, so it stays where
    attention runs on every tier. With rotations by rank, positions roll.
    """
    scores = torch.zeros(shape, dtype=torch.float32, device=device)
    positions = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
    ranks = None if rope is None else torch.zeros_like(positions)
    return EvictionState(eviction, scores, positions, ranks, rope, smoothing)


def narrowed(state: EvictionState, sequences: slice) -> EvictionState:
    """The same eviction state for some of its sequences."""
    return replace(state, scores=state.scores[sequences], positions=state.positions[sequences],
                   ranks=None if state.ranks is None else state.ranks[sequences])


def forget_hidden(scores: torch.Tensor, cuts: Sequence[Cut], window: int) -> None:
    """Let nothing of prompts stay that the next token of each does not see.

    scores are float32 [kv_heads, rows] of the packed prompts, and are changed in place.
    """
    for cut, mine in zip(cuts, scores.split([cut.length for cut in cuts], dim=1), strict=True):
        mine[:, : max(0, cut.length + 1 - window)] = float("-inf")


def decode_metadata(prompts: Sequence[int], tokens: Sequence[int], h2o: H2OConfig | None,
                    layer: int) -> torch.Tensor:
    """The metadata of a step that appends one token to each sequence, for all layers of one budget.

    Parameters
    ----------
    prompts : sequence of int
        Tokens of each prompt.
    tokens : sequence of int
        Tokens of each sequence, the evicted ones and the new one included.

    Returns
    -------
    int32 Tensor [4, sequences], on the host
        The `metadata` of `reference.decode_attention`.
    """
    pairs = list(zip(prompts, tokens, strict=True))
    rows = {}
    for prompt, count in set(pairs):  # sequences are often of one length, and then alike
        size = budget(h2o, layer, prompt, count - prompt)
        before = cached(h2o, layer, prompt, count - 1 - prompt)
        full = size is not None and h2o.evicts_generated_at(layer) and before >= size.total
        rows[prompt, count] = before, count, size.recent if size else 0, int(full)
    return torch.tensor([rows[pair] for pair in pairs], dtype=torch.int32).T.contiguous()
