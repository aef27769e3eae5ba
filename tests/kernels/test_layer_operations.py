"""Norms, rotation and activations against float64, and captured calls of several operations."""

import ctypes
from functools import partial

import pytest
import torch
from helpers.kernel_cases import BOUND, BUILT, SETS, quantized, rotated, same, threads, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.h2o.key_smoothing import BasisChange, block_size
from flexgen_h2o.kernels import abi, ops, torch_ops
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.cpu.library import CapturedCalls
from flexgen_h2o.kernels.reference import layers as reference_layers

pytestmark = BUILT

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
WAYS = st.sampled_from([*SETS, None])
"""An instruction set, or the reference."""
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}
GELUS = {"relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
         "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}


def wide(rows, columns, dtype, *, seed):
    """Random rows between which lies NaN, and the whole that they are a part of."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((rows, columns + 3), float("nan"), dtype=dtype)
    whole[:, :columns] = torch.randn(rows, columns, generator=generator).to(dtype)
    return whole[:, :columns], whole


def run(way, name, *arguments, **named):
    with using(way):
        getattr(native if way else reference_layers, name)(*arguments, **named)


def near(got, expected, rounding, *, beside=1.0):
    """Rounded once; `beside` are the summands, whose own errors stay in float32."""
    bound = rounding * expected.abs() + 2e-6 * beside
    assert ((got.double() - expected).abs() <= bound).all()


@given(WAYS, DTYPES, st.integers(1, 5), st.integers(1, 200), st.booleans(), st.booleans(),
       st.booleans(), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(150))
def test_norms(way, dtype, rows, width, centered, weighted, biased, in_place, seed):
    x, whole = wide(rows, width, dtype, seed=seed)
    weight, bias = (wide(1, width, dtype, seed=seed + i)[0][0] for i in (1, 2))
    weight, bias = weight if weighted else None, bias if biased else None
    expected = x.double()
    if centered:
        expected = expected - expected.mean(-1, keepdim=True)
    expected = expected / (expected.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * (1 if weight is None else weight.double())
    expected = expected + (0 if bias is None else bias.double())
    out, poison = (x, whole) if in_place else wide(rows, width, dtype, seed=seed + 3)
    if not in_place:
        out.fill_(float("nan"))
    run(way, "norm", x, weight, bias, out, eps=1e-5, centered=centered)
    # A row of values that are nearly alike has a mean that float32 knows only so well.
    slack = 300 if centered else 10
    near(out, expected, ROUNDING[dtype], beside=slack)
    assert poison[:, width:].isnan().all()


@given(WAYS, DTYPES, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3),
       st.sampled_from([2, 6, 20, 24, 64, 80, 96, 128, 256]), st.integers(0, 12), st.booleans(),
       st.integers(0, 2**31))
@settings(max_examples=examples(150))
def test_rotation_and_smoothing(way, dtype, rows, kv_heads, group, dim, half, shifted, seed):
    half = min(half, dim // 2)
    x, whole = wide(rows, kv_heads * group * (dim + 2), dtype, seed=seed)
    heads = x.unflatten(1, (kv_heads * group, dim + 2))
    beside = heads[..., dim:].clone()
    given = heads[..., :dim].double()
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randn(rows, half, generator=generator)
    factor = torch.rand(kv_heads, dim, generator=generator) + 0.5
    shift = torch.randn(kv_heads, dim, generator=generator) if shifted else None
    tables = (angles.cos(), angles.sin()) if half else (None, None)
    mean, offsets = torch.randn(kv_heads, dim, generator=generator), torch.full(
        (rows, kv_heads * group), float("nan"))
    run(way, "rotate", heads[..., :dim], *tables, BasisChange(factor, shift, mean), offsets)
    if half:
        c, s = (table.double()[:, None] for table in tables)
        first, second, passed = given.split([half, half, dim - 2 * half], -1)
        given = torch.cat([first * c - second * s, second * c + first * s, passed], -1)
    grouped = given.unflatten(1, (kv_heads, group))
    products = (grouped * mean.double()[:, None]).sum(-1).flatten(1)
    assert ((offsets - products).abs() <= 1e-5 * (1 + grouped.abs().sum(-1).flatten(1) * 4)).all()
    grouped = grouped * factor.double()[:, None]
    grouped = grouped + (0 if shift is None else shift.double()[:, None])
    size = block_size(dim)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)]
                           for i in range(size)], dtype=torch.float64) / size**0.5
    expected = (grouped.unflatten(-1, (-1, size)) @ matrix).flatten(-2).flatten(1, 2)
    near(heads[..., :dim], expected, ROUNDING[dtype], beside=10)
    assert torch.equal(heads[..., dim:], beside) and whole[:, x.shape[1]:].isnan().all()


@given(WAYS, DTYPES, st.sampled_from(abi.ACTIVATIONS), st.integers(1, 4), st.integers(1, 100),
       st.booleans(), st.sampled_from([0.1, 1.0, 20.0]), st.integers(0, 2**31))
@settings(max_examples=examples(200))
def test_activations(way, dtype, function, rows, width, gated, scale, seed):
    x, whole = wide(rows, width, dtype, seed=seed)
    x *= scale
    factor = wide(rows, width, dtype, seed=seed + 1)[0] if gated else None
    expected = GELUS[function](x.double()) * (1 if factor is None else factor.double())
    run(way, "activate", x, function, factor)
    near(x, expected, 1.01 * ROUNDING[dtype] + 1e-6)
    assert whole[:, width:].isnan().all()


@pytest.mark.parametrize("way", SETS)
@pytest.mark.parametrize("function", abi.ACTIVATIONS)
def test_activations_of_nan_and_inf(way, function):
    values = torch.tensor([float("nan"), float("inf"), 0.0, -0.0, 3e38, -3e38]).repeat(4)
    got = values[None].clone()
    run(way, "activate", got, function)
    expected = values.clamp(min=0)  # so far from 0 they are all alike; PyTorch's gelu is NaN there
    assert torch.equal(got[0].nan_to_num(7.0, posinf=8.0), expected.nan_to_num(7.0, posinf=8.0))


@pytest.mark.parametrize("way", SETS)
def test_results_do_not_depend_on_threads(way):
    """Of rows and widths at which several take part."""
    results = []
    for count in (1, 2, 3):
        with threads(count):
            x, weight, bias = (wide(rows, 5000, torch.bfloat16, seed=rows)[0]
                               for rows in (9, 1, 1))
            run(way, "norm", x, weight[0], bias[0], x, eps=1e-5, centered=True)
            run(way, "activate", x, "gelu", x.clone())
            heads = x.unflatten(1, (50, 100))
            angles = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
            run(way, "rotate", heads, angles.cos(), angles.sin())
            results.append(x)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_invalid_arguments_write_nothing():
    x, out = torch.ones(2, 8), torch.full((2, 8), 3.0)
    tables = torch.ones(2, 4)
    for call in (lambda: native.norm(x, torch.ones(7), None, out, eps=1e-5, centered=True),
                 lambda: native.norm(x, None, None, out[:1], eps=1e-5, centered=True),
                 lambda: native.norm(x.T, None, None, out.T, eps=1e-5, centered=True),
                 lambda: native.norm(x.double(), None, None, out.double(), eps=1e-5, centered=True),
                 lambda: native.rotate(out.view(2, 1, 8), torch.ones(2, 5), torch.ones(2, 5)),
                 lambda: native.rotate(out.view(2, 1, 8), tables, tables[:1]),
                 lambda: native.rotate(out.view(2, 1, 8), tables.double(), tables.double()),
                 lambda: native.activate(out, "mish"),
                 lambda: native.activate(out, "relu", torch.ones(2, 7)),
                 lambda: native.activate(out, "relu", x.bfloat16())):
        with pytest.raises(ValueError):
            call()
    assert (out == 3).all()


def operations(x, matrix, out, tables, *, capture=None):
    """Run operations on x [rows, 32]; each reads the result of the one before."""
    named = {} if capture is None else {"capture": capture}
    native.norm(x, None, None, out, eps=1e-6, centered=False, **named)
    native.rotate(out.view(len(x), 2, 16), *tables, **named)
    if capture is None:
        x.mul_(2)
    else:
        capture.append(lambda: x.mul_(2))
    native.linear_quantized(out, matrix, None, x, True, **named)
    native.activate(x, "silu", out, **named)


@pytest.mark.parametrize("way", SETS)
def test_replay_equals_eager_calls_with_new_inputs(way):
    generator = torch.Generator().manual_seed(1)
    matrix = quantized(torch.randn(32, 32, generator=generator), 4, 32)
    x, out = torch.empty(3, 32), torch.full((3, 32), float("nan"))
    tables = torch.empty(2, 3, 8)
    with using(way):
        program = CapturedCalls()
        operations(x, matrix, out, tables, capture=program)
        for _ in range(3):
            fresh = torch.randn(3, 32, generator=generator)
            tables.uniform_(generator=generator)
            x.copy_(fresh)
            program.replay()
            expected, between = fresh.clone(), torch.empty(3, 32)
            operations(expected, matrix, between, tables)
            assert torch.equal(x, expected)
            assert torch.equal(out, between)


def test_capture_keeps_tensors_and_replay_stops_at_errors():
    program = CapturedCalls()

    def note():
        x = torch.full((1, 64), -1.0)
        native.activate(x, "relu", capture=program)
        return x.data_ptr()

    address = note()
    others = [torch.full((1, 64), 5.0) for _ in range(100)]
    program.replay()
    assert all((x == 5).all() for x in others)
    assert (ctypes.c_float * 64).from_address(address)[:] == [0.0] * 64

    x, q = torch.full((1, 8), -1.0), torch.ones(1, 1, 8)
    metadata = torch.tensor([[3], [4], [1], [0]], dtype=torch.int32)  # of slots there are two
    failing = CapturedCalls()
    native.decode_attention(q, q, q, slots=torch.zeros(2, 1, 1, 2, 8), metadata=metadata,
                            layout=None, eviction=native.EvictionArguments(), capture=failing)
    native.activate(x, "relu", capture=failing)
    with pytest.raises(ValueError, match="decode_attention"):
        failing.replay()
    assert (x == -1).all()


# Rotations by position


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", [0, 1, 29])
@pytest.mark.parametrize("dim", [8, 12])
def test_rotations(monkeypatch, dtype, rows, dim):
    torch.default_generator.manual_seed(rows)
    angles = torch.rand(rows, 4) * 6
    tables = angles.cos(), angles.sin()
    x = torch.randn(rows, 3, dim + 5).to(dtype)
    expected = rotated(x[..., :dim], torch.arange(rows)[:, None], tables)
    before = x.clone()
    out = torch_ops.rotated(x[..., :dim], *(table[:, None] for table in tables))
    assert out.dtype == dtype and same(x, before)
    torch.testing.assert_close(out.double(), expected, rtol=BOUND[dtype], atol=BOUND[dtype])
    monkeypatch.setattr(torch_ops, "CHUNK_BYTES", 500)
    result = torch_ops.apply_rope_(x[..., :dim], *(table.to(dtype) for table in tables))
    assert result.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x[..., :dim].double(), expected, rtol=BOUND[dtype],
                               atol=BOUND[dtype])
    assert same(x[..., dim:], before[..., dim:])


@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("dtype", BOUND)
def test_strided_rotation_rounds_once(isa, monkeypatch, kernels, dtype):
    """Prompts' queries and keys, where one matrix gives both; a rounding of the tables or of a
    product would be off by more than the last one alone."""
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", kernels)
    torch.default_generator.manual_seed(3)
    angles = torch.rand(70, 6) * 6
    tables = angles.cos(), angles.sin()
    assert tables[0].dtype == ops.table_dtype(torch.device("cpu"), dtype)
    wide = torch.randn(70, 5, 16).to(dtype)
    x, before = wide[:, 1:4, :15], wide.clone()
    expected = rotated(x, torch.arange(70)[:, None], tables)
    ops.rotate_(x, tables)
    torch.testing.assert_close(x.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=2**-20)
    x.copy_(before[:, 1:4, :15])
    assert same(wide, before)  # nothing else was touched


def test_rotations_broadcast_over_leading_dimensions():
    x = torch.randn(2, 4, 5, 12)
    angles = torch.rand(5, 4)
    out = torch_ops.rotated(x, angles.cos(), angles.sin())
    for place in range(5):
        one = rotated(x[:, :, place], place, (angles.cos(), angles.sin()))
        torch.testing.assert_close(out[:, :, place].double(), one, rtol=1e-5, atol=1e-6)
