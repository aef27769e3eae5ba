"""Rows to treat at once where a temporary is needed, so that it stays in a CPU's caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.attention_form import DEFAULT_FORM, AttentionForm
from flexgen_h2o.kernels.arguments import DEFAULT_ARGUMENTS, FormArguments
from flexgen_h2o.kernels.gpus import gpu_of, has_tensor_cores

# Such temporaries also stay in the heap that malloc reuses: an RMS norm of 2048 x 2048 in bf16
# takes a quarter of the time.
CHUNK_BYTES = 1 << 19


def chunk_rows(x: Tensor) -> int:
    """Rows of x [rows, ...] to treat at once: all of them, except on a CPU."""
    if x.device.type != "cpu":
        return max(1, x.shape[0])
    return max(1, CHUNK_BYTES // max(1, x[:1].numel() * x.element_size()))


# A bound on what PyTorch keeps for each shape of matrix product that it has met on a CPU.


SETTINGS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables of oneDNN, and of PyTorch's layer above it: the products that each keeps prepared."""

PRODUCTS = 64
"""A model's matrices with a few numbers of rows each: all that repeats from step to step."""


def limit_shape_caches() -> None:
    """Let PyTorch keep at most `PRODUCTS` products prepared, unless the environment says else.

    One in bfloat16 takes about half a megabyte, and 1,024 are kept by default. Prompts come with
    ever new numbers of rows, so that a job of many texts grew by a gigabyte. The variables are
    read with the first product of the process.
    """
    for name in SETTINGS:
        os.environ.setdefault(name, str(PRODUCTS))


# The choice of a next token, and its way to the host.


def argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """The likeliest token of each row, of equals the first, and its logit.

    Parameters
    ----------
    logits : Tensor [rows, vocab]

    Returns
    -------
    list of int
    list of float
        Finite if and only if the token is a choice: NaN is above all numbers, and where no token
        is left minus infinity is the highest.
    """
    tops, tokens = logits.max(-1)  # argmax() takes far longer on a CPU
    return to_host(tokens, tops)


def to_host(tokens: Tensor, values: Tensor) -> tuple[list[int], list[float]]:
    """Token ids [rows] and a number for each, in one copy: the device is waited for once."""
    chosen, found = torch.stack([tokens.double(), values.double()]).tolist()
    return [int(token) for token in chosen], found


# Causal attention without scores by PyTorch's own fused kernels, where those are the fastest.


QUERY_BLOCK = 256
SQUARE_BELOW = 768
"""PyTorch's CPU kernel skips the future by key blocks of 512: below this length it computes the
whole square. Cut into query blocks that see only their past, 512 tokens take 0.8 of the time."""


def sdpa_prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *,
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


def sdpa_supports(form: AttentionForm) -> bool:
    """True if PyTorch's kernels can do it: they have no soft caps, and no sinks."""
    return not (form.softcap or form.sinks)


def _causal(q: Tensor, k: Tensor, v: Tensor, *, form: AttentionForm) -> Tensor:
    """Causal attention of [batch, heads, length, head_dim]; fewer heads in k and v."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    gpu = gpu_of(q.device) if grouped else None
    if gpu is not None and not has_tensor_cores(gpu, q.dtype):
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


# Prompt attention with scores through PyTorch's matrix products, a block of queries at a time.
#
# For GPUs whose matrix units PyTorch's products use and Triton does not, and for float32; see
# `dispatch.GPU_TABLE`. Logits are float32: products of float16 matrices come out so where PyTorch
# can
# (`torch.bmm` with `out_dtype`: PyTorch 2.8 and later, on CUDA), else both matrices are made
# float32
# first, in which their products are exact.


BLOCK_BYTES = 32 << 20
"""Of the logits of a block. Some more buffers are as large: memory is linear in the tokens."""


def blockwise_prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
                      key_lengths: Sequence[int], scores: Tensor | None, decay: float,
                      form: FormArguments = DEFAULT_ARGUMENTS) -> Tensor:
    """See `reference.prefill_attention`; what no query of a block sees is skipped."""
    out = q.new_empty(q.shape)
    received = [None] * len(lengths) if scores is None else scores.split(list(key_lengths), dim=1)
    for one in zip(q.split(list(lengths)), k.split(list(key_lengths)), v.split(list(key_lengths)),
                   received, out.split(list(lengths)), strict=True):
        _attend_sequence(*one, decay=decay, form=form)
    return out


def _attend_sequence(q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, out: Tensor, *,
                     decay: float, form: FormArguments) -> None:
    """`prefill_attention` of one sequence: q and out [rows, heads, head_dim]."""
    (rows, heads, dim), (tokens, kv_heads, _) = q.shape, k.shape
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    if scores is not None and decay != 1:
        scores *= decay**rows
    step = max(1, BLOCK_BYTES // (4 * heads * max(1, tokens)))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        seen = tokens - rows + start + count  # by the last row of the block
        first = max(0, seen - count + 1 - form.window) if form.window else 0
        mine = q[start : start + count].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        logits = _float_product(mine.flatten(1, 2), keys[..., first:seen]).unflatten(
            1, (-1, count))
        # Scaled here and not in the queries, which would round them again.
        logits.mul_(form.scale or dim**-0.5)
        if form.softcap:
            logits.div_(form.softcap).tanh_().mul_(form.softcap)
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        logits[..., seen - count - first :].masked_fill_(future, float("-inf"))
        if form.window:
            key = torch.arange(first, seen, device=q.device)
            query = torch.arange(seen - count, seen, device=q.device)[:, None]
            logits.masked_fill_(key <= query - form.window, float("-inf"))
        p = _softmax(logits, form.sink_logits)
        if scores is not None:
            scores[:, first:seen] += _summed(p, decay, rows - start - count)
        attended = torch.bmm(p.to(v.dtype).flatten(1, 2), values[:, first:seen])
        out[start : start + count] = attended.unflatten(1, (-1, count)).permute(
            2, 0, 1, 3).flatten(1, 2)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the keys of [kv_heads, group, rows, keys], with the sinks [heads] in the denominator."""
    if sinks is None:
        return logits.softmax(-1)
    own = sinks.view(*logits.shape[:2], 1, 1)
    lse = torch.logaddexp(logits.logsumexp(-1, keepdim=True), own)
    return logits.sub_(lse).exp_()


def _summed(p: Tensor, decay: float, after: int) -> Tensor:
    """Probabilities [kv_heads, group, rows, keys] summed over heads and rows; `after` so many rows
    follow, and each row's share is decayed by those that follow it."""
    if decay == 1:
        return p.sum((1, 2))
    following = torch.arange(after + p.shape[2] - 1, after - 1, -1, dtype=torch.float64,
                             device=p.device)
    return (p * (decay**following).float()[:, None]).sum((1, 2))


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    """float32 product of batches of matrices; nothing is rounded but the sums."""
    if a.is_cuda and a.dtype == torch.float16 and hasattr(torch.ops.aten.bmm, "dtype"):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
