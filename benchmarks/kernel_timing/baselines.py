"""The baselines of `kernels.py`: PyTorch's fused attention, and plain PyTorch.

The functions take what `flexgen_h2o.kernels.ops` takes; bfloat16 or float32, full slots, prompts of
one length. The plain ones do the same work as ours and give the same results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def plain_decode(q, k, v, *, slots, metadata, layout, state):
    """A decode step as one would write it first, a PyTorch call after the other."""
    _, tokens, recent, _ = metadata
    n, keys, values = slots.shape[3], *slots
    query = q.unflatten(1, (k.shape[1], -1))  # a group's queries are rows of one product
    logits = torch.cat([query @ keys.mT, query @ k[..., None]], -1) * q.shape[-1] ** -0.5
    probabilities = logits.float().softmax(-1)
    weights = probabilities.to(q.dtype)
    out = weights[..., :n] @ values + weights[..., n:] * v[:, :, None]
    received = probabilities.sum(2)
    state.scores.add_(received[..., :n])
    safe = state.positions >= (tokens - recent)[:, None, None]
    taken = state.scores.masked_fill(safe, torch.inf).argmin(-1)
    at = taken[..., None]
    state.scores.scatter_(-1, at, received[..., n:])
    state.positions.scatter_(-1, at, (tokens - 1)[:, None, None].expand(at.shape))
    for held, new in ((keys, k), (values, v)):
        held.scatter_(2, at[..., None].expand(-1, -1, 1, q.shape[-1]), new[:, :, None])
    return out.flatten(1, 2), taken


def sdpa_decode(q, k, v, *, slots, metadata, layout, state):
    """PyTorch's fused attention over the same slots: no scores, no eviction, nothing written.

    The queries of a group go as rows of one head, eight times as fast as `enable_gqa` on a CPU.
    """
    return F.scaled_dot_product_attention(q.unflatten(1, (k.shape[1], -1)), *slots)


def plain_prefill(q, k, v, lengths, *, scores):
    """Prefill with scores in blocks of queries, float32, a PyTorch call after the other."""
    batch = len(lengths)
    query, keys, values = (x.unflatten(0, (batch, -1)).transpose(1, 2).float() for x in (q, k, v))
    total, length, block = scores.unflatten(1, (batch, -1)).transpose(0, 1), keys.shape[2], 256
    out = torch.empty_like(query)
    for start in range(0, length, block):
        end = min(start + block, length)
        logits = query[:, :, start:end] @ keys[:, :, :end].mT * q.shape[-1] ** -0.5
        future = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
        probabilities = logits.masked_fill_(future, -torch.inf).softmax(-1)
        total[..., :end] += probabilities.sum(2)
        out[:, :, start:end] = probabilities @ values[:, :, :end]
    return out.to(q.dtype).transpose(1, 2).flatten(0, 1)


def sdpa_prefill(q, k, v, lengths, *, scores=None):
    """PyTorch's fused causal attention of the same packed rows; no scores."""
    q, k, v = (x.unflatten(0, (len(lengths), -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)


def select_by_gather(k, v, scores, *, cuts, slots, state):
    """Select the tokens that stay of prompts: topk, sort, gather."""
    index = _select(scores, cuts, state)
    rows = index[..., None].expand(-1, -1, -1, k.shape[-1])
    for held, x in zip(slots, (k, v), strict=True):
        torch.gather(x.unflatten(0, (len(cuts), -1)).transpose(1, 2), 2, rows, out=held)


def select_by_index(k, v, scores, *, cuts, slots, state):
    """The same, but keys and values by an index of whole rows, which copies them faster."""
    index = _select(scores, cuts, state)
    sequence, head = torch.arange(len(cuts))[:, None, None], torch.arange(k.shape[1])[:, None]
    for held, x in zip(slots, (k, v), strict=True):
        held.copy_(x.unflatten(0, (len(cuts), -1))[sequence, index, head])


def _select(scores, cuts, state):
    """Write the eviction state; returns the indices of what stays."""
    cut = cuts[0]
    by_text = scores.unflatten(1, (len(cuts), -1)).transpose(0, 1)
    heavy = by_text[..., :-cut.recent].topk(cut.heavy, sorted=False).indices.sort().values
    recent = torch.arange(cut.length - cut.recent, cut.length).expand(*heavy.shape[:2], -1)
    index = torch.cat([heavy, recent], -1)
    torch.gather(by_text, 2, index, out=state.scores)
    state.positions.copy_(index)
    return index
