"""The weights of attention by its form, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen_h2o.config.attention_form import AttentionForm


def attention_weights(products: Tensor, hidden: Tensor, *, dim: int, form: AttentionForm,
                      sinks: Tensor | None) -> Tensor:
    """The weights of some queries over some keys.

    Parameters
    ----------
    products : float32 Tensor [..., heads, queries, keys]
        Of queries with keys.
    hidden : bool Tensor that broadcasts to it
        Keys that a query does not see.
    dim : int
        Width of a head.
    form : AttentionForm
        Its window has to be in `hidden`.
    sinks : Tensor that broadcasts to [..., heads, queries, 1], or None
        Logits that take a share of each query's weights.

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
    own = sinks.float().expand(*logits.shape[:-1], 1)
    return torch.cat((logits, own), dim=-1).softmax(-1)[..., :-1]
