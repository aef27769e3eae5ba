"""The specification of every operation, in plain PyTorch: slow, obvious, exact.

Everything is computed in float32 whatever the inputs' dtype; outputs have the inputs' dtype.
"""

from __future__ import annotations

import torch


def prefill_attention(q, k, v, lengths):
    """Causal self-attention within each of several packed sequences.

    Parameters
    ----------
    q : Tensor [rows, heads, head_dim]
    k, v : Tensor [rows, kv_heads, head_dim]
        Rows of all sequences one after the other; heads is a multiple of kv_heads.
    lengths : list of int
        Tokens of each sequence; they sum to rows.

    Returns
    -------
    Tensor [rows, heads, head_dim]
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        keys = k[rows].float().repeat_interleave(group, dim=1)
        values = v[rows].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", probabilities, values).to(q.dtype)
    return out


def decode_attention(q, k, v, valid=None):
    """Attention of one new token of each sequence over its cached tokens.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k, v : Tensor [sequences, kv_heads, slots, head_dim]
        May be strided views of a larger cache; the new token is among them.
    valid : bool Tensor [sequences, slots], optional
        False for slots that hold no token (pads). None: all hold one.

    Returns
    -------
    Tensor [sequences, heads, head_dim]
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("shd,shtd->sht", q.float(), keys) * q.shape[-1] ** -0.5
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, :], float("-inf"))
    return torch.einsum("sht,shtd->shd", scores.softmax(-1), values).to(q.dtype)
