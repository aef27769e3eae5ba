"""Routing and experts of few tokens each: C++ beside the reference, routers beside transformers."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from helpers.kernel_cases import BUILT, MXFP4, SETS, poisoned_memory, quantized, threads, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import abi
from flexgen_h2o.kernels.cpu import experts as native_experts
from flexgen_h2o.kernels.reference import layers as reference_layers
from flexgen_h2o.models.layers import Operations

pytestmark = BUILT


def matrix(outputs, inputs, bits, generator):
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()
    if bits == 16:
        return weight
    return quantized(weight, bits)


def case(rows, hidden, wide, count, chosen, bits, *, seed=0, missing=(), biased=False):
    """Return x (strided), ids, shares and the experts, some of which are missing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((rows, hidden + 3), float("nan")).bfloat16()
    x[:, :hidden] = torch.randn(rows, hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(rows)])
    shares = torch.rand(rows, chosen, generator=generator)
    experts = [None if number in missing else tuple(
        matrix(*shape, bits, generator) for shape in ((wide, hidden), (wide, hidden),
                                                      (hidden, wide))) for number in range(count)]
    if biased:
        experts = [matrices and (*matrices, *(torch.randn(len(part), generator=generator).bfloat16()
                                           for part in matrices)) for matrices in experts]
    return x[:, :hidden], ids, shares, experts


def table_of(experts):
    table = native_experts.ExpertTable(len(experts))
    for number, matrices in enumerate(experts):
        if matrices is not None:
            table.put(number, *matrices[:3], biases=matrices[3:])
    return table


@given(st.sampled_from([*SETS]), st.sampled_from([16, 8, 4, MXFP4]), st.integers(1, 40),
       st.integers(1, 70), st.integers(1, 50), st.integers(1, 9), st.integers(1, 4),
       st.sampled_from([*abi.ACTIVATIONS, (1.7, 0.6)]), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=examples(80))
def test_experts_equal_the_reference(way, bits, rows, hidden, wide, count, chosen, function,
                                     team, seed):
    """With an activation, or with biases and gpt-oss's gate."""
    options = {"function": function, "max_rows": 16}
    missing = {0} if count > 2 else set()
    x, ids, shares, experts = case(rows, hidden, wide, count, min(chosen, count), bits, seed=seed,
                                missing=missing, biased=isinstance(function, tuple))
    sums, expected = torch.ones(rows, hidden), torch.ones(rows, hidden)
    with using(way), threads(team), poisoned_memory():
        native_experts.experts(x, ids, shares, table_of(experts), sums, **options)
    reference_layers.experts(x, ids, shares, experts, expected, **options)
    torch.testing.assert_close(sums, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("bits", [16, 4])
def test_results_do_not_depend_on_threads(bits):
    """Whether they share an expert's products or its number; 1100 choices take two rounds."""
    for rows, count, chosen in ((3, 5, 4), (220, 40, 5)):
        x, ids, shares, experts = case(rows, 64, 48, count, chosen, bits)
        results = []
        for team in (1, 2, 3):
            results.append(torch.zeros(rows, 64))
            with threads(team):
                native_experts.experts(x, ids, shares, table_of(experts), results[-1],
                                       function="silu", max_rows=64)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("way", SETS)
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_equals_the_reference(way, normalize):
    """With a bias and without."""
    for rows, hidden, count, per_token in ((1, 64, 8, 2), (9, 131, 37, 8), (3, 5, 4, 4)):
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, hidden, generator=generator).bfloat16()
        router = torch.randn(count, hidden, generator=generator).bfloat16()
        router[1] = router[0]  # equal logits: the first comes first
        bias = torch.randn(count, generator=generator).bfloat16()
        bias[1] = bias[0]
        for added in (None, bias):
            with using(way):
                ids, shares = native_experts.route(x, router, added, per_token=per_token,
                                                   normalize=normalize)
            wanted, parts = reference_layers.route(x, router, added, per_token=per_token,
                                                   config=RouterConfig(normalize=normalize))
            assert torch.equal(ids, wanted)
            torch.testing.assert_close(shares, parts, rtol=1e-4, atol=1e-6)


def test_nan_inputs_route_to_valid_experts():
    ids, _ = native_experts.route(torch.full((2, 8), float("nan")).bfloat16(),
                                  torch.ones(4, 8).bfloat16(), per_token=3, normalize=True)
    assert ((ids >= 0) & (ids < 4)).all()


def test_invalid_arguments_are_errors():
    x, ids, shares, experts = case(2, 16, 8, 3, 2, 16)
    table, sums = table_of(experts), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="out of range"):
        native_experts.experts(x, ids + 3, shares, table, sums, function="silu", max_rows=4)
    with pytest.raises(ValueError, match="x must be"):
        native_experts.experts(x[:, :8], ids, shares, table, sums[:, :8], function="silu",
                               max_rows=4)
    with pytest.raises(ValueError, match="up to 64 rows"):
        native_experts.experts(x, ids, shares, table, sums, function="silu", max_rows=65)
    with pytest.raises(ValueError, match="belong together"):
        table.put(0, experts[0][0], experts[0][1], experts[0][0])
    with pytest.raises(ValueError, match="down_bias must be"):
        table.put(0, *experts[0], biases=[torch.zeros(8).bfloat16()] * 3)
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


# Routers of transformers

SIGMOID = RouterConfig("sigmoid", scale=2.5, groups=4, groups_per_token=2)
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
# Model, class of the router, our options, options of the router's config.
ROUTERS = {
    "deepseek_v3": ("DeepseekV3TopkRouter", SIGMOID, GROUPS),
    "glm4_moe": ("Glm4MoeTopkRouter", RouterConfig("sigmoid", normalize=False),
                 {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                  "norm_topk_prob": False}),
    "deepseek_v2": ("DeepseekV2TopkRouter", RouterConfig(
        normalize=False, scale=2.5, groups=4, groups_per_token=2, group_experts=1),
        {**GROUPS, "topk_method": "group_limited_greedy"}),
    "minimax_m2": ("MiniMaxM2TopKRouter", RouterConfig("sigmoid"), {}),
    "ernie4_5_moe": ("Ernie4_5_MoeTopKRouter", RouterConfig(min_sum=0.4), {"moe_norm_min": 0.4}),
    "phimoe": ("PhimoeTopKRouter", RouterConfig("sparsemixer", jitter=0.3),
               {"router_jitter_noise": 0.3, "input_jitter_noise": 0.0})}
COUNT, HIDDEN, ROWS = 20, 24, 300


def router_case(dtype):
    generator = torch.Generator().manual_seed(3)
    x, router = (torch.randn(rows, HIDDEN, generator=generator).to(dtype)
                 for rows in (ROWS, COUNT))
    return x, router / 3, torch.randn(COUNT, generator=generator) / 4


def transformers_router(name, router, correction, *, per_token):
    """Return ids and weights of rows x, by expert."""
    kind, _, options = ROUTERS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    gate = getattr(module, kind)(SimpleNamespace(
        num_experts=COUNT, num_local_experts=COUNT, hidden_size=HIDDEN,
        num_experts_per_tok=per_token, **options)).eval().requires_grad_(False)
    gate.weight.copy_(router)
    for tensor, value in (*gate.named_parameters(), *gate.named_buffers()):
        if tensor.endswith("e_score_correction_bias"):
            value.copy_(correction)

    def route(x):
        added = (correction,) if name == "minimax_m2" else ()
        _, weights, ids = gate(x.to(gate.weight.dtype), *added)
        return torch.zeros(len(x), COUNT).scatter(-1, ids, weights.float())

    return route


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_of_transformers(name, dtype):
    """All compute in float32."""
    config, per_token = ROUTERS[name][1], 2 if name == "phimoe" else 5
    x, router, correction = router_case(dtype)
    corrected = name not in ("phimoe", "deepseek_v2")
    wanted = transformers_router(name, router, correction, per_token=per_token)(x)
    ids, weights = Operations().route(x, router.float() if corrected else router, None,
                                      correction if corrected else None, per_token=per_token,
                                      config=config)
    actual = torch.zeros(ROWS, COUNT).scatter(-1, ids, weights)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-7)
    assert (actual > 0).sum() == ROWS * per_token


def test_correction_changes_the_choice_and_no_weight():
    x, router, _ = router_case(torch.float32)
    high = torch.zeros(COUNT)
    high[7] = 10.0
    config = RouterConfig("sigmoid", normalize=False)
    ids, weights = Operations().route(x, router, None, high, per_token=1, config=config)
    assert (ids == 7).all()
    torch.testing.assert_close(weights[:, 0], (x @ router[7]).sigmoid())


def test_ties_go_to_the_lower_number():
    x = torch.ones(2, HIDDEN)
    for config in (RouterConfig(), RouterConfig("sigmoid"), SIGMOID, RouterConfig("sparsemixer")):
        ids, weights = Operations().route(x, torch.ones(COUNT, HIDDEN) / 99, per_token=3,
                                          config=config)
        assert ids.tolist() == [[0, 1, 2]] * 2
        assert weights.isfinite().all()


def test_invalid_options_are_errors():
    for options in ({"scoring": "tanh"}, {"groups": 0}, {"groups": 2, "groups_per_token": 3}):
        with pytest.raises(UserError, match="router|groups"):
            RouterConfig(**options)
