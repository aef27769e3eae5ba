"""Kernels of hot sets: slots for selected tokens, and reads of those that are missing."""

import os

import pytest
import torch
from helpers.kernel_cases import BUILT
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.cache_layout import PageLayout
from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.reference import recall as reference_recall
from flexgen_h2o.kernels.reference.recall import contiguous_runs
from flexgen_h2o.storage.device import PAGE, Device

FETCH = [reference_recall.fetch_tokens, pytest.param(native_recall.fetch_tokens, marks=BUILT)]
LAYOUT = PageLayout(kv_heads=3, token_bytes=700, slots=2000)  # 5 tokens of a record
HEADS, SLOTS, OFFSET = 6, 600, 2 * PAGE
UNTOUCHED = 77


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file's records [heads, rows, page_bytes], and its descriptors, the first past the page
    cache."""
    path = tmp_path_factory.mktemp("records") / "a"
    records = torch.randint(256, (HEADS, LAYOUT.head_pages, LAYOUT.page_bytes), dtype=torch.uint8)
    path.write_bytes(bytes(OFFSET) + records.numpy().tobytes())
    opened = {direct: os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
              for direct in (True, False)}
    yield records, opened
    for descriptor in opened.values():
        os.close(descriptor)


def missing_tokens(seed: int, counts: list[int]) -> torch.Tensor:
    """Draw `count` tokens of each head, most of them near others, each with its own slot."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for head, count in enumerate(counts):
        last = int(torch.randint(count, LAYOUT.slots + 1, (1,), generator=generator))
        token = torch.randperm(last, generator=generator)[:count].sort().values
        slot = torch.randperm(SLOTS, generator=generator)[:count]
        results.append(torch.stack((torch.full_like(token, head), token, slot)))
    return torch.cat(results, 1)


def lines(records: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Return the bytes of missing tokens in the file, [n, token_bytes]."""
    head, token, _ = missing
    held = records[head, token // LAYOUT.page_tokens, : LAYOUT.page_tokens * LAYOUT.token_bytes]
    held = held.unflatten(1, (LAYOUT.page_tokens, -1))
    return held[torch.arange(len(token)), token % LAYOUT.page_tokens]


def poisoned_slots() -> torch.Tensor:
    return torch.full((2, 3, SLOTS, 2, LAYOUT.token_bytes // 2), UNTOUCHED, dtype=torch.uint8)


@BUILT
@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32), room=st.sampled_from([1, 7, 80, 5000]),
       counts=st.lists(st.sampled_from([0, 1, 9, 200, SLOTS]), min_size=HEADS, max_size=HEADS),
       direct=st.booleans())
def test_fetched_tokens_are_in_their_slots(file, seed, room, counts, direct):
    """As many reads as the kernel takes at a time, fewer and more, and buffers of any size."""
    records, opened = file
    missing = missing_tokens(seed, counts)
    wide = torch.cat((missing, torch.full((3, 5), -1)), 1)[:, : missing.shape[1]]
    expected = poisoned_slots()
    expected.view(HEADS, SLOTS, -1)[missing[0], missing[2]] = lines(records, missing)
    read_buffer = Device().host_empty(room * LAYOUT.page_bytes)
    read = []
    for fetch in (native_recall.fetch_tokens, reference_recall.fetch_tokens):
        slots = poisoned_slots()
        done, nbytes = fetch(wide, slots, file=opened[direct], direct=direct, offset=OFFSET,
                             layout=LAYOUT, read_buffer=read_buffer.fill_(UNTOUCHED))
        assert done == missing.shape[1] and torch.equal(slots, expected)
        read.append(nbytes)
    needed = len((missing[0] * LAYOUT.head_pages + missing[1] // LAYOUT.page_tokens).unique())
    assert min(read) >= needed * LAYOUT.page_bytes
    assert read[0] == read[1] or room < 5000, "both read the same, where there is room for all"


@pytest.mark.parametrize("fetch", FETCH)
@pytest.mark.parametrize("direct", [True, False])
def test_truncated_file_returns_the_tokens_before_the_end(file, tmp_path, fetch, direct):
    """Reads before the one that fails have come."""
    records, _ = file
    path = tmp_path / "cut"
    rows = LAYOUT.head_pages // 2  # of head 1
    path.write_bytes(bytes(OFFSET) + records.numpy().tobytes()[
        : (LAYOUT.head_pages + rows) * LAYOUT.page_bytes])
    missing = missing_tokens(3, [100, 500, 0, 9, 0, 0])
    pages = missing[0] * LAYOUT.head_pages + missing[1] // LAYOUT.page_tokens
    whole = pages < LAYOUT.head_pages + rows
    read_buffer, slots = Device().host_empty(20 * LAYOUT.page_bytes), poisoned_slots()
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        done, nbytes = fetch(missing, slots, file=descriptor, direct=direct, offset=OFFSET,
                             layout=LAYOUT, read_buffer=read_buffer)
        nothing = fetch(missing[:, :0], slots, file=descriptor, direct=direct, offset=OFFSET,
                        layout=LAYOUT, read_buffer=read_buffer)
    finally:
        os.close(descriptor)
    assert whole.sum() - 100 < done <= whole.sum() and nbytes > 0 and nothing == (0, 0)
    came = slots.view(HEADS, SLOTS, -1)[missing[0, :done], missing[2, :done]]
    assert torch.equal(came, lines(records, missing[:, :done]))
    assert fetch(missing, slots, file=descriptor, direct=direct, offset=OFFSET, layout=LAYOUT,
                 read_buffer=read_buffer) == (0, 0), "a file that is closed"


@pytest.mark.parametrize("fetch", FETCH)
@pytest.mark.parametrize("wrong", [(HEADS, 0, 0), (-1, 0, 0),
                                   (0, LAYOUT.head_pages * LAYOUT.page_tokens, 0),
                                   (0, -1, 0), (0, 0, SLOTS), (0, 0, -1)])
def test_indices_out_of_range_are_errors(file, fetch, wrong):
    slots = poisoned_slots()
    missing = torch.tensor([(2, 40, 3), wrong]).T.contiguous()
    with pytest.raises(ValueError, match="fetch_tokens: an index"):
        fetch(missing, slots, file=file[1][True], direct=True, offset=OFFSET, layout=LAYOUT,
              read_buffer=Device().host_empty(PAGE))
    assert (slots == UNTOUCHED).all()


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 300), min_size=1), st.integers(0, 9), st.integers(1, 40))
def test_read_runs_cover_all_records_without_wide_gaps(numbers, gap, most):
    runs = list(contiguous_runs(numbers, gap=gap, max_pages=most))
    assert [place for places, _ in runs for place in places] == list(range(len(numbers)))
    for places, run in runs:
        in_run = {numbers[place] for place in places}
        assert {run[0], run[-1]} <= in_run <= {*run} and len(run) <= most
        order = sorted(in_run)
        assert all(b - a <= gap + 1 for a, b in zip(order, order[1:], strict=False))
    if numbers == sorted(numbers):
        for (_, one), (_, other) in zip(runs, runs[1:], strict=False):
            assert other[0] - one[-1] > gap + 1 or other[0] - one[0] >= most


# Slots of tokens


def state(heads: int, slots: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"slot_of": torch.full((heads, tokens), -1, dtype=torch.int32),
            "token_of": torch.full((heads, slots), -1, dtype=torch.int32),
            "log_weights": torch.zeros((heads, tokens), dtype=torch.int32)}


@pytest.mark.source("hot_set")
@BUILT
def test_taken_slots_equal_the_reference(isa):
    sequences, kv_heads, slots, tokens, most = 2, 3, 300, 1000, 200
    one, other = (state(sequences * kv_heads, slots, tokens) for _ in range(2))
    # So few weights that many are equal, and so many that every bit counts.
    for highest in (1, 2, 300, 70_000, 1 << 24, 2**31 - 1, 2**31 - 1):
        weights = torch.randint(highest, (sequences * kv_heads, tokens), dtype=torch.int32)
        one["log_weights"], other["log_weights"] = weights, weights.clone()
        selected = torch.stack([torch.randperm(tokens)[:most]
                                for _ in range(sequences * kv_heads)]).int()
        selected[1, 150:] = -1
        arguments = {"selected": selected.view(sequences, kv_heads, most), "newest": 32,
                "first_recent": torch.tensor([tokens - 30, tokens], dtype=torch.int32)}
        results = native_recall.assign_slots(**arguments, **one)
        expected = reference_recall.assign_slots(**arguments, **other)
        assert torch.equal(results[0], expected[0]) and torch.equal(results[1], expected[1])
        assert results[2] == expected[2]
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert results[2] > 0 < results[1].shape[1]


@pytest.mark.parametrize("take", [
    reference_recall.assign_slots, pytest.param(native_recall.assign_slots, marks=BUILT)])
@pytest.mark.parametrize("selected", [[0, 1, 2], [0, 20]])
def test_too_many_or_unknown_tokens_are_errors(take, selected):
    slots_of_head = state(1, 2, 20)
    before = {name: tensor.clone() for name, tensor in slots_of_head.items()}
    with pytest.raises(ValueError, match="assign_slots: an index"):
        take(torch.tensor([[selected]], dtype=torch.int32),
             torch.tensor([20], dtype=torch.int32), newest=3, **slots_of_head)
    assert all(torch.equal(slots_of_head[name], before[name]) for name in slots_of_head)
