"""The specification of every operation, in plain PyTorch: slow, obvious, exact.

Everything is computed in float32 whatever the inputs' dtype; outputs have the inputs' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen_h2o.kernels.rotary import rotated
from flexgen_h2o.storage.quantization import GroupLayout

FLOAT16_MAX = torch.finfo(torch.float16).max


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


def half_below(x):
    """The largest float16 that is no larger than x.

    Parameters
    ----------
    x : float32 Tensor, within float16's range

    Returns
    -------
    float16 Tensor, of x's shape
    """
    nearest = x.half()
    # Float16 bits count up with the magnitude: one less is the neighbour towards zero, one more
    # the neighbour away from it. A negative x rounds to -0.0, never to 0.0.
    down = (x < 0).to(torch.int16) * 2 - 1
    return (nearest.view(torch.int16) + (nearest.float() > x) * down).view(torch.float16)


def quantize_groups(x, layout):
    """Quantize vectors to records of codes, scales and zero points, group by group.

    Parameters
    ----------
    x : Tensor [..., length], any floating dtype
        Values outside of float16's range are clamped to it.
    layout : GroupLayout

    Returns
    -------
    uint8 Tensor [..., layout.nbytes]

    Notes
    -----
    The zero point is the group's minimum rounded down to float16. The scale is the distance from
    there to the maximum over layout.levels, rounded up. So every element lies between the lowest
    and the highest code, and rounding to the nearest one errs by at most scale / 2.
    """
    values = x.float().clamp(-FLOAT16_MAX, FLOAT16_MAX)
    values = values.unflatten(-1, (layout.groups, layout.group))
    zeros = half_below(values.amin(-1))
    scales = half_below((zeros.float() - values.amax(-1)) / layout.levels).abs()  # rounded up
    # The smallest float16 above 0 in place of 0: then the group is constant and its codes are 0.
    steps = scales.float().clamp_min(2.0**-24)
    codes = ((values - zeros.float()[..., None]) / steps[..., None]).round().flatten(-2)
    codes = codes.to(torch.uint8)
    if layout.bits == 4:
        low, high = codes.chunk(2, dim=-1)
        codes = low + 16 * high
    records = torch.zeros(*x.shape[:-1], layout.nbytes, dtype=torch.uint8, device=x.device)
    records[..., : codes.shape[-1]] = codes
    records[..., layout.code_bytes :] = torch.cat([scales, zeros], -1).view(torch.uint8)
    return records


def dequantize_groups(records, layout):
    """The vectors of records from `quantize_groups`.

    Parameters
    ----------
    records : uint8 Tensor [..., layout.nbytes]
        Any strides, but contiguous in the last dimension.
    layout : GroupLayout

    Returns
    -------
    float32 Tensor [..., length]
    """
    codes = records[..., : layout.length * layout.bits // 8]
    if layout.bits == 4:
        codes = torch.cat([codes % 16, codes // 16], -1)
    halves = records[..., layout.code_bytes :].clone(memory_format=torch.contiguous_format)
    scales, zeros = halves.view(torch.float16).float()[..., None].chunk(2, dim=-2)
    codes = codes.float().unflatten(-1, (layout.groups, layout.group))
    return (zeros + scales * codes).flatten(-2)


def causal_attention(q, k, v, *, mass=None, decay=1.0):
    """Attention of the last rows of one sequence over all of it, with the mass each key receives.

    Query row r stands at position tokens - rows + r and sees the keys up to there. Query head h
    belongs to KV head h // group. A sequence that comes in chunks gives the same mass as one that
    comes whole.

    Parameters
    ----------
    q : Tensor [rows, heads, head_dim]
    k, v : Tensor [kv_heads, tokens, head_dim]
        tokens >= rows; may be strided views.
    mass : float32 Tensor [kv_heads, tokens], optional
        Scores, updated in place: times decay ** rows, plus the sum of decay ** (rows - 1 - r)
        times the probability of each key over rows r and the query heads of the group.
    decay : float
        1: the plain sum (arXiv 2306.14048).

    Returns
    -------
    Tensor [rows, heads, head_dim]
    """
    rows, heads, head_dim = q.shape
    kv_heads, tokens, _ = k.shape
    queries = q.float().unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.einsum("rkgd,ktd->kgrt", queries, k.float()) * head_dim**-0.5
    future = torch.ones(rows, tokens, dtype=torch.bool, device=q.device).triu(tokens - rows + 1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
    if mass is not None:
        weights = decay ** torch.arange(rows - 1, -1, -1, device=q.device).float()
        mass.mul_(decay**rows).add_(torch.einsum("kgrt,r->kt", probabilities, weights))
    out = torch.einsum("kgrt,ktd->rkgd", probabilities, v.float())
    return out.flatten(1, 2).to(q.dtype)


@dataclass(frozen=True)
class SlotView:
    """How `slot_attention` is to read the slots of a cache.

    Attributes
    ----------
    filled : bool Tensor [sequences, n], optional
        False for slots that hold no token: whatever is in them, NaN too, has no effect. None: all
        hold one.
    layout : GroupLayout, optional
        Of the records that the slots hold. None: they hold plain vectors.
    ranks : int32 Tensor [sequences, kv_heads, n], optional
        Positions by rank: the cached keys, q and k come unrotated, and each cached key is
        rotated to its rank here. Those of empty slots may be anything. None: all is rotated.
    newest : int Tensor [sequences], with ranks
        The new token's rank.
    rope : tuple of two float32 Tensors [positions, rotary_dim / 2], with ranks
        Cosines and sines by rank.
    """

    filled: torch.Tensor | None = None
    layout: GroupLayout | None = None
    ranks: torch.Tensor | None = None
    newest: torch.Tensor | None = None
    rope: tuple[torch.Tensor, torch.Tensor] | None = None


def slot_attention(q, k, v, slots, view=None):
    """Attention of one new token of each sequence over slots of a cache and itself.

    Parameters
    ----------
    q : Tensor [sequences, heads, head_dim]
    k, v : Tensor [sequences, kv_heads, head_dim]
        The new token's, which is not in the slots yet.
    slots : Tensor [2, sequences, kv_heads, n, width]
        Cached keys and values: head_dim floats, or uint8 records of ``view.layout.nbytes``. May
        be a strided view, contiguous in the last dimension; n may be 0.
    view : SlotView, optional
        None: plain rotated vectors in every slot.

    Returns
    -------
    out : Tensor [sequences, heads, head_dim]
        In q's dtype.
    mass : float32 Tensor [sequences, kv_heads, n + 1]
        Probabilities, summed over the query heads of each group; the new token's come last. 0 for
        empty slots.
    """
    view = view or SlotView()
    keys, values = slots if view.layout is None else dequantize_groups(slots, view.layout)
    dtype, q, k, keys, values = q.dtype, *(x.float() for x in (q, k, keys, values))
    if view.ranks is not None:
        positions = view.rope[0].shape[0]
        old = [table[view.ranks.clamp(0, positions - 1)] for table in view.rope]
        new = [table[view.newest][:, None] for table in view.rope]
        q, k, keys = rotated(q, *new), rotated(k, *new), rotated(keys, *old)
    if view.filled is not None:
        empty = ~view.filled[:, None, :, None]
        keys, values = keys.masked_fill(empty, 0), values.masked_fill(empty, 0)
    keys = torch.cat([keys, k[:, :, None]], dim=2)
    values = torch.cat([values, v.float()[:, :, None]], dim=2)
    queries = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("skgd,sktd->skgt", queries, keys) * q.shape[-1] ** -0.5
    if view.filled is not None:
        scores[..., :-1].masked_fill_(~view.filled[:, None, None], float("-inf"))
    probabilities = scores.softmax(-1)
    out = torch.einsum("skgt,sktd->skgd", probabilities, values).flatten(1, 2)
    return out.to(dtype), probabilities.sum(2)
