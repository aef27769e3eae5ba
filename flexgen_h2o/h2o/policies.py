"""Eviction policies: the importance of cached tokens, as one function ``score(state) -> scores``.

The token with the lowest score outside sinks and recent tokens is evicted (`eviction.Eviction`).
To add a policy, write its `score` and register it under a name:

    def sqrt_mean(state: PolicyState) -> torch.Tensor:  # float32 [..., kv_heads, keys]
        return state.attention / state.queries.sqrt()

    register_policy("sqrt-mean", sqrt_mean)
    LLM(model, h2o=H2OConfig(heavy_ratio=0.1, score="sqrt-mean"))

A built-in policy is an entry of `_BUILT_IN`, and its name is in `config.h2o.SCORES`. The kernels
implement ``sum`` (arXiv 2306.14048), ``mean`` and ``decay``. ``caote`` (arXiv 2504.14051) and
registered policies run through the reference operations in plain PyTorch (`kernels.ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from flexgen_h2o.config import h2o as names
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.errors import UserError

SMALLEST = 1e-12
"""Lower bound of divisors."""


@dataclass(frozen=True)
class PolicyState:
    """The cached tokens that a policy scores.

    Attributes
    ----------
    attention : float32 Tensor [..., kv_heads, keys]
        Attention weights that each key has received, summed over queries and over the query heads
        of its group; earlier queries count less if the policy `fades`.
    positions : int Tensor that broadcasts to it
        Position of each token in its sequence; `config.limits.EMPTY` in empty slots.
    tokens : int Tensor that broadcasts to it, or int
        Tokens of the sequence so far, evicted ones included. The newest query is at
        ``tokens - 1``.
    keys, values : float32 Tensor [..., kv_heads, keys, head_dim], or None
        Cached vectors: keys before rotation if positions roll. 0 in empty slots; None unless the
        policy needs them. With latent attention a value is the latent, the end of its key.
    """

    attention: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor | int
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @property
    def filled(self) -> torch.Tensor:
        """True in slots that hold a token; like `positions`."""
        return self.positions != EMPTY

    @property
    def queries(self) -> torch.Tensor:
        """Queries that could attend to each key, its own included; at least 1. Like `positions`."""
        return (self.tokens - self.positions).clamp(min=1)

    @property
    def value_norms(self) -> torch.Tensor:
        """L2 norms of the values, [..., kv_heads, keys]."""
        if self.values is None:
            raise UserError("a policy that reads values must be registered with needs=('values',)")
        return self.values.norm(dim=-1)


Score = Callable[[PolicyState], torch.Tensor]


@dataclass(frozen=True)
class ScorePolicy:
    """A policy by name: the token with the lowest score outside sinks and recent ones is evicted.

    Attributes
    ----------
    name : str
    score : callable (PolicyState) -> float32 Tensor [..., kv_heads, keys]
        Higher scores stay. Finite for every token. It must not modify its state.
    fades : bool
        Accumulated attention is multiplied by `H2OConfig.decay` before each query's is added.
    needs : tuple of str
        ``"keys"`` and ``"values"`` if the score uses them.
    """

    name: str
    score: Score = field(repr=False)
    fades: bool = False
    needs: tuple[str, ...] = ()

    @property
    def in_kernels(self) -> bool:
        """True if the kernels implement it."""
        return self.name in names.FUSED_SCORES

    def scores(self, state: PolicyState, vectors: Sequence[torch.Tensor] | None = None
               ) -> torch.Tensor:
        """Return the scores of a state, float32 [..., kv_heads, keys].

        Parameters
        ----------
        state : PolicyState
            Without keys and values.
        vectors : pair of Tensor [..., kv_heads, keys, head_dim], optional
            Keys and values, for policies that need them.

        Raises
        ------
        UserError
            The scores have another dtype or shape, or are NaN for a token although the state is
            finite. NaN is only checked on a CPU, because the check would synchronize a GPU.
        """
        if self.needs and vectors is not None:
            state = replace(state, **{name: vectors[index].float()
                                      for index, name in enumerate(("keys", "values"))
                                      if name in self.needs})
        scores = self.score(state)
        if not self.in_kernels and (not isinstance(scores, torch.Tensor)
                                  or scores.dtype != torch.float32
                                  or scores.shape != state.attention.shape):
            raise UserError(f"the policy {self.name!r} must return float32 scores of the shape "
                            f"{list(state.attention.shape)}, like its state's attention")
        if (not self.in_kernels and not scores.is_cuda and (scores.isnan() & state.filled).any()
                and all(x is None or x.isfinite().all()
                        for x in (state.attention, state.keys, state.values))):
            raise UserError(f"the policy {self.name!r} returned NaN scores: "
                            "return a finite score for each token")
        return scores


def attention_sum(state: PolicyState) -> torch.Tensor:
    """Return the attention that each key has received (H2O, arXiv 2306.14048)."""
    return state.attention


def attention_mean(state: PolicyState) -> torch.Tensor:
    """Return the attention of each key divided by the number of queries that could see it."""
    return state.attention / state.queries


def output_error(state: PolicyState) -> torch.Tensor:
    """Return how far attention's output would move without each token (CAOTE, arXiv 2504.14051).

    Attention weights are estimated by shares of `attention_mean`.
    """
    values = state.values
    assert values is not None  # it is registered with needs=("values",)
    mean = attention_mean(state).masked_fill(~state.filled, 0)
    share = mean / mean.sum(-1, keepdim=True).clamp(min=SMALLEST)
    output = (share[..., None] * values).sum(-2, keepdim=True)
    return share / (1 - share).clamp(min=SMALLEST) * (output - values).norm(dim=-1)


_BUILT_IN = {policy.name: policy for policy in (
    ScorePolicy("sum", attention_sum), ScorePolicy("mean", attention_mean),
    ScorePolicy("decay", attention_sum, fades=True),
    ScorePolicy("caote", output_error, needs=("values",)))}


def policy_named(name: str) -> ScorePolicy:
    """Return a policy by name; raise `UserError` if none is registered in this process."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    names.check_score(name)
    policy = names.find_policy(name)
    assert isinstance(policy, ScorePolicy)
    return policy


def register_policy(name: str, score: Score, *, fades: bool = False,
                    needs: tuple[str, ...] = ()) -> ScorePolicy:
    """Register a policy in this process for `H2OConfig(score=name)`.

    Parameters
    ----------
    name : str
        Not of a built-in policy, or of one that is registered with another function.
    score, fades, needs
        See `ScorePolicy`.

    Raises
    ------
    UserError
        The name is taken or empty, `score` is not callable, or needs are unknown.
    """
    if not callable(score):
        raise UserError(f"score must be a function of a PolicyState, got {score!r}")
    needs = tuple(needs)
    if set(needs) - {"keys", "values"}:
        raise UserError(f"needs must be of 'keys' and 'values', got {needs!r}")
    policy = ScorePolicy(name, score, bool(fades), needs)
    names.add_policy(name, policy)
    return policy
