"""Products of quantized matrices with activations that are rounded to 8 bits."""

from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import (
    BUILT,
    COMPACT,
    EPSILON,
    MXFP4,
    SETS,
    check_quantized_linear,
    poisoned_memory,
    quantized,
    threads,
    using,
)
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import experts as native_experts
from flexgen_h2o.kernels.reference import layers as reference_layers
from flexgen_h2o.kernels.reference import matrix as reference_matrix

FORMS = st.one_of(st.tuples(st.sampled_from([4, 8]), st.sampled_from([8, 24, 32, 64, 136])),
                  st.tuples(st.just(6), st.sampled_from([16, 32, 48, 64])),
                  st.tuples(st.just(COMPACT), st.sampled_from([8, 32, 64])), st.just((MXFP4, 32)))


def rounding_matrix(outputs, inputs, bits, group, *, seed=0):
    """A random matrix whose products round activations."""
    generator = torch.Generator().manual_seed(seed)
    return quantized(torch.randn(outputs, inputs, generator=generator), bits, group, 8)


def by_hand(x, group):
    """x, rounded group by group, in float64."""
    parts = []
    for part in x.float().split(group, dim=1):
        step = part.abs().amax(dim=1, keepdim=True) / 127
        codes = (part / torch.where(step == 0, 1, step)).round().clamp(-127, 127)
        parts.append(codes.double() * step.double())
    return torch.cat(parts, dim=1)


@given(st.integers(1, 5), st.integers(1, 200), st.sampled_from([8, 32, 64]),
       st.integers(-40, 30), st.integers(0, 2**31))
@settings(max_examples=examples(50))
def test_activation_error_is_within_half_a_step(rows, inputs, group, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator) * 2.0**exponent
    rounded = reference_matrix.quantize_activations(x, group)
    torch.testing.assert_close(rounded.double(), by_hand(x, group), rtol=1e-6, atol=0)
    for part, results in zip(x.split(group, dim=1), rounded.split(group, dim=1), strict=True):
        step = part.abs().amax(dim=1, keepdim=True) / 127
        assert ((results - part).abs() <= 0.5001 * step).all()


@given(st.sampled_from(["reference", *SETS]), FORMS, st.integers(1, 140), st.integers(1, 70),
       st.integers(1, 300), st.sampled_from([*EPSILON]), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(120))
def test_products_of_quantized_activations(way, form, rows, outputs, inputs, dtype, add, seed):
    """Sums of integers are exact: what is left is float32's error, and the result's."""
    matrix = rounding_matrix(outputs, inputs, *form, seed=seed)
    weight = reference_matrix.unpack_rows(matrix.data, matrix.layout, torch.arange(outputs),
                                          torch.float32)
    module, isa = (reference_matrix, None) if way == "reference" else (ops, way)
    with using(isa), poisoned_memory():
        check_quantized_linear(module.linear_quantized, matrix, weight, rows, dtype=dtype, add=add,
                               offset=4, rounded=lambda x: by_hand(x, form[1]))


@BUILT
@pytest.mark.parametrize("form", [(4, 64), (8, 64), (MXFP4, 32)])
def test_largest_integer_sums_do_not_overflow(form):
    """Codes and activations that are all as large as they can be, and of one sign."""
    bits, group = form
    weight = torch.full((16, 4 * group), 6.0)
    weight[:, ::group] = -6.0
    matrix = quantized(weight, bits, group, 8)
    values = reference_matrix.unpack_rows(matrix.data, matrix.layout, torch.arange(16),
                                          torch.float32)
    for x in (torch.full((1, 4 * group), 127.0), torch.full((1, 4 * group), -127.0)):
        for name in SETS:
            out = torch.empty(1, 16)
            with using(name):
                ops.linear_quantized(x, matrix, None, out)
            torch.testing.assert_close(out, x @ values.T, rtol=1e-5, atol=1)


@BUILT
def test_results_do_not_depend_on_threads_or_other_rows():
    matrix, x = rounding_matrix(200, 130, 4, 32), torch.randn(150, 130).bfloat16()
    results = []
    for team in (1, 2, 3):
        results.append(torch.empty(150, 200).bfloat16())
        with threads(team):
            ops.linear_quantized(x, matrix, None, results[-1])
    alone = torch.empty(1, 200).bfloat16()
    ops.linear_quantized(x[77:78], matrix, None, alone)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(results[0][77:78], alone)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", ["reference", *SETS])
def test_nan_and_inf_stay_in_their_row(way, wrong):
    matrix, x = rounding_matrix(20, 100, 4, 32), torch.randn(3, 100)
    x[1, 40] = wrong
    out = torch.zeros(3, 20)
    if way == "reference":
        reference_matrix.linear_quantized(x, matrix, None, out)
    else:
        with using(way):
            ops.linear_quantized(x, matrix, None, out)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@BUILT
@pytest.mark.parametrize("form", [(4, 64), (8, 32), (MXFP4, 32)])
def test_experts_quantize_activations(form):
    matrices = [[rounding_matrix(*shape, *form, seed=3 * number + place)
                 for place, shape in enumerate([(48, 70), (48, 70), (70, 48)])]
                for number in range(4)]
    table = native_experts.ExpertTable(4)
    for number, parts in enumerate(matrices):
        table.put(number, *parts)
    x = torch.randn(9, 70).bfloat16()
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    shares = torch.rand(9, 2)
    sums, expected = torch.zeros(9, 70), torch.zeros(9, 70)
    native_experts.experts(x, ids, shares, table, sums, function="silu", max_rows=16)
    reference_layers.experts(x, ids, shares, matrices, expected, function="silu", max_rows=16)
    torch.testing.assert_close(sums, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


@BUILT
def test_experts_with_mixed_activation_bits_are_errors():
    plain = quantized(torch.randn(48, 64), 4, 32)
    table = native_experts.ExpertTable(1)
    with pytest.raises(ValueError, match="same format"):
        table.put(0, plain, rounding_matrix(48, 64, 4, 32), rounding_matrix(64, 48, 4, 32))


@BUILT
def test_unsupported_activation_bits_are_errors():
    matrix, x = rounding_matrix(40, 70, 4, 64), torch.randn(3, 70)
    with pytest.raises(ValueError, match="cannot round activations to 7 bits"):
        ops.linear_quantized(x, replace(matrix, activation_bits=7), None, torch.empty(3, 40))
