"""Eviction policies: their scores, their registration, and their use by name."""

import pickle

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import prompts_of, tokens
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, PolicyState, register_policy
from flexgen_h2o.config import h2o as names
from flexgen_h2o.config.limits import EMPTY
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.policies import policy_named

TOKENS = 20


def state_of(seed: int, filled: int, empty: int) -> PolicyState:
    """A random state of two heads with empty slots in random places."""
    generator = torch.Generator().manual_seed(seed)
    heads = []
    for _ in range(2):
        places = torch.full((filled + empty,), EMPTY, dtype=torch.int32)
        places[:filled] = torch.randperm(TOKENS, generator=generator)[:filled]
        heads.append(places[torch.randperm(filled + empty, generator=generator)])
    positions = torch.stack(heads)
    gone = positions == EMPTY
    draw = torch.rand(2, 2, filled + empty, 8, generator=generator).masked_fill(gone[..., None], 0)
    attention = torch.rand(2, filled + empty, generator=generator) + 0.01
    return PolicyState(attention.masked_fill(gone, 0), positions, TOKENS, *draw)


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**20), filled=st.integers(2, TOKENS), empty=st.integers(0, 3),
       name=st.sampled_from(names.SCORES))
def test_scores_depend_on_neither_order_nor_empty_slots(seed, filled, empty, name):
    state, policy = state_of(seed, filled, empty), policy_named(name)
    results = policy.score(state)
    order = torch.randperm(filled + empty)
    moved = PolicyState(state.attention[:, order], state.positions[:, order], TOKENS,
                        state.keys[:, order], state.values[:, order])
    torch.testing.assert_close(policy.score(moved), results[:, order])
    for head in range(2):
        used = state.positions[head] != EMPTY
        alone = PolicyState(*(x[head : head + 1, used] for x in (state.attention, state.positions)),
                            TOKENS, *(x[head : head + 1, used] for x in (state.keys, state.values)))
        torch.testing.assert_close(policy.score(alone)[0], results[head, used])


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**20), filled=st.integers(2, TOKENS))
def test_caote_is_the_change_of_the_output(seed, filled):
    state = state_of(seed, filled, 0)
    results = policy_named("caote").score(state)
    for head in range(2):
        mean = state.attention[head].double() / (TOKENS - state.positions[head])
        values = state.values[head].double()
        for victim in range(filled):
            rest = mean.clone()
            rest[victim] = 0
            moved = rest @ values / rest.sum() - mean @ values / mean.sum()
            torch.testing.assert_close(results[head, victim].double(), moved.norm(), rtol=1e-3,
                                       atol=1e-5)


def longest_keys(state: PolicyState) -> torch.Tensor:
    """A user's policy, which looks at keys and the age of tokens."""
    return state.keys.norm(dim=-1) + state.attention / state.queries


def total(state: PolicyState) -> torch.Tensor:
    """The sum, which the kernels do not implement under this name."""
    return state.attention


def negative_root(state: PolicyState) -> torch.Tensor:
    """NaN everywhere."""
    return (state.attention - 1e3).sqrt()


def nan_in_empty_slots(state: PolicyState) -> torch.Tensor:
    """The sum of what there is."""
    return state.attention.masked_fill(~state.filled, torch.nan)


@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_a_registered_policy(tiny_model, positions, caplog):
    """It equals its simulation, and the sum under another name equals the sum."""
    register_policy(f"longest keys, {positions}", longest_keys, needs=["keys"])
    register_policy("total", total)
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    options = {"heavy_ratio": 0.1, "positions": positions, "score": f"longest keys, {positions}"}
    expected = tokens(tiny, prompts, H2OConfig(simulate=True, **options))
    for chunk in (None, 16):
        assert tokens(tiny, prompts, H2OConfig(**options), prefill_chunk=chunk) == expected
    assert sum(f"'longest keys, {positions}' has no fused kernel" in line
               for line in caplog.messages) == 1
    plain = tokens(tiny, prompts, H2OConfig(**options | {"score": "sum"}))
    assert plain != expected
    assert tokens(tiny, prompts, H2OConfig(**options | {"score": "total"})) == plain


def test_registration(tiny_model):
    policy = register_policy("mine", total)
    assert register_policy("mine", total) == policy == policy_named("mine")
    for name, score, options, what in (
            ("sum", total, {}, "a policy named 'sum'"),
            ("mine", longest_keys, {}, "a policy named 'mine'"), (" ", total, {}, "must be a word"),
            (3, total, {}, "must be a word"), ("other", 3, {}, "must be a function"),
            ("other", total, {"needs": ["queries"]}, "of 'keys' and 'values'")):
        with pytest.raises(UserError, match=what):
            register_policy(name, score, **options)
    with pytest.raises(UserError, match="sum, mean, decay, caote, .*got 'other'.*register_policy"):
        H2OConfig(heavy_ratio=0.1, score="other")
    register_policy("wrong shape", lambda state: state.attention[..., :1])
    register_policy("integers", lambda state: state.attention.int())
    for name in ("wrong shape", "integers"):
        with (LLM(str(tiny_model("llama").folder), dtype="float32", progress=False,
                  h2o=H2OConfig(heavy_ratio=0.1, score=name)) as llm,
              pytest.raises(UserError, match=f"'{name}' must return float32 scores of the shape")):
            llm.generate(prompts_of(tiny_model("llama")), max_new_tokens=4)


@pytest.mark.parametrize("simulate", [False, True])
def test_nan_scores_are_errors(tiny_model, simulate):
    """Scores of empty slots do not count."""
    register_policy("a root", negative_root)
    register_policy("of tokens", nan_in_empty_slots)
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    with (LLM(str(tiny.folder), device="cpu", dtype="float32", progress=False,
              h2o=H2OConfig(heavy_ratio=0.1, score="a root", simulate=simulate)) as llm,
          pytest.raises(UserError, match="'a root' returned NaN")):
        llm.generate(prompts, max_new_tokens=4)
    actual, expected = (tokens(tiny, prompts, H2OConfig(heavy_ratio=0.1, score=score,
                                                       simulate=simulate), new=4)
                       for score in ("of tokens", "sum"))
    assert actual == expected


def test_policies_pass_nan_states_to_the_check_of_logits():
    state = state_of(0, TOKENS, 0)
    state.values[0, 3] = torch.inf
    assert policy_named("caote").scores(state).isnan().any()


def test_a_process_in_which_a_policy_is_not_registered(monkeypatch):
    register_policy("there alone", total)
    h2o = pickle.loads(pickle.dumps(H2OConfig(heavy_ratio=0.1, score="there alone")))
    monkeypatch.setattr(names, "_registered", {})
    refused(lambda: policy_named(h2o.score), match="register_policy in every process")
