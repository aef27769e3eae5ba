"""The specification of sparse attention, in plain PyTorch, which is its only backend.

Every key decides who matters, and only the values of those that do are read: FlexGen's sparse
attention (arXiv 2303.06865, section 5). It is in two steps, for the values may have to be brought
from elsewhere between them. Everything is computed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flexgen_h2o.config.attention_form import DEFAULT_FORM
from flexgen_h2o.h2o.attention_weights import attention_weights
from flexgen_h2o.kernels.reference.attention import cache_token, dequantize_groups


def choose_values(q, k, *, keys, metadata, sparsity, layout=None, form=DEFAULT_FORM, sinks=None,
                  offsets=None):
    """Whose values one new token of each sequence reads, and with what weights.

    The weights are those of attention over everything that is cached and the new token itself. Of
    its `cached` tokens a KV head then chooses max(1, int(sparsity * cached)): those of the largest
    weight, summed over the query heads of its group; of equal ones the newer. What the others had
    is lost: weights are not scaled up again.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k : Tensor [sequences, kv_heads, head_dim]
        The new token's.
    keys : Tensor [sequences, kv_heads, slots, width]
        Cached ones: head_dim floats of k's dtype, or uint8 records of `layout`. Slot i holds token
        i. May be strided, contiguous in the last dimension.
    metadata : int32 Tensor [4, sequences]
        As of `reference.decode_attention`; each sequence has at least one cached token, and none
        needs a victim.
    sparsity : float
        Over 0, at most 1.
    layout : CacheLayout, optional
        Of the records that the slots hold. None: they hold plain vectors.
    form : AttentionForm
        Without a window that is shorter than what is cached.
    sinks : Tensor [heads] or None
        The logits that `form.sinks` asks for.
    offsets : float32 Tensor [sequences, heads] or None
        As of `reference.decode_attention`.

    Returns
    -------
    index : int32 Tensor [sequences, kv_heads, most]
        Slots, those of the largest weight first; most is max(1, int(sparsity * slots)). A sequence
        that chooses fewer fills up with slot 0.
    weights : float32 Tensor [sequences, heads, most + 1]
        Of these slots, 0 where `index` is filled up; the last is the new token's own.
    """
    cached = metadata[0].long()
    kv_heads, slots = keys.shape[1:3]
    number = torch.arange(slots, device=q.device)
    filled = (number < cached[:, None])[:, None]  # of every head
    query = q.float().unflatten(1, (kv_heads, -1))
    keys = keys if layout is None else dequantize_groups(keys, layout.keys)
    logits = torch.einsum("skgd,sktd->skgt", query, keys.float())
    own = torch.einsum("skgd,skd->skg", query, k.float())[..., None]
    products = torch.cat([logits, own], dim=-1)
    if offsets is not None:
        products = products + offsets.view(len(q), kv_heads, -1, 1)
    weights = attention_weights(
        products, F.pad(~filled, (0, 1))[:, :, None], dim=q.shape[-1],
        form=form, sinks=None if sinks is None else sinks.view(kv_heads, -1, 1))
    weights, own = weights.split([slots, 1], dim=-1)
    # Floats that are not negative are in the order of their bits. Of equal ones the slot decides.
    order = (weights.sum(2).view(torch.int32).long() << 32) + number
    most = max(1, int(sparsity * slots))
    index = order.masked_fill(~filled, -1).topk(most).indices
    count = (cached.double() * sparsity).long().clamp(min=1)
    chosen = (torch.arange(most, device=q.device) < count[:, None])[:, None]
    index = index.where(chosen, 0)
    weights = weights.gather(3, index[:, :, None].expand(-1, -1, weights.shape[2], -1))
    weights = torch.cat([weights.where(chosen[:, :, None], 0), own], dim=-1)
    return index.int(), weights.flatten(1, 2)


def attend_chosen(k, v, *, slots, values, weights, metadata, layout=None):
    """Attention of one new token of each sequence over chosen values; then it is cached.

    Parameters
    ----------
    k, v : Tensor [sequences, kv_heads, head_dim]
        The new token's.
    slots : Tensor [2, sequences, kv_heads, slots, width]
        As of `reference.decode_attention`; one slot per head is written, and nothing is read.
    values : Tensor [sequences, kv_heads, most, width]
        Records of the values in the slots that `choose_values` gave.
    weights : float32 Tensor [sequences, heads, most + 1]
        From `choose_values`.
    metadata : int32 Tensor [4, sequences]
        As of `choose_values`.
    layout : CacheLayout, optional
        Of the records. None: they are plain vectors of v's dtype.

    Returns
    -------
    out : Tensor [sequences, heads, head_dim], of v's dtype
    taken : int64 Tensor [sequences, kv_heads]
        The slot that each new token got: the next free one.
    """
    kv_heads = v.shape[1]
    values = values if layout is None else dequantize_groups(values, layout.values)
    values = torch.cat([values.float(), v.float()[:, :, None]], dim=2)
    grouped = weights.unflatten(1, (kv_heads, -1))
    out = torch.einsum("skgt,sktd->skgd", grouped, values).flatten(1, 2).to(v.dtype)
    taken = metadata[0].long()[:, None].expand(-1, kv_heads).contiguous()
    cache_token(k, v, slots=slots, taken=taken, layout=layout)
    return out, taken
