"""Specification of FlexGen's sparse attention (arXiv 2303.06865, section 5), its only backend.

All keys are read, and only the values with the largest attention weights. There are two operations
because the values may have to be loaded from another tier in between. Everything is computed in
float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flexgen_h2o.config.layers import DEFAULT_VARIANT
from flexgen_h2o.kernels.reference.attention import (
    cache_token,
    dequantize_groups,
    grouped_weights,
)


def select_values(q, k, *, keys, metadata, sparsity, layout=None, variant=DEFAULT_VARIANT,
                  sinks=None, offsets=None):
    """Return the slots whose values one new token per sequence attends to, and their weights.

    Weights are of attention over the whole cache and the new token. Of `cached` tokens, each
    KV head selects the max(1, int(sparsity * cached)) with the largest weight, summed over the
    query heads of its group; of equal weights, the newer token. Weights are not renormalized.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k : Tensor [sequences, kv_heads, head_dim]
        Key of the new token.
    keys : Tensor [sequences, kv_heads, slots, width]
        Cached keys: head_dim floats of k's dtype, or uint8 in the format of `layout`. Slot i holds
        token i. Any strides, but contiguous in the last dimension.
    metadata : int32 Tensor [4, sequences]
        See `attention.decode_attention`. Each sequence has at least one cached token, and none
        needs a victim.
    sparsity : float
        Fraction of the values to read: above 0, at most 1.
    layout : CacheLayout, optional
        Layout of quantized slots. None: slots hold plain vectors.
    variant : AttentionVariant
        A window must not be shorter than the cache.
    sinks, offsets : Tensor or None
        See `attention.decode_attention`.

    Returns
    -------
    index : int32 Tensor [sequences, kv_heads, top_k]
        Slots by descending weight; top_k is max(1, int(sparsity * slots)). Sequences that select
        fewer are padded with slot 0.
    weights : float32 Tensor [sequences, heads, top_k + 1]
        Attention weights of these slots, 0 for padding, and last of the new token.
    """
    cached = metadata[0].long()
    kv_heads, slots = keys.shape[1:3]
    number = torch.arange(slots, device=q.device)
    filled = (number < cached[:, None])[:, None]  # the same for every head
    query = q.float().unflatten(1, (kv_heads, -1))
    keys = keys if layout is None else dequantize_groups(keys, layout.keys)
    logits = torch.einsum("skgd,sktd->skgt", query, keys.float())
    new_token = torch.einsum("skgd,skd->skg", query, k.float())[..., None]
    products = torch.cat([logits, new_token], dim=-1)
    weights = grouped_weights(products, F.pad(~filled, (0, 1))[:, :, None], dim=q.shape[-1],
                              variant=variant, sinks=sinks, offsets=offsets)
    weights, new_token = weights.split([slots, 1], dim=-1)
    # Non-negative floats are ordered like their bits. Equal weights are ordered by slot.
    order = (weights.sum(2).view(torch.int32).long() << 32) + number
    top_k = max(1, int(sparsity * slots))
    index = order.masked_fill(~filled, -1).topk(top_k).indices
    count = (cached.double() * sparsity).long().clamp(min=1)
    selected = (torch.arange(top_k, device=q.device) < count[:, None])[:, None]
    index = index.where(selected, 0)
    weights = weights.gather(3, index[:, :, None].expand(-1, -1, weights.shape[2], -1))
    weights = torch.cat([weights.where(selected[:, :, None], 0), new_token], dim=-1)
    return index.int(), weights.flatten(1, 2)


def attend_selected(k, v, *, slots, values, weights, metadata, layout=None):
    """Compute attention of one new token per sequence over selected values, and cache the token.

    Parameters
    ----------
    k, v : Tensor [sequences, kv_heads, head_dim]
        Key and value of the new token.
    slots : Tensor [2, sequences, kv_heads, slots, width]
        See `attention.decode_attention`; one slot per head is written, none is read.
    values : Tensor [sequences, kv_heads, top_k, width]
        Content of the value slots that `select_values` returned.
    weights : float32 Tensor [sequences, heads, top_k + 1]
        From `select_values`.
    metadata : int32 Tensor [4, sequences]
        See `select_values`.
    layout : CacheLayout, optional
        Layout of quantized slots. None: plain vectors of v's dtype.

    Returns
    -------
    out : Tensor [sequences, heads, head_dim], of v's dtype
    written_slots : int64 Tensor [sequences, kv_heads]
        The slot of each new token: the next free one.
    """
    kv_heads = v.shape[1]
    values = values if layout is None else dequantize_groups(values, layout.values)
    values = torch.cat([values.float(), v.float()[:, :, None]], dim=2)
    grouped = weights.unflatten(1, (kv_heads, -1))
    out = torch.einsum("skgt,sktd->skgd", grouped, values).flatten(1, 2).to(v.dtype)
    written_slots = metadata[0].long()[:, None].expand(-1, kv_heads).contiguous()
    cache_token(k, v, slots=slots, written_slots=written_slots, layout=layout)
    return out, written_slots
