"""Shared contexts and common prefixes of prompts: computed once, with unchanged results."""

import pytest
import torch
from helpers.generation import PLACES, make_prompts
from helpers.selection import full
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.engine.blocks import GPUBatch, common_prefix

CACHES = {
    "windows": {},
    "windows, h2o": {"h2o": H2OConfig(heavy_tokens=2)},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "window, inside prompts": {"h2o": H2OConfig(heavy_tokens=0, recent_tokens=5, prompt_chunk=6)},
    "h2o, inside prompts": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=6)},
    "rolling": {"h2o": H2OConfig(heavy_ratio=0.15, positions="rolling")},
    "decay": {"h2o": H2OConfig(heavy_ratio=0.15, sink_tokens=1, score="decay", decay=0.9)},
    "simulated": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=6, simulate=True)},
    "8 bits": {"cache_bits": 8},
    "8 bits, h2o": {"cache_bits": 8, "h2o": H2OConfig(heavy_ratio=0.15)},
    "8 and 4 bits": {"key_bits": 8, "value_bits": 4},
    "sparse": {"attn_sparsity": 0.5}}


def pairs_of(vocab: int) -> list[tuple[list[int], list[int]]]:
    """Three continuations of each of three contexts, of which two are as long; and one alone."""
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(2, vocab, (length,), generator=generator).tolist()

    contexts = [draw(length) for length in (20, 17, 20)]
    return [(context, draw(3 + number)) for number in range(3) for context in contexts] + [
        (draw(1), draw(9))]


def check_scores(tiny, pairs, policies: list[Policy], **options) -> None:
    """Check that each policy gives the scores that each pair gets alone."""
    def open_llm(policy):
        return LLM(str(tiny.folder), dtype="float32", policy=policy, progress=False, **options)

    with open_llm(Policy(gpu_batch_size=1)) as llm:
        alone = [llm.score([pair])[0] for pair in pairs]
    for policy in policies:
        with open_llm(policy) as llm:
            for actual, expected in zip(llm.score(pairs), alone, strict=True):
                assert actual.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
                assert actual.likeliest == expected.likeliest


def test_scores_say_which_tokens_are_likeliest(tiny_model):
    tiny = tiny_model("llama")
    prompt = pairs_of(tiny.config.vocab_size)[0][0]
    with LLM(str(tiny.folder), dtype="float32", progress=False) as llm:
        (out,) = llm.generate([prompt], max_new_tokens=4, eos_token_id=-1)
        tokens = list(out.token_ids)
        changed = [*tokens[:2], (tokens[2] + 1) % tiny.config.vocab_size]
        own, other = llm.score([(prompt, tokens), (prompt, changed)])
    assert own.likeliest == [True] * 4 and own.greedy
    assert other.likeliest == [True, True, False] and not other.greedy


def model_key(name: str) -> str:
    return "mistral_window" if name.startswith("windows") else "llama"


@pytest.mark.parametrize("name", [
    "windows, h2o", "h2o", "window, inside prompts", "rolling", "decay", "8 bits, h2o", "sparse",
    *full("windows", "h2o, inside prompts", "simulated", "8 bits", "8 and 4 bits")])
def test_pairs_score_as_alone(tiny_model, name):
    tiny = tiny_model(model_key(name))
    size, batches = [(10, 1), (4, 2), (3, 1)][[*CACHES].index(name) % 3]
    check_scores(tiny, pairs_of(tiny.config.vocab_size),
                 [Policy(gpu_batch_size=size, num_gpu_batches=batches)], **CACHES[name])


@pytest.mark.parametrize("key", ["opt", *full("neox")])
def test_pairs_score_as_alone_on_every_tier(tiny_model, tmp_path, key):
    tiny = tiny_model(key)
    check_scores(tiny, pairs_of(tiny.config.vocab_size),
                 [Policy(gpu_batch_size=6, cache=place, activations=place) for place in PLACES[2:]],
                 offload_dir=str(tmp_path), **CACHES["h2o"])


def test_a_shared_context_is_computed_once(tiny_model, monkeypatch):
    tiny = tiny_model("llama")
    fed = fed_rows(monkeypatch)
    with LLM(str(tiny.folder), dtype="float32", policy=Policy(gpu_batch_size=10), progress=False,
             **CACHES["h2o"]) as llm:
        llm.score(pairs_of(tiny.config.vocab_size))
    assert sum(fed) == 20 + 17 + 20 + 1
    # More sequences than rows: four share a prompt of one token.
    check_scores(tiny, [([5], [6 + number, 7]) for number in range(4)],
                 [Policy(gpu_batch_size=4)], **CACHES["h2o"])


def fed_rows(monkeypatch) -> list[int]:
    """Rows of each prefill from now on."""
    fed, inputs = [], GPUBatch.inputs

    def counted(batch, forward_pass):
        ids, positions = inputs(batch, forward_pass)
        if batch.layout.in_prefill(forward_pass):
            fed.append(len(ids))
        return ids, positions

    monkeypatch.setattr(GPUBatch, "inputs", counted)
    return fed


def test_a_common_prefix_is_computed_once(tiny_model, monkeypatch):
    begin, first, second = make_prompts(96, [20, 9, 4])
    fed = fed_rows(monkeypatch)
    with LLM(str(tiny_model("llama").folder), dtype="float32", policy=Policy(gpu_batch_size=3),
             progress=False) as llm:
        llm.generate([begin + first, begin + second, begin + first], max_new_tokens=1)
    assert fed == [20 + 9 + 4]


@pytest.mark.parametrize("name", ["h2o", "8 bits"])
def test_a_prompt_that_is_a_prefix_is_not_shared(tiny_model, name):
    """Between the two is a third in the batch, with a cache of its own."""
    tiny = tiny_model("llama")
    begin, *rests = make_prompts(96, [SHARED_PREFIX, 9, SHARED_PREFIX + 4, 3])
    prompts = [begin + rests[0], rests[1], begin, rests[2]]
    results = []
    for size in (1, 4):
        with LLM(str(tiny.folder), dtype="float32", policy=Policy(gpu_batch_size=size),
                 **CACHES[name]) as llm:
            results.append(llm.generate(prompts, max_new_tokens=5, eos_token_id=-1))
    assert results[0] == results[1]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1), min_size=1))
def test_a_common_prefix_leaves_something_of_each(prompts):
    begin = list(range(SHARED_PREFIX))
    assert common_prefix([begin[1:] + prompt for prompt in [[0], [1]]]) == 0
    prompts = [begin + prompt for prompt in [*prompts, prompts[0]]]
    length = common_prefix(prompts)
    assert all(prompt[:length] == prompts[0][:length] for prompt in prompts)
    assert min(map(len, prompts)) > length
    assert length >= SHARED_PREFIX
    assert length + 1 in map(len, prompts) or len({prompt[length] for prompt in prompts}) > 1
