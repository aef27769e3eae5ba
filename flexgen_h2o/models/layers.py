"""Layer operations of the model families: functions over tensors, scratch memory, and capture.

Rows are packed real tokens: there is no batch and no padding dimension. Functions whose name ends
in an underscore write into their first argument. Large results go through `out=`, because page
faults of a new tensor can cost more than the matmul that fills it (bf16 2048x2048x8192 on 2 cores:
115 ms into a new tensor, 80 ms into a reused one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.kernels import dispatch, ops
from flexgen_h2o.kernels.arguments import Matrix, QuantizedMatrix, ShardedMatrix
from flexgen_h2o.kernels.cpu import experts as native_experts
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import layers as reference_layers
from flexgen_h2o.kernels.torch_ops import chunk_rows

_PIECE = 1 << 14
"""Elements of a piece of a row: too few for PyTorch to split them between threads."""


class Scratch:
    """Named, reusable buffers on one device.

    There is one flat buffer per (name, dtype), which only grows, so a loop with constant shapes
    allocates nothing. The contents of a returned tensor are undefined. It is valid until the next
    `get` of its name.

    Parameters
    ----------
    device : torch.device or str
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of `shape` in the buffer `name`."""
        size, key = math.prod(shape), (name, dtype)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers.pop(key, None)  # free the old buffer before the new one is allocated
            self._buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
        return self._buffers[key][:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Total bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, *,
           out: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Parameters
    ----------
    x : Tensor [rows, in]
    weight : Tensor, QuantizedMatrix or ShardedMatrix [out, in]
    bias : Tensor [out], optional
    out : Tensor [rows, out], optional
        Destination, which must not overlap x. None: a new tensor.

    Returns
    -------
    Tensor [rows, out], in x's dtype
    """
    if isinstance(weight, ShardedMatrix):
        out = x.new_empty((len(x), len(weight))) if out is None else out
        for outputs, part in weight.shards(x):
            linear(x, part, None if bias is None else bias[outputs], out=out[:, outputs])
        return out
    function = _native_matmul(x, weight)
    if function is not None:
        out = x.new_empty((len(x), len(weight))) if out is None else out
        function(x, weight, bias, out)
        return out
    dense: Any = weight  # a Tensor: all others have a native function
    if out is None:
        return F.linear(x, dense, bias)
    if bias is None:
        return torch.mm(x, dense.t(), out=out)
    return torch.addmm(bias, x, dense.t(), out=out)


def add_linear_(residual: Tensor, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute ``residual += x @ weight.T + bias`` without a temporary tensor; return residual.

    Shapes are residual [rows, out], x [rows, in], weight [out, in], bias [out].
    """
    if isinstance(weight, ShardedMatrix):
        for outputs, part in weight.shards(x):
            add_linear_(residual[:, outputs], x, part, None if bias is None else bias[outputs])
        return residual
    function = _native_matmul(x, weight)
    if function is not None:
        function(x, weight, bias, residual, add=True)
        return residual
    dense: Any = weight  # a Tensor: all others have a native function
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(x, dense.t())


def _native_matmul(x: Tensor, weight: Tensor | QuantizedMatrix) -> Callable[..., None] | None:
    """Return the matmul of the C++ library; None if PyTorch's is to be used."""
    if isinstance(weight, QuantizedMatrix):
        return ops.linear_quantized
    return ops.linear_kernel(x, weight)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float,
               out: Tensor | None = None) -> Tensor:
    """Return the layer norm of each row of x [rows, hidden]; out may be x."""
    if _uses_native_norm(x):
        return _native_norm(x, weight, bias, out, eps=eps, centered=True)
    norm = partial(F.layer_norm, normalized_shape=x.shape[-1:], weight=weight, bias=bias, eps=eps)
    return norm(x) if out is None else _into(out, norm, x)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, out: Tensor | None = None,
             offset: float = 0.0) -> Tensor:
    """Return the RMS norm (arXiv 1910.07467) of each row of x [rows, hidden]; out may be x.

    offset is added to the weights in float32: some families store them minus one. Without weights
    they are 1.
    """
    if offset and weight is not None:
        return _offset_rms_norm(x, weight, eps=eps, out=out, offset=offset)
    if _uses_native_norm(x):
        return _native_norm(x, weight, None, out, eps=eps, centered=False)
    norm = partial(F.rms_norm, normalized_shape=x.shape[-1:], weight=weight, eps=eps)
    return norm(x) if out is None else _into(out, norm, x)


def _uses_native_norm(x: Tensor) -> bool:
    """Return True if the norm of the C++ library is faster, or wanted for batch invariance.

    PyTorch's RMS norm is several operations. Its layer norm of 2,048 rows takes 1.6 times as long
    on a Xeon with AVX-512.
    """
    return (x.dtype == torch.bfloat16 or dispatch.is_batch_invariant()) and ops.uses_native(x)


def _native_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor | None, *,
                 eps: float, centered: bool) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    native.norm(x, weight, bias, out, eps=eps, centered=centered)
    return out


def _offset_rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None,
                     offset: float) -> Tensor:
    factors = weight.float() + offset

    def norm(part: Tensor) -> Tensor:
        return F.rms_norm(part.float(), part.shape[-1:], factors, eps).to(part.dtype)

    return norm(x) if out is None else _into(out, norm, x)


def activation(name: str) -> str:
    """Return the key of `ACTIVATE` for one of `model_config.ACTIVATIONS`.

    gelu_new and gelu_fast are the tanh approximation, equal within rounding.
    """
    if name in ("relu", "gelu"):
        return name
    if name in ("silu", "swish"):
        return "silu"
    if name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        return "gelu_tanh"
    raise ValueError(f"unknown activation {name!r}")


ACTIVATE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    "relu": torch.relu_,
    "silu": partial(F.silu, inplace=True),
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
})
"""In-place functions by the names of abi.ACTIVATIONS."""


def activate_(x: Tensor, name: str, factor: Tensor | None = None) -> Tensor:
    """Compute ``x = activation(x) * factor`` in place and return x.

    name is one of `model_config.ACTIVATIONS`.
    """
    name = activation(name)
    # PyTorch's erf is faster. On a Xeon PyTorch takes 2.4 times as long for relu and gelu_tanh,
    # and 1.3 times for silu with a factor. But its vectors end elsewhere with other rows.
    is_faster = name != "gelu" and x.dtype == torch.bfloat16
    if (is_faster or dispatch.is_batch_invariant()) and ops.uses_native(x):
        native.activate(x, name, factor)
        return x
    ACTIVATE[name](x)
    return x if factor is None else x.mul_(factor)


def xielu_(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> None:
    """Compute xIELU (arXiv 2411.13010) of x [rows, width] in place; its parameters are [1] each.

    The constants equal transformers': beta 0.5, and an upper bound of -1e-6 for expm1.
    """
    positive, negative = F.softplus(alpha_p.float()), 0.5 + F.softplus(alpha_n.float())

    def activate(part: Tensor) -> Tensor:
        wide = part.float()
        below = (wide.clamp(max=-1e-6).expm1_() - wide).mul_(negative)
        return torch.where(wide > 0, positive * wide * wide, below).add_(wide, alpha=0.5)

    _into(x, activate, x)


def sigmoid_(x: Tensor) -> Tensor:
    """Compute the sigmoid of x [rows, width] in place and return x.

    PyTorch computes the last elements of a tensor, or of a thread's share, with other instructions
    than full vectors, and with other bits. For batch invariance it gets one piece of a row at a
    time.
    """
    pieces = (chain.from_iterable(row.split(_PIECE) for row in x)
              if dispatch.is_batch_invariant() else (x,))
    for piece in pieces:
        piece.sigmoid_()
    return x


def sort_pairs_(x: Tensor, width: int) -> None:
    """Sort the first `width` dimensions of x [rows, heads, head_dim]: even ones, then odd ones.

    Rotary embeddings of pairs (2i, 2i + 1) become rotary embeddings of pairs (i, i + width / 2).
    Products of queries with keys stay the same.
    """
    part = x[..., :width]
    _into(part, lambda heads: torch.cat((heads[..., ::2], heads[..., 1::2]), dim=-1), part)


def _into(out: Tensor, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows = chunk_rows(x)  # norms have no `out=`
    for chunk, target in zip(x.split(rows), out.split(rows), strict=True):
        target.copy_(function(chunk))
    return out


class Operations(Scratch):
    """The operations of a decoder layer, and the buffers for their results.

    Families call these methods, and not the functions above, so that the same forward pass can be
    captured by `CapturingOperations`.
    """

    linear = staticmethod(linear)
    add_linear_ = staticmethod(add_linear_)
    layer_norm = staticmethod(layer_norm)
    rms_norm = staticmethod(rms_norm)
    sort_pairs_ = staticmethod(sort_pairs_)
    activate_ = staticmethod(activate_)
    xielu_ = staticmethod(xielu_)
    sigmoid_ = staticmethod(sigmoid_)

    def add_(self, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        """Compute ``x += scale * y``, with the product rounded as in transformers."""
        x.add_(y if scale == 1.0 else y * scale)

    def clamp_(self, x: Tensor, limit: float) -> None:
        """Clamp x to [-limit, limit]."""
        x.clamp_(-limit, limit)

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        """Multiply x by a factor [1] in place."""
        x.mul_(factor)

    def copy_(self, out: Tensor, x: Tensor) -> None:
        """Copy x to out."""
        out.copy_(x)

    def linear_heads(self, x: Tensor, weight: Tensor, *, out: Tensor) -> None:
        """Multiply each head of x [rows, heads, in] by its matrix of weight [heads, outputs, in].

        `out` is [rows, heads, outputs].
        """
        if dispatch.is_batch_invariant():
            for head, matrix in enumerate(weight):
                linear(x[:, head], matrix, out=out[:, head])
            return
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))

    def gate_(self, x: Tensor, gate: Tensor) -> Tensor:
        """Compute ``x *= sigmoid(gate)`` and return x; gate is overwritten."""
        return x.mul_(sigmoid_(gate))

    def route(self, x: Tensor, router: Tensor, bias: Tensor | None = None,
              correction: Tensor | None = None, *, per_token: int, config: RouterConfig
              ) -> tuple[Tensor, Tensor]:
        """Return ids and routing weights of the experts: see `kernels.reference.layers.route`."""
        plain = config.is_plain and correction is None and router.dtype == x.dtype
        if plain and x.is_cpu and x.dtype == torch.bfloat16 and not ops.uses_reference("cpu"):
            return native_experts.route(x, router, bias, per_token=per_token,
                                        normalize=config.normalize)
        return reference_layers.route(x, router, bias, correction, per_token=per_token,
                                      config=config, linear=linear, sigmoid_=sigmoid_)


class CapturingOperations(Operations):
    """Captures the operations of a decode step, to be replayed; computes nothing.

    Tensors must stay at their addresses while the capture is in use. A matmul is bound to the
    implementation that dispatch selects when it is captured. bfloat16 on a CPU only.

    Parameters
    ----------
    operations : Operations
        Provides the buffers, whose contents are undefined between replays.
    capture : CapturedCalls
        Receives the calls.
    """

    def __init__(self, operations: Operations, capture: CapturedCalls):
        super().__init__(operations.device)
        self.get = operations.get  # type: ignore[method-assign]  # shares the buffers
        self._capture = capture

    def linear(self, x, weight, bias=None, *, out=None):
        if self._capture_matmul(x, weight, bias, out, add=False):
            return out
        if bias is None:
            self._capture.append(partial(torch.mm, x, weight.t(), out=out))
        else:
            self._capture.append(partial(torch.addmm, bias, x, weight.t(), out=out))
        return out

    def add_linear_(self, residual, x, weight, bias=None):
        if self._capture_matmul(x, weight, bias, residual, add=True):
            return residual
        if bias is not None:
            self._capture.append(partial(residual.add_, bias))
        self._capture.append(partial(residual.addmm_, x, weight.t()))
        return residual

    def _capture_matmul(self, x: Tensor, weight: Any, bias: Tensor | None, out: Tensor, *,
                        add: bool) -> bool:
        """Capture a matmul of the C++ library; return False if PyTorch's is to be used."""
        if isinstance(weight, QuantizedMatrix):
            if ops.quantized_implementation(x, weight) == "codes":
                native.linear_quantized(x, weight, bias, out, add, capture=self._capture)
            else:
                self._capture.append(partial(ops.linear_quantized, x, weight, bias, out, add=add))
            return True
        kernel = ops.linear_kernel(x, weight)
        if kernel is None:
            return False
        kernel(x, weight, bias, out, add, capture=self._capture)
        return True

    def layer_norm(self, x, weight, bias, *, eps, out=None):
        native.norm(x, weight, bias, out, eps=eps, centered=True, capture=self._capture)
        return out

    def rms_norm(self, x, weight, *, eps, out=None, offset=0.0):
        if offset:
            self._capture.append(partial(rms_norm, x, weight, eps=eps, out=out, offset=offset))
            return out
        native.norm(x, weight, None, out, eps=eps, centered=False, capture=self._capture)
        return out

    def add_(self, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        self._capture.append(partial(super().add_, x, y, scale))

    def clamp_(self, x: Tensor, limit: float) -> None:
        self._capture.append(partial(x.clamp_, -limit, limit))

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        self._capture.append(partial(x.mul_, factor))

    def copy_(self, out: Tensor, x: Tensor) -> None:
        self._capture.append(partial(out.copy_, x))

    def linear_heads(self, x: Tensor, weight: Tensor, *, out: Tensor) -> None:
        self._capture.append(partial(super().linear_heads, x, weight, out=out))

    def sort_pairs_(self, x, width):
        self._capture.append(partial(sort_pairs_, x, width))

    def xielu_(self, x, alpha_p, alpha_n):
        self._capture.append(partial(xielu_, x, alpha_p, alpha_n))

    def gate_(self, x: Tensor, gate: Tensor) -> Tensor:
        self._capture.append(partial(sigmoid_, gate))
        self._capture.append(partial(x.mul_, gate))
        return x

    def activate_(self, x, name, factor=None):
        native.activate(x, activation(name), factor, capture=self._capture)
        return x
