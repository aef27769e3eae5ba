"""Expected numbers of routed experts, from counts of other texts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.layers import ExpertChoices, ExpertsConfig, sum_choices
from flexgen_h2o.planning.planned_run import ExpertUse


@st.composite
def made(draw):
    """Choices of some layers, one of which has no experts, with texts or without."""
    experts, per_token = draw(st.integers(2, 12)), draw(st.integers(1, 2))
    layer = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    counts = [*draw(st.lists(layer, min_size=1, max_size=4)), [draw(st.integers(1, 99))] * experts]
    texts = len(counts) * draw(st.integers(0, 3))
    tokens = texts * draw(st.integers(1, 50))
    chosen = draw(st.integers(texts * per_token, min(tokens * per_token, texts * experts))
                  if texts else st.just(0))
    counts.insert(draw(st.integers(0, len(counts))), [])
    found = ExpertChoices(tuple(map(tuple, counts)), per_token, texts, tokens, chosen)
    return found, ExpertUse(found)


@given(made(), st.floats(0.25, 500), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_touched_parts_sum_to_the_whole(pair, tokens, cuts):
    _, found = pair
    bounds = [0.0, *sorted(cuts), 1.0]
    parts = [found.touched(tokens, *part) for part in zip(bounds, bounds[1:], strict=False)]
    assert sum(parts) == pytest.approx(found.touched(tokens), abs=1e-9)


@given(made())
def test_frequencies_sum_to_experts_per_token(pair):
    found, use = pair
    keys = [(layer, number) for layer, counts in enumerate(found.counts)
            for number in range(len(counts))]
    assert sorted(found.ranked) == keys
    counts = [found.counts[layer][number] for layer, number in found.ranked]
    assert counts == sorted(counts, reverse=True)
    layers = len(set(layer for layer, _ in keys))
    chosen = [sum(found.counts[layer]) > 0 for layer in range(len(found.counts))]
    if sum(chosen) == layers:
        assert sum(use.frequencies) == pytest.approx(found.per_token * layers)
    assert 0 < use.locality <= 1


@given(made(), st.floats(0.5, 40), st.integers(1, 60), st.floats(0, 1), st.floats(0, 14))
def test_untouched_experts_are_not_fetched(pair, sequences, tokens, first, kept):
    _, found = pair
    touched = found.touched(sequences * found.independent(tokens), first)
    missed = [found.missed(sequences, tokens, first, each) for each in (0, kept, kept + 1)]
    assert touched == pytest.approx(missed[0])
    assert touched * (1 + 1e-6) + 1e-6 >= missed[1] >= missed[2] - 1e-6 >= -1e-6


@given(st.integers(2, 64), st.integers(1, 2), st.floats(0.25, 100))
def test_equal_counts_are_as_no_counts(count, per_token, tokens):
    found = ExpertUse(ExpertChoices(((7000,) * count, (7000,) * count), per_token))
    assert found.touched(tokens) == pytest.approx(
        ExpertsConfig(count, per_token, 8).touched(tokens))
    for kept in (0.3 * count, 0.8 * count):  # tokens alike, of one sequence or of many
        assert found.missed(tokens, 1, 0.0, kept) == pytest.approx(
            (1 - kept / count) * found.touched(tokens), rel=1e-4, abs=1e-6)


def test_misses_equal_a_simulated_lfu_cache():
    """Beside a simulation of tokens that choose one of 40 experts each, some more often."""
    rng, weights = random.Random(4), [1000 // (rank + 1) for rank in range(40)]
    drawn = rng.choices(range(40), weights, k=100_000)
    found = ExpertUse(ExpertChoices((tuple(map(drawn.count, range(40))),), 1))
    for slots in (5, 15, 30):
        loads = sum(expert >= slots for expert in drawn)
        assert found.missed(1, 1, 0.0, slots) == pytest.approx(loads / len(drawn), rel=0.03)


def test_frequencies_shrink_with_few_texts():
    """Of 64 experts, each text keeps to eight of its own: all are chosen alike often."""
    rng = random.Random(0)

    def counted(texts):
        counts = [0] * 64
        for _ in range(texts):
            own = rng.sample(range(64), 8)
            for _ in range(100):
                for number in rng.sample(own, 2):
                    counts[number] += 1
        return ExpertUse(ExpertChoices((tuple(counts),), 2, texts, 100 * texts, 8 * texts))

    alike = ExpertsConfig(64, 2, 0)
    for texts in (1, 4, 200):
        found = counted(texts)
        assert found.touched(found.independent(100)) == pytest.approx(8, rel=0.01)
        assert found.touched(32) == pytest.approx(alike.touched(32), rel=0.2 if texts < 9 else 0.03)
        assert found.missed(1, 1, 0.0, 8) < 0.2, "a text goes on with its own"


def test_choices_are_sliced_and_summed():
    one = ExpertChoices(((1, 3), (), (5, 5)), 1, 4, 8, 6, "a.json")
    assert one.slice_layers(1, 3) == ExpertChoices(((), (5, 5)), 1, 2, 4, 3)
    assert (one.slice_layers(1, 3).source, one.slice_layers(1, 2).texts) == ("a.json", 0)
    assert one + one == ExpertChoices(((2, 6), (), (10, 10)), 1, 8, 16, 12)
    assert sum_choices([None, one, None, one]) == one + one
    assert sum_choices([None, None]) is None
