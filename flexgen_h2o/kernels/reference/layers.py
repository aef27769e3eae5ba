"""Specification of norms, rotation, activations and mixtures of experts, in plain PyTorch.

Everything is computed in float32 and rounded once, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.reference.matrix import linear_quantized
from flexgen_h2o.kernels.rotary import rotated

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def norm(x, weight, bias, out, *, eps, centered):
    """Compute LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) of each row.

    Parameters
    ----------
    x : Tensor [rows, width]
    weight, bias : Tensor [width] or None
        None: 1 and 0.
    out : Tensor [rows, width]
        Written in place; may be x.
    eps : float
        Added to the variance.
    centered : bool
        Subtract each row's mean: LayerNorm, otherwise RMSNorm.
    """
    result = x.float()
    if centered:
        result = result - result.mean(-1, keepdim=True)
    result = result * (result.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        result = result * weight.float()
    if bias is not None:
        result = result + bias.float()
    out.copy_(result)


def rotate(x, cos, sin, change=None, offsets=None):
    """Rotate the leading dimensions of each head in place, then change the basis of the heads.

    Parameters
    ----------
    x : Tensor [rows, heads, head_dim]
    cos, sin : float32 Tensor [rows, half] or None
        half is at most head_dim / 2; see `kernels.rotary` for the layout. None: no rotation.
    change : h2o.key_smoothing.BasisChange or None
    offsets : float32 Tensor [rows, heads] or None
        Overwritten with the products of the rotated heads with `change.mean`.
    """
    result = x.float()
    if cos is not None:
        result = rotated(result, cos[:, None].float(), sin[:, None].float())
    if offsets is not None:
        offsets.copy_(change.offsets(result))
    x.copy_(result if change is None else change(result))


def activate(x, function, factor=None):
    """Compute ``x = function(x) * factor`` in place.

    Parameters
    ----------
    x : Tensor [rows, width]
    function : str
        One of abi.ACTIVATIONS; gelu_tanh is the tanh approximation (arXiv 1606.08415, section 2).
    factor : Tensor [rows, width] or None
        None: 1.
    """
    result = _FUNCTIONS[function](x.float())
    x.copy_(result if factor is None else result * factor.float())


def route(x, router, bias=None, correction=None, *, per_token, config):
    """Return the experts of each row and their weights, in float32.

    The experts with the highest scores are chosen, best first. Ties are broken in favor of the
    expert with the lower number.

    Parameters
    ----------
    x : Tensor [rows, hidden]
        After the norm.
    router : Tensor [experts, hidden]
    bias : Tensor [experts], optional
        Added to the logits.
    correction : Tensor [experts] or [1, experts], optional
        Added to the scores for the selection only (arXiv 2408.15664).
    per_token : int
        Experts per row.
    config : RouterConfig

    Returns
    -------
    ids : int64 Tensor [rows, per_token]
    routing_weights : float32 Tensor [rows, per_token]
    """
    logits = x.float() @ router.float().t() + (0 if bias is None else bias.float())
    if config.scoring == "sparsemixer":
        return _sparsemixer(logits, per_token, config.jitter)
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)
    # Different logits may have equal scores, because these are rounded.
    scores_for_choice = logits if config.groups == 1 and correction is None else scores
    if correction is not None:
        scores_for_choice = scores + correction.float()
    if config.groups > 1:
        scores_for_choice = _best_groups(scores_for_choice, config)
    ids = scores_for_choice.argsort(dim=-1, descending=True, stable=True)[:, :per_token]
    routing_weights = scores.gather(-1, ids)
    if config.normalize:
        routing_weights /= routing_weights.sum(-1, keepdim=True).clamp(min=config.min_sum)
    return ids, routing_weights if config.scale == 1.0 else routing_weights * config.scale


def _best_groups(scores, config):
    """Return scores [rows, experts] with -inf outside of each row's best groups."""
    grouped = scores.unflatten(-1, (config.groups, -1))
    best = grouped.topk(min(config.group_experts, grouped.shape[-1]), dim=-1)[0].sum(-1)
    ranks = best.argsort(dim=-1, descending=True, stable=True)
    outside = torch.ones_like(best, dtype=torch.bool)
    outside.scatter_(-1, ranks[:, : config.groups_per_token], False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def _sparsemixer(logits, per_token, jitter):
    """Return the experts of arXiv 2409.12136 at inference.

    An expert's weight is its softmax among the remaining experts whose logits are near its own.
    """
    left, ids, routing_weights = logits.clone(), [], []
    for _ in range(per_token):
        largest, chosen = left.max(-1, keepdim=True)
        far = (largest - logits) / logits.abs().clamp(min=largest) > 2 * jitter
        weights = left.masked_fill(far, -torch.inf).softmax(-1)
        ids.append(chosen)
        routing_weights.append(weights.gather(-1, chosen))
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(ids, -1), torch.cat(routing_weights, -1)


def experts(x, ids, routing_weights, table, sums, *, function, max_rows):
    """Add ``weight * down(function(gate(x)) * up(x))`` of each row's experts to its sum.

    Results of matmuls are rounded to x's dtype. Experts that are missing in the table, or selected
    by more than `max_rows` rows, are skipped.

    Parameters
    ----------
    x : Tensor [rows, hidden]
    ids : int64 Tensor [rows, per_token]
    routing_weights : float32 Tensor [rows, per_token]
    table : sequence of tuple or None
        For each expert (gate, up, down), optionally followed by their biases; None if missing.
        Weights in x's dtype or `QuantizedMatrix`: gate and up [intermediate, hidden],
        down [hidden, intermediate].
    sums : float32 Tensor [rows, hidden]
        Updated in place.
    function : str or (slope, limit)
        One of abi.ACTIVATIONS. Or the clamped SwiGLU of gpt-oss (arXiv 2508.10925), rounded once:
        ``(up(x) + 1) * gate(x) * sigmoid(slope * gate(x))``, with gate(x) clamped to at most limit,
        which is above 0, and up(x) to [-limit, limit].
    max_rows : int
        Maximum rows of an expert.
    """
    for number, matrices in enumerate(table):
        rows, places = (ids == number).nonzero(as_tuple=True)
        if matrices is None or not 0 < len(rows) <= max_rows:
            continue
        parts, biases = matrices[:3], matrices[3:] or (None, None, None)
        gate, up = (_matmul(x[rows], *arguments)
                    for arguments in zip(parts[:2], biases[:2], strict=True))
        if isinstance(function, tuple):
            gate = _gated(gate, up, *function)
        else:
            activate(gate, function, up)
        out = _matmul(gate, parts[2], biases[2])
        sums.index_add_(0, rows, out.float() * routing_weights[rows, places, None])


def _gated(gate, up, slope, limit):
    x = gate.float().clamp(max=limit)
    return ((up.float().clamp(-limit, limit) + 1) * x * (slope * x).sigmoid()).to(gate.dtype)


def _matmul(x, matrix, bias):
    out = x.new_empty(len(x), len(matrix))
    if isinstance(matrix, QuantizedMatrix):
        linear_quantized(x, matrix, bias, out)
    elif bias is None:
        torch.mm(x, matrix.t(), out=out)
    else:
        torch.addmm(bias, x, matrix.t(), out=out)
    return out
