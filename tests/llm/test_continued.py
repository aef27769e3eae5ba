"""Sequences that continue in another block: the tokens of a run without interruption."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable

import pytest
import torch
from helpers import selection
from helpers.generation import PLACES, make_prompts
from helpers.internals import before_continued
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

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
WINDOWS = {
    "window": {},
    "window, 4 bits": {"cache_bits": 4},
    "window, h2o": {"h2o": H2OConfig(heavy_tokens=2)},
    "window, rolling": {"h2o": H2OConfig(heavy_tokens=2, positions="rolling")},
    "window, inside prompts": {"h2o": H2OConfig(heavy_tokens=2, recent_tokens=2, prompt_chunk=3)},
}
LENGTHS = [13, 4, 1, 9, 6, 16, 2, 8]
NEW = [2, 9, 5, 1, 20, 4, 11, 7]  # one of them more than the write-back log of a cache on disk


class Case:
    """Prompts with answers of different lengths, and the tokens that each gets alone."""

    def __init__(self, folder, **options):
        self.folder, self.options = str(folder), options
        self.prompts = make_prompts(96, LENGTHS)
        self.params = [SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=key % 3 == 0,
                                      seed=key, presence_penalty=key % 2)
                       for key, new in enumerate(NEW)]
        policy = Policy(gpu_batch_size=1, refill_share=1)
        with LLM(self.folder, dtype="float32", policy=policy, **options) as llm:
            self.alone = [out.token_ids for out in llm.generate(self.prompts, self.params)]

    def check(self, policy: Policy, offload_dir) -> None:
        """Check that a run gives the same tokens, and its figures."""
        with LLM(self.folder, dtype="float32", policy=policy, offload_dir=str(offload_dir),
                 **self.options) as llm:
            found = [out.token_ids for out in llm.generate(self.prompts, self.params)]
            assert found == self.alone
            assert llm.stats.num_prompts == len(found)
            assert llm.stats.generated_tokens == sum(map(len, found))
            assert llm.stats.decode_slots - llm.stats.idle_slots == sum(
                len(tokens) - 1 for tokens in found)
            assert llm.stats.idle_share < policy.refill_share


@pytest.mark.parametrize("cache", [*CACHES, *WINDOWS])
def test_tokens_do_not_depend_on_continuation(tiny_model, tmp_path, device, cache, monkeypatch):
    """On every tier, with batches of any size, prompts whole and in chunks: one of five each."""
    moved: list = []
    before_continued(monkeypatch, moved.append)
    tiny = tiny_model("mistral_window" if cache in WINDOWS else "llama")
    case = Case(tiny.folder, **(CACHES | WINDOWS)[cache])
    assert not any(moved)
    policies = [(PLACES[0], (2, 1), 0.01, None), (PLACES[1], (3, 2), 0.5, 5),
                (PLACES[2], (2, 2), 0.3, None), (PLACES[3], (4, 1), 0.01, 5),
                (PLACES[0], (8, 1), 0.5, 5)]
    number = [*CACHES, *WINDOWS].index(cache)
    if not selection.every_case:
        policies = [policies[number % 5]]
    for place, (size, batches), share, chunk in policies:
        if case.options.get("h2o", H2OConfig()).prompt_chunk:
            chunk = None
        case.check(Policy(gpu_batch_size=size, num_gpu_batches=batches, cache=place,
                          cpu_cache_compute=size == 3, refill_share=share, prefill_chunk=chunk),
                   tmp_path)
        assert size == 8 or any(moved) or cache == "simulated"
        moved.clear()


@pytest.mark.parametrize("cache", ["full", "rolling, some evict", "4 bits, h2o"])
def test_any_lengths_continue_as_alone(tiny_model, tmp_path, cache):
    """Many sequences are continued more than once."""
    folder = str(tiny_model("neox").folder)
    one = Policy(gpu_batch_size=1, refill_share=1)
    some = Policy(gpu_batch_size=3, num_gpu_batches=2, cache=Placement(34, 0, 66), refill_share=0.2)
    lengths = st.tuples(st.integers(1, 14), st.integers(1, 8))
    with (LLM(folder, dtype="float32", policy=one, **CACHES[cache]) as alone,
          LLM(folder, dtype="float32", policy=some, offload_dir=str(tmp_path),
              **CACHES[cache]) as together):

        @settings(max_examples=examples(8))
        @given(st.lists(lengths, min_size=2, max_size=10), st.integers(0, 99))
        def check(sizes, seed):
            prompts = make_prompts(96, [length for length, _ in sizes], seed)
            params = [SamplingParams(max_new_tokens=new, eos_token_id=-1) for _, new in sizes]
            found = {}
            for ended in together.generate_in_blocks(prompts, params):
                assert ended and not ended.keys() & found.keys()
                found |= ended
            assert found == dict(enumerate(alone.generate(prompts, params)))

        check()


def test_a_block_does_not_wait_for_one_long_answer(tiny_model):
    """The others' outputs come before it, and few slots are idle."""
    prompts = make_prompts(96, [9] * 16)
    params = [SamplingParams(max_new_tokens=40 if key == 0 else 3 + key % 2, eos_token_id=-1)
              for key in range(16)]
    shares, orders = {}, {}
    for share in (0.5, 1):
        policy = Policy(gpu_batch_size=8, refill_share=share)
        with LLM(str(tiny_model("llama").folder), dtype="float32", policy=policy) as llm:
            orders[share] = [sorted(ended) for ended in llm.generate_in_blocks(prompts, params)]
            shares[share] = llm.stats.idle_share
    assert orders[1] == [list(range(8)), list(range(8, 16))] and shares[1] > 0.7
    assert orders[0.5][-1] == [0] and shares[0.5] < 0.25


def test_a_block_without_memory_is_halved(tiny_model, tmp_path, monkeypatch, caplog):
    """Whatever lacks memory: the workspace, the prefill or a step, with sequences continued."""
    case = Case(tiny_model("llama").folder, **CACHES["h2o"])

    def fails(method: str, rows: Callable[..., int], most: int, after: int, error) -> Policy:
        """Let a method of the cache fail from its call number `after` on, beyond `most` rows."""
        real, calls = getattr(KVCache, method), itertools.count()

        def limited(self, *args, **options):
            if next(calls) >= after and rows(*args) > most:
                raise error
            return real(self, *args, **options)

        monkeypatch.setattr(KVCache, method, limited)
        caplog.clear()
        return Policy(gpu_batch_size=4, num_gpu_batches=2, cache=Placement(30, 0, 70),
                      refill_share=0.3)

    sequences = lambda shape, size, *_: size.sequences * size.batches  # noqa: E731
    new_rows = lambda layer, batch, q, *_: len(q)  # noqa: E731
    for method, rows, most, after, error, sizes in (
            ("__init__", sequences, 1, 0, MemoryError(), ["2 x 2", "1 x 2", "1 x 1"]),
            ("attend_prompt", new_rows, 30, 4, torch.OutOfMemoryError("out of memory"), ["2 x 2"]),
            ("attend_token", new_rows, 1, 9, OSError(errno.ENOMEM, "Cannot allocate memory"),
             ["2 x 2", "1 x 2"])):
        case.check(fails(method, rows, most, after, error), tmp_path)
        monkeypatch.undo()
        assert [record.getMessage().split("blocks of ")[1] for record in caplog.records] == [
            f"{size} sequences" for size in sizes]
    assert list(tmp_path.iterdir()) == []
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5")
    policy = fails("attend_token", new_rows, 0, 9, error)
    with LLM(case.folder, dtype="float32", policy=policy, **case.options) as llm:
        with pytest.raises(UserError, match="too little memory for one sequence alone"):
            llm.generate(case.prompts, case.params)
        monkeypatch.undo()
        assert [out.token_ids for out in llm.generate(case.prompts, case.params)] == case.alone
