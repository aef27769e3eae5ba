"""linear_skinny against float64: bfloat16 weights by up to 16 rows."""

import pytest
import torch
from kernel_cases import SETS, using

from flexgen_h2o.kernels import library, native, ops, reference
from flexgen_h2o.models import layers

HERE = pytest.mark.skipif("avx512bf16" not in SETS, reason="needs a CPU with AVX512_BF16")


def case(rows, inputs, outputs, *, bias=True):
    """x and out as slices of wider tensors, out poisoned."""
    torch.manual_seed(rows + inputs + outputs)
    x = torch.randn(rows, inputs + 6).bfloat16()[:, :inputs]
    weight = torch.randn(outputs, inputs).bfloat16()
    out = torch.full((rows, outputs + 3), float("nan")).bfloat16()
    return x, weight, torch.randn(outputs).bfloat16() if bias else None, out


def check(function, rows, inputs, outputs, *, bias=True, add=False):
    x, weight, bias, wide = case(rows, inputs, outputs, bias=bias)
    out = wide[:, :outputs]
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    if add:
        out.copy_(torch.randn(rows, outputs))
        expected += out.double()
    function(x, weight, bias, out, add=add)
    bound = 2**-8 * expected.abs() + 1e-5 * inputs
    assert ((out.double() - expected).abs() <= bound).all()
    assert wide[:, outputs:].isnan().all()


@pytest.fixture(autouse=True)
def _bfloat16():
    with using("avx512bf16" if "avx512bf16" in SETS else None):
        yield


@pytest.mark.parametrize("function", [pytest.param(ops.linear_skinny, marks=HERE),
                                      reference.linear_skinny])
@pytest.mark.parametrize("rows", [1, 2, 15, 16])
@pytest.mark.parametrize("inputs, outputs", [(2, 1), (30, 8), (32, 7), (34, 9), (258, 33),
                                             (2048, 64)])
def test_products(function, rows, inputs, outputs):
    for bias in (True, False):
        for add in (True, False):
            check(function, rows, inputs, outputs, bias=bias, add=add)


@HERE
def test_threads_change_nothing():
    results = []
    for threads in (1, 2, 3):
        x, weight, bias, wide = case(5, 130, 77)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            ops.linear_skinny(x, weight, bias, wide[:, :77])
        finally:
            torch.set_num_threads(before)
        results.append(wide[:, :77])
    assert all(torch.equal(results[0], other) for other in results[1:])


@HERE
def test_the_custom_op():
    x, weight, bias, wide = case(3, 32, 16)
    out = torch.randn(3, 16).bfloat16()
    for arguments in ((x, weight, bias, out, True), (x, weight, None, out, False)):
        torch.library.opcheck(library.linear_skinny, arguments)


@pytest.mark.parametrize("rows", [16, 17])
def test_a_layer_gives_the_same_either_way(monkeypatch, rows):
    x, weight, bias, wide = case(rows, 64, 40)
    residual = torch.randn(rows, 40).bfloat16()
    kept = residual.clone()
    outputs = [layers.linear(x, weight, bias), layers.linear(x, weight, bias, out=wide[:, :40]),
               layers.add_linear_(residual, x, weight, bias)]
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    expected = layers.linear(x, weight, bias)
    for got, wanted in zip(outputs, (expected, expected, kept + expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=0.1)


def test_what_is_admitted(monkeypatch):
    x, weight, *_ = case(16, 32, 8)
    assert ops.skinny(x, weight) == native.multiplies_bfloat16()
    for bad in ((case(17, 32, 8)[0], weight), (x.float(), weight.float()), (x.T, weight),
                (x, weight.T), (x[:, :31], weight[:, :31]), (x.to("meta"), weight.to("meta"))):
        assert not ops.skinny(*bad)
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    assert not ops.skinny(x, weight)
