"""Selective fetch of the tokens that recall selects: from disk, and from pinned host memory."""

from dataclasses import replace

import pytest
import torch
from helpers.fakes import LazyDevice
from helpers.generation import answers, open_llm, prompts_of, run, tokens
from helpers.internals import cache_of, open_devices
from helpers.selection import examples, full_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.cache import disk_recall
from flexgen_h2o.cache.disk_recall import page_layout, view_pages, view_slots
from flexgen_h2o.cache.hot_set import HotSet, ZeroCopyTier
from flexgen_h2o.cache.layout import SlotLayout
from flexgen_h2o.cache.tiers import FetchedTier
from flexgen_h2o.config.cache_layout import PageLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o import budget
from flexgen_h2o.kernels import ops
from flexgen_h2o.storage.device import PAGE, Device
from flexgen_h2o.storage.transfer import BufferRing

DISK, HOST = Placement(0, 0, 100), Placement(0, 100, 0)
RECALL = H2OConfig(heavy_ratio=0.1, recall=True)
SOME_LAYERS = H2OConfig(heavy_ratio=(0.1, 1.0, 0.1), recent_ratio=(0.1, 1.0, 0.1), recall=True)


@pytest.fixture
def fetched(request, monkeypatch) -> dict[str, object]:
    """Options of a policy whose cache is on disk, or in host memory with or without a hot set.

    Pages on disk have few tokens, so that short texts have many, and the hot set is small. In host
    memory, the kernels of a fake GPU read tokens in place.
    """
    if request.param == "disk":
        open_devices(monkeypatch, Device)
        monkeypatch.setattr(PageLayout, "page_tokens", 5)
        monkeypatch.setattr(budget, "HOT_SET_FACTOR", 1)
        return {"cache": DISK, "selective_fetch": True}
    open_devices(monkeypatch, LazyDevice)
    return {"cache": HOST, "selective_fetch": request.param == "hot set"}


on_disk = pytest.mark.parametrize("fetched", ["disk"], indirect=True)
in_host_memory = pytest.mark.parametrize("fetched", ["in place", "hot set"], indirect=True)
everywhere = pytest.mark.parametrize("fetched", ["disk", "in place", "hot set"], indirect=True)
OTHER_BLOCKS = {"gpu_batch_size": 2, "num_gpu_batches": 1, "refill_share": 0.01}


def test_pages_keep_their_tokens():
    slots = SlotLayout(3, 64, torch.bfloat16)
    layout = page_layout(slots, 100)
    assert (layout.page_tokens, layout.page_bytes, layout.head_pages) == (16, 4096, 7)
    assert layout.sequence_bytes == 7 * 3 * 4096
    held = torch.randn(2, 3, 7 * 16, 64).bfloat16()
    buffer = torch.zeros(layout.sequence_bytes, dtype=torch.uint8)
    view_slots(buffer, layout, slots).copy_(held.unflatten(2, (7, 16)))
    assert torch.equal(view_slots(buffer, layout, slots).flatten(2, 3), held)
    page = view_pages(buffer, layout, slots)[2 * 7 + 4]  # head 2, row 4
    assert torch.equal(page[5], held[:, 2, 4 * 16 + 5])
    assert page_layout(SlotLayout(1, 1000, torch.float32), 9).page_bytes == 8192


@pytest.mark.parametrize(("fetched", "options"), [
    ("disk", {"cache_bits": 4, "prefill_chunk": 16}), ("disk", OTHER_BLOCKS),
    ("disk", {"cache": Placement(40, 0, 60), "gpu_batch_size": 2, "overlap": False}),
    ("in place", {"cache": Placement(30, 40, 30)}),
    ("hot set", {"prefill_chunk": 16, "cache_bits": (8, 4)}),
    ("hot set", {"hot_set": 0.7, **OTHER_BLOCKS}),
    *full_cases(("disk", {}), ("disk", {"cache_bits": (8, 4)}), ("disk", {"hot_set": 0.4}),
                ("in place", {}),
                ("disk", {"prefill_chunk": 16, "overlap": False}),
                *((place, options) for place in ("in place", "hot set") for options in (
                    {"gpu_batch_size": 1, "num_gpu_batches": 3}, {"prefill_chunk": 16},
                    {"overlap": False}, {"cache_bits": 4}, {"cache_bits": (8, 4)}))),
], indirect=["fetched"])
def test_tokens_equal_recall_on_the_device(tiny_model, fetched, options):
    tiny = tiny_model("llama")
    prompts, bits = prompts_of(tiny), options.get("cache_bits", 16)
    expected = tokens(tiny, prompts, RECALL, new=20, cache_bits=bits)
    actual, stats = run(tiny, prompts, RECALL, new=20, **fetched | options)
    assert actual == expected
    if fetched["cache"] == DISK and options is not OTHER_BLOCKS:
        assert stats.links["disk->cpu"][0] > 0 and 0 < stats.recall_hit_rate < 1
        assert (stats.recall_prefetches > 0) == options.get("overlap", True)


@on_disk
def test_small_read_buffers_give_the_same_tokens(tiny_model, fetched, monkeypatch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected = tokens(tiny, prompts, RECALL)
    monkeypatch.setattr(disk_recall, "CHUNK", 5 * PAGE)
    assert tokens(tiny, prompts, RECALL, prefill_chunk=16, **fetched) == expected


@on_disk
def test_tokens_the_kernel_did_not_fetch_are_read_singly(tiny_model, fetched, monkeypatch):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    expected, fetch, left = tokens(tiny, prompts, RECALL), ops.fetch_tokens, []

    def some(missing, slots, **options):
        left.append(missing.shape[1] - missing.shape[1] // 2)
        return fetch(missing[:, : missing.shape[1] // 2], slots, **options)

    monkeypatch.setattr(ops, "fetch_tokens", some)
    assert tokens(tiny, prompts, RECALL, **fetched) == expected
    assert sum(left) > 0


@pytest.mark.parametrize("fetched", ["disk", "hot set"], indirect=True)
def test_larger_hot_set_misses_less(tiny_model, fetched):
    """Beside a GPU it starts empty. Of a cache on disk, the first step loads what it holds."""
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny)
    on_disk = fetched["cache"] == DISK
    loads, read = [], []
    for share in (0.3, 0.6, 1.0):
        first, rest = (run(tiny, prompts, RECALL, new=new, hot_set=share, overlap=False,
                           **fetched)[1] for new in (2, 20))
        loads.append(first.recall_loads)
        read.append(rest.recall_loads - first.recall_loads * on_disk)
    assert read[0] > read[1] > read[2] >= 0
    assert not on_disk or loads[0] < loads[1] < loads[2]
    assert rest.recall_hits > 0 and rest.recall_prefetches == 0


@in_host_memory
def test_decode_steps_load_no_whole_layer(tiny_model, fetched, monkeypatch):
    loaded, load = [], BufferRing.load
    monkeypatch.setattr(BufferRing, "load", lambda ring, key, fill, **options: (
        loaded.append(key), load(ring, key, fill, **options)))
    tiny = tiny_model("llama")
    counts = []
    for new in (2, 12):
        loaded.clear()
        tokens(tiny, prompts_of(tiny)[:3], RECALL, new=new, gpu_batch_size=3, **fetched)
        counts.append(len(loaded))
    assert counts[0] == counts[1] > 0


@everywhere
@pytest.mark.parametrize(("key", "h2o"), [("llama", SOME_LAYERS), ("gemma3", RECALL),
                                          ("gemma4", RECALL)])
def test_full_and_windowed_layers_are_fetched_whole(tiny_model, fetched, key, h2o):
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    assert tokens(tiny, prompts, h2o, **fetched) == tokens(tiny, prompts, h2o)


@everywhere
def test_a_conversation_continues(tiny_model, fetched):
    tiny, h2o = tiny_model("llama"), H2OConfig(heavy_tokens=5, recall=True)
    turns = prompts_of(tiny, [14, 3, 9, 1])
    with open_llm(tiny, replace(h2o, simulate=True), chunk=6) as llm:
        expected = answers(llm, turns, 6, max_tokens=70)
    with open_llm(tiny, h2o, chunk=6, **fetched) as llm:
        assert answers(llm, turns, 6, max_tokens=70) == expected


@pytest.mark.parametrize("zero_copy, kind", [(True, ZeroCopyTier), (False, FetchedTier)])
def test_devices_without_zero_copy_fetch_whole_layers(tiny_model, monkeypatch, zero_copy, kind):
    open_devices(monkeypatch, LazyDevice)
    monkeypatch.setattr(LazyDevice, "zero_copy", zero_copy)
    tiny = tiny_model("llama")
    with LLM(str(tiny.folder), dtype="float32", h2o=RECALL, policy=Policy(cache=HOST)) as llm:
        llm.generate(prompts_of(tiny)[:1], max_new_tokens=2)
        assert [type(tier) for tier in cache_of(llm).tiers] == [kind]
    if not zero_copy:
        with pytest.raises(UserError, match="selective_fetch needs the kernels of a GPU"):
            LLM(str(tiny.folder), h2o=RECALL, policy=Policy(cache=HOST, selective_fetch=True))


CHOSEN = {"selective_fetch": True}


@pytest.mark.parametrize(("device", "h2o", "policy", "words"), [
    (Device, None, CHOSEN, "selective_fetch has no effect without recall"),
    (Device, RECALL, CHOSEN, "selective_fetch has no effect on a cache in memory"),
    (Device, replace(RECALL, simulate=True), {"cache": DISK, **CHOSEN}, "in a simulation"),
    (Device, RECALL, {"cache": DISK, "hot_set": 0.5}, "has no effect without selective_fetch"),
    (LazyDevice, RECALL, {"cache": Placement(50, 0, 50), **CHOSEN},
     "no part of the cache is in host memory"),
    (LazyDevice, RECALL, {"cache": HOST, "cpu_cache_compute": True, **CHOSEN},
     "selective_fetch has no effect .*leave one of them out")])
def test_selective_fetch_without_effect_raises(tiny_model, monkeypatch, device, h2o, policy, words):
    open_devices(monkeypatch, device)
    with pytest.raises(UserError, match=words):
        LLM(str(tiny_model("llama").folder), h2o=h2o, policy=Policy(**policy))


# The hot set against a dictionary for each head

TOKENS, NEWEST = 20, 3


class Model:
    """One head's slots as a dictionary: slot to token."""

    def __init__(self, slots: int):
        self.held: dict[int, int] = {}
        self.slots = range(slots)

    def take(self, tokens: list[int], first: int, weights: list[int]
             ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the slots of tokens, and (token, slot) of missing tokens."""
        slots = {token: slot for slot, token in self.held.items()}
        old = [token for token in tokens if 0 <= token < first]
        missing = [token for token in old if token not in slots]
        free = [slot for slot in self.slots if self.held.get(slot) not in old]
        free.sort(key=lambda slot: weights[self.held[slot]] if slot in self.held else 0)
        new = dict(zip(missing, sorted(free[: len(missing)]), strict=True))
        self.held |= {slot: token for token, slot in new.items()}
        places = slots | new
        return [-1 if token < 0 else len(self.slots) + token % NEWEST if token >= first
                else places[token] for token in tokens], list(new.items())

    def forget(self, first: int) -> None:
        self.held = {slot: token for slot, token in self.held.items() if token < first}


@st.composite
def histories(draw):
    """Slots, and steps of two heads of one sequence.

    A step is the tokens that each head selects, the first of the newest tokens, and the weights of
    tokens; or the token from which on each head forgets.
    """
    slots = draw(st.integers(1, 8))
    chosen = st.lists(st.integers(0, TOKENS - 1), max_size=slots, unique=True)
    weights = st.lists(st.integers(0, 5), min_size=TOKENS, max_size=TOKENS)
    forgotten = st.integers(0, TOKENS)
    return slots, draw(st.lists(st.one_of(
        st.tuples(chosen, chosen, st.integers(0, TOKENS), weights),
        st.tuples(forgotten, forgotten)),
        max_size=12))


@settings(max_examples=examples(150))
@given(histories())
def test_a_hot_set_evicts_the_least_weights(history):
    slots, steps = history
    fast, models = HotSet(2, TOKENS, slots, NEWEST), [Model(slots), Model(slots)]
    for step in steps:
        if len(step) == 2:
            fast.forget(torch.tensor(step))
            for model, first in zip(models, step, strict=True):
                model.forget(first)
                assert not fast.log_weights[models.index(model), first:].any()
            continue
        *wanted, first, weights = step
        fast.log_weights[:] = torch.tensor(weights)
        most = max(map(len, wanted))
        tokens = [chosen + [-1] * (most - len(chosen)) for chosen in wanted]
        results, missing, held = fast.assign(
            torch.tensor(tokens, dtype=torch.int32).view(1, 2, most),
            torch.tensor([first], dtype=torch.int32))
        expected = [model.take(chosen, first, weights)
                    for model, chosen in zip(models, tokens, strict=True)]
        assert results[0].tolist() == [places for places, _ in expected]
        moves = [[head, *move] for head, (_, new) in enumerate(expected) for move in new]
        assert missing.T.tolist() == moves
        assert held == sum(0 <= token < first for chosen in tokens for token in chosen) - len(moves)
