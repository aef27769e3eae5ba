"""The part of gpu-check about quantized matrices: products with them, and their rows.

Every (dtype, bits, number of rows up to a power of two) that is new here is tuned first, for some
10 seconds: what is checked shares as many as it can with what is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen_h2o.config.limits import MATRIX_TILE, MXFP4_GROUP
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.reference import matrix as reference_matrix

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
GPU = "cuda"


class Product(NamedTuple):
    """A product that is checked."""

    dtype: torch.dtype
    rows: int
    outputs: int
    inputs: int
    form: str
    bias: bool
    add: bool


# Every value of each, not every tuple: the widths of published models, and some that fill nothing.
MATRICES = [
    Product(HALF, 1, 16384, 4096, "4 bits", True, False),
    Product(HALF, 1, 4096, 16384, "8 bits", False, True),
    Product(BRAIN, 2, 50272, 768, "4 bits", False, False),
    Product(FULL, 1, 3072, 768, "4 bits", True, True),
    Product(HALF, 3, 5632, 2048, "4 bits", False, True),
    Product(HALF, 16, 11008, 4096, "8 bits", True, True),
    Product(BRAIN, 16, 4096, 11008, "4 bits", True, False),
    Product(HALF, 64, 16384, 4096, "4 bits", True, True),
    Product(HALF, 50, 1001, 1003, "8 bits", False, False),
    Product(FULL, 13, 3072, 770, "8 bits", True, True),
    Product(HALF, 65, 16384, 4096, "4 bits", True, False),
    Product(BRAIN, 200, 1001, 1003, "8 bits", True, True),
    Product(BRAIN, 130, 4096, 11008, "4 bits", False, True),
    Product(HALF, 300, 11008, 4096, "4 bits", True, False),
    Product(HALF, 999, 4096, 11008, "8 bits", True, False),
    Product(FULL, 300, 768, 3072, "4 bits", False, True),
    Product(BRAIN, 600, 1001, 1003, "8 bits", True, True),
    Product(HALF, 1, 16384, 4096, "12 bits", True, False),
    Product(BRAIN, 7, 1001, 1003, "12 bits", False, True),
    Product(BRAIN, 65, 4096, 11008, "12 bits", True, True),
    Product(FULL, 3, 3072, 770, "12 bits", True, False),
    Product(BRAIN, 4, 5760, 2880, "MXFP4", True, False),
    Product(HALF, 300, 1001, 1003, "MXFP4", False, True),
]
CACHED = 200_000_000
"""Bytes of weights that products take turns with: several times the second-level cache."""
FORMS = {"4 bits": {"bits": 4}, "8 bits": {"bits": 8}, "12 bits": {"bits": 12},
         "MXFP4": {"bits": 4, "group": MXFP4_GROUP, "mxfp4": True}}
"""Of matrices, by name: arguments of `MatrixLayout`."""


def matrix(outputs: int, inputs: int, form: str) -> QuantizedMatrix:
    """Random codes; weights are of both signs, and around 0.02."""
    layout = MatrixLayout(outputs, inputs, **FORMS[form])
    blocks = torch.randint(256, (layout.tiles, layout.groups, layout.block_bytes), device=GPU,
                           dtype=torch.uint8)
    if not layout.has_zeros:
        exponents = torch.randint(119, 123, blocks[..., :MATRIX_TILE].shape, device=GPU)
        blocks[..., :MATRIX_TILE] = exponents.to(torch.uint8)
        return QuantizedMatrix(blocks.view(-1), layout)
    scale = (torch.rand(layout.tiles, layout.groups, MATRIX_TILE,
                        device=GPU) + 0.5) * 0.08 / layout.levels
    header = torch.cat((scale, -scale * layout.levels / 2), -1).half()
    blocks[..., : 4 * MATRIX_TILE] = header.view(torch.uint8)
    return QuantizedMatrix(blocks.view(-1), layout)


def check_matrix(rows, case: Product, error: Callable[[Tensor, Tensor], float],
                 bound: float) -> None:
    """A product against the reference in float32, done twice: the same bits, or it is wrong."""
    weight = matrix(case.outputs, case.inputs, case.form)
    x = torch.randn(case.rows, case.inputs + 8, device=GPU).to(case.dtype)[:, : case.inputs]
    bias = torch.randn(case.outputs, device=GPU).to(case.dtype) if case.bias else None
    before = torch.randn(case.rows, case.outputs, device=GPU).to(case.dtype)
    if not case.add:
        before.fill_(float("nan"))
    wanted, *results = before.float(), before.clone(), before.clone()
    reference_matrix.linear_quantized(x, weight, bias, wanted, add=case.add)
    for out in results:
        ops.linear_quantized(x, weight, bias, out, add=case.add)
    wrong = error(results[0], wanted) if torch.equal(*results) else float("nan")
    shape = f"{case.rows} x {case.inputs} x {case.outputs}, {case.form}"
    rows.add("check", "product", f"{shape}, bias {case.bias}, add {case.add}", case.dtype, wrong,
             "error", limit=bound)


def check_rows(rows) -> None:
    """Rows of a vocabulary's size in any order: the reference's bits."""
    for outputs, inputs, form in ((50272, 4096, "4 bits"), (49152, 576, "8 bits"),
                                  (1001, 1003, "4 bits"), (50272, 4096, "12 bits"),
                                  (1001, 1003, "12 bits"), (1001, 1003, "MXFP4")):
        weight = matrix(outputs, inputs, form)
        chosen = torch.randint(outputs, (700,), device=GPU)
        for dtype in (HALF, FULL):
            right = reference_matrix.unpack_rows(weight.data, weight.layout, chosen, dtype)
            wrong = (ops.unpack_rows(weight, chosen, dtype) != right).sum().item()
            rows.add("check", "unpack", f"700 of {outputs} x {inputs}, {form}", dtype, wrong,
                     "differences", limit=0)


def _copies(size: int) -> int:
    return 1 + -(-CACHED // size)


def time_matrices(rows, timed: Callable[[list[Callable]], float], rate: float,
                  gemms: float) -> None:
    """Products beside PyTorch's with the plain weight; all take turns with several weights."""
    outputs, inputs = 16384, 4096
    plain = [torch.randn(outputs, inputs, device=GPU).mul_(0.02).half()
             for _ in range(_copies(2 * outputs * inputs))]
    quantized = {form: [matrix(outputs, inputs, form)
                        for _ in range(_copies(outputs * inputs * FORMS[form]["bits"] // 8))]
                 for form in ("4 bits", "8 bits", "12 bits")}
    for count in (1, 4, 16, 64, 128, 256, 512, 2048):
        x = torch.randn(count, inputs, device=GPU).half()
        out = x.new_empty(count, outputs)
        work = 2 * count * inputs * outputs / gemms
        shape = f"{count} x {inputs} x {outputs}"
        base = timed([lambda w=w, x=x: F.linear(x, w) for w in plain])
        roofline = max((plain[0].nbytes + x.nbytes + out.nbytes) / rate, work) * 1e3
        rows.add("time", "cuBLAS", shape, HALF, base, "ms", roofline_ms=roofline)
        for form, weights in quantized.items():
            taken = timed([lambda w=w, x=x, out=out: ops.linear_quantized(x, w, None, out)
                           for w in weights])
            goal = 1.15 if count > 64 else 0.5 if count <= 16 and form == "4 bits" else None
            roofline = max((weights[0].data.nbytes + x.nbytes + out.nbytes) / rate, work) * 1e3
            rows.add("time", "product", f"{shape}, {form}", HALF, taken, "ms",
                     limit=goal and goal * base, roofline_ms=roofline)
