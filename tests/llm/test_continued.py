"""Sequences that go on in another block: the tokens of a run that nothing disturbs."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable

import pytest
import torch
from helpers import selection
from helpers.internals import before_continued
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from llm.test_llm import PLACES, make_prompts

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cache.kv_cache import KVCache
from flexgen_h2o.errors import UserError

CACHES = {
    "full": {},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "of the text": {"h2o": H2OConfig(heavy_ratio=0.15, budget_of="text")},
    "mean, sinks, some evict": {"h2o": H2OConfig(heavy_tokens=6, recent_tokens=5, sink_tokens=2,
                                                 score="mean")},
    "rolling, some evict": {"h2o": H2OConfig(heavy_tokens=8, recent_tokens=7,
                                             positions="rolling")},
    "inside prompts": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=6)},
    "prompts only": {"h2o": H2OConfig(heavy_ratio=0.15, evict_generated=False)},
    "simulated": {"h2o": H2OConfig(heavy_ratio=0.15, simulate=True)},
    "recall": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
    "4 bits": {"cache_bits": 4},
    "4 bits, h2o": {"cache_bits": 4, "h2o": H2OConfig(heavy_ratio=0.15)},
    "8 and 4 bits, rolling": {"key_bits": 8, "value_bits": 4,
                              "h2o": H2OConfig(heavy_ratio=0.15, positions="rolling")},
    "sparse": {"attn_sparsity": 0.5},
}


class Case:
    """Prompts of any lengths with answers of any, and what each gets alone."""

    def __init__(self, folder, cache: str, seed: int):
        self.folder, self.options = folder, CACHES[cache]
        lengths = [23, 4, 1, 17, 9, 30, 2, 11]
        self.prompts = make_prompts(96, lengths, seed)
        self.params = [
            SamplingParams(max_new_tokens=1 + (7 * key + seed) % 29, eos_token_id=-1,
                           do_sample=key % 3 == 0, seed=key, presence_penalty=key % 2)
            for key in range(len(lengths))]
        policy = Policy(gpu_batch_size=1, refill_share=1)
        with LLM(str(folder), dtype="float32", policy=policy, **self.options) as llm:
            self.alone = [out.token_ids for out in llm.generate(self.prompts, self.params)]

    def holds(self, policy: Policy, offload_dir) -> float:
        """Hold a run to the same tokens; returns the share of its slots that were idle."""
        with LLM(str(self.folder), dtype="float32", policy=policy, offload_dir=str(offload_dir),
                 **self.options) as llm:
            found = [out.token_ids for out in llm.generate(self.prompts, self.params)]
            assert found == self.alone
            assert llm.stats.num_prompts == len(found)
            assert llm.stats.generated_tokens == sum(map(len, found))
            assert llm.stats.decode_slots - llm.stats.idle_slots == sum(
                len(tokens) - 1 for tokens in found)
            assert llm.stats.idle_share < policy.refill_share
            return llm.stats.idle_share


@pytest.mark.parametrize("cache", CACHES)
def test_the_same_tokens_whatever_is_continued(tiny_model, tmp_path, device, cache, monkeypatch):
    """On every tier, with batches of any size, prompts whole and in chunks: half of them each."""
    moved: list = []
    before_continued(monkeypatch, moved.append)
    case = Case(tiny_model("llama").folder, cache, 1)
    assert not any(moved)
    some = slice(None) if selection.every_case else slice([*CACHES].index(cache) % 2, None, 2)
    for place, (size, batches), share, chunk in [
            (PLACES[0], (2, 1), 0.01, None), (PLACES[1], (3, 2), 0.5, 5),
            (PLACES[2], (2, 2), 0.3, None), (PLACES[3], (4, 1), 0.01, 5),
            (PLACES[0], (8, 1), 0.5, 5)][some]:
        if case.options.get("h2o", H2OConfig()).prompt_chunk:
            chunk = None
        case.holds(Policy(gpu_batch_size=size, num_gpu_batches=batches, cache=place,
                          cpu_cache_compute=size == 3, refill_share=share, prefill_chunk=chunk),
                   tmp_path)
        assert any(moved) or cache == "simulated"
        moved.clear()


sequence = st.tuples(st.integers(1, 30), st.integers(1, 14))


@pytest.mark.parametrize("cache", ["full", "rolling, some evict", "4 bits, h2o"])
def test_any_lengths_go_on_as_alone(tiny_model, tmp_path, cache):
    """A prompt and an answer of any length each; many are continued more than once."""
    folder = str(tiny_model("neox").folder)
    one = Policy(gpu_batch_size=1, refill_share=1)
    some = Policy(gpu_batch_size=3, num_gpu_batches=2, cache=Placement(34, 0, 66), refill_share=0.2)
    with (LLM(folder, dtype="float32", policy=one, **CACHES[cache]) as alone,
          LLM(folder, dtype="float32", policy=some, offload_dir=str(tmp_path),
              **CACHES[cache]) as together):

        @settings(max_examples=examples(8))
        @given(st.lists(sequence, min_size=2, max_size=14), st.integers(0, 99))
        def hold(sizes, seed):
            prompts = make_prompts(96, [length for length, _ in sizes], seed)
            params = [SamplingParams(max_new_tokens=new, eos_token_id=-1) for _, new in sizes]
            expected = alone.generate(prompts, params)
            found = {}
            for ended in together.generate_in_blocks(prompts, params):
                assert ended and not ended.keys() & found.keys()
                found |= ended
            assert found == dict(enumerate(expected))

        hold()


def test_a_block_does_not_wait_for_one_long_answer(tiny_model, tmp_path):
    """The others' outputs come before it, and few slots are idle."""
    prompts = make_prompts(96, [9] * 16, 0)
    params = [SamplingParams(max_new_tokens=60 if key == 0 else 3 + key % 2, eos_token_id=-1)
              for key in range(16)]
    shares, orders = {}, {}
    for share in (0.5, 1):
        policy = Policy(gpu_batch_size=8, refill_share=share)
        with LLM(str(tiny_model("llama").folder), dtype="float32", policy=policy) as llm:
            orders[share] = [sorted(ended) for ended in llm.generate_in_blocks(prompts, params)]
            shares[share] = llm.stats.idle_share
    assert orders[1] == [list(range(8)), list(range(8, 16))] and shares[1] > 0.75
    assert orders[0.5][-1] == [0] and shares[0.5] < 0.25


ERRORS = [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
          OSError(errno.ENOMEM, "Cannot allocate memory"),
          RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_block_without_memory_is_halved_and_begun_anew(tiny_model, tmp_path, monkeypatch, caplog,
                                                         error):
    """Whatever lacks it, be it the workspace, the prefill or a step, with sequences continued."""
    case = Case(tiny_model("llama").folder, "h2o", 2)
    short = Placement(30, 0, 70)

    def fails(method: str, rows: Callable[..., int], most: int, after: int) -> Policy:
        """Let a method of the cache fail from its call number `after` on, beyond `most` rows."""
        real, calls = getattr(KVCache, method), itertools.count()

        def limited(self, *args, **options):
            if next(calls) >= after and rows(*args) > most:
                raise error
            return real(self, *args, **options)

        monkeypatch.setattr(KVCache, method, limited)
        caplog.clear()
        return Policy(gpu_batch_size=4, num_gpu_batches=2, cache=short, refill_share=0.3)

    sequences = lambda shape, size, *_: size.sequences * size.batches  # noqa: E731
    new_rows = lambda layer, batch, q, *_: len(q)  # noqa: E731
    for method, rows, most, after, sizes in (
            ("__init__", sequences, 1, 0, ["2 x 2", "1 x 2", "1 x 1"]),
            ("attend_prompt", new_rows, 40, 4, ["2 x 2"]),
            ("attend_token", new_rows, 1, 9, ["2 x 2", "1 x 2"])):
        case.holds(fails(method, rows, most, after), tmp_path)
        monkeypatch.undo()
        assert [record.getMessage().split("blocks of ")[1] for record in caplog.records] == [
            f"{size} sequences" for size in sizes]
    assert list(tmp_path.iterdir()) == []
    policy = fails("attend_token", new_rows, 0, 9)
    with LLM(str(case.folder), dtype="float32", policy=policy, **case.options) as llm:
        with pytest.raises(UserError, match="too little memory for one sequence alone"):
            llm.generate(case.prompts, case.params)
        monkeypatch.undo()
        assert [out.token_ids for out in llm.generate(case.prompts, case.params)] == case.alone
