"""Recall: the engine against the simulation, on every tier, and error cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import (
    LENGTHS,
    NEW,
    answers,
    open_llm,
    prompts_of,
    tokens,
    transformers_tokens,
)
from helpers.selection import full_cases

from flexgen_h2o import H2OConfig, Placement
from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.recall import QUERY_LEVELS, indexed_keys, rounded_queries, select_tokens

RECALL = H2OConfig(heavy_ratio=0.1, recall=True)


@pytest.mark.parametrize("key, options", [
    ("opt", {}), ("llama", {"index_bits": 2, "budget_of": "text"}), ("mistral_window", {}),
    ("glm4_moe", {}), ("minimax_m2", {}),
    *full_cases(("llama", {}), ("llama", {"index_bits": 2}), ("llama", {"budget_of": "text"}),
                ("neox", {"heavy_ratio": None, "heavy_tokens": 3})),
])
def test_recall_equals_its_simulation(tiny_model, key, options):
    tiny = tiny_model(key)
    prompts, h2o = prompts_of(tiny), replace(RECALL, **options)
    expected = tokens(tiny, prompts, replace(h2o, simulate=True))
    assert tokens(tiny, prompts, h2o) == expected
    if key != "mistral_window":  # there all layers attend to a window
        assert expected != transformers_tokens(tiny, prompts, NEW), "all was chosen"


@pytest.mark.parametrize("key", ["llama", "gemma2"])  # the latter has windows
def test_a_conversation_with_recall(tiny_model, key):
    tiny, h2o = tiny_model(key), H2OConfig(heavy_tokens=5, recall=True)
    turns = prompts_of(tiny, [30, 3, 21, 1])
    with open_llm(tiny, replace(h2o, simulate=True), chunk=6) as llm:
        expected = answers(llm, turns, 6, max_tokens=140)
    with open_llm(tiny, h2o, chunk=6, cache=Placement(0, 0, 100)) as llm:
        assert answers(llm, turns, 6, max_tokens=140) == expected
    with open_llm(tiny, RECALL) as llm, pytest.raises(UserError, match="ratios have no base"):
        llm.stream(max_tokens=100)


def test_scoring_with_recall_in_chunks(tiny_model):
    tiny = tiny_model("llama")
    (text,) = prompts_of(tiny, [40])
    with (open_llm(tiny, H2OConfig(heavy_tokens=2, recall=True)) as llm,
          llm.stream(max_tokens=40) as whole, llm.stream(max_tokens=40) as parts):
        found = [each for token in text for each in parts.loglikelihood([token])]
        assert found == pytest.approx(whole.loglikelihood(text), abs=1e-4)


def test_a_budget_of_everything_is_the_full_cache(tiny_model):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    everything = H2OConfig(heavy_tokens=max(LENGTHS), recent_tokens=NEW, recall=True)
    assert tokens(tiny, prompts, everything) == tokens(tiny, prompts, None)


@pytest.mark.parametrize("bits", [8, 4, (8, 4), (4, 8)])
def test_the_index_of_a_quantized_cache(tiny_model, bits):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [40, 23])
    full, some = (tokens(tiny, prompts, h2o, cache_bits=bits) for h2o in (None, RECALL))
    assert some != full
    assert tokens(tiny, prompts, RECALL, cache_bits=bits, cache=Placement(0, 0, 100)) == some


@pytest.mark.parametrize("length, bits, worst", [(64, 4, 1 / 15), (80, 4, 1 / 15), (64, 2, 1 / 3)])
def test_index_error_is_within_half_a_step(length, bits, worst):
    keys = torch.randn(3, 50, length, generator=torch.Generator().manual_seed(0))
    found = indexed_keys(keys, IndexLayout(length, bits))
    groups = keys.unflatten(-1, (IndexLayout(length, bits).groups, -1))
    step = worst * (groups.amax(-1) - groups.amin(-1))
    error = (found - keys).abs().unflatten(-1, groups.shape[-2:]).amax(-1)
    assert (error <= 0.51 * step + 2e-3).all()  # scales and zero points are float16


@pytest.mark.parametrize("length", [64, 80, 128])
def test_rounded_queries_have_8_bits(length):
    layout = IndexLayout(length, 4)
    q = torch.randn(3, 5, length, generator=torch.Generator().manual_seed(0)).bfloat16()
    q[0, 0] = 0
    groups, found = (x.float().unflatten(-1, (layout.groups, -1))
                     for x in (q, rounded_queries(q, layout)))
    step = groups.abs().amax(-1, keepdim=True) / QUERY_LEVELS
    codes = found / step.where(step > 0, 1)
    assert ((found - groups).abs() <= 0.501 * step).all()
    assert (codes - codes.round()).abs().max() < 1e-4 and codes.abs().max() < QUERY_LEVELS + 1e-4


def test_ties_select_the_newer_tokens():
    weights = torch.tensor([[[0.1, 0.3, 0.3, 0.3, 0.0], [0.0, 0.0, 0.0, 0.9, 0.9]]])
    found = select_tokens(weights, torch.tensor([2]), cached=torch.tensor([4]))
    assert found.tolist() == [[[False, False, True, True, False],
                               [False, False, True, True, False]]]


@pytest.mark.parametrize("options, words", [
    ({"recall": True}, "no effect on the full cache"),
    ({"index_bits": 2, "heavy_ratio": 0.1}, "no effect without recall"),
    ({"recall": True, "heavy_ratio": 0.1, "index_bits": 3}, "index_bits"),
    ({"recall": 1, "heavy_ratio": 0.1}, "recall"),
    *(({"recall": True, "heavy_ratio": 0.1, name: value}, f"leave {name} out")
      for name, value in (("sink_tokens", 2), ("score", "mean"), ("positions", "rolling"),
                          ("evict_generated", False), ("prompt_chunk", 4))),
])
def test_options_that_recall_does_not_support(options, words):
    refused(lambda: H2OConfig(**options), match=words)


def test_sparse_values_and_recall_are_an_error(tiny_model):
    from flexgen_h2o import LLM

    with pytest.raises(UserError, match="leave attn_sparsity out"):
        LLM(str(tiny_model("llama").folder), h2o=RECALL, attn_sparsity=0.5)
