"""The specification of a mixture of experts of few tokens each, in plain PyTorch.

Experts are tables of three matrices, and of their biases if there are any; what is not there is
None.
"""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.reference_layer import activate
from flexgen_h2o.kernels.reference_matrix import linear_quantized


def route(x, router, bias=None, *, each, normalise):
    """Choose the experts of each row, in float32; of equal logits the first.

    Parameters
    ----------
    x : Tensor [rows, hidden]
        Normed.
    router : Tensor [experts, hidden]
    bias : Tensor [experts], optional
        Added to the logits.
    each : int
        Experts of a row.
    normalise : bool
        Each row's shares sum up to 1; else they are parts of all experts' sum.

    Returns
    -------
    ids : int64 Tensor [rows, each]
    shares : float32 Tensor [rows, each]
    """
    logits = x.float() @ router.float().t() + (0 if bias is None else bias.float())
    ids = logits.argsort(dim=-1, descending=True, stable=True)[:, :each]
    shares = logits.softmax(-1).gather(-1, ids)
    return ids, shares / shares.sum(-1, keepdim=True) if normalise else shares


def experts(x, ids, shares, table, sums, *, function, most):
    """Add ``share * down(function(gate(x)) * up(x))`` of each expert that a row chose to its sum.

    Products are rounded to x's dtype. Experts that are not there are left out, and so are those
    that more than `most` rows chose.

    Parameters
    ----------
    x : Tensor [rows, hidden]
    ids : int64 Tensor [rows, each]
    shares : float32 Tensor [rows, each]
    table : sequence of (gate, up, down), or these and a bias of each, or None
        Matrices of x's dtype or `QuantizedMatrix`: gate and up [wide, hidden], down [hidden, wide].
    sums : float32 Tensor [rows, hidden]
        Updated in place.
    function : str or (slope, limit)
        One of abi.ACTIVATIONS. Or two floats, the limit above 0, for an inside of
        ``(up(x) + 1) * gate(x) * sigmoid(slope * gate(x))``, of gates of at most the limit and ups
        within it, rounded once (gpt-oss, arXiv 2508.10925).
    most : int
    """
    for number, matrices in enumerate(table):
        rows, places = (ids == number).nonzero(as_tuple=True)
        if matrices is None or not 0 < len(rows) <= most:
            continue
        parts, biases = matrices[:3], matrices[3:] or (None, None, None)
        wide, up = (_product(x[rows], *each) for each in zip(parts[:2], biases[:2], strict=True))
        if isinstance(function, tuple):
            wide = _gated(wide, up, *function)
        else:
            activate(wide, function, up)
        out = _product(wide, parts[2], biases[2])
        sums.index_add_(0, rows, out.float() * shares[rows, places, None])


def _gated(gate, up, slope, limit):
    held = gate.float().clamp(max=limit)
    return ((up.float().clamp(-limit, limit) + 1) * held * (slope * held).sigmoid()).to(gate.dtype)


def _product(x, matrix, bias):
    out = x.new_empty(len(x), len(matrix))
    if isinstance(matrix, QuantizedMatrix):
        linear_quantized(x, matrix, bias, out)
    elif bias is None:
        torch.mm(x, matrix.t(), out=out)
    else:
        torch.addmm(bias, x, matrix.t(), out=out)
    return out
