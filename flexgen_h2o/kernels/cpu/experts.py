"""Mixtures of experts of few tokens each on a CPU: the C++ of cpu/experts.cpp, and what it takes.

One call routes, and one computes all experts of a table. `reference_experts` specifies both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from flexgen_h2o.config.limits import EXPERT_ROWS
from flexgen_h2o.kernels import abi, dispatch, ops
from flexgen_h2o.kernels.arguments import contiguous, expect, lines, need
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.matrix import QuantizedMatrix


def max_expert_rows(bits: int, activation_bits: int = 16) -> int:
    """The most tokens of an expert that `experts` is for; 0: it is not to be used.

    Beyond, or where dispatch prefers another product, experts are computed one by one.

    Parameters
    ----------
    bits : int
        Of the weights: 16, 12, 8 or 4.
    activation_bits : int
        Of what meets weights of 8 or 4 bits.
    """
    if ops.uses_reference("cpu"):
        return 0
    if bits != 16 and activation_bits != 16:
        return EXPERT_ROWS  # such products always go by codes
    operation, ours = ("linear", "skinny") if bits == 16 else ("linear_quantized", "codes")
    rows = 0
    while 2 << rows <= EXPERT_ROWS and dispatch.choice(
            operation, 2 << rows, torch.bfloat16, bits) == ours:
        rows += 1
    return 1 << rows if rows else 0


class ExpertTable:
    """The matrices of experts by number, as `experts` takes them.

    Parameters
    ----------
    count : int
        Experts of a layer. At first none is there.
    """

    def __init__(self, count: int):
        self.structs = (cpu_library.STRUCTS["Expert"] * count)()
        self._held: dict[int, tuple[Tensor | QuantizedMatrix, ...]] = {}
        self._shape: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.structs)

    @property
    def shape(self) -> tuple[int, int] | None:
        """(inputs, width) of its experts; None without any."""
        return self._shape

    def put(self, number: int, gate: Tensor | QuantizedMatrix, up: Tensor | QuantizedMatrix,
            down: Tensor | QuantizedMatrix, *, biases: Sequence[Tensor] = ()) -> None:
        """Have an expert there: gate and up [wide, hidden], down [hidden, wide], of bfloat16 or
        quantized, all experts' alike; with the biases of all three, bfloat16, or none."""
        wide, hidden = gate.shape
        need(tuple(up.shape) == (wide, hidden) and tuple(down.shape) == (hidden, wide)
             and self._shape in (None, (hidden, wide)), "experts",
             f"gate {list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)} do not "
             "belong together")
        need(_form(gate) == _form(up), "experts", "gate and up must be quantized alike")
        struct = self.structs[number]
        struct.gate, struct.up, struct.down = map(_matrix, (gate, up, down))
        struct.gate_bias = struct.up_bias = struct.down_bias = None
        if biases:
            gate_bias, up_bias, down_bias = biases
            expect("experts", torch.bfloat16, gate_bias=(gate_bias, (wide,)),
                   up_bias=(up_bias, (wide,)), down_bias=(down_bias, (hidden,)))
            lines("experts", gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
            struct.gate_bias, struct.up_bias, struct.down_bias = (
                bias.data_ptr() for bias in biases)
        self._held[number], self._shape = (gate, up, down, *biases), (hidden, wide)

    def drop(self, number: int) -> None:
        """Have an expert there no more."""
        self.structs[number].gate.data = None
        del self._held[number]


def _form(matrix: Tensor | QuantizedMatrix) -> tuple[int, ...]:
    if isinstance(matrix, QuantizedMatrix):
        return *ops.flat(matrix)[3:], matrix.activation_bits
    return 16, 0


def _matrix(matrix: Tensor | QuantizedMatrix) -> ctypes.Structure:
    if isinstance(matrix, QuantizedMatrix):
        return native.matrix("experts", *ops.flat(matrix), matrix.activation_bits)
    expect("experts", torch.bfloat16, matrix=(matrix, tuple(matrix.shape)))
    contiguous("experts", matrix=matrix)
    return native.plain_matrix(matrix)


def route(x: Tensor, router: Tensor, bias: Tensor | None = None, *, each: int, normalise: bool
          ) -> tuple[Tensor, Tensor]:
    """See `reference_experts.route`; bfloat16."""
    name = "route"
    expect(name, torch.bfloat16, x=(x, (len(x), router.shape[1])), router=(router, router.shape),
           bias=(bias, router.shape[:1]))
    lines(name, x=x, router=router, bias=bias)
    need(0 < each <= len(router), name, f"{each} of {len(router)} experts")
    ids = torch.empty(len(x), each, dtype=torch.int64)
    shares = torch.empty(len(x), each)
    cpu_library.call(name, "Route", x=x.data_ptr(), router=router.data_ptr(),
                     bias=None if bias is None else bias.data_ptr(), ids=ids.data_ptr(),
                     shares=shares.data_ptr(), rows=len(x), hidden=x.shape[1], count=len(router),
                     each=each, x_row=x.stride(0), router_row=router.stride(0), normalise=normalise)
    return ids, shares


def experts(x: Tensor, ids: Tensor, shares: Tensor, table: ExpertTable, sums: Tensor, *,
            function: str | tuple[float, float], most: int) -> None:
    """See `reference_experts.experts`; bfloat16, and `most` at most EXPERT_ROWS."""
    name = "experts"
    if table.shape is None:
        return
    slope, limit = function if isinstance(function, tuple) else (1.0, 0.0)
    known = limit > 0 or function in abi.ACTIVATIONS
    need(x.dim() == ids.dim() == 2 and known and most <= EXPERT_ROWS, name,
         f"takes x [rows, hidden], ids [rows, each], one of {abi.ACTIVATIONS} and up to "
         f"{EXPERT_ROWS} rows")
    expect(name, torch.bfloat16, x=(x, (len(ids), table.shape[0])))
    expect(name, torch.float32, shares=(shares, tuple(ids.shape)), sums=(sums, tuple(x.shape)))
    expect(name, torch.int64, ids=(ids, tuple(ids.shape)))
    contiguous(name, ids=ids, shares=shares)
    lines(name, x=x, sums=sums)
    cpu_library.call(name, "Experts", x=x.data_ptr(), ids=ids.data_ptr(), shares=shares.data_ptr(),
                     sums=sums.data_ptr(), experts=ctypes.addressof(table.structs), rows=len(x),
                     each=ids.shape[1], count=len(table), most=most,
                     function=0 if limit else abi.ACTIVATIONS.index(function), x_row=x.stride(0),
                     sums_row=sums.stride(0), slope=slope, limit=limit)
