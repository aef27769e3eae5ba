"""Recall: nothing is evicted, and each new token attends to what its own query weighs most.

Every key and value stays somewhere. A decode step guesses the weights of attention from an *index*,
the keys in few bits, which its queries meet in 8 bits. It chooses for each KV head the budget's
worth of cached tokens of most weight, summed over the query heads of the group; of equals the
newer. It then attends, with exact queries, keys and values, to these and to the new token itself.
Prompts attend to all of themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_h2o.config.attention_form import AttentionForm
from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.h2o.attention_weights import attention_weights

HALF_MAX = torch.finfo(torch.float16).max
QUERY_LEVELS = 127
"""The highest code of a query; the lowest is as far below 0."""


def index_codes(keys: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in few bits.

    Parameters
    ----------
    keys : Tensor [..., head_dim], any floating dtype
        As attention meets them: rotated where positions are rotary.
    layout : IndexLayout

    Returns
    -------
    codes : uint8 Tensor [..., head_dim]
    scales, zeros : float16 Tensor [..., groups]
        The zero point is the least element of the group, the scale the distance from there to the
        largest over the highest code; both are rounded to the nearest float16.
    """
    x = keys.float().clamp(-HALF_MAX, HALF_MAX).unflatten(-1, (layout.groups, layout.group))
    zeros = x.amin(-1).half()
    # A tensor on the same device: on a GPU PyTorch multiplies by the reciprocal of a number.
    levels = x.new_full((), layout.levels)
    scales = ((x.amax(-1) - zeros.float()) / levels).clamp(min=0, max=HALF_MAX).half()
    steps = scales.float().clamp_min(2.0**-24)  # a constant group has codes 0
    codes = ((x - zeros.float()[..., None]) / steps[..., None]).round().clamp(0, layout.levels)
    return codes.flatten(-2).to(torch.uint8), scales, zeros


def indexed(keys: Tensor, layout: IndexLayout) -> Tensor:
    """Keys as an index has them: float32, of keys' shape [..., head_dim]."""
    codes, scales, zeros = index_codes(keys, layout)
    codes = codes.float().unflatten(-1, (layout.groups, layout.group))
    return (zeros.float()[..., None] + scales.float()[..., None] * codes).flatten(-2)


def rounded_queries(q: Tensor, layout: IndexLayout) -> Tensor:
    """Queries as they meet an index: each group of elements rounded to whole steps.

    Parameters
    ----------
    q : Tensor [..., head_dim], any floating dtype
    layout : IndexLayout
        Its groups are the queries' too.

    Returns
    -------
    float32 Tensor like q
        A step is the group's largest magnitude over `QUERY_LEVELS`, so that codes have 8 bits: what
        a group's meet of a key's are sums of products of whole numbers.
    """
    groups = q.float().unflatten(-1, (layout.groups, layout.group))
    steps = groups.abs().amax(-1, keepdim=True) / groups.new_full((), QUERY_LEVELS)
    codes = (groups / steps.where(steps > 0, 1)).round().clamp(-QUERY_LEVELS, QUERY_LEVELS)
    return (steps * codes).flatten(-2)


def index_weights(q: Tensor, k: Tensor, keys: Tensor, *, layout: IndexLayout, hidden: Tensor,
                  form: AttentionForm, sinks: Tensor | None, offsets: Tensor | None = None
                  ) -> Tensor:
    """The weights that the query heads of a group together give to each cached token.

    Parameters
    ----------
    q : Tensor [..., kv_heads, group, head_dim]
        Of the new token. Cached keys meet `rounded_queries`.
    k : Tensor [..., kv_heads, head_dim]
        Its key, which is exact, and so are the queries that meet it.
    keys : Tensor [..., kv_heads, tokens, head_dim]
        Cached ones, of `indexed`.
    layout : IndexLayout
    hidden : bool Tensor that broadcasts to [..., kv_heads, 1, tokens]
        Where there is no token.
    form : AttentionForm
        Without a window.
    sinks : Tensor that broadcasts to [..., kv_heads, group, 1], or None
        The logits that `form.sinks` asks for.
    offsets : float32 Tensor [..., kv_heads, group, 1], or None
        Added to the products of the queries with all keys.

    Returns
    -------
    float32 Tensor [..., kv_heads, tokens]
    """
    logits = torch.einsum("...hgd,...htd->...hgt", rounded_queries(q, layout), keys.float())
    own = torch.einsum("...hgd,...hd->...hg", q.float(), k.float())[..., None]
    products = torch.cat((logits, own), dim=-1)
    if offsets is not None:
        products = products + offsets
    weights = attention_weights(
        products, torch.nn.functional.pad(hidden, (0, 1)),
        dim=q.shape[-1], form=form, sinks=sinks)
    return weights[..., :-1].sum(-2)


def choose(weights: Tensor, counts: Tensor, *, cached: Tensor) -> Tensor:
    """The cached tokens that a step attends to.

    Parameters
    ----------
    weights : float32 Tensor [..., kv_heads, tokens]
        From `index_weights`.
    counts : int Tensor [...]
        How many each sequence is to choose; at most `cached`.
    cached : int Tensor [...]
        How many tokens it has.

    Returns
    -------
    bool Tensor like weights
    """
    tokens = weights.shape[-1]
    place = torch.arange(tokens, device=weights.device)
    # Floats that are not negative are in the order of their bits. Of equal ones the newer goes in.
    order = (weights.view(torch.int32).long() << 32) + place
    order = order.masked_fill(place >= cached[..., None, None], -1)
    number = place.expand(order.shape)
    rank = torch.empty_like(order).scatter_(-1, order.argsort(dim=-1, descending=True), number)
    return rank < counts[..., None, None]
