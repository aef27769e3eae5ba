"""Products with quantized matrices on a GPU, in Triton's interpreter."""

from itertools import product

import pytest
import torch
from helpers import selection
from helpers.fakes import A100, T4
from helpers.selection import examples, full, full_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.dispatch import assume_gpu
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.kernels.triton import matrix as triton_matrix
from flexgen_h2o.kernels.triton import tensor_cores

pytestmark = pytest.mark.usefixtures("mended_interpreter", "seeded")

BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative to the largest sum of absolute products: a few roundings of each dtype."""
FORMS = [(bits, group) for bits in (4, 6, 8) for group in (64, 32)]
SHORT_FLOATS = [(12, 64), (12, 32), (12, 8), (12, 24), (4, 0)]
"""Bits and groups of matrices of short floats: 12 bits, and MXFP4."""
MATRICES = [(16, 64), (5, 40), (40, 200), (70, 129)]
NAN = float("nan")


def layout_of(outputs, inputs, bits, group):
    """A group of 0 is MXFP4's."""
    return MatrixLayout(outputs, inputs, bits, abs(group) or 32, mxfp4=not group, compact=group < 0)


def matrix(outputs, inputs, bits, group):
    """The bytes, what fills up tiles and groups poisoned; the layout and the values."""
    layout = layout_of(outputs, inputs, bits, group)
    weight = torch.randn(outputs, inputs) * 10 ** torch.empty(outputs, 1).uniform_(-1.7, 0)
    data = reference_matrix.quantize_matrix(weight, layout)
    values = reference_matrix.unpack_rows(data, layout, torch.arange(outputs), torch.float32)
    blocks = data.view(layout.tiles, layout.groups, layout.block_bytes)
    filled = MATRIX_TILE * layout.tiles - outputs
    if filled:
        heads = blocks[-1, :, : layout.head_bytes]
        if layout.has_zeros:
            heads.unflatten(-1, (2, MATRIX_TILE, 2))[:, :, -filled:] = torch.tensor(
                [0, 0x7E], dtype=torch.uint8)  # NaN
        else:
            heads[:, -filled:] = 200  # huge
        words = blocks[-1, :, layout.head_bytes :].unflatten(-1, (layout.words, MATRIX_TILE, 4))
        words[:, :, -filled:] = torch.randint(256, (4,)).to(torch.uint8)
    rest = inputs % layout.group
    if rest:  # whole bytes of codes past the inputs: of whole words, any bits
        words = blocks[:, -1, layout.head_bytes :].unflatten(-1, (layout.words, 4 * MATRIX_TILE))
        unit = 3 if bits in (6, 12) else 1
        words[:, -(-rest * bits // (32 * unit)) * unit :] = 0xA7
    return data, layout, values


def strided(*shape, dtype=torch.float32):
    """Random rows with poison between them; the whole, and what counts."""
    whole = torch.full((shape[0] + 2, shape[1] + 9), NAN, dtype=dtype)
    inside = whole[1:-1, 3 : 3 + shape[1]]
    inside.copy_(torch.randn(shape))
    return whole, inside


@pytest.fixture(params=[True, False], ids=["ahead", "in turn"])
def ahead(request, monkeypatch):
    """Both ways in which the kernels of matrix units load codes."""
    for kernel in (tensor_cores._narrow, tensor_cores._wide):
        for config in kernel.configs:
            monkeypatch.setitem(config.kwargs, "AHEAD", request.param)


def check_linear(rows, shape, form, *, bias=False, add=False, dtype=torch.float32):
    data, layout, values = matrix(*shape, *form)
    held = QuantizedMatrix(data, layout)
    x = strided(rows, layout.inputs, dtype=dtype)[1]
    whole, out = strided(rows, layout.outputs, dtype=dtype)
    if not add:
        out.fill_(NAN)
    vector = torch.randn(layout.outputs).to(dtype) if bias else None
    wanted = torch.full(out.shape, NAN) if not add else out.float()
    reference_matrix.linear_quantized(x, held, vector, wanted, add=add)
    size = (x.float().abs() @ values.abs().T).max() + wanted.abs().max()
    triton_matrix.linear_quantized(x, held, vector, out, add)
    assert ((out.double() - wanted.double()).abs().max() / size).item() < BOUND[dtype]
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside[1:-1, 3 : 3 + layout.outputs] = True
    assert torch.equal(whole.isnan(), ~inside)


@pytest.mark.parametrize(("rows", "form", "dtype"), [
    (3, (6, 32), torch.float32),
    *full_cases(*product((1, 3, 16, 17), FORMS, (torch.float16, torch.float32)))])
def test_linear_of_skinny_matrices(rows, form, dtype):
    for i, shape in enumerate(MATRICES if selection.every_case else MATRICES[:2]):
        check_linear(rows, shape, form, bias=i % 2 == 0, add=i < 2, dtype=dtype)


@pytest.mark.parametrize("rows", [9, 65, *full(*range(1, 66))])
def test_linear_of_any_rows(rows):
    """Of 1 to 65 rows, with and without partial tiles and groups."""
    shape = [(70, 129), (64, 128), (5, 600)][rows % 3]
    check_linear(rows, shape, FORMS[rows % len(FORMS)], bias=rows % 2 == 0, add=rows % 5 == 0,
                 dtype=torch.float16)


@pytest.mark.parametrize(("bits", "group", "dtype"), [
    (4, 64, torch.bfloat16), (8, 32, torch.float16),
    *full_cases((4, 32, torch.float16), (4, 128, torch.float16), (8, 16, torch.bfloat16),
                (8, 64, torch.bfloat16))])
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize(("gpu", "adjacent", "wide"), [
    (None, 2, True), (None, 4, False), (A100, 2, False), (A100, 4, True)])
@pytest.mark.usefixtures("ahead")
def test_layouts_of_matrix_units(monkeypatch, rows, bits, group, dtype, gpu, adjacent, wide):
    """Blocks of several tiles and their splits, in each order in which compilers take inputs."""
    monkeypatch.setattr(tensor_cores, "ADJACENT", adjacent)
    shape = (150, 3 * group) if wide else (20, 5 * group - 9)
    with assume_gpu(gpu):
        check_linear(rows, shape, (bits, group), bias=wide, add=not wide, dtype=dtype)


@pytest.mark.parametrize("processors", [40, 108, 132])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_splits_cover_all_groups_and_fill_a_gpu(monkeypatch, rows, processors):
    monkeypatch.setattr(tensor_cores, "interpreted", lambda: False)
    side = 8 if rows <= 8 else 1
    for outputs in (512, 4096, 5120, 11008, 14336, 16384, 65536):
        for inputs in (512, 4096, 11008, 16384):
            groups, tiles = inputs // 64, -(-outputs // (32 if rows <= 8 else 128))
            split = tensor_cores._split(groups, tiles, rows, processors)
            assert split % side == 0 and split > 0
            programs = tiles * -(-groups // split)
            at_once = (8 if rows <= 8 else 4 if rows <= 32 else 2) * processors
            assert programs <= max(at_once, tiles)
            assert programs >= min(tiles * (groups // side), at_once / (3.3 if rows <= 8 else 2.1))


def test_only_unaligned_inputs_are_copied():
    layout = MatrixLayout(16, 128, 4)
    x = torch.randn(4, 144).half()
    assert tensor_cores._pad_groups(x[:, :128], layout).data_ptr() == x.data_ptr()
    for odd in (x[:, 1:129], torch.randn(3, 130).half()[:, :128]):
        assert torch.equal(tensor_cores._pad_groups(odd, layout), odd)
        assert tensor_cores._pad_groups(odd, layout).stride() == (128, 1)
    filled = tensor_cores._pad_groups(x[:, :100], MatrixLayout(16, 100, 4))
    assert torch.equal(filled, torch.cat([x[:, :100], x.new_zeros(4, 28)], 1))


@pytest.mark.parametrize(("rows", "dtype", "bias", "add"), [
    (2, torch.bfloat16, True, True), (9, torch.float16, False, False),
    *full_cases(*((rows, dtype, flag, flag) for rows, dtype, flag in product(
        (2, 9), BOUND, (False, True))))])
def test_linear_options(monkeypatch, rows, dtype, bias, add):
    """9 are unpacked on a T4, and their weights do not fit into the buffer at once."""
    monkeypatch.setattr(triton_matrix, "UNPACKED_BYTES", 40 * 136 * dtype.itemsize)
    for gpu, shape, form in ((None, (33, 72), (8, 32)), (T4, (70, 129), (4, 64))):
        with assume_gpu(gpu):
            check_linear(rows, shape, form, bias=bias, add=add, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, *full(torch.float32)])
def test_linear_of_many_rows(dtype):
    """bfloat16 of PyTorch on a host with AMX would read the poison behind a row."""
    check_linear(64, (70, 129), (4, 64), bias=True, dtype=dtype)
    check_linear(65, (70, 129), (6, 32), bias=True, dtype=dtype)


@pytest.mark.parametrize(("bits", "group", "rows", "dtype"), [
    (4, 24, 6, torch.float16), (8, 256, 1, torch.float16), (4, 24, 6, torch.float32),
    *full_cases(*((*form, 6, torch.float16) for form in (
        (6, 16), (4, 8), (8, 8), (4, 16), (8, 16), (8, 40), (6, 48), (4, 96), (8, 256))))])
def test_groups_of_any_size(bits, group, rows, dtype):
    check_linear(rows, (20, 300), (bits, group), dtype=dtype)


def test_linear_of_noncontiguous_and_empty_inputs():
    data, layout, values = matrix(20, 70, 4, 64)
    held = QuantizedMatrix(data, layout)
    x, out = torch.randn(70, 3).T, torch.full((3, 20), NAN)
    triton_matrix.linear_quantized(x, held, None, out, False)
    torch.testing.assert_close(out, x @ values.T)
    empty = torch.empty(0, 20)
    triton_matrix.linear_quantized(torch.empty(0, 70), held, None, empty, False)


def test_linear_at_an_offset_of_4_bytes():
    data, layout, values = matrix(20, 70, 8, 64)
    held = QuantizedMatrix(torch.cat([torch.zeros(4, dtype=torch.uint8), data])[4:], layout)
    for rows in (1, 12):
        x, out = torch.randn(rows, 70), torch.full((rows, 20), NAN)
        triton_matrix.linear_quantized(x, held, None, out, False)
        torch.testing.assert_close(out, x @ values.T)
        half = out.half()
        triton_matrix.linear_quantized(x.half(), held, None, half, False)
        torch.testing.assert_close(half.float(), out, rtol=1e-2, atol=1e-2)


def test_linear_is_deterministic():
    data, layout, _ = matrix(20, 200, 4, 64)
    held = QuantizedMatrix(data, layout)
    for rows, dtype in ((1, torch.float32), (6, torch.float16)):
        x = torch.randn(rows, 200).to(dtype)
        first, second = torch.full((2, rows, 20), NAN, dtype=dtype)
        for out in (first, second):
            triton_matrix.linear_quantized(x, held, None, out, False)
        assert torch.equal(first, second)


@pytest.mark.parametrize(("form", "shape"), [
    ((4, 64), (5, 40)), ((6, 32), (20, 100)), ((12, 8), (5, 40)), ((4, 0), (20, 100)),
    *full_cases(*product([*FORMS, *SHORT_FLOATS], MATRICES))])
def test_unpack_rows(form, shape):
    data, layout, values = matrix(*shape, *form)
    held = QuantizedMatrix(data, layout)
    rows = torch.randint(shape[0], (shape[0] + 3,))  # in any order, some more than once
    for dtype in BOUND:
        wanted = reference_matrix.unpack_rows(data, layout, rows, dtype)
        got = triton_matrix.unpack_rows(held, rows, dtype)
        assert got.dtype == dtype
        # The interpreter cuts bfloat16 off where a GPU rounds. It holds short floats exactly.
        limit = 2**-7 if dtype == torch.bfloat16 and form in FORMS else 0
        torch.testing.assert_close(got, wanted, rtol=limit, atol=0)
    assert torch.equal(triton_matrix.unpack_rows(held, rows[::2], torch.float32), values[rows[::2]])
    none = triton_matrix.unpack_rows(held, rows[:0], torch.float32)
    assert none.shape == (0, shape[1])


@pytest.mark.parametrize(("rows", "form", "dtype"), [
    (1, (12, 64), torch.bfloat16), (8, (4, 0), torch.float16), (9, (12, 24), torch.float32),
    *full_cases(*product((1, 8, 9), SHORT_FLOATS, BOUND))])
def test_linear_of_short_floats(rows, form, dtype):
    check_linear(rows, (20, 200), form, bias=rows == 8, add=rows > 1, dtype=dtype)


@given(st.sampled_from(SHORT_FLOATS), st.integers(1, 10), st.integers(1, 40), st.integers(1, 300),
       st.integers(0, 3))
@settings(max_examples=examples(20))
def test_linear_of_any_short_floats(form, rows, outputs, inputs, options):
    check_linear(rows, (outputs, inputs), form, bias=options % 2 == 0, add=options < 2)


@pytest.mark.parametrize(("bits", "group"), [(12, 64), (4, 0)])
def test_short_floats_of_every_exponent(bits, group):
    """Random codes by all exponents of finite numbers: the reference's bits, down to denormals."""
    layout = layout_of(256, 128, bits, group)
    blocks = torch.randint(256, (layout.tiles, layout.groups, layout.block_bytes)).to(torch.uint8)
    exponents = torch.arange(256).clamp(max=254 if bits == 12 else 252).to(torch.uint8)
    blocks[..., :MATRIX_TILE] = exponents.view(layout.tiles, 1, MATRIX_TILE)
    data, rows = blocks.view(-1), torch.arange(256)
    wanted = reference_matrix.unpack_rows(data, layout, rows, torch.float32)
    got = triton_matrix.unpack_rows(QuantizedMatrix(data, layout), rows, torch.float32)
    assert torch.equal(got, wanted)
