"""One function per operation; the backend by device. `kernels.reference` specifies each.

``FLEXGEN_H2O_KERNELS=reference`` in the environment forces the reference.
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.nn.functional as F

from flexgen_h2o.kernels import reference, torch_attention, torch_groups
from flexgen_h2o.kernels.reference import SlotView

__all__ = ["SlotView", "causal_attention", "decode_attention", "dequantize_groups",
           "prefill_attention", "quantize_groups", "slot_attention"]


def _forced_reference() -> bool:
    return os.environ.get("FLEXGEN_H2O_KERNELS") == "reference"


QUERY_BLOCK = 256
SQUARE_BELOW = 768
"""PyTorch's CPU kernel skips the future by key blocks of 512: below this length it computes the
whole square. Cut into query blocks that see only their past, 512 tokens take 0.8 of the time."""


def prefill_attention(q, k, v, lengths):
    """See `reference.prefill_attention`; memory linear in the length (flash attention)."""
    if _forced_reference():
        return reference.prefill_attention(q, k, v, lengths)
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        out = _causal(*(x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).flatten(0, 1)
    # Sequences of unequal lengths go one by one: no pads to compute and no mask to build.
    parts = (x.split(lengths) for x in (q, k, v))
    return torch.cat([_causal(*(x.transpose(0, 1)[None] for x in one))[0].transpose(0, 1)
                      for one in zip(*parts, strict=True)])


def _causal(q, k, v):
    """Causal attention of [batch, heads, length, head_dim]; fewer heads in k and v."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and (q.dtype == torch.float32
                                  or torch.cuda.get_device_capability(q.device)[0] < 8):
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


def decode_attention(q, k, v, valid=None):
    """See `reference.decode_attention`; each cached byte is read once per group of query heads."""
    if _forced_reference():
        return reference.decode_attention(q, k, v, valid)
    sequences, heads, head_dim = q.shape
    # The query heads of a group stand as rows of one query, so that they share a read of the keys.
    grouped = q.view(sequences, k.shape[1], -1, head_dim)
    rows = grouped.shape[2]
    if rows == 1 and _slow_single_row(q):
        grouped = grouped.expand(-1, -1, 2, -1)
    mask = None if valid is None else valid[:, None, None, :]
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return out[:, :, :rows].reshape(sequences, heads, head_dim)


def _slow_single_row(q: torch.Tensor) -> bool:
    """Whether a single bfloat16 query row takes PyTorch's slow path.

    On CPUs without AMX one row runs as a scalar matrix-vector product at 5 GB/s; two equal rows
    run as a GEMM at 11 GB/s, although they do twice the arithmetic.
    """
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and not getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)()
    )


def causal_attention(q, k, v, *, mass=None, decay=1.0):
    """See `reference.causal_attention`; memory linear in the tokens."""
    if _forced_reference():
        return reference.causal_attention(q, k, v, mass=mass, decay=decay)
    if mass is None and q.is_cuda:
        return torch_attention.fused_causal_attention(q, k, v)
    return torch_attention.causal_attention(q, k, v, mass=mass, decay=decay)


def slot_attention(q, k, v, slots, view=None):
    """See `reference.slot_attention`; each cached byte is read once per group of query heads."""
    backend = reference if _forced_reference() else torch_attention
    return backend.slot_attention(q, k, v, slots, view or SlotView())


def quantize_groups(x, layout):
    """See `reference.quantize_groups`."""
    backend = reference if _forced_reference() else torch_groups
    return backend.quantize_groups(x, layout)


def dequantize_groups(records, layout):
    """See `reference.dequantize_groups`."""
    backend = reference if _forced_reference() else torch_groups
    return backend.dequantize_groups(records, layout)
