"""A cache in host memory of which GPU kernels read selected tokens in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import generation
from helpers.fakes import LazyDevice
from helpers.generation import answers, open_llm, run
from helpers.internals import cache_of, open_devices
from helpers.selection import full

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.cache.hot_set import ZeroCopyPart
from flexgen_h2o.cache.tiers import FetchedPart
from flexgen_h2o.errors import UserError
from flexgen_h2o.storage.buffer_ring import BufferRing

RECALL = H2OConfig(heavy_ratio=0.1, recall=True)
HOST = Placement(0, 100, 0)


def prompts_of(tiny, lengths=(30, 23, 7, 12, 1)):
    return generation.prompts_of(tiny, lengths)


def tokens(*args, **options):
    return run(*args, **{"new": 10} | options)[0]


@pytest.fixture
def loaded(monkeypatch) -> list:
    """A device with separate memory; return the (layer, batch) that are loaded."""
    found, load = [], BufferRing.load
    open_devices(monkeypatch, LazyDevice)

    def watched(self, key, fill, **options):
        found.append(key)
        load(self, key, fill, **options)

    monkeypatch.setattr(BufferRing, "load", watched)
    return found


@pytest.mark.parametrize("fast", [{}, {"fetch_chosen": True}, {"fetch_chosen": True,
                                                              "fast_set": 0.7}])
@pytest.mark.parametrize("options", [
    {}, {"prefill_chunk": 16, "cache_bits": (8, 4)},
    {"gpu_batch_size": 2, "num_gpu_batches": 1, "refill_share": 0.01},
    *full({"gpu_batch_size": 1, "num_gpu_batches": 3}, {"prefill_chunk": 16}, {"overlap": False},
          {"cache_bits": 4}, {"cache_bits": (8, 4)})])
def test_tokens_are_those_of_a_cache_on_the_device(tiny_model, loaded, options, fast):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    shared = {"cache_bits": options.get("cache_bits", 16)}
    expected = tokens(tiny, prompts, RECALL, **shared)
    for place in (HOST, Placement(30, 40, 30)):
        assert tokens(tiny, prompts, RECALL, cache=place, **shared | options | fast) == expected


@pytest.mark.parametrize("fetch", [False, True])
def test_decode_steps_load_no_whole_layer(tiny_model, loaded, fetch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)[:3]
    few = {"cache": HOST, "gpu_batch_size": 3, "fetch_chosen": fetch}
    counts = []
    for new in (2, 12):
        loaded.clear()
        tokens(tiny, prompts, RECALL, new=new, **few)
        counts.append(len(loaded))
    assert counts[0] == counts[1] > 0


def test_a_larger_hot_set_misses_less(tiny_model, loaded):
    tiny = tiny_model("llama")
    prompts, loads = prompts_of(tiny), []
    for share in (0.3, 0.6, 1.0):
        stats = run(tiny, prompts, RECALL, new=20, cache=HOST, fetch_chosen=True,
                    fast_set=share)[1]
        asked = stats.recall_hits + stats.recall_loads
        loads.append(stats.recall_loads)
    assert asked > loads[0] > loads[1] > loads[2] > 0
    assert stats.recall_guesses == 0


@pytest.mark.parametrize("fetch", [False, True])
def test_full_and_windowed_layers_are_fetched_whole(tiny_model, loaded, fetch):
    some = H2OConfig(heavy_ratio=(0.1, 1.0, 0.1), recent_ratio=(0.1, 1.0, 0.1), recall=True)
    for key, h2o in (("llama", some), ("gemma3", RECALL)):
        tiny = tiny_model(key)
        prompts = prompts_of(tiny)
        expected = tokens(tiny, prompts, h2o)
        assert tokens(tiny, prompts, h2o, cache=HOST, fetch_chosen=fetch) == expected


@pytest.mark.parametrize("fetch", [False, True])
def test_a_conversation_continues_in_host_memory(tiny_model, loaded, fetch):
    tiny, h2o = tiny_model("llama"), H2OConfig(heavy_tokens=5, recall=True)
    turns = prompts_of(tiny, [14, 3, 9, 1])
    with open_llm(tiny, replace(h2o, simulate=True), chunk=6) as llm:
        expected = answers(llm, turns, 6, max_tokens=70)
    with open_llm(tiny, h2o, chunk=6, cache=HOST, fetch_chosen=fetch) as llm:
        assert answers(llm, turns, 6, max_tokens=70) == expected


def test_a_hot_set_without_a_cache_in_host_memory_is_an_error(tiny_model, loaded):
    folder = str(tiny_model("llama").folder)
    for placed, words in (({"cache": Placement(50, 0, 50)}, "of which none is in host memory"),
                          ({"cache": HOST, "cpu_cache_compute": True}, "leave one of them out")):
        with pytest.raises(UserError, match=f"fetch_chosen has no effect .*{words}"):
            LLM(folder, h2o=RECALL, policy=Policy(fetch_chosen=True, **placed))


@pytest.mark.parametrize("zero_copy, kind", [(True, ZeroCopyPart), (False, FetchedPart)])
def test_devices_without_zero_copy_fetch_whole_layers(tiny_model, monkeypatch, zero_copy, kind):
    open_devices(monkeypatch, LazyDevice)
    monkeypatch.setattr(LazyDevice, "zero_copy", zero_copy)
    tiny = tiny_model("llama")
    with LLM(str(tiny.folder), dtype="float32", h2o=RECALL, policy=Policy(cache=HOST)) as llm:
        llm.generate(prompts_of(tiny)[:1], max_new_tokens=2)
        assert [type(part) for part in cache_of(llm).parts] == [kind]
    if not zero_copy:
        with pytest.raises(UserError, match="fetch_chosen needs the kernels of a GPU"):
            LLM(str(tiny.folder), h2o=RECALL, policy=Policy(cache=HOST, fetch_chosen=True))
