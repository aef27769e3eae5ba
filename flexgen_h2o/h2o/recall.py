"""Recall (KV retrieval): nothing is evicted, and new tokens attend to selected cached tokens.

A decode step estimates attention weights from a *quantized key index*: keys in few bits, times
queries in 8 bits. For each KV head it selects as many cached tokens as the budget has, those with
the largest weights summed over the query heads of the group; of equal weights the newer token. It
then attends to these and to the new token, with exact queries, keys and values. Prompts attend to
all of their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.h2o.eviction import attention_weights

HALF_MAX = torch.finfo(torch.float16).max
QUERY_LEVELS = 127
"""The highest code of a quantized query; the lowest is its negative."""


def index_codes(keys: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize keys for an index.

    Parameters
    ----------
    keys : Tensor [..., head_dim], any floating dtype
        After rotation, if positions are rotary.

    Returns
    -------
    codes : uint8 Tensor [..., head_dim]
    scales, zeros : float16 Tensor [..., groups]
        The zero point is the smallest element of a group. The scale is the range of the group
        divided by the highest code. Both are rounded to float16.
    """
    x = keys.float().clamp(-HALF_MAX, HALF_MAX).unflatten(-1, (layout.groups, layout.group))
    zeros = x.amin(-1).half()
    # A tensor, not a number: on a GPU PyTorch would multiply by the number's reciprocal.
    levels = x.new_full((), layout.levels)
    scales = ((x.amax(-1) - zeros.float()) / levels).clamp(min=0, max=HALF_MAX).half()
    steps = scales.float().clamp_min(2.0**-24)  # codes of a constant group are 0
    codes = ((x - zeros.float()[..., None]) / steps[..., None]).round().clamp(0, layout.levels)
    return codes.flatten(-2).to(torch.uint8), scales, zeros


def indexed_keys(keys: Tensor, layout: IndexLayout) -> Tensor:
    """Return keys [..., head_dim] as quantized by an index, in float32."""
    codes, scales, zeros = index_codes(keys, layout)
    codes = codes.float().unflatten(-1, (layout.groups, layout.group))
    return (zeros.float()[..., None] + scales.float()[..., None] * codes).flatten(-2)


def rounded_queries(q: Tensor, layout: IndexLayout) -> Tensor:
    """Return queries rounded to 8 bits, as they are multiplied with an index.

    Parameters
    ----------
    q : Tensor [..., head_dim], any floating dtype
    layout : IndexLayout
        Queries have the groups of its keys.

    Returns
    -------
    float32 Tensor like q
        Multiples of a step for each group: its largest magnitude divided by `QUERY_LEVELS`. Dot
        products of groups are integer sums.
    """
    groups = q.float().unflatten(-1, (layout.groups, layout.group))
    steps = groups.abs().amax(-1, keepdim=True) / groups.new_full((), QUERY_LEVELS)
    codes = (groups / steps.where(steps > 0, 1)).round().clamp(-QUERY_LEVELS, QUERY_LEVELS)
    return (steps * codes).flatten(-2)


def index_weights(q: Tensor, k: Tensor, keys: Tensor, *, layout: IndexLayout, hidden: Tensor,
                  variant: AttentionVariant, sinks: Tensor | None, offsets: Tensor | None = None
                  ) -> Tensor:
    """Return the attention weights of cached tokens, summed over the query heads of a group.

    Parameters
    ----------
    q : Tensor [..., kv_heads, group, head_dim]
        Queries of the new token.
    k : Tensor [..., kv_heads, head_dim]
        The new token's key; its product with q is exact.
    keys : Tensor [..., kv_heads, tokens, head_dim]
        Cached keys, of `indexed_keys`; they are multiplied with `rounded_queries`.
    hidden : bool Tensor that broadcasts to [..., kv_heads, 1, tokens]
        True where there is no token.
    variant : AttentionVariant
        Without a window.
    sinks : Tensor that broadcasts to [..., kv_heads, group, 1], or None
        Attention sinks, if the variant has them.
    offsets : float32 Tensor [..., kv_heads, group, 1], or None
        Added to the products of queries with all keys.

    Returns
    -------
    float32 Tensor [..., kv_heads, tokens]
    """
    logits = torch.einsum("...hgd,...htd->...hgt", rounded_queries(q, layout), keys.float())
    new = torch.einsum("...hgd,...hd->...hg", q.float(), k.float())[..., None]
    products = torch.cat((logits, new), dim=-1)
    if offsets is not None:
        products = products + offsets
    weights = attention_weights(
        products, torch.nn.functional.pad(hidden, (0, 1)),
        dim=q.shape[-1], variant=variant, sinks=sinks)
    return weights[..., :-1].sum(-2)


def select_tokens(weights: Tensor, counts: Tensor, *, cached: Tensor) -> Tensor:
    """Return a mask of the cached tokens that a step attends to.

    Parameters
    ----------
    weights : float32 Tensor [..., kv_heads, tokens]
        From `index_weights`.
    counts : int Tensor [...]
        Tokens that each sequence selects; at most `cached`.
    cached : int Tensor [...]
        Cached tokens of each sequence.

    Returns
    -------
    bool Tensor like weights
    """
    tokens = weights.shape[-1]
    position = torch.arange(tokens, device=weights.device)
    # Floats that are not negative sort as their bits. Of equal weights the newer token wins.
    order = (weights.view(torch.int32).long() << 32) + position
    order = order.masked_fill(position >= cached[..., None, None], -1)
    rank = torch.empty_like(order).scatter_(
        -1, order.argsort(dim=-1, descending=True), position.expand(order.shape))
    return rank < counts[..., None, None]
