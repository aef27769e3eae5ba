"""Attention weights by the form of attention, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_h2o.config.attention_form import AttentionForm


def attention_weights(products: Tensor, hidden: Tensor, *, dim: int, form: AttentionForm,
                      sinks: Tensor | None) -> Tensor:
    """Return the attention weights of queries over keys.

    Parameters
    ----------
    products : float32 Tensor [..., heads, queries, keys]
        Dot products of queries and keys.
    hidden : bool Tensor that broadcasts to `products`
        True for keys that a query does not see, also because of the form's window.
    dim : int
        head_dim.
    form : AttentionForm
    sinks : Tensor that broadcasts to [..., heads, queries, 1], or None
        Attention sinks: logits that take a share of each query's weights.

    Returns
    -------
    float32 Tensor like products
    """
    logits = products * form.scale_of(dim)
    if form.softcap:
        logits = (logits / form.softcap).tanh() * form.softcap
    logits = logits.masked_fill(hidden, float("-inf"))
    if not form.sinks:
        return logits.softmax(-1)
    sinks = sinks.float().expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
