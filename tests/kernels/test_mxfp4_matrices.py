"""Matrices of MXFP4: their bytes, and products with them on every instruction set."""

import pytest
import torch
from helpers.kernel_cases import (
    BUILT,
    SETS,
    poisoned_memory,
    using,
)
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.kernels.reference.matrix import pack_mxfp4

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
def layout_of(outputs, inputs):
    return MatrixLayout(outputs, inputs, 4, 32, mxfp4=True)


def case(outputs, inputs, *, low, high, seed=0):
    """A matrix of random codes and exponents from `low` to `high`, and its values in float64."""
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(outputs, inputs)
    blocks = torch.randint(256, (outputs, layout.groups, 16), generator=generator)
    exponents = torch.randint(low, high + 1, (outputs, layout.groups), generator=generator)
    codes = torch.stack((blocks % 16, blocks // 16), dim=-1).flatten(2)
    values = torch.tensor(NUMBERS, dtype=torch.float64)[codes]
    values = (values * 2.0 ** (exponents.double() - 127)[..., None]).flatten(1)[:, :inputs]
    data = pack_mxfp4(blocks.to(torch.uint8), exponents.to(torch.uint8), layout)
    return QuantizedMatrix(data, layout), values


def test_sizes():
    assert layout_of(64, 64).nbytes * 8 == 64 * 64 * 4.25
    assert layout_of(17, 33).nbytes == 2 * 2 * (16 + 256)
    options = WeightOptions(4, mxfp4=frozenset({(64, 64)}))
    assert options.layout((64, 64)).mxfp4 and not options.layout((64, 96)).mxfp4
    assert options.matrix_bytes((64, 64), 2) * 8 == 64 * 64 * 4.25
    for bits, group in ((8, 32), (4, 64)):
        with pytest.raises(UserError, match="cannot quantize to MXFP4"):
            MatrixLayout(8, 64, bits, group, mxfp4=True)


@given(st.sampled_from(["reference", *SETS]), st.integers(1, 50), st.integers(1, 100),
       st.integers(0, 2**31))
@settings(max_examples=examples(60))
def test_rows_are_exact(way, outputs, inputs, seed):
    """Whatever the exponents, up to the largest whose numbers float32 holds."""
    matrix, values = case(outputs, inputs, low=0, high=252, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.arange(outputs), torch.randint(outputs, (5,), generator=generator)])
    if way == "reference":
        found = reference_matrix.unpack_rows(matrix.data, matrix.layout, rows, torch.float32)
    else:
        with using(way), poisoned_memory():
            found = ops.unpack_rows(matrix, rows, torch.float32)
    assert torch.equal(found.double(), values[rows])


@BUILT
def test_group_0_marks_mxfp4_in_the_abi():
    """In the arguments of the C ABI."""
    x, found = torch.randn(3, 64), []
    first, second = (case(24, 64, low=120, high=127, seed=seed) for seed in (1, 2))
    spaced = MatrixLayout(24, 64, 4, 32)
    other = QuantizedMatrix(ops.quantize_matrix(torch.randn(24, 64), spaced), spaced)
    assert native.matrix_struct("m", other).group == 32
    for matrix, values in (first, second):
        assert native.matrix_struct("m", matrix).group == 0
        found.append(torch.zeros(3, 24))
        native.linear_quantized(x, matrix, None, found[-1], False)
        torch.testing.assert_close(found[-1], x @ values.float().T)
    with pytest.raises(ValueError, match="data must be"):
        native.matrix_struct("m", QuantizedMatrix(other.data, first[0].layout))
    with pytest.raises(ValueError, match="for the reference"):
        native.quantize_matrix(torch.randn(24, 64), first[0])


@pytest.mark.parametrize("size", [1e-40, 1e-3, 1.0, 1e30])
def test_rounding_gives_the_nearest_number(size):
    weight = torch.randn(5, 70) * size
    weight[0], weight[1, :3] = 0, torch.tensor([7.9, 0.26, 2.6]) * size
    layout = layout_of(5, 70)
    data = ops.quantize_matrix(weight, layout, search=True)
    found = reference_matrix.unpack_rows(data, layout, torch.arange(5), torch.float32)
    for start in (0, 32, 64):
        part, mine = weight[:, start : start + 32].double(), found[:, start : start + 32].double()
        top = part.abs().amax(1, keepdim=True)
        exponent = (torch.floor(torch.log2(top.clamp_min(2.0**-200))) - 2).clamp_min(-127)
        steps = 2.0**exponent * torch.tensor(NUMBERS, dtype=torch.float64)[:, None, None]
        least = (steps - part).abs().amin(0)
        assert ((mine - part).abs() <= least * (1 + 1e-12)).all()
    again = ops.quantize_matrix(found, layout)
    assert torch.equal(reference_matrix.unpack_rows(again, layout, torch.arange(5), torch.float32),
                       found)
