"""H2O eviction (arXiv 2306.14048, algorithm 1): which tokens stay cached. No storage.

Attention accumulates the *attention score* of every cached key. A new key starts at 0, and each
query does ``scores = scores * decay + attention_weights``, for its own key, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.h2o.budget import budget, num_cached
from flexgen_h2o.h2o.key_smoothing import KeySmoothing
from flexgen_h2o.h2o.policies import PolicyState, ScorePolicy, policy_named


class Cut(NamedTuple):
    """Cut of a prompt of `length` tokens: sinks, `heavy` and the newest `recent` tokens stay."""

    length: int
    heavy: int
    recent: int


@dataclass(frozen=True)
class Eviction:
    """Selects the tokens of a prompt that stay, and the token that a new one evicts.

    Results are the same on every device: ties are broken by position.

    Attributes
    ----------
    policy : ScorePolicy
        Score of a token. The one with the lowest score is evicted.
    decay : float
        Factor on the accumulated scores before each query.
    sinks : int
        First tokens of a sequence that always stay.
    window : int
        Size of the sliding window, the query's own position included; 0: no window. Tokens that
        the next query does not see are evicted first.
    """

    policy: ScorePolicy = policy_named("sum")
    decay: float = 1.0
    sinks: int = 0
    window: int = 0

    def num_cached(self, cut: Cut) -> int:
        """Return the number of tokens of a prompt that stay."""
        return min(cut.length, cut.heavy + cut.recent + self.sinks)

    def select(self, scores: torch.Tensor, cut: Cut, positions: torch.Tensor | None = None,
               *, vectors: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Return the tokens of a prompt that stay: sinks, recent tokens, the heaviest of the rest.

        Ties are broken in favor of the newer token.

        Parameters
        ----------
        scores : float32 Tensor [kv_heads, cut.length]
            Accumulated over all queries of the prompt; any finite values if ``heavy`` is 0.
        positions : int Tensor [kv_heads, cut.length], optional
            Positions of the tokens, ascending. No sink may be missing. None: 0, 1, 2 and so on.
        vectors : pair of Tensor [kv_heads, cut.length, head_dim], optional
            Keys and values, for a policy that needs them.

        Returns
        -------
        int64 Tensor [kv_heads, kept]
            Indices of tokens, ascending.
        """
        heads, tokens = scores.shape
        index = torch.arange(tokens, device=scores.device)
        if self.num_cached(cut) == tokens:
            return index.repeat(heads, 1)
        first, last = self.sinks, tokens - cut.recent
        positions = index if positions is None else positions
        length = positions[..., -1:] + 1
        score = self.policy.scores(PolicyState(scores, positions, length), vectors)
        if self.window:
            score = score.masked_fill(positions <= length - self.window, -torch.inf)
        score = score[:, first:last]
        # Sort from new to old: a stable sort leaves the newer of equal scores in front.
        order = score.flip(-1).argsort(dim=-1, descending=True, stable=True)
        heavy = (last - 1 - order[:, : cut.heavy]).sort(dim=-1).values
        sinks, recent = (part.expand(heads, -1) for part in (index[:first], index[last:]))
        return torch.cat([sinks, heavy, recent], dim=-1)

    def victims(self, scores: torch.Tensor, positions: torch.Tensor, *, tokens: torch.Tensor,
                recent: torch.Tensor, vectors: Sequence[torch.Tensor] | None = None
                ) -> torch.Tensor:
        """Return the slot with the lowest score outside sinks and recent tokens.

        Tokens outside of the window come first. Of equal scores the oldest token is evicted. Where
        nothing can be evicted, the index is undefined.

        Parameters
        ----------
        scores : float32 Tensor [sequences, kv_heads, slots]
            Scores after the new token's query.
        positions : int32 Tensor [sequences, kv_heads, slots]
            Position of the token in each slot, or `EMPTY`. The new token may be included: it is
            recent.
        tokens : int Tensor [sequences]
            Tokens so far, the new one included.
        recent : int Tensor [sequences]
            Recent tokens of the budget, at least 1.
        vectors : pair of Tensor [sequences, kv_heads, slots, head_dim], optional
            Keys and values, for a policy that needs them.

        Returns
        -------
        int64 Tensor [sequences, kv_heads]
        """
        tokens, recent = tokens[:, None, None], recent[:, None, None]
        evictable = (positions >= self.sinks) & (positions < tokens - recent)
        score = self.policy.scores(PolicyState(scores, positions, tokens), vectors)
        if self.window:
            score = score.masked_fill(positions <= tokens - self.window, -torch.inf)
        score = score.masked_fill(~evictable, torch.inf)
        lowest = score.amin(dim=-1, keepdim=True)
        # Positions differ, so the oldest of equal scores is the same slot on every device.
        return positions.masked_fill(~evictable | (score > lowest), EMPTY).argmin(dim=-1)

    @property
    def mean(self) -> bool:
        """True if scores are means over the queries that could see a key."""
        return self.policy.name == "mean"

    @property
    def needs(self) -> tuple[str, ...]:
        """``"keys"`` and ``"values"`` if the score uses them."""
        return self.policy.needs


@dataclass(frozen=True)
class EvictionState:
    """Eviction state of the slots of some sequences; operations update it in place.

    Attributes
    ----------
    eviction : Eviction
    scores : float32 Tensor [sequences, kv_heads, slots]
        Attention that each cached key has received; 0 in empty slots.
    positions : int32 Tensor [sequences, kv_heads, slots]
        Position of the token in each slot; `EMPTY` in empty slots.
    ranks : int32 Tensor [sequences, kv_heads, slots], or None
        With rolling positions: each token's rank among the cached ones is its position, and keys
        are cached before rotation. None: keys are cached after rotation.
    rope : two float32 Tensors [positions, rotary_dim / 2], or None
        With `ranks`: cosines and sines by rank, the new token's included.
    smoothing : KeySmoothing or None
        With `ranks`: the operations smooth and restore cached keys.
    """

    eviction: Eviction
    scores: torch.Tensor
    positions: torch.Tensor
    ranks: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    smoothing: KeySmoothing | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Scores, positions, and ranks if there are any."""
        return [x for x in (self.scores, self.positions, self.ranks) if x is not None]


def eviction_of(h2o: H2OConfig | None) -> Eviction:
    """Return the eviction of a configuration; budgets come with each sequence."""
    if h2o is None:
        return Eviction()
    policy = policy_named(h2o.score)
    return Eviction(policy, float(h2o.decay) if policy.fades else 1.0, sinks=h2o.sink_tokens)


def layer_eviction(h2o: H2OConfig, layer: int, *, scored: bool) -> Eviction:
    """Return the eviction of a layer. `scored`: some sequence has heavy hitters.

    Without heavy hitters the cache never holds tokens outside of the layer's window.
    """
    eviction, window = eviction_of(h2o), h2o.window(layer)
    if window is None:
        return eviction
    return replace(eviction, sinks=0, window=window if scored else 0)


def new_state(shape: tuple[int, int, int], eviction: Eviction, *,
              rope: tuple[torch.Tensor, torch.Tensor] | None,
              device: torch.device, smoothing: KeySmoothing | None = None) -> EvictionState:
    """Return the eviction state of empty slots [sequences, kv_heads, slots].

    It is float32 for every cache dtype, and on the device that runs attention. With `rope`,
    positions roll.
    """
    scores = torch.zeros(shape, dtype=torch.float32, device=device)
    positions = torch.full(shape, EMPTY, dtype=torch.int32, device=device)
    ranks = None if rope is None else torch.zeros_like(positions)
    return EvictionState(eviction, scores, positions, ranks, rope, smoothing)


def narrow_state(state: EvictionState, sequences: slice) -> EvictionState:
    """Return the eviction state of some of its sequences, sharing memory."""
    return replace(state, scores=state.scores[sequences], positions=state.positions[sequences],
                   ranks=None if state.ranks is None else state.ranks[sequences])


def clear_scores_outside_window(scores: torch.Tensor, cuts: Sequence[Cut], window: int) -> None:
    """Set the scores of tokens that the next token does not see to -inf, in place.

    `scores` are float32 [kv_heads, rows] of packed prompts.
    """
    for cut, prompt in zip(cuts, scores.split([cut.length for cut in cuts], dim=1), strict=True):
        prompt[:, : max(0, cut.length + 1 - window)] = float("-inf")


def decode_metadata(prompts: Sequence[int], tokens: Sequence[int], h2o: H2OConfig | None,
                    layer: int) -> torch.Tensor:
    """Return the metadata of a step that appends one token to each sequence.

    It is the same for all layers of the same budgets.

    Parameters
    ----------
    prompts : sequence of int
        Tokens of each prompt.
    tokens : sequence of int
        Tokens of each sequence, evicted ones and the new one included.

    Returns
    -------
    int32 Tensor [4, sequences], on the host
        The `metadata` of `reference.decode_attention`.
    """
    pairs = list(zip(prompts, tokens, strict=True))
    rows = {}
    for prompt, count in set(pairs):  # sequences often have the same lengths
        size = budget(h2o, layer, prompt, count - prompt)
        before = num_cached(h2o, layer, prompt, count - 1 - prompt)
        full = size is not None and h2o.evicts_generated_at(layer) and before >= size.total
        rows[prompt, count] = before, count, size.recent if size else 0, int(full)
    return torch.tensor([rows[pair] for pair in pairs], dtype=torch.int32).T.contiguous()


def attention_weights(products: torch.Tensor, hidden: torch.Tensor, *, dim: int,
                      variant: AttentionVariant, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the attention weights of queries over keys.

    Parameters
    ----------
    products : float32 Tensor [..., heads, queries, keys]
        Dot products of queries and keys.
    hidden : bool Tensor that broadcasts to `products`
        True for keys that a query does not see, also because of the variant's window.
    dim : int
        head_dim.
    sinks : Tensor that broadcasts to [..., heads, queries, 1], or None
        Attention sinks: logits that take a share of each query's weights.

    Returns
    -------
    float32 Tensor like products
    """
    logits = products * variant.scale_for(dim)
    if variant.softcap:
        logits = (logits / variant.softcap).tanh() * variant.softcap
    logits = logits.masked_fill(hidden, float("-inf"))
    if not variant.sinks:
        return logits.softmax(-1)
    sinks = sinks.float().expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
