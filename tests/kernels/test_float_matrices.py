"""Matrices of short floats, MXFP4 and 12 bits: their bytes and values on every instruction set."""

import struct

import pytest
import torch
from helpers.kernel_cases import BUILT, SETS, poisoned_memory, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.cpu import native
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


def test_sizes_of_mxfp4():
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
    """For all exponents whose numbers float32 holds."""
    matrix, values = case(outputs, inputs, low=0, high=252, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.arange(outputs), torch.randint(outputs, (5,), generator=generator)])
    if way == "reference":
        actual = reference_matrix.unpack_rows(matrix.data, matrix.layout, rows, torch.float32)
    else:
        with using(way), poisoned_memory():
            actual = ops.unpack_rows(matrix, rows, torch.float32)
    assert torch.equal(actual.double(), values[rows])


@BUILT
def test_group_0_marks_mxfp4_in_the_abi():
    """In the arguments of the C ABI."""
    x, results = torch.randn(3, 64), []
    first, second = (case(24, 64, low=120, high=127, seed=seed) for seed in (1, 2))
    spaced = MatrixLayout(24, 64, 4, 32)
    other = QuantizedMatrix(ops.quantize_matrix(torch.randn(24, 64), spaced), spaced)
    assert native.matrix_struct("m", other).group == 32
    for matrix, values in (first, second):
        assert native.matrix_struct("m", matrix).group == 0
        results.append(torch.zeros(3, 24))
        native.linear_quantized(x, matrix, None, results[-1], False)
        torch.testing.assert_close(results[-1], x @ values.float().T)
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
    results = reference_matrix.unpack_rows(data, layout, torch.arange(5), torch.float32)
    for start in (0, 32, 64):
        part, values = (x[:, start : start + 32].double() for x in (weight, results))
        top = part.abs().amax(1, keepdim=True)
        exponent = (torch.floor(torch.log2(top.clamp_min(2.0**-200))) - 2).clamp_min(-127)
        steps = 2.0**exponent * torch.tensor(NUMBERS, dtype=torch.float64)[:, None, None]
        least = (steps - part).abs().amin(0)
        assert ((values - part).abs() <= least * (1 + 1e-12)).all()
    again = ops.quantize_matrix(results, layout)
    assert torch.equal(reference_matrix.unpack_rows(again, layout, torch.arange(5), torch.float32),
                       results)


# 12 bits

WAYS = st.sampled_from(["reference", *SETS])


def by_hand(data, layout):
    """Values in float64 from the bytes, as the layout's text says."""
    raw, values = bytes(data.tolist()), torch.zeros(layout.outputs, layout.inputs).double()
    block_bytes = 16 + 4 * 16 * layout.group * 12 // 32
    for output in range(layout.outputs):
        for i in range(layout.inputs):
            block = (output // 16 * layout.groups + i // layout.group) * block_bytes
            lane, within = output % 16, i % layout.group
            unit, t, side = within // 8, within % 8 // 2, within % 2
            halves = [struct.unpack_from("<H", raw, block + 16 + 64 * (3 * unit + word)
                                         + 4 * lane + 2 * side)[0] for word in range(3)]
            if t < 3:
                sign, code = halves[t] >> 15, halves[t] & 0x7FF
            else:
                sign = halves[1] >> 14 & 1
                code = ((halves[0] >> 11 & 15) << 7 | (halves[1] >> 11 & 7) << 4
                        | halves[2] >> 11 & 15)
            largest = raw[block + lane]
            size = 2.0 ** ((code >> 7) - 15 + largest - 127) * (1 + (code & 127) / 128)
            values[output, i] = (-1) ** sign * size * (code > 0 and largest > 0)
    return values


def shortened(weight, layout, way):
    """Its bytes, and the values of these."""
    if way == "reference":
        data = reference_matrix.quantize_matrix(weight, layout)
        every = torch.arange(layout.outputs)
        return data, reference_matrix.unpack_rows(data, layout, every, torch.float32)
    with using(way), poisoned_memory():
        data = ops.quantize_matrix(weight, layout)
        matrix = QuantizedMatrix(data, layout)
        return data, ops.unpack_rows(matrix, torch.arange(layout.outputs), torch.float32)


def test_sizes_of_12_bits():
    layout = MatrixLayout(64, 128, 12)
    assert layout.nbytes * 8 == 64 * 128 * (12 + 8 / 64) and layout.block_bytes == 16 + 1536
    assert MatrixLayout(17, 33, 12, 32).nbytes == 2 * 2 * (16 + 768)
    assert WeightOptions(12).matrix_bytes((64, 128), 2) == layout.nbytes
    assert not layout.has_zeros and MatrixLayout(64, 128, 8).has_zeros


@given(WAYS, st.integers(1, 40), st.integers(1, 90), st.sampled_from([8, 32, 64]),
       st.sampled_from([0.0, 1.0, 5.0]), st.integers(0, 2**31))
@settings(max_examples=examples(80))
def test_values_near_the_largest_are_exact(way, outputs, inputs, group, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = outputs, inputs
    weight = torch.randn(shape, generator=generator) * torch.exp(
        spread * torch.randn(shape, generator=generator))
    weight = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, weight).bfloat16()
    data, results = shortened(weight, MatrixLayout(*shape, 12, group), way)
    for start in range(0, inputs, group):
        columns = slice(start, start + group)
        part, values = weight[:, columns].double(), results[:, columns]
        _, exponent = part.abs().amax(1, keepdim=True).frexp()
        least = torch.ldexp(torch.ones(outputs, 1).double(), exponent - 1 - 15)
        exact = (part.abs() > least) | (part == 0)
        assert torch.equal(values.double()[exact], part[exact])
        nearest = torch.minimum(part.abs(), (part.abs() - least * 129 / 128).abs())
        assert torch.equal((values - part).abs()[~exact], nearest[~exact])


@given(WAYS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 2**31))
@settings(max_examples=examples(60))
def test_bytes_equal_the_layout(way, dtype, seed):
    """Of numbers that are rounded, too large, too small, or none."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(19, 75, generator=generator) * torch.exp2(
        torch.randint(-130, 128, (19, 1), generator=generator))
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 3e38, 1e-40])
    weight.view(-1)[torch.randint(19 * 75, (6,), generator=generator)] = odd
    weight, layout = weight.to(dtype), MatrixLayout(19, 75, 12, 32)
    data, values = shortened(weight, layout, way)
    assert torch.equal(data, reference_matrix.quantize_matrix(weight, layout))
    assert torch.equal(values.double(), by_hand(data, layout))
    whole = weight.float().nan_to_num(nan=0.0).bfloat16().float()
    whole = whole.clamp(-torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).max)
    largest = torch.nn.functional.pad(whole.abs(), (0, 21)).view(19, 3, 32).amax(-1)
    bound = (largest * 2.0**-16 * 129 / 128 + 2.0**-126).repeat_interleave(32, 1)[:, :75]
    assert ((values - whole).abs().double() <= bound.double()).all()


@BUILT
def test_activation_bits_are_errors():
    layout = MatrixLayout(24, 64, 12)
    matrix = QuantizedMatrix(ops.quantize_matrix(torch.randn(24, 64), layout), layout, 8)
    with pytest.raises(ValueError, match="8 bits for weights of 12"):
        native.linear_quantized(torch.randn(3, 64), matrix, None, torch.zeros(3, 24))
