"""Selective fetch of a cache on disk: records on disk, and end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import generation
from helpers.generation import answers, open_llm, run
from helpers.selection import full

from flexgen_h2o import H2OConfig, Placement
from flexgen_h2o.cache import disk_recall
from flexgen_h2o.cache.disk_recall import page_layout, view_pages, view_slots
from flexgen_h2o.cache.layout import SlotLayout
from flexgen_h2o.config.cache_layout import PageLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o import budget
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.tiers import PAGE

pytestmark = pytest.mark.usefixtures("on_cpu")

DISK = Placement(0, 0, 100)
SOME = Placement(40, 0, 60)
FETCHED = {"cache": DISK, "fetch_chosen": True}
RECALL = H2OConfig(heavy_ratio=0.1, recall=True)


def prompts_of(tiny, lengths=(30, 23, 7, 12, 1)):
    return generation.prompts_of(tiny, lengths)


def tokens(*args, **options):
    return run(*args, **{"new": 10} | options)[0]


@pytest.fixture
def small_records(monkeypatch):
    """Few tokens in a page, so that short texts have many records, and a small hot set."""
    monkeypatch.setattr(PageLayout, "tokens", 5)
    monkeypatch.setattr(budget, "HOT_SET_FACTOR", 1)


def test_records_fill_pages_and_keep_their_tokens():
    records = SlotLayout(3, 64, torch.bfloat16)
    layout = page_layout(records, 100)
    assert (layout.tokens, layout.page_bytes, layout.rows) == (16, 4096, 7)
    assert layout.sequence_bytes == 7 * 3 * 4096
    held = torch.randn(2, 3, 7 * 16, 64).bfloat16()
    buffer = torch.zeros(layout.sequence_bytes, dtype=torch.uint8)
    view_slots(buffer, layout, records).copy_(held.unflatten(2, (7, 16)))
    assert torch.equal(view_slots(buffer, layout, records).flatten(2, 3), held)
    page = view_pages(buffer, layout, records)[2 * 7 + 4]  # head 2, row 4
    assert torch.equal(page[5], held[:, 2, 4 * 16 + 5])
    assert page_layout(SlotLayout(1, 1000, torch.float32), 9).page_bytes == 8192


@pytest.mark.parametrize("options", [
    {}, {"cache_bits": 4, "prefill_chunk": 16}, {"cache": SOME, "gpu_batch_size": 2},
    {"fast_set": 0.4, "overlap": False},
    *full({"cache_bits": (8, 4)}, {"prefill_chunk": 16, "overlap": False}, {"fast_set": 0.4})])
def test_selective_fetch_equals_recall_in_memory(tiny_model, small_records, options):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    here = {name: value for name, value in options.items() if name in ("cache_bits",)}
    expected = tokens(tiny, prompts, RECALL, new=20, **here)
    found, stats = run(tiny, prompts, RECALL, new=20, **FETCHED | options)
    assert found == expected
    assert stats.links["disk->cpu"][0] > 0 and 0 < stats.recall_hit_rate < 1
    assert (stats.recall_guesses > 0) == options.get("overlap", True)


def test_small_buffers_change_nothing(tiny_model, small_records, monkeypatch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected = tokens(tiny, prompts, RECALL)
    monkeypatch.setattr(disk_recall, "CHUNK", 5 * PAGE)
    assert tokens(tiny, prompts, RECALL, prefill_chunk=16, **FETCHED) == expected


def test_tokens_the_kernel_did_not_fetch_are_read_singly(tiny_model, small_records,
                                                               monkeypatch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected, fetch, left = tokens(tiny, prompts, RECALL), ops.fetch_tokens, []

    def some(missing, slots, **options):
        left.append(missing.shape[1] - missing.shape[1] // 2)
        return fetch(missing[:, : missing.shape[1] // 2], slots, **options)

    monkeypatch.setattr(ops, "fetch_tokens", some)
    assert tokens(tiny, prompts, RECALL, **FETCHED) == expected
    assert sum(left) > 0


def test_larger_hot_set_loads_more_first_and_misses_less(tiny_model, monkeypatch):
    monkeypatch.setattr(PageLayout, "tokens", 5)
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    placed = FETCHED | {"overlap": False}
    loads, read = {}, {}
    for share in (0.3, 0.6, 1.0):
        first, rest = (run(tiny, prompts, RECALL, new=new, fast_set=share, **placed)[1]
                       for new in (2, 20))
        loads[share] = first.recall_loads
        read[share] = rest.recall_loads - first.recall_loads
    assert loads[0.3] < loads[0.6] < loads[1.0], "the first step loads as much as there is room for"
    assert read[0.3] > read[0.6] > read[1.0], "which is what was in no page by then"


def test_full_and_windowed_layers_are_fetched_whole(tiny_model, small_records):
    for key, h2o in (("llama", H2OConfig(heavy_ratio=(0.1, 1.0, 0.1), recent_ratio=(0.1, 1.0, 0.1),
                                         recall=True)), ("gemma3", RECALL)):
        tiny = tiny_model(key)
        prompts = prompts_of(tiny)
        assert tokens(tiny, prompts, h2o, **FETCHED) == tokens(tiny, prompts, h2o)


def test_a_conversation_on_disk_continues(tiny_model, small_records):
    tiny, h2o = tiny_model("llama"), H2OConfig(heavy_tokens=5, recall=True)
    turns = prompts_of(tiny, [14, 3, 9, 1])
    with open_llm(tiny, h2o, chunk=6) as llm:
        expected = answers(llm, turns, 6, max_tokens=70)
    with open_llm(tiny, h2o, chunk=6, **FETCHED) as llm:
        assert answers(llm, turns, 6, max_tokens=70) == expected


def test_sequences_continue_in_other_blocks(tiny_model, small_records):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected = tokens(tiny, prompts, RECALL)
    assert tokens(tiny, prompts, RECALL, gpu_batch_size=2, num_gpu_batches=1,
                  refill_share=0.01, **FETCHED) == expected


def test_fetch_chosen_without_effect_is_an_error(tiny_model):
    from flexgen_h2o import LLM, Policy

    for h2o, placed, words in (
            (None, {}, "without recall"), (RECALL, {}, "on a cache in memory"),
            (replace(RECALL, simulate=True), {"cache": DISK}, "in a simulation")):
        with pytest.raises(UserError, match=f"fetch_chosen has no effect {words}"):
            LLM(str(tiny_model("llama").folder), h2o=h2o,
                policy=Policy(fetch_chosen=True, **placed))
    with pytest.raises(UserError, match="fast_set has no effect without fetch_chosen"):
        LLM(str(tiny_model("llama").folder), h2o=RECALL, policy=Policy(fast_set=0.5, cache=DISK))
