"""The eviction policy of expert slots."""

import random

import pytest
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.engine.slot_policy import DECAY, SlotPolicy

LAYERS, EXPERTS = 4, 6
CHOICES = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), min_size=1,
                   max_size=40)


def passes(choices):
    """Layer after layer, over and over, and the experts that each pass uses."""
    for number, chosen in enumerate(choices):
        yield number % LAYERS, [(number % LAYERS, expert) for expert in sorted(chosen)]


def step(policy, layer, keys) -> int:
    """One layer that uses experts one by one; how many had slots."""
    policy.begin(layer)
    hits = 0
    for key in keys:
        policy.use(key)
    for key in keys:
        hits += policy.slot(key) is not None
        if policy.slot(key) is None:
            assert policy.allocate(key) is not None
    return hits


@given(CHOICES, st.integers(1, 12))
@settings(max_examples=examples(80))
def test_each_slot_holds_one_expert_until_it_is_needed(choices, slots):
    policy = SlotPolicy(slots, LAYERS)
    seen = set()
    for layer, keys in passes(choices):
        before = set(policy.cached)
        step(policy, layer, keys)
        seen |= set(keys)
        held = set(policy.cached)
        numbers = [policy.slot(key) for key in held]
        assert len(set(numbers)) == len(numbers) and set(numbers) <= set(range(slots))
        assert len(held) == min(slots, len(seen)), "a slot is never left empty"
        assert held <= before | set(keys)
        assert keys[-1] in held


@given(CHOICES, st.integers(2, 12), st.randoms(use_true_random=False))
@settings(max_examples=examples(80))
def test_evicted_experts_have_low_scores_or_wait_long(choices, slots, chance):
    policy = SlotPolicy(slots, LAYERS)
    pinned: dict = {}

    def worth(key):
        return policy.score(key) / (1 + (key[0] - layer - 1) % LAYERS / LAYERS)

    for layer, keys in passes(choices):
        policy.begin(layer)
        for key in keys:
            policy.use(key)
            if policy.slot(key) is None:
                victim, full = policy.victim(), len(policy.cached) == slots
                if full:
                    free = [other for other in policy.cached if other not in pinned]
                    assert (victim is None) == (not free)
                    assert not free or worth(victim) == pytest.approx(min(map(worth, free)))
                slot = policy.allocate(key)
                assert (slot is None) == (full and victim is None)
                assert not full or victim is None or policy.slot(victim) is None
            if policy.slot(key) is not None and chance.random() < 0.4:
                policy.pin(key)
                pinned[key] = policy.slot(key)
        for key in [key for key in pinned if chance.random() < 0.3]:
            policy.unpin(key)
            del pinned[key]
        assert all(policy.slot(key) == slot for key, slot in pinned.items())


@given(CHOICES)
def test_scores_are_uses_that_decay_with_each_pass(choices):
    policy = SlotPolicy(1, LAYERS)
    wanted = {(layer, expert): 0.0 for layer in range(LAYERS) for expert in range(EXPERTS)}
    for layer, keys in passes(choices):
        policy.begin(layer)
        for key in wanted:
            wanted[key] *= DECAY if key[0] == layer else 1
        for key in keys:
            policy.use(key)
            wanted[key] += 1
    assert all(abs(policy.score(key) - worth) < 1e-9 for key, worth in wanted.items())


def hit_rate(weights, slots, passes=60):
    """The share of hits, where each layer's tokens choose two experts by these weights."""
    chance, policy, hits, uses = random.Random(5), SlotPolicy(slots, LAYERS), 0, 0
    for number in range(passes * LAYERS):
        layer, keys = number % LAYERS, set()
        while len(keys) < 2:
            keys.add((number % LAYERS, *chance.choices(range(EXPERTS), weights)))
        actual = step(policy, layer, sorted(keys))
        if number >= 10 * LAYERS:
            hits, uses = hits + actual, uses + len(keys)
    return hits / uses


def test_popular_experts_stay_when_layers_alternate():
    """Least recently used would keep nothing of what comes round again."""
    assert hit_rate([1] * EXPERTS, slots=12) > 0.35, "half of the experts have slots"
    assert hit_rate([20, 20, 20, 1, 1, 1], slots=12) > 0.75


def test_many_sequences_hit_as_often_as_with_fixed_experts():
    """Most experts are chosen in each pass, all alike often, and half of them have slots."""
    chance, policy, hits = random.Random(5), SlotPolicy(LAYERS * 32, LAYERS), 0
    for number in range(60 * LAYERS):
        layer = number % LAYERS
        keys = [(layer, expert) for expert in chance.sample(range(64), 50)]
        policy.begin(layer)
        for key in keys:
            policy.use(key)
        present = [key for key in keys if policy.slot(key) is not None]
        for key in present:
            policy.pin(key)
        for key in [key for key in keys if key not in present]:
            policy.allocate(key)
        for key in present:
            policy.unpin(key)
        if number >= 20 * LAYERS:
            hits += len(present)
    assert hits / (40 * LAYERS * 50) > 0.98 * 0.5, "fixed ones would be hit by half"


def test_frequent_choices_of_one_pass_stay():
    """A prompt chooses all experts of a layer, some of them with most of its tokens."""
    policy = SlotPolicy(3, 1)
    policy.begin(0)
    for expert, tokens in enumerate([1, 9, 1, 9, 1, 1]):
        policy.use((0, expert), tokens)
        policy.allocate((0, expert))
    assert {(0, 1), (0, 3)} < set(policy.cached)


def test_an_evicted_expert_has_no_slot():
    policy = SlotPolicy(2, LAYERS)
    step(policy, 0, [(0, 1), (0, 2)])
    policy.pin((0, 1))
    policy.evict((0, 1))
    assert policy.slot((0, 1)) is None and set(policy.cached) == {(0, 2)}
    assert policy.allocate((0, 3)) is not None and len(policy.cached) == 2
