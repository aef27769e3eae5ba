"""Sequences that continue in another block: the tokens of a run without interruption."""

import errno
import itertools
from collections.abc import Callable

import pytest
import torch
from helpers.generation import make_prompts, token_ids

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cache.kv_cache import KVCache
from flexgen_h2o.cache.prefill import PromptAttention
from flexgen_h2o.cache.token_attention import TokenAttention
from flexgen_h2o.errors import UserError

H2O = {"h2o": H2OConfig(heavy_ratio=0.15)}


def test_a_block_does_not_wait_for_one_long_answer(tiny_model):
    """The other outputs come first, and few slots are idle."""
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
    folder, prompts = str(tiny_model("llama").folder), make_prompts(96, [13, 4, 1, 9, 6, 16, 2, 8])
    params = [SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=key % 3 == 0, seed=key)
              for key, new in enumerate([2, 9, 5, 1, 20, 4, 11, 7])]

    def generate(llm: LLM) -> list[list[int]]:
        return token_ids(llm.generate(prompts, params))

    with LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=1, refill_share=1),
             **H2O) as llm:
        expected = generate(llm)

    def fails(part: type, method: str, rows: Callable[..., int], most: int, after: int, error
              ) -> Policy:
        """Let a method of the cache fail from its call number `after` on, beyond `most` rows."""
        real, calls = getattr(part, method), itertools.count()

        def limited(self, *args, **options):
            if next(calls) >= after and rows(*args) > most:
                raise error
            return real(self, *args, **options)

        monkeypatch.setattr(part, method, limited)
        caplog.clear()
        return Policy(gpu_batch_size=4, num_gpu_batches=2, cache=Placement(30, 0, 70),
                      refill_share=0.3)

    sequences = lambda shape, size, *_: size.sequences * size.batches  # noqa: E731
    new_rows = lambda layer, batch, q, *_: len(q)  # noqa: E731
    for part, method, rows, most, after, error, sizes in (
            (KVCache, "__init__", sequences, 1, 0, MemoryError(), ["2 x 2", "1 x 2", "1 x 1"]),
            (PromptAttention, "attend", new_rows, 30, 4, torch.OutOfMemoryError("out of memory"),
             ["2 x 2"]),
            (TokenAttention, "attend", new_rows, 1, 9,
             OSError(errno.ENOMEM, "Cannot allocate memory"), ["2 x 2", "1 x 2"])):
        policy = fails(part, method, rows, most, after, error)
        with LLM(folder, dtype="float32", policy=policy, offload_dir=str(tmp_path), **H2O) as llm:
            assert generate(llm) == expected
            assert llm.stats.generated_tokens == sum(map(len, expected))
            assert llm.stats.decode_slots - llm.stats.idle_slots == sum(
                len(tokens) - 1 for tokens in expected)
            assert llm.stats.idle_share < policy.refill_share
        monkeypatch.undo()
        assert [record.getMessage().split("blocks of ")[1] for record in caplog.records] == [
            f"{size} sequences" for size in sizes]
    assert list(tmp_path.iterdir()) == []
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5")
    policy = fails(TokenAttention, "attend", new_rows, 0, 9, error)
    with LLM(folder, dtype="float32", policy=policy, **H2O) as llm:
        with pytest.raises(UserError, match="too little memory for one sequence alone"):
            generate(llm)
        monkeypatch.undo()
        assert generate(llm) == expected
