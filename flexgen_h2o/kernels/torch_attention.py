"""Attention that tells how much of it each key received, in blocks of vectorised PyTorch.

See `reference` for the specification. All arithmetic is float32: that is what scores need, and
on a CPU float32 products are several times as fast as bfloat16 ones. PyTorch's fused attention
gives no probabilities; with its fused softmax (not its exp, a tenth of the speed) the same in
blocks is as fast on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.reference import SlotView
from flexgen_h2o.kernels.rotary import rotated, turn_
from flexgen_h2o.kernels.torch_groups import scales_and_zeros, stretch_, unpack

# Float32 temporaries of a block. A CPU keeps them in its caches; a GPU wants large products.
CPU_BYTES, GPU_BYTES = 4 << 20, 1 << 28
QUERIES, FEWEST_QUERIES, FUSED_QUERIES = 64, 16, 256


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, mass: Tensor | None = None,
                     decay: float = 1.0) -> Tensor:
    """See `reference.causal_attention`; memory linear in the tokens."""
    rows, heads, head_dim = q.shape
    kv_heads, tokens, _ = k.shape
    group = heads // kv_heads
    if mass is not None:
        mass.mul_(decay**rows)
    queries, most_heads = _block_sizes(q, kv_heads=kv_heads, tokens=tokens)
    # Fresh memory of this size for each block would cost more in page faults than the softmax.
    room = torch.empty(most_heads * group * queries * tokens, device=q.device)
    out = q.new_empty(q.shape)
    for first in range(0, kv_heads, most_heads):
        some = slice(first, first + most_heads)
        # Contiguous heads: the rows of packed tokens lie a whole hidden state apart.
        keys, values = (x[some].to(torch.float32, memory_format=torch.contiguous_format)
                        for x in (k, v))
        for start in range(0, rows, queries):
            block = slice(start, min(start + queries, rows))
            seen = tokens - rows + block.stop
            mine = q[block].unflatten(1, (kv_heads, group))[:, some]
            probabilities = _probabilities(mine, keys[:, :seen], room=room)
            heads_out = (probabilities @ values[:, :seen]).unflatten(1, (group, -1))
            out[block].unflatten(1, (kv_heads, group))[:, some] = heads_out.permute(2, 0, 1, 3)
            if mass is not None:
                mass[some, :seen] += _received(probabilities, block, rows=rows, decay=decay)
    return out


def fused_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`causal_attention` where no mass is wanted, by PyTorch's fused kernels: fast on a GPU."""
    rows, heads, head_dim = q.shape
    kv_heads, tokens, _ = k.shape
    group = heads // kv_heads
    out = q.new_empty(q.shape)
    for start in range(0, rows, FUSED_QUERIES):
        block = slice(start, min(start + FUSED_QUERIES, rows))
        count, seen = block.stop - start, tokens - rows + block.stop
        past = torch.ones(count, seen, dtype=torch.bool, device=q.device).tril(seen - count)
        # The query heads of a group stand as rows: not every fused kernel takes fewer KV heads.
        mine = q[block].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
        attended = F.scaled_dot_product_attention(
            mine[None], k[None, :, :seen], v[None, :, :seen], attn_mask=past.repeat(group, 1))
        out[block] = attended[0].unflatten(1, (group, count)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _block_sizes(q: Tensor, *, kv_heads: int, tokens: int) -> tuple[int, int]:
    """Queries of a block, and KV heads treated together."""
    size = GPU_BYTES if q.is_cuda else CPU_BYTES
    one = 4 * (q.shape[1] // kv_heads) * max(1, tokens)  # logits of one query of one KV head
    queries = min(max(size // one, FEWEST_QUERIES), QUERIES * (4 if q.is_cuda else 1))
    queries = max(1, min(queries, q.shape[0]))
    return queries, min(max(size // (one * queries), 1), kv_heads)


def _probabilities(q: Tensor, keys: Tensor, *, room: Tensor) -> Tensor:
    """Of queries [count, kv_heads, group, head_dim] that stand at the end of the keys.

    keys is float32 [kv_heads, tokens, head_dim]; the result [kv_heads, group * count, tokens] may
    lie in `room`.
    """
    count, kv_heads, group, head_dim = q.shape
    rows = q.permute(1, 2, 0, 3).to(torch.float32) * head_dim**-0.5
    shape = (kv_heads, group * count, keys.shape[1])
    logits = room[: math.prod(shape)].view(shape)
    torch.bmm(rows.flatten(1, 2), keys.transpose(1, 2), out=logits)
    future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    logits.unflatten(1, (group, count))[..., -count:].masked_fill_(future, float("-inf"))
    # A CPU normalises row by row, so that it may write where it reads: 6 % faster.
    return torch.softmax(logits, -1, out=logits if logits.is_cpu else None)


def _received(probabilities: Tensor, block: slice, *, rows: int, decay: float) -> Tensor:
    """What a block of rows adds to the mass: [kv_heads, tokens]."""
    ages = torch.arange(rows - 1 - block.start, rows - 1 - block.stop, -1, dtype=torch.float32,
                        device=probabilities.device)
    group = probabilities.shape[1] // len(ages)
    weights = (decay**ages).repeat(group).expand(len(probabilities), 1, -1)
    return (weights @ probabilities).squeeze(1)


def slot_attention(q: Tensor, k: Tensor, v: Tensor, slots: Tensor,
                   view: SlotView) -> tuple[Tensor, Tensor]:
    """See `reference.slot_attention`; the slots go through float32 copies of a few sequences."""
    sequences, heads, head_dim = q.shape
    _, _, kv_heads, n, _ = slots.shape
    queries = q.to(torch.float32).unflatten(1, (kv_heads, -1)) * head_dim**-0.5
    new = k.float()
    if view.ranks is not None:
        cos, sin = (table[view.newest][:, None] for table in view.rope)
        queries = rotated(queries, cos[:, None], sin[:, None])
        new = rotated(new, cos, sin)
    logits = queries.new_empty((*queries.shape[:3], n + 1))
    logits[..., n] = (queries * new[:, :, None]).sum(-1)
    blocks = list(_blocks(slots, head_dim))
    for block in blocks:
        logits[block][..., :n] = _key_products(queries[block], slots[0][block], view, block)
    if view.filled is not None:
        logits[..., :n].masked_fill_(~view.filled[:, None, None], float("-inf"))
    probabilities = logits.softmax(-1)
    out = probabilities[..., n:] * v.float()[:, :, None]
    for block in blocks:
        out[block] += _value_products(probabilities[block][..., :n], slots[1][block], view, block)
    return out.flatten(1, 2).to(q.dtype), probabilities.sum(2)


def _blocks(slots: Tensor, head_dim: int) -> Iterator[tuple[slice, slice]]:
    """Cut slots into (sequences, KV heads) whose float32 copies are about a block's size."""
    _, sequences, kv_heads, n, _ = slots.shape
    if n == 0:
        return
    most = max(1, (GPU_BYTES if slots.is_cuda else CPU_BYTES) // (4 * n * head_dim))
    heads, count = min(most, kv_heads), max(1, most // kv_heads)
    for sequence in range(0, sequences, count):
        for head in range(0, kv_heads, heads):
            yield slice(sequence, sequence + count), slice(head, head + heads)


def _key_products(q: Tensor, keys: Tensor, view: SlotView, block: tuple[slice, slice]) -> Tensor:
    """Logits [sequences, kv_heads, group, n] of queries over one block of cached keys."""
    x, affine = _widened(keys, view)
    if view.ranks is not None:
        ranks = view.ranks[block].clamp(0, len(view.rope[0]) - 1)
        x = x.clone() if x is keys else x
        if affine is not None:
            x, affine = stretch_(x, affine), None
        turn_(x, *(F.embedding(ranks, table) for table in view.rope))
    if affine is None:
        return q @ x.transpose(2, 3)
    # q . (zero + scale * codes), so that the codes need no pass of their own.
    size = x.shape[-1] // affine.shape[1]
    total = 0
    for part, codes, (scale, zero) in zip(q.split(size, -1), x.split(size, -1),
                                          affine.unbind(1), strict=True):
        products = part @ codes.transpose(2, 3)
        products.mul_(scale[:, :, None]).add_(part.sum(-1, keepdim=True) * zero[:, :, None])
        total = total + products
    return total


def _value_products(p: Tensor, values: Tensor, view: SlotView,
                    block: tuple[slice, slice]) -> Tensor:
    """Probabilities [sequences, kv_heads, group, n] times one block of cached values."""
    x, affine = _widened(values, view)
    filled = None if view.filled is None else view.filled[block[0], None]
    if affine is None:
        if filled is not None:
            x = x.clone() if x is values else x
            # A NaN times 0 is a NaN, so empty slots get all bits cleared: the one way to put
            # zeros into rows that PyTorch does with vector instructions.
            x.view(torch.int32).bitwise_and_(-filled[..., None].int())
        return p @ x
    if filled is not None:
        affine = affine.masked_fill(~filled, 0)
    size = x.shape[-1] // affine.shape[1]
    return torch.cat([(p * scale[:, :, None]) @ codes + p @ zero[..., None]
                      for codes, (scale, zero) in zip(x.split(size, -1), affine.unbind(1),
                                                      strict=True)], dim=-1)


def _widened(cached: Tensor, view: SlotView) -> tuple[Tensor, Tensor | None]:
    """Cached vectors, or their codes beside scales and zero points, in float32.

    Returns [sequences, kv_heads, n, head_dim], and None or [2, groups, sequences, kv_heads, n].
    """
    if view.layout is None:
        return cached.float(), None
    codes = torch.empty(*cached.shape[:-1], view.layout.length, device=cached.device)
    unpack(cached, view.layout, out=codes)
    return codes, scales_and_zeros(cached, view.layout)
