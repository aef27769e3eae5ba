"""Eviction inside of prompts (`H2OConfig.prompt_chunk`): `append_chunk`, and end to end."""

from dataclasses import replace

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import NEW, prompts_of, run, tokens
from helpers.internals import buffer_bytes, cache_of
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cache.chunked_prefill import LayerAttention, SequenceState, append_chunk
from flexgen_h2o.config.cache_layout import CacheLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.eviction import Eviction, new_state
from flexgen_h2o.h2o.policies import policy_named
from flexgen_h2o.kernels.reference.attention import pack_slots, unpack_slots

# The operation


def draw(rows, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, 16, generator=generator)


def naive(q, keys, values, alive):
    """Attend from the last rows over the alive ones of all tokens [tokens, kv_heads, head_dim]."""
    tokens, heads = keys.shape[:2]
    rows, group = len(q), q.shape[1] // heads
    newest = torch.arange(tokens - rows, tokens)
    seen = alive.T[:, None] & (torch.arange(tokens) <= newest[:, None])  # [kv_heads, rows, tokens]
    out, scores = torch.empty_like(q), torch.zeros(heads, tokens)
    for head in range(q.shape[1]):
        logits = q[:, head] @ keys[:, head // group].T / 4
        row = logits.masked_fill(~seen[head // group], float("-inf")).softmax(-1)
        out[:, head] = row @ values[:, head // group]
        scores[head // group] += row.sum(0)
    return out, scores


@settings(max_examples=examples(60))
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=5), heavy=st.integers(0, 6),
       recent=st.integers(1, 6), sinks=st.integers(0, 2), mean=st.booleans(),
       bits=st.sampled_from([(16, 16), (8, 8), (8, 4)]), shuffle=st.booleans())
def test_chunks_equal_the_definition(chunks, heavy, recent, sinks, mean, bits, shuffle):
    """Attention, the tokens that stay, their scores and entries, for any order of slots."""
    kv_heads, budget = 2, heavy + recent + sinks
    layout = CacheLayout.from_bits(16, *bits)
    held = torch.full((2, kv_heads, budget, 16), float("nan")) if layout is None else (
        torch.full((layout.kinds, kv_heads, budget, layout.width), 255, dtype=torch.uint8))
    eviction = Eviction(policy_named("mean" if mean else "sum"), sinks=sinks)
    state = new_state((1, kv_heads, budget), eviction, rope=None,
                      device=torch.device("cpu"))
    k, v = draw(0, kv_heads, 0), draw(0, kv_heads, 0)
    alive, scores = torch.ones(0, kv_heads, dtype=torch.bool), torch.zeros(kv_heads, 0)
    for number, rows in enumerate(chunks):
        before = len(k)
        q, new_k, new_v = draw(rows, 4, 3 * number), draw(rows, kv_heads, 3 * number + 1), draw(
            rows, kv_heads, 3 * number + 2)
        sequence = SequenceState(min(before, budget), before, heavy, recent, scored=heavy > 0)
        if shuffle:  # as decode leaves the slots
            order = torch.randperm(sequence.cached, generator=torch.Generator().manual_seed(number))
            for x, dim in ((held, 2), (state.scores, 2), (state.positions, 2)):
                x.narrow(dim, 0, sequence.cached).copy_(x.index_select(dim, order))
        out = append_chunk(q, new_k, new_v, slots=held, sequence=sequence, state=state,
                           layout=layout, attention=LayerAttention())
        # Earlier tokens are read as they are cached.
        keys, values = torch.cat((k, new_k)), torch.cat((v, new_v))
        alive = torch.cat((alive, torch.ones(rows, kv_heads, dtype=torch.bool)))
        expected, received = naive(q, keys, values, alive)
        assert torch.allclose(out, expected, atol=1e-5)
        scores = torch.cat((scores, torch.zeros(kv_heads, rows)), dim=1) + received
        if heavy == 0:
            scores.zero_()
        new_k, new_v = unpack_slots(pack_slots(torch.stack((new_k, new_v)), layout), layout)
        k, v = torch.cat((k, new_k)), torch.cat((v, new_v))
        total = len(k)
        for head in range(kv_heads):
            left = [p for p in range(total) if alive[p, head]]
            others = [p for p in left if sinks <= p < total - recent]
            score = {p: scores[head, p].item() / (total - p if mean else 1) for p in others}
            for victim in sorted(others, key=lambda p, s=score: (s[p], p))[
                    : max(0, len(left) - budget)]:
                alive[victim, head] = False
            stay = [p for p in range(total) if alive[p, head]]
            assert state.positions[0, head, : len(stay)].tolist() == stay
            assert torch.allclose(state.scores[0, head, : len(stay)], scores[head, stay], atol=1e-5)
            results = unpack_slots(held, layout)
            assert torch.equal(results[0, head, : len(stay)], k[stay, head])
            assert torch.equal(results[1, head, : len(stay)], v[stay, head])


# End to end


def test_prompt_longer_than_the_context_fits_the_budget(tiny_model):
    tiny = tiny_model("llama")  # 256 positions
    prompts = prompts_of(tiny, [300])
    h2o = H2OConfig(heavy_tokens=16, recent_tokens=16, positions="rolling", prompt_chunk=32)
    with LLM(str(tiny.folder), policy=Policy(gpu_batch_size=1), h2o=h2o, dtype="float32") as llm:
        (out,) = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        (tier,), token = cache_of(llm).tiers, llm.model_config.kv_bytes_per_token(4)
        assert llm.stats.kv_cache_bytes == 32 * token
        assert buffer_bytes(tier) <= 33 * token + 12288
    assert [out.token_ids] == tokens(tiny, prompts, replace(h2o, simulate=True))
    refused(lambda: run(tiny, prompts, replace(h2o, prompt_chunk=None)), match="has 300 tokens")
    refused(lambda: run(tiny, prompts, replace(h2o, prompt_chunk=250)), match="lower the budget")


def test_conflicting_options_are_errors(tiny_model):
    refused(lambda: H2OConfig(prompt_chunk=4), match="no effect on the full cache")
    refused(lambda: H2OConfig(heavy_ratio=0.1, prompt_chunk=0), match="at least 1")
    with pytest.raises(UserError, match="give one of them"):
        LLM(str(tiny_model("llama").folder), policy=Policy(prefill_chunk=3),
            h2o=H2OConfig(heavy_ratio=0.1, prompt_chunk=4))
