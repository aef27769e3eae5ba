"""Prompt attention with scores through PyTorch's matrix products, a block of queries at a time.

For GPUs whose matrix units PyTorch's products use and Triton does not, and for float32; see
`dispatch.GPU_TABLE`. Logits are float32: products of float16 matrices come out so where PyTorch can
(`torch.bmm` with `out_dtype`: PyTorch 2.8 and later, on CUDA), else both matrices are made float32
first, in which their products are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_h2o.kernels.arguments import DEFAULT_ARGUMENTS, FormArguments

BLOCK_BYTES = 32 << 20
"""Of the logits of a block. Some more buffers are as large: memory is linear in the tokens."""


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int],
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
