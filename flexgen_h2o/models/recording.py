"""A decode step of a decoder layer, noted as a program while its family's functions run.

Nothing is computed meanwhile: what the families call in `Operations` is bound to the tensors as
they lie, which have to stay there. bfloat16 on a CPU.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.models.layers import Operations, activation, rms_norm


class Recording(Operations):
    """Notes operations in a program, with the buffers of other operations.

    A product is the implementation that `dispatch` names for its rows when it is noted; PyTorch's
    are calls of their own between those of the C++ library.

    Parameters
    ----------
    operations : Operations
        Whose buffers are used. What they hold is undefined between runs of the program.
    program : CapturedCalls
    """

    def __init__(self, operations: Operations, program: CapturedCalls):
        super().__init__(operations.device)
        self.get = operations.get
        self._program = program

    def linear(self, x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None, *,
               out: Tensor) -> None:
        if self._own_product(x, weight, bias, out, add=False):
            return
        if bias is None:
            self._program.append(partial(torch.mm, x, weight.t(), out=out))
        else:
            self._program.append(partial(torch.addmm, bias, x, weight.t(), out=out))

    def add_linear_(self, residual: Tensor, x: Tensor, weight: Tensor | QuantizedMatrix,
                    bias: Tensor | None) -> None:
        if self._own_product(x, weight, bias, residual, add=True):
            return
        if bias is not None:
            self._program.append(partial(residual.add_, bias))
        self._program.append(partial(residual.addmm_, x, weight.t()))

    def _own_product(self, x: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None,
                     out: Tensor, *, add: bool) -> bool:
        """Note a product of ours; False where PyTorch's is to be used."""
        if isinstance(weight, QuantizedMatrix):
            if ops.quantized_choice(x, weight) == "codes":
                native.linear_quantized(x, *ops.flat(weight), bias, out, add,
                                        weight.activation_bits, capture=self._program)
            else:
                self._program.append(partial(ops.linear_quantized, x, weight, bias, out, add=add))
            return True
        name = ops.linear_choice(x, weight)
        if name == "pytorch":
            return False
        function = getattr(native, f"linear_{name}")
        function(x, weight, bias, out, add, capture=self._program)
        return True

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float,
                   out: Tensor) -> Tensor:
        native.norm(x, weight, bias, out, eps=eps, centred=True, capture=self._program)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor,
                 offset: float = 0.0) -> Tensor:
        if offset:
            self._program.append(partial(rms_norm, x, weight, eps=eps, out=out, offset=offset))
            return out
        native.norm(x, weight, None, out, eps=eps, centred=False, capture=self._program)
        return out

    def add_(self, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        self._program.append(partial(x.add_, y, alpha=scale))

    def clamp_(self, x: Tensor, limit: float) -> None:
        self._program.append(partial(x.clamp_, -limit, limit))

    def activate_(self, x: Tensor, name: str, factor: Tensor | None = None) -> Tensor:
        native.activate(x, activation(name), factor, capture=self._program)
        return x
