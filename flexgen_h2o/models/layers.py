"""Building blocks of the model families: pure functions over plain tensors, and reusable scratch
memory.

Rows are real tokens, packed: there is no batch and no padding dimension. Functions whose name
ends in an underscore write into their first argument. A fresh [rows, wide] tensor costs more in
page faults than some products take to fill it (measured: bf16 2048x2048x8192 on 2 cores, 115 ms
into a fresh output and 80 ms into a reused one), so everything large goes through `out=`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import experts as native_experts
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.matrix import Matrix, QuantizedMatrix, ShardedMatrix
from flexgen_h2o.kernels.torch_ops import chunk_rows


class Scratch:
    """Named buffers on one device that a loop uses again and again.

    One flat buffer is kept per (name, dtype) and only ever grows, so a loop that asks for the
    same shapes allocates nothing. Contents are undefined when handed out; a view is good until
    its name is asked for again. Names never share memory.

    Parameters
    ----------
    device : torch.device or str
        Where the buffers live.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of `shape` in the buffer of that name."""
        size, key = math.prod(shape), (name, dtype)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers.pop(key, None)  # let go of the old one before its successor is made
            self._buffers[key] = torch.empty(size, dtype=dtype, device=self.device)
        return self._buffers[key][:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held by all buffers together."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


class Operations(Scratch):
    """The operations of a decoder layer, each carried out at once, and the buffers for what they
    give.

    The families call them here, so that the same forward pass can be captured: see
    `CapturingOperations`.
    """

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None, *, out: Tensor) -> None:
        """See `linear`."""
        linear(x, weight, bias, out=out)

    def add_linear_(self, residual: Tensor, x: Tensor, weight: Matrix,
                    bias: Tensor | None) -> None:
        """See `add_linear_`."""
        add_linear_(residual, x, weight, bias)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float,
                   out: Tensor) -> Tensor:
        """See `layer_norm`; out is returned."""
        return layer_norm(x, weight, bias, eps=eps, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor,
                 offset: float = 0.0) -> Tensor:
        """See `rms_norm`; out is returned."""
        return rms_norm(x, weight, eps=eps, out=out, offset=offset)

    def add_(self, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        """``x += scale * y``."""
        x.add_(y, alpha=scale)

    def clamp_(self, x: Tensor, limit: float) -> None:
        """No element of x is larger than this from here on, nor smaller than its negative."""
        x.clamp_(-limit, limit)

    def activate_(self, x: Tensor, name: str, factor: Tensor | None = None) -> Tensor:
        """See `activate_`."""
        return activate_(x, name, factor)

    def route(self, x: Tensor, router: Tensor, bias: Tensor | None = None, *,
              per_token: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """See `reference_experts.route`."""
        ours = x.is_cpu and x.dtype == torch.bfloat16 and not ops.uses_reference("cpu")
        if ours:
            return native_experts.route(x, router, bias, each=per_token, normalise=normalise)
        logits = x.float() @ router.float().t()
        if bias is not None:
            logits += bias.float()
        shares, ids = logits.softmax(-1).topk(per_token, dim=-1)
        if normalise:
            shares /= shares.sum(-1, keepdim=True)
        return ids, shares


class CapturingOperations(Operations):
    """Notes operations in a program, with the buffers of other operations.

    A product is the implementation that `dispatch` names for its rows when it is noted; PyTorch's
    are calls of their own between those of the C++ library.

    Parameters
    ----------
    operations : Operations
        Whose buffers are used. What they hold is undefined between runs of the program.
    capture : CapturedCalls
    """

    def __init__(self, operations: Operations, capture: CapturedCalls):
        super().__init__(operations.device)
        self.get = operations.get
        self._capture = capture

    def linear(self, x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None, *,
               out: Tensor) -> None:
        if self._capture_matmul(x, weight, bias, out, add=False):
            return
        if bias is None:
            self._capture.append(partial(torch.mm, x, weight.t(), out=out))
        else:
            self._capture.append(partial(torch.addmm, bias, x, weight.t(), out=out))

    def add_linear_(self, residual: Tensor, x: Tensor, weight: Tensor | QuantizedMatrix,
                    bias: Tensor | None) -> None:
        if self._capture_matmul(x, weight, bias, residual, add=True):
            return
        if bias is not None:
            self._capture.append(partial(residual.add_, bias))
        self._capture.append(partial(residual.addmm_, x, weight.t()))

    def _capture_matmul(self, x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None,
                     out: Tensor, *, add: bool) -> bool:
        """Note a product of ours; False where PyTorch's is to be used."""
        if isinstance(weight, QuantizedMatrix):
            if ops.quantized_choice(x, weight) == "codes":
                native.linear_quantized(x, weight, bias, out, add, capture=self._capture)
            else:
                self._capture.append(partial(ops.linear_quantized, x, weight, bias, out, add=add))
            return True
        name = ops.linear_choice(x, weight)
        if name == "pytorch":
            return False
        function = getattr(native, f"linear_{name}")
        function(x, weight, bias, out, add, capture=self._capture)
        return True

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float,
                   out: Tensor) -> Tensor:
        native.norm(x, weight, bias, out, eps=eps, centred=True, capture=self._capture)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor,
                 offset: float = 0.0) -> Tensor:
        if offset:
            self._capture.append(partial(rms_norm, x, weight, eps=eps, out=out, offset=offset))
            return out
        native.norm(x, weight, None, out, eps=eps, centred=False, capture=self._capture)
        return out

    def add_(self, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        self._capture.append(partial(x.add_, y, alpha=scale))

    def clamp_(self, x: Tensor, limit: float) -> None:
        self._capture.append(partial(x.clamp_, -limit, limit))

    def activate_(self, x: Tensor, name: str, factor: Tensor | None = None) -> Tensor:
        native.activate(x, activation(name), factor, capture=self._capture)
        return x


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, *,
           out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    Parameters
    ----------
    x : Tensor [rows, in]
    weight : Tensor, QuantizedMatrix or ShardedMatrix [out, in]
    bias : Tensor [out], optional
    out : Tensor [rows, out], optional
        Where to write; must not overlap x. Without it the result is a new tensor.

    Returns
    -------
    Tensor [rows, out], in x's dtype
    """
    if isinstance(weight, ShardedMatrix):
        out = x.new_empty((len(x), len(weight))) if out is None else out
        for outputs, part in weight.shards(x):
            linear(x, part, None if bias is None else bias[outputs], out=out[:, outputs])
        return out
    function = _own_product(x, weight)
    if function is not None:
        out = x.new_empty((len(x), len(weight))) if out is None else out
        function(x, weight, bias, out)
        return out
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def add_linear_(residual: Tensor, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """``residual += x @ weight.T + bias``, with no tensor in between.

    residual is [rows, out], x [rows, in], weight [out, in], bias [out]; residual is returned.
    """
    if isinstance(weight, ShardedMatrix):
        for outputs, part in weight.shards(x):
            add_linear_(residual[:, outputs], x, part, None if bias is None else bias[outputs])
        return residual
    function = _own_product(x, weight)
    if function is not None:
        function(x, weight, bias, residual, add=True)
        return residual
    if bias is not None:
        residual.add_(bias)
    return residual.addmm_(x, weight.t())


def _own_product(x: Tensor, weight: Tensor | QuantizedMatrix) -> Callable[..., None] | None:
    """Ours of `ops`, where PyTorch has no such product or a slower one."""
    if isinstance(weight, QuantizedMatrix):
        return ops.linear_quantized
    name = ops.linear_choice(x, weight)
    return None if name == "pytorch" else getattr(native, f"linear_{name}")


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float,
               out: Tensor | None = None) -> Tensor:
    """Layer normalisation of each row; x is [rows, hidden] and may itself be `out`."""
    if _normalised_natively(x):
        return _native_norm(x, weight, bias, out, eps=eps, centred=True)
    norm = partial(F.layer_norm, normalized_shape=x.shape[-1:], weight=weight, bias=bias, eps=eps)
    return norm(x) if out is None else _into(out, norm, x)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None,
             offset: float = 0.0) -> Tensor:
    """Root-mean-square normalisation (arXiv 1910.07467) of each row, like `layer_norm`.

    offset is added to the weights, in float32: some families keep them less one.
    """
    if offset:
        return _offset_rms_norm(x, weight, eps=eps, out=out, offset=offset)
    if _normalised_natively(x):
        return _native_norm(x, weight, None, out, eps=eps, centred=False)
    norm = partial(F.rms_norm, normalized_shape=x.shape[-1:], weight=weight, eps=eps)
    return norm(x) if out is None else _into(out, norm, x)


def _normalised_natively(x: Tensor) -> bool:
    """True where ours is faster: PyTorch's RMS norm is several operations, and its layer norm of
    2,048 rows takes 1.6 times as long on a Xeon, and as long without AVX-512."""
    return x.dtype == torch.bfloat16 and ops.uses_native(x)


def _native_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor | None, *,
                 eps: float, centred: bool) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    native.norm(x, weight, bias, out, eps=eps, centred=centred)
    return out


def _offset_rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None,
                     offset: float) -> Tensor:
    factors = weight.float() + offset

    def norm(part: Tensor) -> Tensor:
        return F.rms_norm(part.float(), part.shape[-1:], factors, eps).to(part.dtype)

    return norm(x) if out is None else _into(out, norm, x)


def activation(name: str) -> str:
    """The function, one of `ACTIVATE`, of an activation that config.json names (one of
    spec.ACTIVATIONS).

    gelu_new and gelu_fast are the tanh approximation written out, equal to it within rounding.
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
"""In place, by the names of abi.ACTIVATIONS."""


def activate_(x: Tensor, name: str, factor: Tensor | None = None) -> Tensor:
    """``x = activation(x) * factor`` in place, of an activation that config.json names; x is
    returned."""
    name = activation(name)
    # PyTorch has the faster erf. On a Xeon it takes 2.4 times as long for relu and gelu_tanh, and
    # 1.3 times for silu with a factor.
    if name != "gelu" and x.dtype == torch.bfloat16 and ops.uses_native(x):
        native.activate(x, name, factor)
        return x
    ACTIVATE[name](x)
    return x if factor is None else x.mul_(factor)


def _into(out: Tensor, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    rows = chunk_rows(x)  # norms have no `out=`
    for chunk, place in zip(x.split(rows), out.split(rows), strict=True):
        place.copy_(function(chunk))
    return out
