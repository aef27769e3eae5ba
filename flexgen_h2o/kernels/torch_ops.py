"""Operations by PyTorch's own kernels: prefill attention with SDPA or matmuls, RoPE, and argmax.

Rotary position embeddings (RoPE, arXiv 2104.09864, section 3.2) have the GPT-NeoX layout: dimension
i of a head is rotated with dimension i + rotary_dim / 2. Dimensions from rotary_dim on are not
rotated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.layers import DEFAULT_VARIANT, AttentionVariant
from flexgen_h2o.config.limits import BLOCK_BYTES
from flexgen_h2o.kernels.arguments import DEFAULT_ARGUMENTS, VariantArguments
from flexgen_h2o.kernels.dispatch import gpu_of, has_tensor_cores

CHUNK_BYTES = 1 << 19
"""Size of temporaries on a CPU. They stay in cache, and in the heap that malloc reuses: an RMS norm
of 2048 x 2048 in bfloat16 takes a quarter of the time."""

CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables with the capacities of the matmul caches of oneDNN and of PyTorch."""

CACHED_SHAPES = 64
"""Matmul shapes to cache: a model's weights with a few numbers of rows, which repeat every step."""

QUERY_BLOCK = 256
SQUARE_BELOW = 768
"""PyTorch's CPU kernel skips masked keys by blocks of 512, so below this length it computes the
whole square. Split into blocks of `QUERY_BLOCK` queries, 512 tokens take 0.8 of the time."""


def chunk_rows(x: Tensor) -> int:
    """Return the rows of x [rows, ...] per chunk of `CHUNK_BYTES`; all of them except on a CPU."""
    if x.device.type != "cpu":
        return max(1, x.shape[0])
    return max(1, CHUNK_BYTES // max(1, x[:1].numel() * x.element_size()))


def limit_shape_caches() -> None:
    """Limit the matmul shapes that PyTorch caches on a CPU, unless the environment sets limits.

    A shape in bfloat16 takes about half a megabyte, and the default limit is 1,024. Every prompt
    length is another shape, so jobs with many prompts would grow by a gigabyte. The variables are
    read with the first matmul of the process.
    """
    for name in CACHE_VARIABLES:
        os.environ.setdefault(name, str(CACHED_SHAPES))


def argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the token with the highest logit in each row, the first of equals, and the logit.

    logits are [rows, vocab]. The result of a row with NaN, or with every token masked, is not
    finite.
    """
    tops, tokens = logits.max(-1)  # argmax() takes far longer on a CPU
    return to_host(tokens, tops)


def to_host(tokens: Tensor, values: Tensor) -> tuple[list[int], list[float]]:
    """Copy token ids [rows] and a value for each to the host, with one synchronization."""
    host_tokens, host_values = torch.stack([tokens.double(), values.double()]).tolist()
    return [int(token) for token in host_tokens], host_values


def sdpa_prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *,
                           variant: AttentionVariant = DEFAULT_VARIANT) -> Tensor:
    """Run `reference.attention.prefill_attention` with PyTorch's SDPA.

    Without scores, for sequences that are not in chunks, and for a variant that `sdpa_supports`.
    """
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        out = _causal(*(x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v)), variant=variant)
        return out.transpose(1, 2).flatten(0, 1)
    # Sequences of unequal lengths run one by one: no padding to compute and no mask to build.
    parts = (x.split(lengths) for x in (q, k, v))
    return torch.cat([_causal(*(x.transpose(0, 1)[None] for x in one),
                              variant=variant)[0].transpose(0, 1)
                      for one in zip(*parts, strict=True)])


def sdpa_supports(variant: AttentionVariant) -> bool:
    """Return True if SDPA supports a variant: one without soft cap and attention sinks."""
    return not (variant.softcap or variant.sinks)


def _causal(q: Tensor, k: Tensor, v: Tensor, *, variant: AttentionVariant) -> Tensor:
    """Return causal attention of [batch, heads, length, head_dim]; k and v may have fewer heads."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    gpu = gpu_of(q.device) if grouped else None
    if gpu is not None and not has_tensor_cores(gpu, q.dtype):
        # No FlashAttention, and the memory-efficient kernel does not support grouped queries.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    attend = partial(F.scaled_dot_product_attention, enable_gqa=grouped, scale=variant.scale)
    window = length if variant.window is None else variant.window
    if window >= length and (q.device.type != "cpu" or not QUERY_BLOCK < length < SQUARE_BELOW):
        return attend(q, k, v, is_causal=True)
    out = torch.empty_like(q)
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        first = max(0, start + 1 - window)
        visible = torch.ones(end - start, end - first, dtype=torch.bool, device=q.device)
        visible = visible.tril(start - first).triu(start - first + 1 - window)
        out[:, :, start:end] = attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end],
                                      attn_mask=visible)
    return out


def blockwise_prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                                key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                                variant: VariantArguments = DEFAULT_ARGUMENTS) -> Tensor:
    """Run `reference.attention.prefill_attention` with matmuls, a block of queries at a time.

    For GPUs whose tensor cores PyTorch's matmuls use and Triton does not, for float32
    (`dispatch.GPU_TABLE`), and for values of another width than keys. Keys that no query of a block
    sees are skipped.
    """
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    received = [None] * len(lengths) if scores is None else scores.split(list(key_lengths), dim=1)
    for sequence in zip(q.split(list(lengths)), k.split(list(key_lengths)),
                        v.split(list(key_lengths)),
                        received, out.split(list(lengths)), strict=True):
        _attend_sequence(*sequence, decay=decay, variant=variant)
    return out


def _attend_sequence(q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, out: Tensor, *,
                     decay: float, variant: VariantArguments) -> None:
    """Compute attention of one sequence; out is [rows, heads, elements of a value]."""
    (rows, heads, dim), (tokens, kv_heads, _) = q.shape, k.shape
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    if scores is not None and decay != 1:
        scores *= decay**rows
    step = max(1, BLOCK_BYTES // (4 * heads * max(1, tokens)))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        num_keys = tokens - rows + start + count  # keys up to the last row of the block
        first = max(0, num_keys - count + 1 - variant.window) if variant.window else 0
        queries = q[start : start + count].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        logits = _float_matmul(queries.flatten(1, 2), keys[..., first:num_keys]).unflatten(
            1, (-1, count))
        # Scaling the queries instead would round them again.
        logits.mul_(variant.scale or dim**-0.5)
        if variant.softcap:
            logits.div_(variant.softcap).tanh_().mul_(variant.softcap)
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        logits[..., num_keys - count - first :].masked_fill_(future, float("-inf"))
        if variant.window:
            key = torch.arange(first, num_keys, device=q.device)
            query = torch.arange(num_keys - count, num_keys, device=q.device)[:, None]
            logits.masked_fill_(key <= query - variant.window, float("-inf"))
        p = _softmax(logits, variant.sink_logits)
        if scores is not None:
            scores[:, first:num_keys] += _summed(p, decay, rows - start - count)
        attended = torch.bmm(p.to(v.dtype).flatten(1, 2), values[:, first:num_keys])
        out[start : start + count] = attended.unflatten(1, (-1, count)).permute(
            2, 0, 1, 3).flatten(1, 2)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over keys of [kv_heads, group, rows, keys], with sinks [heads]."""
    if sinks is None:
        return logits.softmax(-1)
    learned_sinks = sinks.view(*logits.shape[:2], 1, 1)
    lse = torch.logaddexp(logits.logsumexp(-1, keepdim=True), learned_sinks)
    return logits.sub_(lse).exp_()


def _summed(p: Tensor, decay: float, after: int) -> Tensor:
    """Sum probabilities [kv_heads, group, rows, keys] over heads and rows.

    Each row is multiplied by decay ** n, with n the number of rows after it; `after` rows follow
    the block.
    """
    if decay == 1:
        return p.sum((1, 2))
    following = torch.arange(after + p.shape[2] - 1, after - 1, -1, dtype=torch.float64,
                             device=p.device)
    return (p * (decay**following).float()[:, None]).sum((1, 2))


def _float_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product of batches of matrices, of which only sums are rounded.

    `torch.bmm` has `out_dtype` from PyTorch 2.8 on, on CUDA. Else both matrices are converted to
    float32, in which products of 16-bit floats are exact.
    """
    if a.is_cuda and a.dtype == torch.float16 and hasattr(torch.ops.aten.bmm, "dtype"):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the rows of packed sequences x [rows, heads, head_dim] in place, and return x.

    With cos and sin [rows, rotary_dim / 2] in x's dtype, products are rounded to it; in a wider
    dtype, only the result is rounded.
    """
    rows = chunk_rows(x)
    for chunk, c, s in zip(x.split(rows), cos[:, None].split(rows), sin[:, None].split(rows),
                           strict=True):
        if cos.dtype == x.dtype:
            _rotate_(chunk, c, s)
        else:
            chunk.copy_(rotated(chunk, c, s))
    return x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return a rotated copy of x.

    x is [..., head_dim]; cos and sin [..., rotary_dim / 2] broadcast over its leading dimensions.
    The result has x's dtype, and is computed in the tables' dtype if that is wider.
    """
    wide = torch.promote_types(x.dtype, cos.dtype)
    return _rotate_(x.to(wide, copy=True), cos, sin).to(x.dtype)


def rotated_to(x: Tensor, positions: Tensor, rope: Callable[[Tensor], tuple[Tensor, Tensor] | None]
               ) -> Tensor:
    """Return x rotated to positions; x itself if `rope` returns None.

    x is [heads, tokens, head_dim], positions are [heads or 1, tokens]. `rope` returns cosines and
    sines [n, rotary_dim / 2] of positions [n].
    """
    tables = rope(positions.flatten())
    if tables is None:
        return x
    return rotated(x, *(table.unflatten(0, positions.shape) for table in tables))


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x in place, as `rotated` does, and return it."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    before = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(before, sin)
    return x
