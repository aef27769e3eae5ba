"""Routing and experts of few tokens each in C++ beside their reference, and what they refuse."""

import pytest
import torch
from helpers.kernel_cases import BUILT, SETS, poisoned_memory, threads, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import abi, ops
from flexgen_h2o.kernels.cpu import experts as native_experts
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.reference import layers as reference_layers

pytestmark = BUILT
MXFP4 = 4.25  # bits of a number


def matrix(outputs, inputs, bits, generator):
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()
    if bits == 16:
        return weight
    layout = (MatrixLayout(outputs, inputs, 4, 32, mxfp4=True) if bits == MXFP4
              else MatrixLayout(outputs, inputs, bits))
    return QuantizedMatrix(ops.quantize_matrix(weight, layout), layout)


def case(rows, hidden, wide, count, each, bits, *, seed=0, missing=(), biased=False):
    """x, ids, shares and the experts, some of which are missing; x is strided."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((rows, hidden + 3), float("nan")).bfloat16()
    x[:, :hidden] = torch.randn(rows, hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(count, generator=generator)[:each] for _ in range(rows)])
    shares = torch.rand(rows, each, generator=generator)
    made = [None if number in missing else tuple(
        matrix(*shape, bits, generator) for shape in ((wide, hidden), (wide, hidden),
                                                      (hidden, wide))) for number in range(count)]
    if biased:
        made = [matrices and (*matrices, *(torch.randn(len(each), generator=generator).bfloat16()
                                           for each in matrices)) for matrices in made]
    return x[:, :hidden], ids, shares, made


def table_of(made):
    table = native_experts.ExpertTable(len(made))
    for number, matrices in enumerate(made):
        if matrices is not None:
            table.put(number, *matrices[:3], biases=matrices[3:])
    return table


@given(st.sampled_from([*SETS]), st.sampled_from([16, 8, 4, MXFP4]), st.integers(1, 40),
       st.integers(1, 70), st.integers(1, 50), st.integers(1, 9), st.integers(1, 4),
       st.sampled_from([*abi.ACTIVATIONS, (1.7, 0.6)]), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=examples(80))
def test_experts_equal_the_reference(way, bits, rows, hidden, wide, count, each, function,
                                     team, seed):
    """With an activation, or with biases and gpt-oss's gate."""
    options = {"function": function, "max_rows": 16}
    missing = {0} if count > 2 else set()
    x, ids, shares, made = case(rows, hidden, wide, count, min(each, count), bits, seed=seed,
                                missing=missing, biased=isinstance(function, tuple))
    sums, expected = torch.ones(rows, hidden), torch.ones(rows, hidden)
    with using(way), threads(team), poisoned_memory():
        native_experts.experts(x, ids, shares, table_of(made), sums, **options)
    reference_layers.experts(x, ids, shares, made, expected, **options)
    torch.testing.assert_close(sums, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("bits", [16, 4])
def test_results_do_not_depend_on_threads(bits):
    """Whether they share an expert's products or its number; 1100 choices take two rounds."""
    for rows, count, each in ((3, 5, 4), (220, 40, 5)):
        x, ids, shares, made = case(rows, 64, 48, count, each, bits)
        found = []
        for team in (1, 2, 3):
            found.append(torch.zeros(rows, 64))
            with threads(team):
                native_experts.experts(x, ids, shares, table_of(made), found[-1], function="silu",
                                       max_rows=64)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("way", SETS)
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_equals_the_reference(way, normalize):
    """With a bias and without."""
    for rows, hidden, count, each in ((1, 64, 8, 2), (9, 131, 37, 8), (3, 5, 4, 4)):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, hidden, generator=generator).bfloat16()
        router = torch.randn(count, hidden, generator=generator).bfloat16()
        router[1] = router[0]  # equal logits: the first comes first
        bias = torch.randn(count, generator=generator).bfloat16()
        bias[1] = bias[0]
        for added in (None, bias):
            with using(way):
                ids, shares = native_experts.route(x, router, added, per_token=each,
                                                   normalize=normalize)
            wanted, parts = reference_layers.route(x, router, added, per_token=each,
                                                   config=RouterConfig(normalize=normalize))
            assert torch.equal(ids, wanted)
            torch.testing.assert_close(shares, parts, rtol=1e-4, atol=1e-6)


def test_nan_inputs_route_to_valid_experts():
    ids, _ = native_experts.route(torch.full((2, 8), float("nan")).bfloat16(),
                                  torch.ones(4, 8).bfloat16(), per_token=3, normalize=True)
    assert ((ids >= 0) & (ids < 4)).all()


def test_invalid_arguments_are_errors():
    x, ids, shares, made = case(2, 16, 8, 3, 2, 16)
    table, sums = table_of(made), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="out of range"):
        native_experts.experts(x, ids + 3, shares, table, sums, function="silu", max_rows=4)
    with pytest.raises(ValueError, match="x must be"):
        native_experts.experts(x[:, :8], ids, shares, table, sums[:, :8], function="silu",
                               max_rows=4)
    with pytest.raises(ValueError, match="up to 64 rows"):
        native_experts.experts(x, ids, shares, table, sums, function="silu", max_rows=65)
    with pytest.raises(ValueError, match="belong together"):
        table.put(0, made[0][0], made[0][1], made[0][0])
    with pytest.raises(ValueError, match="down_bias must be"):
        table.put(0, *made[0], biases=[torch.zeros(8).bfloat16()] * 3)
    with pytest.raises(ValueError, match="4 of 3 experts"):
        native_experts.route(x, torch.ones(3, 16).bfloat16(), per_token=4, normalize=True)
    assert not sums.any()
    for number in range(3):
        table.drop(number)
    native_experts.experts(x, ids, shares, table, sums, function="silu", max_rows=4)
    assert not sums.any(), "none is there"


def test_max_expert_rows(monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_ISA", "portable")
    assert native_experts.max_expert_rows(4) == native_experts.max_expert_rows(4, 8) == 64
    assert native_experts.max_expert_rows(16) == 0, "PyTorch's products"
    if "avx2" in SETS:
        monkeypatch.setenv("FLEXGEN_H2O_ISA", "avx2")
        assert native_experts.max_expert_rows(16) == 16, "then float32"
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    assert native_experts.max_expert_rows(4) == 0
