"""Causal attention without scores by PyTorch's own fused kernels, where those are the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.kernels.gpus import gpu_of, has_matrix_units

QUERY_BLOCK = 256
SQUARE_BELOW = 768
"""PyTorch's CPU kernel skips the future by key blocks of 512: below this length it computes the
whole square. Cut into query blocks that see only their past, 512 tokens take 0.8 of the time."""


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *,
                      form: AttentionForm = DEFAULT_FORM) -> Tensor:
    """See `reference.prefill_attention`; whole sequences, no attention score, and forms that are
    `possible`."""
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        out = _causal(*(x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v)), form=form)
        return out.transpose(1, 2).flatten(0, 1)
    # Sequences of unequal lengths go one by one: no pads to compute and no mask to build.
    parts = (x.split(lengths) for x in (q, k, v))
    return torch.cat([_causal(*(x.transpose(0, 1)[None] for x in one), form=form)[0].transpose(0, 1)
                      for one in zip(*parts, strict=True)])


def possible(form: AttentionForm) -> bool:
    """True if PyTorch's kernels can do it: they have no soft caps, and no sinks."""
    return not (form.softcap or form.sinks)


def _causal(q: Tensor, k: Tensor, v: Tensor, *, form: AttentionForm) -> Tensor:
    """Causal attention of [batch, heads, length, head_dim]; fewer heads in k and v."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    gpu = gpu_of(q.device) if grouped else None
    if gpu is not None and not has_matrix_units(gpu, q.dtype):
        # No flash kernel: the one that is linear in memory takes no groups.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    attend = partial(F.scaled_dot_product_attention, enable_gqa=grouped, scale=form.scale)
    window = length if form.window is None else form.window
    if window >= length and (q.device.type != "cpu" or not QUERY_BLOCK < length < SQUARE_BELOW):
        return attend(q, k, v, is_causal=True)
    out = torch.empty_like(q)
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        first = max(0, start + 1 - window)
        seen = torch.ones(end - start, end - first, dtype=torch.bool, device=q.device)
        seen = seen.tril(start - first).triu(start - first + 1 - window)
        out[:, :, start:end] = attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end],
                                      attn_mask=seen)
    return out
