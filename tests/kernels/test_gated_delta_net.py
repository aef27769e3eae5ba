"""The gated DeltaNet: the reference against transformers, kernels against the reference."""

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_cases import BUILT, sets_of, threads, using
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.layers import RecurrentConfig
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.reference import layers as reference

SETS = sets_of("gated_delta_net")
CONFIGS = [RecurrentConfig(2, 6, 5, 7, 3), RecurrentConfig(1, 1, 8, 16, 2),
           RecurrentConfig(3, 3, 33, 70, 4), RecurrentConfig(2, 4, 128, 128, 4)]


def case(config: RecurrentConfig, lengths, *, dtype=torch.float32, seed=0) -> dict:
    """Random arguments: rows of sequences, whose states are some of more states."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator).mul_(scale)

    rows, heads = sum(lengths), config.value_heads
    weights = draw(config.conv_size, config.kernel), draw(heads), draw(heads)
    order = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].tolist()
    return {"mixed": draw(rows, config.conv_size).to(dtype), "beta": draw(rows, heads).to(dtype),
            "step": draw(rows, heads).to(dtype), "weights": [x.to(dtype) for x in weights],
            "states": draw(len(lengths) + 2, config.state_size, scale=0.3),
            "sequences": order, "lengths": list(lengths), "config": config}


def run(module, arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs, and the states after the call."""
    states = arguments["states"].clone()
    return module.gated_delta_net(**arguments | {"states": states}), states


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_delta_rules_equal_transformers(tokens):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (F.normalize(torch.randn(2, tokens, 3, width, generator=generator), dim=-1)
               for width in (5, 5, 7))
    decay = -torch.rand(2, tokens, 3, generator=generator) * 2
    beta = torch.rand(2, tokens, 3, generator=generator)
    state = torch.randn(2, 3, 5, 7, generator=generator)
    for name in ("recurrent", "chunk"):
        wanted, last = getattr(theirs, f"torch_{name}_gated_delta_rule")(
            q, k, v, g=decay, beta=beta, initial_state=state.clone(), output_final_state=True)
        rule = reference.chunked_delta_rule if name == "chunk" else reference.recurrent_delta_rule
        results = state.clone()
        out = rule(q.transpose(1, 2) * 5**-0.5, k.transpose(1, 2), v.transpose(1, 2),
                   decay.transpose(1, 2), beta.transpose(1, 2), results)
        torch.testing.assert_close(out.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[:3])
def test_a_split_prompt_leaves_the_same_state(config):
    """Token by token, and in chunks of the rule and of the caller."""
    arguments = case(config, [300])
    whole, state = run(reference, arguments)
    for lengths in ([1] * 300, [64, 236], [1, 100, 199]):
        states, outputs, first = arguments["states"].clone(), [], 0
        for length in lengths:
            rows = slice(first, first + length)
            first = rows.stop
            part = {name: arguments[name][rows] for name in ("mixed", "beta", "step")}
            outputs.append(reference.gated_delta_net(
                **arguments | part | {"lengths": [length], "states": states}))
        torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SETS)
@given(st.sampled_from(CONFIGS), st.lists(st.integers(1, 80), min_size=1, max_size=4),
       st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 2**31))
@settings(max_examples=examples(25))
def test_kernels_equal_the_reference(name, config, lengths, dtype, seed):
    arguments = case(config, lengths, dtype=dtype, seed=seed)
    wanted, states = run(reference, arguments)
    with using(name):
        out, results = run(native, arguments)
    torch.testing.assert_close(results, states, rtol=1e-4, atol=1e-4)
    rounding = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(out, wanted, rtol=rounding, atol=rounding / 4)


@pytest.mark.parametrize("name", SETS)
def test_no_bit_depends_on_splits_or_threads(name):
    arguments = case(CONFIGS[2], [70, 1, 40], dtype=torch.bfloat16)
    with using(name):
        with threads(3):
            whole, states = run(native, arguments)
        with threads(1):
            again, first = arguments["states"].clone(), 0
            for sequence, length in zip(arguments["sequences"], arguments["lengths"], strict=True):
                for start in range(first, first + length, 17):
                    rows = slice(start, min(start + 17, first + length))
                    part = {key: arguments[key][rows] for key in ("mixed", "beta", "step")}
                    out = native.gated_delta_net(**arguments | part | {
                        "states": again, "sequences": [sequence],
                        "lengths": [rows.stop - rows.start]})
                    assert torch.equal(out, whole[rows])
                first += length
    assert torch.equal(again, states)


@BUILT
def test_wrong_lengths_are_refused():
    arguments = case(CONFIGS[0], [3, 2])
    for wrong in ({"lengths": [3, 3]}, {"sequences": [0, 9]}, {"sequences": [1, 1]},
                  {"lengths": [5, 0]}, {"beta": arguments["beta"][:, :2]}):
        with pytest.raises(ValueError, match="gated_delta_net"):
            native.gated_delta_net(**arguments | wrong)
