"""Caches of layers with different heads: tokens do not depend on blocks, tiers and drafts."""

from dataclasses import replace

import pytest
from helpers.generation import make_prompts, token_ids
from helpers.internals import cache_of

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cache.kv_cache import GroupedCache

LENGTHS = [21, 4, 1, 13, 30, 9, 17]
ALONE = Policy(gpu_batch_size=1, refill_share=1)
POLICIES = {
    "blocks": Policy(gpu_batch_size=3, num_gpu_batches=2, cache=Placement(34, 0, 66),
                     refill_share=0.2),
    "chunks": Policy(gpu_batch_size=4, prefill_chunk=6, cache=Placement(0, 0, 100))}


def generated(folder, tmp_path, policy, lengths=LENGTHS, **options):
    """Return the tokens of prompts whose answers differ in length, and the run's statistics."""
    prompts = make_prompts(96, lengths)
    params = [SamplingParams(max_new_tokens=3 + key % 5, eos_token_id=-1)
              for key in range(len(prompts))]
    with LLM(str(folder), dtype="float32", policy=policy, offload_dir=str(tmp_path),
             **options) as llm:
        tokens = token_ids(llm.generate(prompts, params))
        assert isinstance(cache_of(llm), GroupedCache)
        return tokens, llm.stats


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("options", [
    {}, {"cache_bits": 4}, {"cache_bits": 8, "h2o": H2OConfig(heavy_tokens=5, recent_tokens=4)},
    {"h2o": H2OConfig(heavy_ratio=0.2, prompt_chunk=6)}],
    ids=["full", "4 bits", "h2o", "in chunks"])
def test_tokens_do_not_depend_on_blocks_and_tiers(tiny_model, tmp_path, options, policy):
    folder = tiny_model("gemma4").folder
    chunked = replace(ALONE, prefill_chunk=POLICIES[policy].prefill_chunk)
    expected, _ = generated(folder, tmp_path, chunked, **options)
    tokens, stats = generated(folder, tmp_path, POLICIES[policy], **options)
    assert tokens == expected
    if not options:  # 2 layers of two heads of 12 elements, and 2 of one of 20
        assert stats.kv_bytes_per_token == 4 * 2 * 2 * (2 * 12 + 20)


@pytest.mark.parametrize("h2o", [None, H2OConfig(heavy_tokens=5, recent_tokens=4)])
def test_tokens_do_not_depend_on_drafts(tiny_model, tmp_path, h2o):
    folder, lengths = tiny_model("gemma4").folder, [30, 9]
    drafting = replace(ALONE, speculate="ngram", cache=Placement(0, 0, 100))
    expected, _ = generated(folder, tmp_path, ALONE, lengths, h2o=h2o)
    assert generated(folder, tmp_path, drafting, lengths, h2o=h2o)[0] == expected


def test_hot_sets_are_counted(tiny_model, tmp_path):
    """Only layers without windows recall tokens."""
    h2o, lengths = H2OConfig(heavy_tokens=5, recall=True), [150, 90, 220]
    policy = Policy(gpu_batch_size=3, cache=Placement(0, 0, 100), selective_fetch=True)
    folder = tiny_model("gemma4").folder
    expected, _ = generated(folder, tmp_path, ALONE, lengths, h2o=h2o)
    tokens, stats = generated(folder, tmp_path, policy, lengths, h2o=h2o)
    assert tokens == expected and stats.recall_hits > 0 and stats.recall_loads > 0
