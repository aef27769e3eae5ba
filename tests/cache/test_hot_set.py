"""`HotSet` against a dictionary for each head."""

from __future__ import annotations

import torch
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.cache.hot_set import HotSet

TOKENS, NEWEST = 20, 3


class Model:
    """One head's slots as a dictionary: slot to token."""

    def __init__(self, slots: int):
        self.held: dict[int, int] = {}
        self.slots = range(slots)

    def take(self, tokens: list[int], first: int, weights: list[int]
             ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the slots of tokens, and (token, slot) of missing tokens."""
        here = {token: slot for slot, token in self.held.items()}
        old = [token for token in tokens if 0 <= token < first]
        away = [token for token in old if token not in here]
        free = [slot for slot in self.slots if self.held.get(slot) not in old]
        free.sort(key=lambda slot: weights[self.held[slot]] if slot in self.held else 0)
        new = dict(zip(away, sorted(free[: len(away)]), strict=True))
        self.held |= {slot: token for token, slot in new.items()}
        places = here | new
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
        tokens = [each + [-1] * (most - len(each)) for each in wanted]
        found, missing, held = fast.assign(
            torch.tensor(tokens, dtype=torch.int32).view(1, 2, most),
            torch.tensor([first], dtype=torch.int32))
        expected = [model.take(each, first, weights)
                    for model, each in zip(models, tokens, strict=True)]
        assert found[0].tolist() == [places for places, _ in expected]
        away = [[head, *each] for head, (_, new) in enumerate(expected) for each in new]
        assert missing.T.tolist() == away
        assert held == sum(0 <= token < first for each in tokens for token in each) - len(away)
