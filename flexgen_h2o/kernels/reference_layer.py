"""The specification of what stands between the products of a decoder layer, in plain PyTorch.

Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch.nn.functional as F

from flexgen_h2o.kernels.rotary import rotated

_FUNCTIONS = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu,
              "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def norm(x, weight, bias, out, *, eps, centred):
    """Layer normalisation (arXiv 1607.06450) of each row, or by its root mean square (arXiv
    1910.07467).

    Parameters
    ----------
    x : Tensor [rows, width]
    weight, bias : Tensor [width] or None
        1 and 0 where there is none.
    out : Tensor [rows, width]
        Written in place; may be x.
    eps : float
        Added to the variance.
    centred : bool
        Subtract each row's mean.
    """
    result = x.float()
    if centred:
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
        half is at most head_dim / 2: see `kernels.rotary`. None: no rotation.
    change : h2o.key_smoothing.BasisChange or None
    offsets : float32 Tensor [rows, heads] or None
        Written in place: the products of the rotated heads with `change.mean`.
    """
    result = x.float()
    if cos is not None:
        result = rotated(result, cos[:, None].float(), sin[:, None].float())
    if offsets is not None:
        offsets.copy_(change.offsets(result))
    x.copy_(result if change is None else change(result))


def activate(x, function, factor=None):
    """``x = function(x) * factor``, in place.

    Parameters
    ----------
    x : Tensor [rows, width]
    function : str
        One of abi.ACTIVATIONS; gelu_tanh is the approximation by tanh (arXiv 1606.08415).
    factor : Tensor [rows, width] or None
        None: 1.
    """
    result = _FUNCTIONS[function](x.float())
    x.copy_(result if factor is None else result * factor.float())
