"""The experts that texts to come choose, by the choices of others: a model of counts. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from flexgen_h2o.config.expert_choices import ExpertChoices

_MOST_TOKENS = 1e9
"""So many independent tokens choose whatever is ever chosen."""
_LEAST_LOCALITY = 0.05
_ROUNDS, _HALVINGS = 8, 40


class ExpertUse:
    """A model of what is chosen, of two things that counts tell.

    Some experts are chosen more often than others. And a text keeps to some of them: t successive
    tokens of it choose as many as ``t ** locality`` tokens do that choose on their own. With few
    texts the one looks like the other, so that frequencies are shrunk towards equal ones: by the
    share of their variance that texts that all choose alike would have too (James and Stein, 1961).

    Attributes
    ----------
    frequencies : ndarray [experts of all layers]
        The share of tokens that choose an expert, in the order of `ExpertChoices.ranked`.
    locality : float
        1 if a text's tokens have no more in common than those of different ones.
    """

    def __init__(self, choices: ExpertChoices):
        layers = [counts for counts in choices.counts if counts]
        self._layers = len(layers)
        tokens = sum(map(sum, layers)) / choices.per_token / self._layers
        counted = [choices.counts[layer][number] / max(sum(choices.counts[layer]), 1)
                   for layer, number in choices.ranked]
        self._counted = choices.per_token * np.array(counted)
        self._alike = choices.per_token / len(layers[0])
        self._length = choices.text_tokens / choices.texts if choices.texts else 1.0
        self._of_text = choices.text_experts / choices.texts if choices.texts else 0.0
        texts = choices.texts / self._layers or tokens or 1.0
        found = float(np.mean((self._counted - self._alike) ** 2))
        self._set(0.0)
        for _ in range(_ROUNDS):
            independent = texts * max(tokens / texts, 1.0) ** self.locality
            by_chance = self._alike * (1 - self._alike) / independent
            self._set(max(0.0, 1 - by_chance / found) if found > 0 else 0.0)

    def _set(self, weight: float) -> None:
        """Take frequencies that are those of the counts by this weight, and the locality that goes
        with them."""
        self.frequencies = weight * self._counted + (1 - weight) * self._alike
        self.locality = 1.0
        if self._length >= 2:
            alike = _inverse(self.touched, self._of_text)
            self.locality = min(max(math.log(max(alike, 1.0)) / math.log(self._length),
                                    _LEAST_LOCALITY), 1.0)

    def independent(self, tokens: float) -> float:
        """The independent tokens that choose as many experts as so many of a text."""
        return max(tokens, 0.0) ** self.locality

    def touched(self, tokens: float, first: float = 0.0, last: float = 1.0) -> float:
        """The experts of a mean layer that so many independent tokens choose, as expected.

        An expert that a token chooses with probability p is chosen by any of n tokens with
        probability ``1 - (1 - p) ** n``.

        Parameters
        ----------
        tokens : float
        first, last : float
            Of all experts by frequency, only those from the share `first` on, up to the share
            `last`: 0 and 1 are all.
        """
        chances = 1 - (1 - np.minimum(self.frequencies, 1.0)) ** tokens
        if (first, last) == (0.0, 1.0):
            return float(chances.sum()) / self._layers
        sums = np.concatenate(([0.0], np.cumsum(chances)))
        places = np.clip((first, last), 0, 1) * len(chances)
        low, high = np.interp(places, np.arange(len(sums)), sums)
        return max(0.0, float(high - low)) / self._layers

    def missed(self, sequences: float, tokens: float, first: float, kept: float) -> float:
        """Experts of a mean layer that a forward pass has to bring.

        It has so many tokens of each of so many sequences: one, with which texts go on, or new
        prompts. `kept` experts a layer are at hand, the ones used last of those from the share
        `first` on, of which alone this speaks: the working set (Denning, 1968) of the passes, or
        texts, that touch as many.
        """
        new = sequences * self.independent(tokens)
        if kept <= 0:
            return self.touched(new, first)
        if self.touched(_MOST_TOKENS, first) <= kept:
            return 0.0
        experts = len(self.frequencies) / self._layers
        by_frequency = self.touched(new, min(first + kept / experts, 1.0))
        held = _inverse(lambda many: self.touched(many, first), kept)
        after = held + new
        if tokens <= 1:
            passes = (held / sequences) ** (1 / self.locality)
            after = sequences * (passes + 1) ** self.locality
        return min(by_frequency, max(0.0, self.touched(after, first) - kept))


@lru_cache(maxsize=16)
def expert_use(choices: ExpertChoices) -> ExpertUse:
    """The model of these choices."""
    return ExpertUse(choices)


def _inverse(touched: Callable[[float], float], experts: float) -> float:
    """The independent tokens that touch so many experts; `touched` grows with them."""
    low, high = 0.0, 1.0
    while touched(high) < experts and high < _MOST_TOKENS:
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if touched(middle) < experts else (low, middle)
    return high
