"""Slots of fast memory for selected tokens: the kernel beside its reference."""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_cases import BUILT

from flexgen_h2o.kernels.cpu import recall as native_recall
from flexgen_h2o.kernels.reference import recall as reference_recall


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
        told = {"selected": selected.view(sequences, kv_heads, most), "newest": 32,
                "first_recent": torch.tensor([tokens - 30, tokens], dtype=torch.int32)}
        found = native_recall.assign_slots(**told, **one)
        expected = reference_recall.assign_slots(**told, **other)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert found[2] == expected[2]
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert found[2] > 0 < found[1].shape[1]


@pytest.mark.parametrize("take", [
    reference_recall.assign_slots, pytest.param(native_recall.assign_slots, marks=BUILT)])
@pytest.mark.parametrize("selected", [[0, 1, 2], [0, 20]])
def test_too_many_or_unknown_tokens_are_errors(take, selected):
    some = state(1, 2, 20)
    before = {name: tensor.clone() for name, tensor in some.items()}
    with pytest.raises(ValueError, match="assign_slots: an index"):
        take(torch.tensor([[selected]], dtype=torch.int32),
             torch.tensor([20], dtype=torch.int32), newest=3, **some)
    assert all(torch.equal(some[name], before[name]) for name in some)
