"""Batch invariance of the operations: a row gives the same bits alone and among any others."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.kernel_cases import AVAILABLE, BUILT, decode_case, prefill_case, threads, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.layers import AttentionVariant, RouterConfig
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


def heads_of(x):
    """Multiply 4 heads of each row by their matrices."""
    out = x.new_empty(len(x), 4, 30)
    weight = WEIGHT.to(x.dtype).flatten()[: 4 * 30 * 50].view(4, 30, 50)
    layers.Operations().linear_heads(x.view(len(x), 4, 50), weight, out=out)
    return out


def gated(x):
    return layers.Operations().gate_(x.flip(1), x.clone())


ROUTERS = {
    "plain": RouterConfig(), "sigmoid": RouterConfig("sigmoid", scale=1.7),
    "groups": RouterConfig("sigmoid", groups=5, groups_per_token=2),
    "softmax of groups": RouterConfig(groups=5, groups_per_token=2, group_experts=1),
    "sparsemixer": RouterConfig("sparsemixer"),
}


def routed(x, router: str):
    """Return the experts of each row and their weights, as one tensor."""
    correction = WEIGHT[:, 0] if router == "groups" else None
    weight = WEIGHT if router == "sigmoid" else WEIGHT.to(x.dtype)
    ids, routing_weights = layers.Operations().route(
        x, weight, correction=correction, per_token=3, config=ROUTERS[router])
    return torch.cat((ids, routing_weights), dim=1)


def normed(x):
    return layers.rms_norm(x, x.new_full((INPUTS,), 0.3), eps=1e-5, offset=1.0)


ROW_OPERATIONS = {"heads": heads_of, "norm": normed, "gate": gated,
                  **{f"route: {name}": partial(routed, router=name) for name in ROUTERS}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_operations_do_not_depend_on_other_rows(name, dtype):
    x, operation = X.to(dtype), ROW_OPERATIONS[name]
    with dispatch.batch_invariant():
        with threads(2):
            everything = operation(x)
        for size in (1, 2, 3, 17, 130):
            assert torch.equal(torch.cat([operation(rows) for rows in x.split(size)]), everything)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_does_not_depend_on_chunks_and_other_prompts(dtype):
    lengths = [70, 300, 9]
    case = prefill_case(lengths, group=5, kv_heads=1, dim=22, dtype=dtype)
    variant = AttentionVariant(scale=0.3)
    q, k = case["q"], case["k"]
    with dispatch.batch_invariant():
        with threads(2):
            together = ops.prefill_attention(q, k, k[..., 6:], lengths, variant=variant)
        for rows, keys, out in zip(q.split(lengths), k.split(lengths), together.split(lengths),
                                   strict=True):
            for start in range(0, len(rows), 64):
                end = min(start + 64, len(rows))
                part = ops.prefill_attention(rows[start:end], keys[:end], keys[:end, :, 6:],
                                             [end - start], key_lengths=[end], variant=variant)
                assert torch.equal(part, out[start:end])


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
