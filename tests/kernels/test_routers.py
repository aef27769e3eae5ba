"""Choices and weights of experts: those of transformers' routers, in float32 and bfloat16."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from flexgen_h2o.config.layers import RouterConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.layers import Operations

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
               {"router_jitter_noise": 0.3, "input_jitter_noise": 0.0}),
}
COUNT, HIDDEN, ROWS = 20, 24, 300


def case(dtype):
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
    x, router, correction = case(dtype)
    corrected = name not in ("phimoe", "deepseek_v2")
    wanted = transformers_router(name, router, correction, per_token=per_token)(x)
    ids, weights = Operations().route(x, router.float() if corrected else router, None,
                                      correction if corrected else None, per_token=per_token,
                                      config=config)
    found = torch.zeros(ROWS, COUNT).scatter(-1, ids, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert (found > 0).sum() == ROWS * per_token


def test_correction_changes_the_choice_and_no_weight():
    x, router, _ = case(torch.float32)
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
