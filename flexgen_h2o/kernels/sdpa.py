"""Causal attention without scores by PyTorch's own fused kernels, where those are the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.gpus import gpu_of, has_matrix_units

QUERY_BLOCK = 256
SQUARE_BELOW = 768
"""PyTorch's CPU kernel skips the future by key blocks of 512: below this length it computes the
whole square. Cut into query blocks that see only their past, 512 tokens take 0.8 of the time."""


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """See `reference.prefill_attention`; whole sequences, no attention score."""
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        out = _causal(*(x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).flatten(0, 1)
    # Sequences of unequal lengths go one by one: no pads to compute and no mask to build.
    parts = (x.split(lengths) for x in (q, k, v))
    return torch.cat([_causal(*(x.transpose(0, 1)[None] for x in one))[0].transpose(0, 1)
                      for one in zip(*parts, strict=True)])


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, heads, length, head_dim]; fewer heads in k and v."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    gpu = gpu_of(q.device) if grouped else None
    if gpu is not None and not has_matrix_units(gpu, q.dtype):
        # No flash kernel: the one that is linear in memory takes no groups.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    attend = partial(F.scaled_dot_product_attention, enable_gqa=grouped)
    if q.device.type != "cpu" or not QUERY_BLOCK < length < SQUARE_BELOW:
        return attend(q, k, v, is_causal=True)
    out = torch.empty_like(q)
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        seen = torch.ones(end - start, end, dtype=torch.bool).tril(start)
        out[:, :, start:end] = attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end],
                                      attn_mask=seen)
    return out
