"""Matmuls with 16-bit weights against float64: linear_skinny, linear_float32 and linear_tiled."""

import pytest
import torch
from helpers import kernel_internals
from helpers.kernel_cases import (
    BUILT,
    SETS,
    TILED,
    check_linear,
    linear_case,
    quantized,
    threads,
    using,
)
from helpers.selection import full

from flexgen_h2o.config.limits import TILED_INPUTS, TILED_OUTPUTS, TILED_ROWS
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import attention as reference
from flexgen_h2o.models import layers


@pytest.fixture(params=SETS or [None])
def isa_choice(request):
    with using(request.param):
        yield


@pytest.fixture(params=TILED)
def tiles(request):
    """AMX tiles, and their emulation."""
    with using(request.param):
        yield


def check(function, rows, inputs, outputs, **options):
    for bias, add in ((True, False), (False, True)):
        check_linear(function, rows, inputs, outputs, bias=bias, add=add, **options)


@BUILT
@pytest.mark.usefixtures("isa_choice")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 33, 50, 64, 65, 81, 128])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (31, 8), (65, 49), (258, 33), (576, 192),
                                   (2075, 10)])
def test_skinny_matmuls(rows, shape):
    check(native.linear_skinny, rows, *shape)


@BUILT
@pytest.mark.usefixtures("isa_choice")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 31, 8), (12, 130, 77), (17, 128, 128),
                                   (65, 300, 33), (256, 65, 49), (300, 257, 260)])
def test_matmuls_in_float32(shape, dtype):
    """Rows of one panel and of more, inputs and outputs that fill blocks and that do not."""
    check(native.linear_float32, *shape, dtype=dtype)


@pytest.mark.parametrize("shape", [
    (1, 1, 1), (129, 32, 33), (TILED_ROWS + 17, TILED_INPUTS + 32, 7),
    *full((17, 31, 8), (160, 65, 192), (40, 576, 520), (33, TILED_INPUTS, 2 * TILED_OUTPUTS + 40),
          (50, TILED_INPUTS + 27, TILED_OUTPUTS + 2))])
def test_tiled_matmuls(tiles, shape):
    """Sizes that fill tiles and that do not, and more rows than have their sums kept."""
    check(native.linear_tiled, *shape)


def test_padding_of_tiles_is_not_read(tiles):
    """Where inputs fill no step, and rows and outputs no tile, memory may hold NaN."""
    x, weight = torch.randn(150, 70).bfloat16(), torch.randn(61, 80).bfloat16()
    for padded, rows in ((x, 140), (weight, 50)):
        padded[:, 45:], padded[rows:] = (float("nan"),) * 2
    out = torch.full((140, 50), float("nan")).bfloat16()
    native.linear_tiled(x[:140, :45], weight[:50, :45], None, out)
    torch.testing.assert_close(out.float(), x[:140, :45].float() @ weight[:50, :45].float().T,
                               rtol=2**-8, atol=1e-3)


@BUILT
@pytest.mark.usefixtures("isa_choice")
def test_broadcast_weight_rows():
    x, weight, _, out = linear_case(3, 31, 1)
    many = out.new_empty(3, 5)
    native.linear_skinny(x, weight, None, out[:, :1])
    native.linear_skinny(x, weight.expand(5, 31), None, many)
    assert torch.equal(many, out[:, :1].expand(3, 5))


@pytest.mark.parametrize("rows", [1, 17])
def test_reference_linear(rows):
    check(reference.linear_skinny, rows, 34, 9)


def check_threads(function, rows):
    """More threads than there are slabs share rows, too."""
    results = []
    for count in (1, 2, 3, 9):
        x, weight, bias, out = linear_case(rows, 130, 77)
        with threads(count):
            function(x, weight, bias, out[:, :77])
        results.append(out[:, :77])
    assert all(torch.equal(results[0], other) for other in results[1:])


def check_merged_calls(function, rows):
    """Weights of other heights, with a bias and without, and one whose input is another."""
    torch.default_generator.manual_seed(rows)
    x, other = torch.randn(2, rows, 70).bfloat16()
    program, expected, outputs = CapturedCalls(), [], []
    for source, height, add in ((x, 40, False), (x, 7, False), (x, 33, True), (other, 20, False)):
        weight, bias = torch.randn(height, 70).bfloat16(), torch.randn(height).bfloat16()
        outputs.append(torch.randn(rows, height).bfloat16())
        expected.append(outputs[-1].clone())
        function(source, weight, bias, expected[-1], add=add)
        function(source, weight, bias, outputs[-1], add, capture=program)
    for height, bits in ((64, 4), (50, 4), (30, 4), (30, 8)):
        matrix = quantized(torch.randn(height, 70), bits)
        outputs.append(torch.empty(rows, height).bfloat16())
        expected.append(outputs[-1].clone())
        native.linear_quantized(x, matrix, None, expected[-1], False)
        native.linear_quantized(x, matrix, None, outputs[-1], False, capture=program)
    assert kernel_internals.calls(program) == [function.__name__] * 2 + ["linear_quantized"] * 2
    program.replay()
    assert all(map(torch.equal, outputs, expected))


@BUILT
@pytest.mark.usefixtures("isa_choice")
@pytest.mark.parametrize("check_calls", [check_threads, check_merged_calls])
@pytest.mark.parametrize("function, rows", [
    (native.linear_skinny, 3), (native.linear_skinny, 21), (native.linear_skinny, 100),
    (native.linear_float32, 270)])
def test_threads_and_merged_calls_change_no_bit(check_calls, function, rows):
    check_calls(function, rows)


@pytest.mark.parametrize("check_calls", [check_threads, check_merged_calls])
def test_threads_and_merged_calls_of_tiles(tiles, check_calls):
    check_calls(native.linear_tiled, 270)


@pytest.mark.parametrize("name", sorted({*SETS} - {*TILED}))
def test_tiled_linear_needs_amx(name):
    x, weight, _, out = linear_case(140, 32, 16)
    with using(name), pytest.raises(ValueError, match="AMX"):
        native.linear_tiled(x, weight, None, out[:, :16])


@pytest.mark.usefixtures("isa_choice")
@pytest.mark.parametrize("rows", [16, 65, 129])
def test_layers_equal_the_reference(monkeypatch, rows):
    x, weight, bias, wide = linear_case(rows, 64, 40)
    residual = torch.randn(rows, 40).bfloat16()
    before = residual.clone()
    outputs = [layers.linear(x, weight, bias), layers.linear(x, weight, bias, out=wide[:, :40]),
               layers.add_linear_(residual, x, weight, bias)]
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    expected = layers.linear(x, weight, bias)
    for out, wanted in zip(outputs, (expected, expected, before + expected), strict=True):
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=0.1)


@BUILT
@pytest.mark.usefixtures("isa_choice")
def test_linear_kernel_of_dtypes_and_strides(monkeypatch):
    x, weight, *_ = linear_case(16, 31, 8)
    vectorized = cpu_library.instruction_set() != "portable"
    assert ops.linear_kernel(x, weight) is (native.linear_skinny if vectorized else None)
    for bad in ((x.float(), weight.float()), (x.half(), weight), (x.T, weight), (x, weight.T),
                (x.to("meta"), weight.to("meta"))):
        assert ops.linear_kernel(*bad) is None
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    assert ops.linear_kernel(x, weight) is None
