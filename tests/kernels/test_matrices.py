"""Quantized matrices: their bytes, how far off they are, and products with them."""

import struct

import pytest
import torch
from helpers.error_cases import refused
from helpers.kernel_cases import (
    COMPACT,
    EPSILON,
    MATRIX_SHAPES,
    SETS,
    matrix_layout,
    poisoned_memory,
)

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.models import layers

DTYPES = tuple(EPSILON)



@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.delenv("FLEXGEN_H2O_KERNELS", raising=False)
    with poisoned_memory():
        yield


@pytest.fixture(params=["reference", *SETS])
def backend(request, monkeypatch):
    """The reference, and the kernels and choices of each instruction set."""
    if request.param == "reference":
        monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    else:
        monkeypatch.setenv("FLEXGEN_H2O_ISA", request.param)
    return request.param


def weights(outputs, inputs, *, dtype=torch.float32, size=0.3):
    """A slice of something wider."""
    torch.default_generator.manual_seed(outputs + 7 * inputs)
    wide = torch.full((outputs, inputs + 5), float("nan")).to(dtype)
    wide[:, :inputs] = torch.randn(outputs, inputs) * size
    return wide[:, :inputs]


def by_hand(data, layout):
    """The matrix, byte by byte in plain Python, and the scale of each element."""
    raw = bytes(data.tolist())
    per_word = 32 // layout.bits
    rows, scales, head = [], [], 32 if layout.compact else 64

    def code_of(block, lane, i):
        def word(n):
            return struct.unpack_from("<I", raw, block + head + 64 * n + 4 * lane)[0]

        if layout.bits != 6:
            n, within = divmod(i, per_word)
            return word(n) >> (16 * (within % 2) + layout.bits * (within // 2)) & layout.levels
        three = [word(i // 16 * 3 + n) for n in range(3)]
        part, within = divmod(i % 16, 4)
        byte = 16 * (within % 2) + 8 * (within // 2)
        if part < 3:
            return three[part] >> byte & 63
        return sum((three[n] >> byte + 6 & 3) << 2 * n for n in range(3))

    for output in range(layout.outputs):
        row, row_scales = [], []
        for i in range(layout.inputs):
            tile, lane = divmod(output, 16)
            block = (tile * -(-layout.inputs // layout.group) + i // layout.group) * (
                head + 2 * layout.group * layout.bits)
            if layout.compact:
                exponent, mantissa = divmod(raw[block + lane], 16)
                scale = (1 + mantissa / 16) * 2.0 ** (exponent - 14)
                zero = -scale * raw[block + 16 + lane] / 16
            else:
                scale, = struct.unpack_from("<e", raw, block + 2 * lane)
                zero, = struct.unpack_from("<e", raw, block + 32 + 2 * lane)
            row.append(zero + scale * code_of(block, lane, i % layout.group))
            row_scales.append(scale)
        rows.append(row)
        scales.append(row_scales)
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)


@pytest.mark.parametrize(("layout", "nbytes"), [
    (MatrixLayout(4096, 16384, 4), 4096 * 16384 * 9 // 16),
    (MatrixLayout(4096, 4096, 8, 32), 4096 * 4096 * 9 // 8), (MatrixLayout(1, 1, 4), 576),
    (MatrixLayout(17, 65, 8), 4 * 1088), (MatrixLayout(16, 256, 6, 16), 16 * (64 + 192)),
    (MatrixLayout(4096, 4096, 4, 32, compact=True), 4096 * 4096 * 9 // 16)])
def test_known_sizes(layout, nbytes):
    assert layout.nbytes == nbytes and layout.block_bytes % 32 == 0


@pytest.mark.parametrize("arguments", [(8, 8, 3), (8, 8, 16), (8, 8, 4, 12), (8, 8, 4, 0),
                                       (8, 8, 6, 24), (0, 8, 4), (8, 0, 4)])
def test_unsupported_layouts_are_errors(arguments):
    refused(lambda: MatrixLayout(*arguments), match="cannot quantize")


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("bits", [4, COMPACT, 6, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantization_error_is_within_half_a_scale(backend, shape, bits, dtype):
    *size, group = shape
    weight, layout = weights(*size, dtype=dtype), matrix_layout(*size, bits, group)
    data = ops.quantize_matrix(weight, layout)
    assert data.dtype == torch.uint8 and data.shape == (layout.nbytes,)
    values, scales = by_hand(data, layout)
    # Beside half a scale, the zero point's rounding: to float16, or to a sixteenth of the scale.
    bound = 0.5 * scales + weight.double().abs().max() * 2**-11
    if layout.compact:
        bound += scales / 32
    assert ((values - weight.double()).abs() <= bound).all()
    assert torch.equal(data, reference_matrix.quantize_matrix(weight, layout))


def test_padding_is_zeros(backend):
    layout = MatrixLayout(17, 70, 4)
    data = ops.quantize_matrix(weights(17, 70), layout, search=True)
    blocks = data.view(2, 2, -1)
    lanes = torch.stack([blocks[1, :, k::64] for k in range(4, 64)])  # words of outputs 17 to 31
    assert not lanes[..., 1:].any()
    halves = blocks[1, :, :64].view(torch.int16).view(2, 2, MATRIX_TILE)
    assert not halves[..., 1:].any()
    assert not blocks[0, 1, 64 + 64:].any()  # inputs 72 on


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-3.5, -3.5), (-1e9, 1e9), (1e-8, 2e-8),
                                           (65504.0, 65504.0), (-0.0, 0.0)])
@pytest.mark.parametrize("search", [False, True])
def test_extreme_groups(backend, low, high, search):
    weight = torch.full((3, 64), low)
    weight[:, ::3] = high
    layout = MatrixLayout(3, 64, 4)
    data = ops.quantize_matrix(weight, layout, search=search)
    values, _ = by_hand(data, layout)
    wanted = weight.double().clamp(-65504, 65504)
    step = (wanted.max() - wanted.min()) / 15
    assert values.isfinite().all()
    assert ((values - wanted).abs() <= step + wanted.abs() * 2**-10 + 2**-24).all()


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-3.5, -3.5), (3.5, 4.0), (-4.0, -3.5),
                                           (1e-8, 2e-8), (-0.0, 0.0), (-1e9, 1e9)])
@pytest.mark.parametrize("search", [False, True])
def test_extreme_groups_with_compact_scales(backend, low, high, search):
    """They span 0, with scales from 2^-14 to 3.9."""
    weight = torch.full((3, 64), low)
    weight[:, ::3] = high
    layout = matrix_layout(3, 64, COMPACT)
    values, _ = by_hand(ops.quantize_matrix(weight, layout, search=search), layout)
    wanted = weight.double().clamp(-28, 28)
    step = max((max(wanted.max(), 0) - min(wanted.min(), 0)) / 15 * 17 / 16, 2**-14)
    assert ((values - wanted).abs() <= step * 0.6).all()


@pytest.mark.parametrize("bits", [4, COMPACT, 6, 8])
@pytest.mark.parametrize("shape", [(33, 200, 64), (20, 70, 32)])
def test_scale_search_reduces_the_error_of_every_group(backend, shape, bits):
    *size, group = shape
    weight, layout = weights(*size), matrix_layout(*size, bits, group)

    def errors(search, quantize=ops.quantize_matrix):
        values, _ = by_hand(quantize(weight, layout, search=search), layout)
        off = (values - weight.double()).square()
        ones = torch.ones(size[1])
        return torch.stack([(part * reference_matrix.error_weights(x, one)).sum(-1)
                            for part, x, one in zip(off.split(layout.group, 1),
                                                    weight.split(layout.group, 1),
                                                    ones.split(layout.group), strict=True)], 1)

    plain, searched = errors(False), errors(True)
    assert (searched <= plain * (1 + 1e-5)).all()
    if layout.bits == 4:
        assert searched.sum() < 0.9 * plain.sum()
    # Sums in another order may choose another of two scales that are about as good.
    wanted = errors(True, reference_matrix.quantize_matrix)
    assert abs(searched.sum() / wanted.sum() - 1) < 1e-2


@pytest.mark.parametrize("bits", [4, COMPACT, 6])
def test_scale_search_minimizes_the_weighted_error(backend, bits):
    weight, layout = weights(33, 200), matrix_layout(33, 200, bits)
    importance = torch.rand(200) ** 8
    importance[64:128] = 0  # a group without importance

    def error(importance_of_search, quantize=ops.quantize_matrix):
        data = quantize(weight, layout, search=True, importance=importance_of_search)
        return (importance * (by_hand(data, layout)[0] - weight).square()).sum()

    assert error(importance) < 0.95 * error(None)
    wanted = error(importance, reference_matrix.quantize_matrix)
    assert abs(error(importance) / wanted - 1) < 1e-2
    same = [ops.quantize_matrix(weight, layout, search=True, importance=importance_of_all)
            for importance_of_all in (None, torch.full((200,), 3.0))]
    assert torch.equal(*same)


def check_output(weight, bits, *, search):
    """Check that a product is off by no more than half a scale of each group."""
    layout = MatrixLayout(*weight.shape, bits)
    matrix = QuantizedMatrix(ops.quantize_matrix(weight, layout, search=search), layout)
    x = torch.randn(6, weight.shape[1])
    out = torch.full((6, len(weight)), float("nan"))
    ops.linear_quantized(x, matrix, None, out)
    groups = [(x[:, k : k + 64].norm(dim=1), weight[:, k : k + 64].float())
              for k in range(0, weight.shape[1], 64)]
    # Cauchy and Schwarz: a search lessens the sum of a group's squares, not each error.
    bound = sum(size[:, None] * ((w.amax(1) - w.amin(1)) / layout.levels / 2 * 8)
                for size, w in groups)  # 8 is the root of a group's elements
    wanted = x.double() @ weight.double().T
    scale = weight.float().abs().max() * x.abs().sum(1, keepdim=True)
    assert ((out - wanted).abs() <= 1.01 * bound + 2**-10 * scale).all()
    return ((out - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "most"), [(4, 0.1), (8, 0.006)])
def test_output_error_is_within_the_bound_of_the_format(backend, dtype, bits, most):
    weight = weights(70, 640, dtype=dtype, size=0.02)
    plain, searched = (check_output(weight, bits, search=search) for search in (False, True))
    assert searched < 1.05 * plain < 1.05 * most


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("bits", [4, COMPACT, 6, 8])
def test_unpacked_rows(backend, shape, bits):
    *size, group = shape
    layout = matrix_layout(*size, bits, group)
    data = ops.quantize_matrix(weights(*size), layout)
    values, _ = by_hand(data, layout)
    every = torch.arange(size[0])
    for rows in (every, every.flip(0), torch.randint(size[0], (40,)), every[:0],
                 torch.cat([every[:1], every]), every[-17:]):
        for dtype in DTYPES:
            got = ops.unpack_rows(QuantizedMatrix(data, layout), rows, dtype)
            assert got.dtype == dtype and got.shape == (len(rows), size[1])
            exact = values[rows].float()  # by hand nothing is rounded between product and sum
            torch.testing.assert_close(got.float(), exact.to(dtype).float(), atol=1e-7,
                                       rtol=EPSILON[dtype])


def test_layers_accept_quantized_matrices(backend):
    layout = MatrixLayout(24, 40, 8)
    matrix = QuantizedMatrix(ops.quantize_matrix(weights(24, 40), layout), layout)
    exact = by_hand(matrix.data, layout)[0].float()
    x, bias = torch.randn(5, 40), torch.randn(24)
    residual, out = torch.randn(5, 24), torch.full((5, 24), float("nan"))
    expected = x @ exact.T + bias
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(layers.linear(x, matrix, bias), expected, **close)
    assert layers.linear(x, matrix, bias, out=out) is out
    torch.testing.assert_close(out, expected, **close)
    kept = residual.clone()
    assert layers.add_linear_(residual, x, matrix, bias) is residual
    torch.testing.assert_close(residual, kept + expected, **close)
    assert matrix.shape == (24, 40) and len(matrix) == 24
