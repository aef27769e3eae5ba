"""Batch invariance of the operations: a row gives the same bits alone and among any others."""

from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import AVAILABLE, BUILT, decode_case, threads, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.h2o.eviction import Eviction
from flexgen_h2o.kernels import dispatch, ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.models import layers

pytestmark = BUILT
INPUTS, OUTPUTS, MOST = 200, 50, 300
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = {
    "4 bits": MatrixLayout(OUTPUTS, INPUTS, 4, 64),
    "6 bits": MatrixLayout(OUTPUTS, INPUTS, 6, 32),
    "8 bits": MatrixLayout(OUTPUTS, INPUTS, 8, 64),
    "12 bits": MatrixLayout(OUTPUTS, INPUTS, 12, 64),
    "MXFP4": MatrixLayout(OUTPUTS, INPUTS, 4, 32, mxfp4=True),
    "compact": MatrixLayout(OUTPUTS, INPUTS, 4, 64, compact=True),
}
generator = torch.Generator().manual_seed(1)
X = torch.randn(MOST, INPUTS, generator=generator)
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=generator)


@pytest.fixture(params=AVAILABLE, autouse=True)
def _set(request):
    with using(request.param):
        yield


def weight_of(name: str, dtype: torch.dtype):
    """The weight in a dtype or in one of `LAYOUTS`, with activations in 8 bits after "a8"."""
    if name == "plain":
        return WEIGHT.to(dtype)
    layout = LAYOUTS[name.removesuffix(" a8")]
    return QuantizedMatrix(ops.quantize_matrix(WEIGHT, layout), layout,
                           8 if name.endswith("a8") else 16)


def product(x, weight, *, bias=None, residual=None):
    if residual is None:
        return layers.linear(x, weight, bias)
    return layers.add_linear_(residual.clone(), x, weight, bias)


ROWS = st.lists(st.integers(0, MOST - 1), min_size=1, max_size=140, unique=True)


@pytest.mark.parametrize("name", ["plain", *LAYOUTS, *(f"{name} a8" for name in LAYOUTS
                                                       if name != "12 bits")])
@given(rows=ROWS, count=st.integers(1, 3), dtype=st.sampled_from(DTYPES), add=st.booleans())
@settings(max_examples=examples(20))
def test_products_do_not_depend_on_other_rows(name, rows, count, dtype, add):
    weight, bias = weight_of(name, dtype), X[0, :OUTPUTS].to(dtype)
    residual = X[:, :OUTPUTS].to(dtype)
    with dispatch.batch_invariant():
        with threads(1):
            everything = product(X.to(dtype), weight, bias=bias, residual=residual if add else None)
        with threads(count):
            some = product(X[rows].to(dtype), weight, bias=bias,
                           residual=residual[rows] if add else None)
    assert torch.equal(some, everything[rows])


@pytest.mark.parametrize("name", ["plain", "4 bits"])
def test_products_depend_on_other_rows_otherwise(name):
    def depends(dtype: torch.dtype) -> bool:
        x, weight = X.to(dtype), weight_of(name, dtype)
        alone = torch.cat([product(row[None], weight) for row in x])
        return any(not torch.equal(product(x[:rows], weight), alone[:rows]) for rows in (16, MOST))

    assert any(map(depends, DTYPES))


CACHED = [600, 3, 257, 0, 256, 512, 40]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, 8, 4])
@pytest.mark.parametrize("evicts", [True, False])
def test_decode_attention_does_not_depend_on_batch(stored, evicts):
    def case():
        return decode_case(CACHED, stored=stored, group=2, dim=64, full=(0, 4) if evicts else (),
                           eviction=Eviction(sinks=1) if evicts else None)

    together = case()
    out, written = ops.decode_attention(**together)
    for index, cached in enumerate(CACHED):
        alone, slots = case(), cached + 2
        rows = slice(index, index + 1)
        for name in ("q", "k", "v"):
            alone[name] = alone[name][rows]
        alone["slots"] = alone["slots"][:, rows, :, :slots]
        alone["metadata"] = alone["metadata"][:, rows].contiguous()
        if evicts:
            alone["state"] = replace(alone["state"], **{
                name: getattr(alone["state"], name)[rows, :, :slots].contiguous()
                for name in ("scores", "positions")})
        with threads(2):
            single, single_written = ops.decode_attention(**alone)
        assert torch.equal(single, out[rows]) and torch.equal(single_written, written[rows])
        if evicts:
            assert torch.equal(alone["state"].scores, together["state"].scores[rows, :, :slots])
