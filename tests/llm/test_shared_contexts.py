"""Contexts that several pairs have, and what prompts begin with: computed once, it gives what each
alone gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llm.test_llm import PLACES, make_prompts

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.engine.batch import Batch, common_prefix

CACHES = {
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "window, inside prompts": {"h2o": H2OConfig(heavy_tokens=0, recent_tokens=5, prompt_chunk=6)},
    "h2o, inside prompts": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=6)},
    "rolling": {"h2o": H2OConfig(heavy_ratio=0.15, positions="rolling")},
    "decay": {"h2o": H2OConfig(heavy_ratio=0.15, sink_tokens=1, score="decay", decay=0.9)},
    "simulated": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=6, simulate=True)},
    "8 bits": {"cache_bits": 8},
    "8 bits, h2o": {"cache_bits": 8, "h2o": H2OConfig(heavy_ratio=0.15)},
    "8 and 4 bits": {"key_bits": 8, "value_bits": 4},
    "sparse": {"attn_sparsity": 0.5},
}


def pairs_of(vocab: int) -> list[tuple[list[int], list[int]]]:
    """Four continuations of each of three contexts, of which two are as long; and one alone."""
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(2, vocab, (length,), generator=generator).tolist()

    contexts = [draw(length) for length in (30, 17, 30)]
    return [(context, draw(3 + number)) for number in range(4) for context in contexts] + [
        (draw(1), draw(9))]


def scores(tiny, pairs, *, policy: Policy, **options) -> list:
    with LLM(str(tiny.folder), dtype="float32", policy=policy, progress=False, **options) as llm:
        return [(scored.log_probs, scored.likeliest) for scored in llm.score(pairs)]


def test_each_token_says_whether_it_is_the_likeliest(tiny_model):
    tiny = tiny_model("llama")
    prompt = pairs_of(tiny.config.vocab_size)[0][0]
    with LLM(str(tiny.folder), dtype="float32", progress=False) as llm:
        (out,) = llm.generate([prompt], max_new_tokens=4, eos_token_id=-1)
        tokens = list(out.token_ids)
        changed = [*tokens[:2], (tokens[2] + 1) % tiny.config.vocab_size]
        own, other = llm.score([(prompt, tokens), (prompt, changed)])
    assert own.likeliest == [True] * 4 and own.greedy
    assert other.likeliest == [True, True, False] and not other.greedy


@pytest.mark.parametrize("name", CACHES)
def test_as_each_pair_alone(tiny_model, name):
    tiny = tiny_model("llama")
    pairs = pairs_of(tiny.config.vocab_size)
    one = Policy(gpu_batch_size=1)
    expected = [scores(tiny, [pair], policy=one, **CACHES[name])[0] for pair in pairs]
    for size, batches in ((13, 1), (5, 2), (3, 1)):
        found = scores(tiny, pairs, policy=Policy(gpu_batch_size=size, num_gpu_batches=batches),
                       **CACHES[name])
        for (values, likeliest), (others, also) in zip(found, expected, strict=True):
            assert values == pytest.approx(others, abs=1e-4) and likeliest == also


@pytest.mark.parametrize("key", ["opt", "neox"])
@pytest.mark.parametrize("place", PLACES)
def test_on_every_tier(tiny_model, tmp_path, key, place):
    tiny = tiny_model(key)
    pairs = pairs_of(tiny.config.vocab_size)
    expected = scores(tiny, pairs, policy=Policy(gpu_batch_size=1), **CACHES["h2o"])
    policy = Policy(gpu_batch_size=6, cache=place, activations=place)
    found = scores(tiny, pairs, policy=policy, offload_dir=str(tmp_path), **CACHES["h2o"])
    for (values, likeliest), (others, also) in zip(found, expected, strict=True):
        assert values == pytest.approx(others, abs=1e-4) and likeliest == also


def test_a_shared_context_is_computed_once(tiny_model, monkeypatch):
    tiny = tiny_model("llama")
    pairs = pairs_of(tiny.config.vocab_size)
    fed = fed_rows(monkeypatch)
    scores(tiny, pairs, policy=Policy(gpu_batch_size=13), **CACHES["h2o"])
    assert sum(fed) == 30 + 17 + 30 + 1
    # Longer than their prompt's rows: four sequences that share a prompt of one token.
    short = [([5], [6 + number, 7]) for number in range(4)]
    found = scores(tiny, short, policy=Policy(gpu_batch_size=4), **CACHES["h2o"])
    alone = [scores(tiny, [pair], policy=Policy(gpu_batch_size=1), **CACHES["h2o"])[0]
             for pair in short]
    assert [v for v, _ in found] == [pytest.approx(v, abs=1e-4) for v, _ in alone]


def fed_rows(monkeypatch) -> list[int]:
    """Rows of each prefill from now on."""
    fed, inputs = [], Batch.inputs

    def counted(batch, forward_pass):
        ids, positions = inputs(batch, forward_pass)
        if batch.batch_layout.in_prefill(forward_pass):
            fed.append(len(ids))
        return ids, positions

    monkeypatch.setattr(Batch, "inputs", counted)
    return fed


@pytest.mark.parametrize("name", CACHES)
def test_what_prompts_begin_with_is_computed_once(tiny_model, tmp_path, device, monkeypatch, name):
    """In a batch, whatever is cached of it, wherever; equal prompts as well; in any row chunks."""
    from flexgen_h2o.engine import decoder

    tiny = tiny_model("llama")
    begin, other, *rests = make_prompts(96, [20, 16, 9, 4, 1, 17, 6, 30])
    prompts = [begin + rest for rest in (*rests, rests[1])] + [rests[0][:3]]
    prompts += [other + rests[0], rests[3], other + rests[1], begin[:19] + rests[1]]
    options = {"max_new_tokens": 9, "eos_token_id": -1}
    with LLM(str(tiny.folder), dtype="float32", policy=Policy(gpu_batch_size=1),
             **CACHES[name]) as llm:
        expected = llm.generate(prompts, **options)
    monkeypatch.setitem(decoder.CHUNK_ROWS, "cpu", 8)
    policy = Policy(gpu_batch_size=10, cache=PLACES[3])
    with LLM(str(tiny.folder), dtype="float32", policy=policy, offload_dir=str(tmp_path),
             **CACHES[name]) as llm:
        fed = fed_rows(monkeypatch)
        assert llm.generate(prompts, **options) == expected
    if not CACHES[name].get("h2o", H2OConfig()).prompt_chunk:
        alike = 19 + sum(1 + len(rest) for rest in rests) + len(rests[1])
        assert fed == [alike + 16 + len(rests[0] + rests[1]), len(rests[3]) + 3]


@pytest.mark.parametrize("name", ["h2o", "8 bits"])
def test_a_prompt_with_which_another_begins_shares_nothing_if_it_is_too_short(tiny_model, name):
    """Between the two stands a third in the batch, whose cache is its own."""
    tiny = tiny_model("llama")
    begin, *rests = make_prompts(96, [SHARED_PREFIX, 9, SHARED_PREFIX + 4, 3])
    prompts = [begin + rests[0], rests[1], begin, rests[2]]
    found = []
    for size in (1, 4):
        with LLM(str(tiny.folder), dtype="float32", policy=Policy(gpu_batch_size=size),
                 **CACHES[name]) as llm:
            found.append(llm.generate(prompts, max_new_tokens=5, eos_token_id=-1))
    assert found[0] == found[1]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1), min_size=1))
def test_a_common_prefix_leaves_something_of_each(prompts):
    begin = list(range(SHARED_PREFIX))
    assert common_prefix([begin[1:] + prompt for prompt in [[0], [1]]]) == 0
    prompts = [begin + prompt for prompt in [*prompts, prompts[0]]]
    found = common_prefix(prompts)
    assert all(prompt[:found] == prompts[0][:found] and len(prompt) > found for prompt in prompts)
    assert found >= SHARED_PREFIX
    assert found + 1 in map(len, prompts) or len({prompt[found] for prompt in prompts}) > 1
