"""Products with quantized matrices of every format on each instruction set, against float64."""

from functools import cache
from itertools import product

import pytest
import torch
from helpers.kernel_cases import (
    BUILT,
    COMPACT,
    EPSILON,
    MATRIX_SHAPES,
    MXFP4,
    SETS,
    TILED,
    check_quantized_linear,
    matrix_layout,
    poisoned_memory,
    threads,
    using,
)
from helpers.selection import examples, full, full_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.limits import MATRIX_TILE, TILED_OUTPUTS, TILED_ROWS
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import dispatch, ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.reference import matrix as reference_matrix

FORMATS = [4, MXFP4, COMPACT, 6, 8, 12]
WAYS = ["reference", *SETS]



def rounds_weights(layout, rows, dtype):
    """Whether weights are rounded to the dtype: for PyTorch's products, and in AMX tiles."""
    if dispatch.select_implementation("linear_quantized", rows, dtype, layout.bits) == "unpacked":
        return True
    tiles = cpu_library.instruction_set().startswith("amx") and rows > 64
    return tiles and dtype == torch.bfloat16 and layout.has_zeros


def random(rows, columns, dtype=torch.float32, size=0.3):
    generator = torch.Generator().manual_seed(rows + 7 * columns)
    return (torch.randn(rows, columns, generator=generator) * size).to(dtype)


@cache
def matrix_of(layout):
    """A random matrix of the layout, and its values."""
    data = ops.quantize_matrix(random(layout.outputs, layout.inputs), layout)
    values = reference_matrix.unpack_rows(data, layout, torch.arange(layout.outputs), torch.float32)
    return QuantizedMatrix(data, layout), values


def check_product(way, layout, rows, *, dtype=torch.bfloat16, bias=True, add=False, data=None):
    matrix, values = matrix_of(layout)
    if data is not None:
        matrix = QuantizedMatrix(data, layout)
    with using(None if way == "reference" else way), poisoned_memory():
        native = way != "reference"
        check_quantized_linear(
            ops.linear_quantized if native else reference_matrix.linear_quantized, matrix, values,
            rows, dtype=dtype, bias=bias, add=add, offset=2 if layout.has_zeros else 0,
            unpacked=native and rounds_weights(layout, rows, dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", EPSILON)
def test_products(way, shape, bits, dtype):
    outputs, inputs, group = shape
    layout = matrix_layout(outputs, inputs, bits, group)
    for rows, bias, add in ((1, True, False), (3, False, True), (8, True, True),
                            (17, False, False)):
        check_product(way, layout, rows, dtype=dtype, bias=bias, add=add)


@pytest.mark.parametrize("way", SETS)
@pytest.mark.parametrize("bits", [MXFP4, 12, *full(4, COMPACT, 6, 8)])
def test_products_of_few_and_many_rows(way, bits):
    layout = matrix_layout(161, 1100, bits)
    with dispatch.use_autotune_table({"linear_quantized": {layout.bits: {1: "codes"}}}):
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 300):
            check_product(way, layout, rows, add=rows % 2 == 1)
        for dtype in (torch.float32, torch.float16):
            check_product(way, layout, 70, dtype=dtype)


@pytest.mark.parametrize("way", TILED)
@pytest.mark.parametrize(("rows", "shape"), [
    (25, (33, 200, 4, 64)), (TILED_ROWS + 21, (70, 700, 6, 16)), (65, (161, 1100, COMPACT, 32)),
    (65, (2 * TILED_OUTPUTS + 40, 40, 12, 32)),
    *full_cases(*product((2, 5, 16, 25, 33, 64, 65, 80, 97, TILED_ROWS + 21), (
        (33, 200, 4, 64), (161, 1100, 4, 64), (70, 2100, 8, 24), (20, 70, 8, 32), (70, 700, 6, 16),
        (161, 1100, 6, 64), (161, 1100, COMPACT, 32), (2 * TILED_OUTPUTS, 2000, 4, 64),
        (96, 40, 4, 1000), (1100, 200, 4, 32), (2 * TILED_OUTPUTS + 40, 40, 4, 32),
        (2 * TILED_OUTPUTS + 40, 40, 12, 32))))])
def test_products_in_tiles(way, rows, shape):
    """Rows, outputs and inputs that fill up no tiles or slabs, and that need several."""
    check_product(way, matrix_layout(*shape), rows, bias=rows % 2 == 1, add=rows % 3 == 0)


@given(st.sampled_from(WAYS), st.integers(1, 140), st.integers(1, 70), st.integers(1, 200),
       st.sampled_from(FORMATS), st.sampled_from([*EPSILON]), st.booleans(),
       st.sampled_from([8, 32, 64]))
@settings(max_examples=examples(200))
def test_products_of_any_size(way, rows, outputs, inputs, bits, dtype, add, group):
    check_product(way, matrix_layout(outputs, inputs, bits, group), rows, dtype=dtype, bias=not add,
                  add=add)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [4, 8])
def test_padding_has_no_effect(way, bits):
    layout = MatrixLayout(17, 70, bits)
    data = matrix_of(layout)[0].data.clone()
    halves = data.view(2, 2, -1)[1, :, :64].view(torch.int16).view(2, 2, MATRIX_TILE)
    halves[..., 1:] = 0x7E00  # NaN, in the scales and zero points of outputs that are not there
    words = data.view(2, 2, -1)[1, :, 64:].view(torch.int32).view(2, -1, MATRIX_TILE)
    words[..., 1:] = -1
    for rows in (1, 20):
        check_product(way, layout, rows, dtype=torch.float32, data=data)


@BUILT
@pytest.mark.parametrize("bits", [4, MXFP4, 12])
def test_weights_are_unpacked_in_slices(monkeypatch, bits):
    """Where PyTorch multiplies many rows faster: never more of a matrix than stays in cache."""
    unpacked, unpack, layout = [], ops.unpack_rows, matrix_layout(70, 130, bits)
    matrix_of(layout)
    monkeypatch.setattr(ops, "UNPACKED_OUTPUTS", 32)
    monkeypatch.setattr(ops, "unpack_rows", lambda *a: unpacked.append(len(a[1])) or unpack(*a))
    table = {"linear_quantized": {layout.bits: {1: "codes", 40: "unpacked"}}}
    with dispatch.use_autotune_table(table):
        for add, rows in product((False, True), (1, 2, 70)):
            check_product(None, layout, rows, add=add)
    assert unpacked == [32, 32, 6] * 4  # of 2 and of 70 rows


def multiplied(x, matrix):
    out = torch.full((len(x), len(matrix)), float("nan")).to(x.dtype)
    ops.linear_quantized(x, matrix, None, out)
    return out


@pytest.mark.parametrize("way", SETS)
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("rows", [7, 150])
def test_results_do_not_depend_on_threads(way, dtype, rows):
    """Except where PyTorch multiplies, which promises nothing: see `ops.linear_quantized`."""
    layout, results, x = MatrixLayout(130, 200, 4), [], random(rows, 200, dtype, 1.0)
    with using(way):
        for count in (1, 2, 3):
            with threads(count):
                data = ops.quantize_matrix(random(130, 200), layout, search=True)
                results.append((data, multiplied(x, QuantizedMatrix(data, layout))))
        codes = dispatch.select_implementation("linear_quantized", rows, dtype, 4) != "unpacked"
    for data, out in results[1:]:
        assert torch.equal(data, results[0][0])
        assert not codes or torch.equal(out, results[0][1])


@pytest.mark.parametrize("way", SETS)
@pytest.mark.parametrize("dtype", EPSILON)
def test_results_do_not_depend_on_the_row_split(way, dtype):
    layout = MatrixLayout(40, 200, 4)
    (matrix, values), x = matrix_of(layout), random(70, 200, dtype, 1.0)
    with using(way):
        whole = multiplied(x, matrix).double()
        # Sums in another order, and a rounding of each; of weights too where either is PyTorch's.
        bound = 2.02 * EPSILON[dtype] * whole.abs() + 1e-5
        if rounds_weights(layout, 70, dtype):
            bound += 1.01 * EPSILON[dtype] * (x.double().abs() @ values.double().abs().T)
        for size in (5, 8, 13, 64):
            parts = torch.cat([multiplied(part, matrix) for part in x.split(size)])
            assert ((parts.double() - whole).abs() <= bound).all()
