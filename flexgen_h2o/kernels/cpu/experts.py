"""Mixtures of experts with few tokens per expert, on a CPU (cpu/experts.cpp).

One call computes the router, and one all experts of a table; `reference.layers` specifies both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.limits import EXPERT_ROWS
from flexgen_h2o.kernels import abi, dispatch, ops
from flexgen_h2o.kernels.arguments import (
    QuantizedMatrix,
    check,
    check_contiguous,
    check_last_dim_contiguous,
    check_tensors,
)
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native


def max_expert_rows(bits: int, activation_bits: int = 16) -> int:
    """Return the maximum number of tokens per expert for `experts`; 0 if it should not be used.

    With more tokens, or where `dispatch` prefers another matmul, experts run one by one.

    Parameters
    ----------
    bits : int
        Bit width of the weights: 16, 12, 8 or 4.
    activation_bits : int
        Bit width of the activations in matmuls with 8-bit or 4-bit weights.
    """
    if ops.uses_reference("cpu"):
        return 0
    if bits != 16 and activation_bits != 16:
        return EXPERT_ROWS  # always multiplied as quantized values
    operation, kernel = ("linear", "skinny") if bits == 16 else ("linear_quantized", "codes")
    rows = 0
    while 2 << rows <= EXPERT_ROWS and dispatch.select_implementation(
            operation, 2 << rows, torch.bfloat16, bits) == kernel:
        rows += 1
    return 1 << rows if rows else 0


class ExpertTable:
    """The weights of a layer's experts by number, as `experts` takes them.

    Parameters
    ----------
    count : int
        Experts of the layer. The table starts empty.
    """

    def __init__(self, count: int):
        self.structs = (cpu_library.STRUCTS["Expert"] * count)()
        self._weights: dict[int, tuple[Tensor | QuantizedMatrix, ...]] = {}
        self._shape: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.structs)

    @property
    def shape(self) -> tuple[int, int] | None:
        """(hidden, intermediate) sizes of the experts; None for an empty table."""
        return self._shape

    def put(self, number: int, gate: Tensor | QuantizedMatrix, up: Tensor | QuantizedMatrix,
            down: Tensor | QuantizedMatrix, *, biases: Sequence[Tensor] = ()) -> None:
        """Add an expert.

        Parameters
        ----------
        gate, up : Tensor or QuantizedMatrix [intermediate, hidden]
        down : Tensor or QuantizedMatrix [hidden, intermediate]
            bfloat16 or quantized; all experts of a table have the same format.
        biases : sequence of Tensor
            bfloat16 biases of gate, up and down; or none.
        """
        intermediate, hidden = gate.shape
        check(tuple(up.shape) == (intermediate, hidden)
              and tuple(down.shape) == (hidden, intermediate)
              and self._shape in (None, (hidden, intermediate)), "experts",
              f"gate {list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)} do not "
              "belong together")
        check(_format(gate) == _format(up), "experts", "gate and up must have the same format")
        struct = self.structs[number]
        struct.gate, struct.up, struct.down = map(_matrix, (gate, up, down))
        struct.gate_bias = struct.up_bias = struct.down_bias = None
        if biases:
            gate_bias, up_bias, down_bias = biases
            check_tensors("experts", torch.bfloat16, gate_bias=(gate_bias, (intermediate,)),
                          up_bias=(up_bias, (intermediate,)), down_bias=(down_bias, (hidden,)))
            check_last_dim_contiguous("experts", gate_bias=gate_bias, up_bias=up_bias,
                                      down_bias=down_bias)
            struct.gate_bias, struct.up_bias, struct.down_bias = (
                bias.data_ptr() for bias in biases)
        self._weights[number], self._shape = (gate, up, down, *biases), (hidden, intermediate)

    def drop(self, number: int) -> None:
        """Remove an expert."""
        self.structs[number].gate.data = None
        del self._weights[number]


def _format(matrix: Tensor | QuantizedMatrix) -> tuple[int, ...]:
    if isinstance(matrix, QuantizedMatrix):
        layout = matrix.layout
        return layout.bits, layout.group, layout.mxfp4, layout.compact, matrix.activation_bits
    return (16,)


def _matrix(matrix: Tensor | QuantizedMatrix) -> ctypes.Structure:
    if isinstance(matrix, QuantizedMatrix):
        return native.matrix_struct("experts", matrix)
    check_tensors("experts", torch.bfloat16, matrix=(matrix, tuple(matrix.shape)))
    check_contiguous("experts", matrix=matrix)
    return native.plain_matrix(matrix)


def route(x: Tensor, router: Tensor, bias: Tensor | None = None, *, per_token: int, normalize: bool
          ) -> tuple[Tensor, Tensor]:
    """Run `reference.layers.route` in bfloat16."""
    name = "route"
    check_tensors(name, torch.bfloat16, x=(x, (len(x), router.shape[1])),
                  router=(router, router.shape), bias=(bias, router.shape[:1]))
    check_last_dim_contiguous(name, x=x, router=router, bias=bias)
    check(0 < per_token <= len(router), name, f"{per_token} of {len(router)} experts")
    ids = torch.empty(len(x), per_token, dtype=torch.int64)
    routing_weights = torch.empty(len(x), per_token)
    cpu_library.call(name, "Route", x=x.data_ptr(), router=router.data_ptr(),
                     bias=None if bias is None else bias.data_ptr(), ids=ids.data_ptr(),
                     routing_weights=routing_weights.data_ptr(), rows=len(x), hidden=x.shape[1],
                     num_experts=len(router), per_token=per_token, x_row=x.stride(0),
                     router_row=router.stride(0), normalize=normalize)
    return ids, routing_weights


def experts(x: Tensor, ids: Tensor, routing_weights: Tensor, table: ExpertTable, sums: Tensor, *,
            function: str | tuple[float, float], max_rows: int) -> None:
    """Run `reference.layers.experts` in bfloat16; `max_rows` is at most EXPERT_ROWS."""
    name = "experts"
    if table.shape is None:
        return
    slope, limit = function if isinstance(function, tuple) else (1.0, 0.0)
    known = limit > 0 or function in abi.ACTIVATIONS
    check(x.dim() == ids.dim() == 2 and known and max_rows <= EXPERT_ROWS, name,
         f"takes x [rows, hidden], ids [rows, per_token], one of {abi.ACTIVATIONS} and up to "
         f"{EXPERT_ROWS} rows")
    check_tensors(name, torch.bfloat16, x=(x, (len(ids), table.shape[0])))
    check_tensors(name, torch.float32, routing_weights=(routing_weights, tuple(ids.shape)),
                  sums=(sums, tuple(x.shape)))
    check_tensors(name, torch.int64, ids=(ids, tuple(ids.shape)))
    check_contiguous(name, ids=ids, routing_weights=routing_weights)
    check_last_dim_contiguous(name, x=x, sums=sums)
    cpu_library.call(name, "Experts", x=x.data_ptr(), ids=ids.data_ptr(),
                     routing_weights=routing_weights.data_ptr(), sums=sums.data_ptr(),
                     experts=ctypes.addressof(table.structs), rows=len(x),
                     per_token=ids.shape[1], num_experts=len(table), max_rows=max_rows,
                     function=0 if limit else abi.ACTIVATIONS.index(function), x_row=x.stride(0),
                     sums_row=sums.stride(0), slope=slope, limit=limit)
