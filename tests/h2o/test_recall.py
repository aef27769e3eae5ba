"""Recall: the engine against the simulation, on every tier, and error cases."""

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import open_llm, prompts_of

from flexgen_h2o import H2OConfig
from flexgen_h2o.config.cache_layout import IndexLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.recall import QUERY_LEVELS, indexed_keys, rounded_queries, select_tokens

RECALL = H2OConfig(heavy_ratio=0.1, recall=True)


def test_scoring_with_recall_in_chunks(tiny_model):
    tiny = tiny_model("llama")
    (text,) = prompts_of(tiny, [40])
    with (open_llm(tiny, H2OConfig(heavy_tokens=2, recall=True)) as llm,
          llm.stream(max_tokens=40) as whole, llm.stream(max_tokens=40) as parts):
        actual = [log_prob for token in text for log_prob in parts.loglikelihood([token])]
        assert actual == pytest.approx(whole.loglikelihood(text), abs=1e-4)


@pytest.mark.parametrize("length, bits, worst", [(64, 4, 1 / 15), (80, 4, 1 / 15), (64, 2, 1 / 3)])
def test_index_error_is_within_half_a_step(length, bits, worst):
    keys = torch.randn(3, 50, length, generator=torch.Generator().manual_seed(0))
    actual = indexed_keys(keys, IndexLayout(length, bits))
    groups = keys.unflatten(-1, (IndexLayout(length, bits).groups, -1))
    step = worst * (groups.amax(-1) - groups.amin(-1))
    error = (actual - keys).abs().unflatten(-1, groups.shape[-2:]).amax(-1)
    assert (error <= 0.51 * step + 2e-3).all()  # scales and zero points are float16


@pytest.mark.parametrize("length", [64, 80, 128])
def test_rounded_queries_have_8_bits(length):
    layout = IndexLayout(length, 4)
    q = torch.randn(3, 5, length, generator=torch.Generator().manual_seed(0)).bfloat16()
    q[0, 0] = 0
    groups, results = (x.float().unflatten(-1, (layout.groups, -1))
                     for x in (q, rounded_queries(q, layout)))
    step = groups.abs().amax(-1, keepdim=True) / QUERY_LEVELS
    codes = results / step.where(step > 0, 1)
    assert ((results - groups).abs() <= 0.501 * step).all()
    assert (codes - codes.round()).abs().max() < 1e-4 and codes.abs().max() < QUERY_LEVELS + 1e-4


def test_ties_select_the_newer_tokens():
    weights = torch.tensor([[[0.1, 0.3, 0.3, 0.3, 0.0], [0.0, 0.0, 0.0, 0.9, 0.9]]])
    actual = select_tokens(weights, torch.tensor([2]), cached=torch.tensor([4]))
    assert actual.tolist() == [[[False, False, True, True, False],
                               [False, False, True, True, False]]]


@pytest.mark.parametrize("options, words", [
    ({"recall": True}, "no effect on the full cache"),
    ({"index_bits": 2, "heavy_ratio": 0.1}, "no effect without recall"),
    ({"recall": True, "heavy_ratio": 0.1, "index_bits": 3}, "index_bits"),
    ({"recall": 1, "heavy_ratio": 0.1}, "recall"),
    *(({"recall": True, "heavy_ratio": 0.1, name: value}, f"leave {name} out")
      for name, value in (("sink_tokens", 2), ("score", "mean"), ("positions", "rolling"),
                          ("evict_generated", False), ("prompt_chunk", 4)))])
def test_options_that_recall_does_not_support(options, words):
    refused(lambda: H2OConfig(**options), match=words)


def test_sparse_values_and_recall_are_an_error(tiny_model):
    from flexgen_h2o import LLM

    with pytest.raises(UserError, match="leave attn_sparsity out"):
        LLM(str(tiny_model("llama").folder), h2o=RECALL, attn_sparsity=0.5)
