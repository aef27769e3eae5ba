"""Expected numbers of routed experts, from counts of other texts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.layers import ExpertChoices, ExpertsConfig, sum_choices
from flexgen_h2o.planning.planned_run import ExpertUse


@st.composite
def expert_choices(draw):
    """Draw expert choices of some layers, one without experts, with texts or without."""
    experts, per_token = draw(st.integers(2, 12)), draw(st.integers(1, 2))
    layer = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    counts = [*draw(st.lists(layer, min_size=1, max_size=4)), [draw(st.integers(1, 99))] * experts]
    texts = len(counts) * draw(st.integers(0, 3))
    tokens = texts * draw(st.integers(1, 50))
    chosen = draw(st.integers(texts * per_token, min(tokens * per_token, texts * experts))
                  if texts else st.just(0))
    counts.insert(draw(st.integers(0, len(counts))), [])
    choices = ExpertChoices(tuple(map(tuple, counts)), per_token, texts, tokens, chosen)
    return choices, ExpertUse(choices)


@given(expert_choices(), st.floats(0.25, 500), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_touched_parts_sum_to_the_whole(pair, tokens, cuts):
    _, use = pair
    bounds = [0.0, *sorted(cuts), 1.0]
    parts = [use.touched(tokens, *part) for part in zip(bounds, bounds[1:], strict=False)]
    assert sum(parts) == pytest.approx(use.touched(tokens), abs=1e-9)


@given(expert_choices())
def test_frequencies_sum_to_experts_per_token(pair):
    choices, use = pair
    keys = [(layer, number) for layer, counts in enumerate(choices.counts)
            for number in range(len(counts))]
    assert sorted(choices.ranked) == keys
    counts = [choices.counts[layer][number] for layer, number in choices.ranked]
    assert counts == sorted(counts, reverse=True)
    layers = len(set(layer for layer, _ in keys))
    chosen = [sum(choices.counts[layer]) > 0 for layer in range(len(choices.counts))]
    if sum(chosen) == layers:
        assert sum(use.frequencies) == pytest.approx(choices.per_token * layers)
    assert 0 < use.locality <= 1


@given(expert_choices(), st.floats(0.5, 40), st.integers(1, 60), st.floats(0, 1), st.floats(0, 14))
def test_untouched_experts_are_not_fetched(pair, sequences, tokens, first, kept):
    _, use = pair
    touched = use.touched(sequences * use.independent(tokens), first)
    missed = [use.missed(sequences, tokens, first, slots) for slots in (0, kept, kept + 1)]
    assert touched == pytest.approx(missed[0])
    assert touched * (1 + 1e-6) + 1e-6 >= missed[1] >= missed[2] - 1e-6 >= -1e-6


@given(st.integers(2, 64), st.integers(1, 2), st.floats(0.25, 100))
def test_equal_counts_are_as_no_counts(count, per_token, tokens):
    use = ExpertUse(ExpertChoices(((7000,) * count, (7000,) * count), per_token))
    assert use.touched(tokens) == pytest.approx(
        ExpertsConfig(count, per_token, 8).touched(tokens))
    for kept in (0.3 * count, 0.8 * count):  # tokens alike, of one sequence or of many
        assert use.missed(tokens, 1, 0.0, kept) == pytest.approx(
            (1 - kept / count) * use.touched(tokens), rel=1e-4, abs=1e-6)


def test_misses_equal_a_simulated_lfu_cache():
    """Beside a simulation of tokens that choose one of 40 experts each, some more often."""
    rng, weights = random.Random(4), [1000 // (rank + 1) for rank in range(40)]
    drawn = rng.choices(range(40), weights, k=100_000)
    use = ExpertUse(ExpertChoices((tuple(map(drawn.count, range(40))),), 1))
    for slots in (5, 15, 30):
        loads = sum(expert >= slots for expert in drawn)
        assert use.missed(1, 1, 0.0, slots) == pytest.approx(loads / len(drawn), rel=0.03)


def test_frequencies_shrink_with_few_texts():
    """Of 64 experts, each text keeps to eight of its own: all are chosen alike often."""
    rng = random.Random(0)

    def counted(texts):
        counts = [0] * 64
        for _ in range(texts):
            chosen = rng.sample(range(64), 8)
            for _ in range(100):
                for number in rng.sample(chosen, 2):
                    counts[number] += 1
        return ExpertUse(ExpertChoices((tuple(counts),), 2, texts, 100 * texts, 8 * texts))

    uniform = ExpertsConfig(64, 2, 0)
    for texts in (1, 4, 200):
        use = counted(texts)
        assert use.touched(use.independent(100)) == pytest.approx(8, rel=0.01)
        assert use.touched(32) == pytest.approx(uniform.touched(32), rel=0.2 if texts < 9 else 0.03)
        assert use.missed(1, 1, 0.0, 8) < 0.2, "a text goes on with its own"


def test_choices_are_sliced_and_summed():
    one = ExpertChoices(((1, 3), (), (5, 5)), 1, 4, 8, 6, "a.json")
    assert one.slice_layers(1, 3) == ExpertChoices(((), (5, 5)), 1, 2, 4, 3)
    assert (one.slice_layers(1, 3).source, one.slice_layers(1, 2).texts) == ("a.json", 0)
    assert one + one == ExpertChoices(((2, 6), (), (10, 10)), 1, 8, 16, 12)
    assert sum_choices([None, one, None, one]) == one + one
    assert sum_choices([None, None]) is None
