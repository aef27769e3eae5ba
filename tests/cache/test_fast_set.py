"""The set of tokens in fast memory, against a dictionary for each head."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.cache.fast_set import FastSet

TOKENS = 20


class Model:
    """One head's slots as a dictionary: slot to token, and when each was wanted last."""

    def __init__(self, slots: int):
        self.held: dict[int, int] = {}
        self.wanted = dict.fromkeys(range(slots), 0)
        self.step = 0

    def take(self, tokens: list[int], slots: list[int], missing: list[bool]) -> None:
        """Check an answer of `FastSet.take`, and do what it says."""
        self.step += 1
        here = {token: slot for slot, token in self.held.items()}
        assert missing == [token >= 0 and token not in here for token in tokens]
        kept = [slot for token, slot in zip(tokens, slots, strict=True) if token in here]
        assert kept == [here[token] for token in tokens if token in here]
        given = [slot for slot, new in zip(slots, missing, strict=True) if new]
        others = sorted(when for slot, when in self.wanted.items() if slot not in kept)
        assert sorted(self.wanted[slot] for slot in given) == others[: len(given)]
        assert len({*kept, *given}) == len(kept) + len(given)
        for token, slot in zip(tokens, slots, strict=True):
            if token < 0:
                assert slot == len(self.wanted)
                continue
            self.held[slot], self.wanted[slot] = token, self.step

    def forget(self, first: int) -> None:
        for slot, token in list(self.held.items()):
            if token >= first:
                del self.held[slot]
                self.wanted[slot] = 0


@st.composite
def histories(draw):
    """Slots, and what two heads want in each step, or from which token on they forget."""
    slots = draw(st.integers(1, 8))
    wanted = st.lists(st.integers(0, TOKENS - 1), max_size=slots, unique=True)
    forgotten = st.integers(0, TOKENS)
    return slots, draw(st.lists(st.one_of(
        st.tuples(wanted, wanted), st.tuples(forgotten, forgotten)), max_size=12))


@settings(max_examples=150, deadline=None)
@given(histories())
def test_the_fast_set_is_a_dictionary_that_drops_what_was_wanted_longest_ago(history):
    slots, steps = history
    fast, models = FastSet(2, TOKENS, slots), [Model(slots), Model(slots)]
    for step in steps:
        if isinstance(step[0], int):
            fast.forget(torch.tensor(step))
            for model, first in zip(models, step, strict=True):
                model.forget(first)
            continue
        most = max(map(len, step))
        tokens = [each + [-1] * (most - len(each)) for each in step]
        found = fast.take(torch.tensor(tokens, dtype=torch.int32).view(2, most))
        for model, *answer in zip(models, tokens, *(x.tolist() for x in found), strict=True):
            model.take(*answer)
