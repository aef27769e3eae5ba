"""Which experts of a mixture tokens chose: counted in one run, for plans of later ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add

Key = tuple[int, int]
"""(decoder layer, number of the expert)."""


@dataclass(frozen=True)
class ExpertChoices:
    """The choices of the tokens of a run.

    The tokens of a text keep to some experts. How much so is known from prompts: `texts` of them
    had `text_tokens`, which chose `text_experts` different experts; all three are sums over
    prompts and over layers that have experts. Of a prompt that comes in parts the first counts, and
    of prompts that begin alike what they have in common.

    Attributes
    ----------
    counts : tuple of tuple of int
        Of each decoder layer how many tokens chose each expert; empty for a layer without experts.
    per_token : int
        Experts of a token.
    texts, text_tokens, text_experts : int
        As above.
    source : str
        The file that they come from, for messages and flags.
    """

    counts: tuple[tuple[int, ...], ...] = field(repr=False)
    per_token: int
    texts: int = 0
    text_tokens: int = 0
    text_experts: int = 0
    source: str = field(default="", compare=False)

    def __add__(self, other: ExpertChoices) -> ExpertChoices:
        """The choices of two runs of a model together."""
        return replace(
            self, counts=tuple(tuple(one + more for one, more in zip(*layer, strict=True))
                               for layer in zip(self.counts, other.counts, strict=True)),
            texts=self.texts + other.texts, text_tokens=self.text_tokens + other.text_tokens,
            text_experts=self.text_experts + other.text_experts)

    def part(self, first: int, last: int) -> ExpertChoices:
        """Those of decoder layers `first` to `last` - 1, and their share of the other sums."""
        counts = self.counts[first:last]
        share = sum(map(bool, counts)) / max(sum(map(bool, self.counts)), 1)
        return replace(self, counts=counts, texts=round(share * self.texts),
                       text_tokens=round(share * self.text_tokens),
                       text_experts=round(share * self.text_experts))

    @cached_property
    def ranked(self) -> list[Key]:
        """All experts, those that were chosen most often first; equals in the order of layers."""
        keys = [(layer, number) for layer, counts in enumerate(self.counts)
                for number in range(len(counts))]
        return sorted(keys, key=lambda key: -self.counts[key[0]][key[1]])


def summed(choices: Iterable[ExpertChoices | None]) -> ExpertChoices | None:
    """The choices of runs together; None where none made any."""
    found = [each for each in choices if each is not None]
    return reduce(add, found) if found else None
