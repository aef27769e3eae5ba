"""Policies: which cached tokens matter, as one function `score(state) -> scores`, found by name.

The built-in ones are `sum` (arXiv 2306.14048), `mean` and `decay`, which the kernels know, and
`caote` (arXiv 2504.14051). That and what users register run through the reference operations in
plain PyTorch (`kernels.ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.config import h2o as names
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.errors import UserError

SMALLEST = 1e-12
"""Divisors are no smaller."""


@dataclass(frozen=True)
class PolicyState:
    """The cached tokens as a policy sees them.

    Attributes
    ----------
    attention : float32 Tensor [..., kv_heads, keys]
        Attention weights that each key has received: summed over the queries, which fade if the
        policy says so, and over the query heads of its group.
    positions : int Tensor that broadcasts to it
        Of each token in its sequence; `config.limits.EMPTY` where a slot holds none.
    tokens : int Tensor that broadcasts to it, or int
        Tokens of the sequence so far, evicted ones included. The newest query stood at
        ``tokens - 1``.
    keys, values : float32 Tensor [..., kv_heads, keys, head_dim], or None
        As they are cached (keys before rotation where positions roll); None unless the policy
        asks for them. In empty slots they are 0.
    """

    attention: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor | int
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    @property
    def filled(self) -> torch.Tensor:
        """True where there is a token; like `positions`."""
        return self.positions != EMPTY

    @property
    def queries(self) -> torch.Tensor:
        """The queries that could see each key, its own included; at least 1. Like `positions`."""
        return (self.tokens - self.positions).clamp(min=1)

    @property
    def value_norms(self) -> torch.Tensor:
        """Euclidean norms of the values, [..., kv_heads, keys]."""
        if self.values is None:
            raise UserError("a policy that looks at values is registered with needs=('values',)")
        return self.values.norm(dim=-1)


Score = Callable[[PolicyState], torch.Tensor]


@dataclass(frozen=True)
class ScorePolicy:
    """A policy: the token with the lowest score outside sinks and recent ones goes first.

    Attributes
    ----------
    name : str
    score : callable (PolicyState) -> float32 Tensor [..., kv_heads, keys]
        Larger is kept; finite wherever there is a token. It changes nothing that it is given.
    fades : bool
        Whether accumulated attention is multiplied by `H2OConfig.decay` before each query's is
        added.
    needs : tuple of str
        Of ``"keys"`` and ``"values"``, those that the score looks at.
    """

    name: str
    score: Score
    fades: bool = False
    needs: tuple[str, ...] = ()

    @property
    def in_kernels(self) -> bool:
        """True if the kernels know it."""
        return self.name in names.KERNELS

    def scores(self, state: PolicyState, vectors: torch.Tensor | None = None) -> torch.Tensor:
        """The scores of a state that is given `vectors` [2, ..., kv_heads, keys, head_dim], keys
        and values, as far as the policy asks for them.

        Raises `UserError` where it gives no float32 scores of the right shape, and on a CPU where a
        token's is NaN although all that the policy was given is finite. (Looking at a GPU's would
        mean to wait for it.)
        """
        if self.needs and vectors is not None:
            state = replace(state, **{what: vectors[index].float()
                                      for index, what in enumerate(("keys", "values"))
                                      if what in self.needs})
        found = self.score(state)
        if not self.in_kernels and (not isinstance(found, torch.Tensor)
                                  or found.dtype != torch.float32
                                  or found.shape != state.attention.shape):
            raise UserError(f"the policy {self.name!r} must give float32 scores of the shape "
                            f"{list(state.attention.shape)}, like its state's attention")
        if (not self.in_kernels and not found.is_cuda and (found.isnan() & state.filled).any()
                and all(x is None or x.isfinite().all()
                        for x in (state.attention, state.keys, state.values))):
            raise UserError(f"the policy {self.name!r} must give each token a score that can be "
                            "compared: it gave NaN")
        return found


def attention_sum(state: PolicyState) -> torch.Tensor:
    """The attention that a key has received (arXiv 2306.14048)."""
    return state.attention


def attention_mean(state: PolicyState) -> torch.Tensor:
    """The same over the queries that could see the key."""
    return state.attention / state.queries


def output_error(state: PolicyState) -> torch.Tensor:
    """The distance that attention's output would move without a token (CAOTE, arXiv 2504.14051).

    Weights are shares of the mean attention that keys have received.
    """
    values = state.values
    assert values is not None  # as its registration asks for them
    mean = attention_mean(state).masked_fill(~state.filled, 0)
    share = mean / mean.sum(-1, keepdim=True).clamp(min=SMALLEST)
    output = (share[..., None] * values).sum(-2, keepdim=True)
    return share / (1 - share).clamp(min=SMALLEST) * (output - values).norm(dim=-1)


_BUILT_IN = {policy.name: policy for policy in (
    ScorePolicy("sum", attention_sum), ScorePolicy("mean", attention_mean),
    ScorePolicy("decay", attention_sum, fades=True),
    ScorePolicy("caote", output_error, needs=("values",)))}


def policy_named(name: str) -> ScorePolicy:
    """The policy of a name.

    Raises `UserError` where none is registered under it in this process.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    names.check_score(name)
    found = names.registered(name)
    assert isinstance(found, ScorePolicy)
    return found


def register_policy(name: str, score: Score, *, fades: bool = False,
                    needs: tuple[str, ...] = ()) -> ScorePolicy:
    """Make a policy of one's own known in this process as `H2OConfig(score=name)`.

    Parameters
    ----------
    name : str
        Neither of a built-in policy, nor of one that was registered with another function.
    score, fades, needs
        See `ScorePolicy`.

    Raises
    ------
    UserError
        A name that is taken or empty, a score that is no function, unknown needs.
    """
    if not callable(score):
        raise UserError(f"score must be a function of a PolicyState, got {score!r}")
    needs = tuple(needs)
    if set(needs) - {"keys", "values"}:
        raise UserError(f"needs must be of 'keys' and 'values', got {needs!r}")
    policy = ScorePolicy(name, score, bool(fades), needs)
    names.register(name, policy)
    return policy
