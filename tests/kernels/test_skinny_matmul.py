"""linear_skinny and linear_float32 against float64: 16-bit weights, on each instruction set."""

import pytest
import torch
from helpers import kernel_internals
from helpers.kernel_cases import BUILT, SETS, check_linear, linear_case, threads, using

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.models import layers


@pytest.fixture(params=SETS or [None], autouse=True)
def _set(request):
    with using(request.param):
        yield


@BUILT
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 33, 50, 64, 65, 81, 128])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (31, 8), (65, 49), (258, 33), (576, 192),
                                   (2075, 10)])
def test_products(rows, shape):
    """Of some rows with weights of some inputs and outputs."""
    for bias, add in ((True, False), (False, True)):
        check_linear(native.linear_skinny, rows, *shape, bias=bias, add=add)


@BUILT
def test_broadcast_weight_rows():
    x, weight, _, out = linear_case(3, 31, 1)
    many = out.new_empty(3, 5)
    native.linear_skinny(x, weight, None, out[:, :1])
    native.linear_skinny(x, weight.expand(5, 31), None, many)
    assert torch.equal(many, out[:, :1].expand(3, 5))


@BUILT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, inputs, outputs", [
    (1, 1, 1), (3, 31, 8), (12, 130, 77), (17, 128, 128), (65, 300, 33), (256, 65, 49),
    (300, 257, 260)])
def test_products_in_float32(rows, inputs, outputs, dtype):
    """Rows of one panel and of more, inputs and outputs that fill blocks and that do not."""
    for bias, add in ((True, False), (False, True)):
        check_linear(native.linear_float32, rows, inputs, outputs, bias=bias, add=add, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 17])
def test_reference_linear(rows):
    for bias, add in ((True, True), (False, False)):
        check_linear(reference.linear_skinny, rows, 34, 9, bias=bias, add=add)


@BUILT
@pytest.mark.parametrize("rows, function", [
    (3, "linear_skinny"), (21, "linear_skinny"), (100, "linear_skinny"), (270, "linear_float32")])
def test_results_do_not_depend_on_threads(rows, function):
    results = []
    for count in (1, 2, 3):
        x, weight, bias, wide = linear_case(rows, 130, 77)
        with threads(count):
            getattr(native, function)(x, weight, bias, wide[:, :77])
        results.append(wide[:, :77])
    assert all(torch.equal(results[0], other) for other in results[1:])


@BUILT
@pytest.mark.parametrize("rows, function", [
    (2, "linear_skinny"), (20, "linear_skinny"), (100, "linear_skinny"), (70, "linear_float32")])
def test_matmuls_of_one_input_are_merged_into_a_call(rows, function):
    """Weights of other heights, with a bias and without, and one whose input is another."""
    torch.default_generator.manual_seed(rows)
    x, other = torch.randn(2, rows, 70).bfloat16()
    program, wanted, found = CapturedCalls(), [], []
    for source, outputs, add in ((x, 40, False), (x, 7, False), (x, 33, True), (other, 20, False)):
        weight, bias = torch.randn(outputs, 70).bfloat16(), torch.randn(outputs).bfloat16()
        out = torch.randn(rows, outputs).bfloat16()
        wanted.append(out.clone())
        found.append(out)
        getattr(native, function)(source, weight, bias, wanted[-1], add=add)
        getattr(native, function)(source, weight, bias, out, add, capture=program)
    for width, bits in ((64, 4), (50, 4), (30, 4), (30, 8)):
        layout = MatrixLayout(width, 70, bits)
        matrix = QuantizedMatrix(ops.quantize_matrix(torch.randn(width, 70), layout), layout)
        out = torch.empty(rows, width).bfloat16()
        wanted.append(out.clone())
        found.append(out)
        native.linear_quantized(x, matrix, None, wanted[-1], False)
        native.linear_quantized(x, matrix, None, out, False, capture=program)
    assert kernel_internals.calls(program) == [function] * 2 + ["linear_quantized"] * 2
    program.replay()
    for mine, one in zip(found, wanted, strict=True):
        assert torch.equal(mine, one)


@pytest.mark.parametrize("rows", [16, 65, 129])
def test_layers_equal_the_reference(monkeypatch, rows):
    x, weight, bias, wide = linear_case(rows, 64, 40)
    residual = torch.randn(rows, 40).bfloat16()
    kept = residual.clone()
    outputs = [layers.linear(x, weight, bias), layers.linear(x, weight, bias, out=wide[:, :40]),
               layers.add_linear_(residual, x, weight, bias)]
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    expected = layers.linear(x, weight, bias)
    for got, wanted in zip(outputs, (expected, expected, kept + expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=0.1)


@BUILT
def test_linear_implementation(monkeypatch):
    x, weight, *_ = linear_case(16, 31, 8)
    own = cpu_library.instruction_set() != "portable"
    assert ops.linear_implementation(x, weight) == ("skinny" if own else "pytorch")
    for bad in ((x.float(), weight.float()), (x.half(), weight), (x.T, weight), (x, weight.T),
                (x.to("meta"), weight.to("meta"))):
        assert ops.linear_implementation(*bad) == "pytorch"
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    assert ops.linear_implementation(x, weight) == "pytorch"
