"""Fetched parts whose caches grow: on disk, and in host memory beside a fake GPU."""

import math

import torch
from helpers.generation import prompts_of, run
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import Placement
from flexgen_h2o.cache import tiers
from flexgen_h2o.cache.tiers import SlotUpdate, WriteBackLog, expand_slots

DISK = Placement(0, 0, 100)
LOG = 4  # tokens, by the fixture of all tests in this folder


@settings(max_examples=examples(200))
@given(lines=st.tuples(st.just(2), st.integers(1, 5), st.integers(1, 5)), few=st.integers(1, 9),
       more=st.integers(0, 30), width=st.integers(1, 5), itemsize=st.sampled_from([1, 2, 4]),
       seed=st.integers(0, 2**32))
def test_slots_expand_in_place(lines, few, more, width, itemsize, seed):
    before, after = (*lines, few, width), (*lines, few + more, width)
    size = math.prod(after) * itemsize
    buffer = torch.randint(256, (size + 7,), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(seed))
    old = buffer[: math.prod(before) * itemsize].view(*before[:-1], -1).clone()
    rest = buffer[size:].clone()
    expand_slots(buffer, before, after, itemsize)
    assert torch.equal(buffer[:size].view(*after[:-1], -1)[:, :, :, :few], old)
    assert torch.equal(buffer[size:], rest), "nothing beyond"


@given(sequences=st.integers(1, 3), heads=st.integers(1, 3), slots=st.integers(1, 6),
       width=st.integers(1, 5), count=st.integers(0, LOG),
       dtype=st.sampled_from([torch.bfloat16, torch.uint8, torch.float32]),
       seed=st.integers(0, 2**32))
def test_log_applies_updates_in_order(sequences, heads, slots, width, count, dtype, seed):
    """The last update of a slot wins; sequences that a batch lacks are skipped."""
    random = torch.Generator().manual_seed(seed)
    shape = (LOG, 2, sequences + 1, heads, width)
    log = WriteBackLog(torch.randint(100, shape, generator=random).to(dtype),
                       torch.randint(slots, (LOG, *shape[2:4]), generator=random), count)
    held = torch.zeros(2, sequences, heads, slots, width, dtype=dtype)
    expected = held.clone()
    for entries, slots_of in zip(log.entries[:count], log.slots[:count], strict=True):
        SlotUpdate(entries[:, :sequences], slots_of[:sequences]).write(expected)
    log.write(held)
    assert torch.equal(held, expected)


def test_empty_slots_are_not_transferred(tiny_model, monkeypatch):
    prompt, new, page, growth = 20, 140, 4096, 32
    monkeypatch.setattr(tiers, "CACHE_GROWTH", growth)
    tiny = tiny_model("llama")
    _, stats = run(tiny, prompts_of(tiny, [prompt] * 4), None, new=new, cache=DISK,
                   gpu_batch_size=4, num_gpu_batches=1)

    def nbytes(slots):
        size = 4 * 2 * 2 * 8 * 4 * min(slots, prompt + new - 1)  # of a layer
        return 3 * -(-size // page) * page

    # A backing store is read with the slots it had, and grows when they are full.
    reads = [nbytes(prompt + growth * (1 + max(0, token - 2) // growth)) for token in range(1, new)]
    assert stats.links["disk->cpu"][0] == sum(reads)
    assert sum(reads) < 0.8 * (new - 1) * nbytes(prompt + new)
    writes = [nbytes(prompt + growth * (1 + token // growth))
              for token in range(LOG, new - 1, LOG)]
    assert stats.links["cpu->disk"][0] == nbytes(prompt + growth) + sum(writes)
