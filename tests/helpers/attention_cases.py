"""Random attention for the tests of its statistics, and the whole matrix of it."""

from __future__ import annotations

import torch
from attention_stats import ROWS
from hypothesis import given
from hypothesis import strategies as st

KV_HEADS, GROUP, DIM = 2, 3, 8


def qkv(tokens: int, *, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Fresh random queries, keys and values, with grouped heads."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, DIM, generator=generator) * scale
                 for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS))


def matrix(q, k) -> torch.Tensor:
    """All probabilities at once: float64 [kv_heads, group, tokens, tokens]."""
    queries = q.double().unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("rkgd,tkd->kgrt", queries, k.double()) * q.shape[-1] ** -0.5
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return logits.masked_fill(future, float("-inf")).softmax(-1)


cases = given(tokens=st.one_of(st.integers(1, 40), st.integers(ROWS - 1, 2 * ROWS + 2)),
              seed=st.integers(0, 99), scale=st.sampled_from([0.3, 1.0, 2.0]))
