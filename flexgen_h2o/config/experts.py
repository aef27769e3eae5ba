"""The mixture of experts of a model: its sizes, and how many experts tokens choose together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add

COMING = 16
"""The most experts that are on their way to compute at a time: enough to keep a disk at work. Each
has a slot from then on, in which another one could have been kept."""

FEWEST_SLOTS = 4 * COMING
"""The fewest slots that a plan gives to experts by itself. Some are computed, some are coming, and
some of the next layer are there already: with half as many compute and reading wait in turn."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that is the MLP of decoder layers (arXiv 1701.06538).

    Attributes
    ----------
    count, per_token : int
        Experts of a layer, and how many of them a token goes to.
    ffn_size : int
        Width of an expert.
    normalise : bool
        The weights of a token's experts are made to sum to 1.
    shared_ffn_size : int
        Width of the expert that every token goes to, behind a gate of its own; 0: there is none.
    gate_slope, gate_limit : float
        gpt-oss: the gate is ``x * sigmoid(gate_slope * x)`` of what is at most `gate_limit`.
    """

    count: int
    per_token: int
    ffn_size: int
    normalise: bool = True
    shared_ffn_size: int = 0
    gate_slope: float = 1.0
    gate_limit: float = 0.0

    def slots(self, tokens: int, away: int, given: int | None = None) -> int:
        """Experts that fast memory has room for beside those that rest in it.

        Without a number that is `given`, as many as a decode step of so many `tokens` chooses in
        two layers. Never more than the experts that rest `away` from fast memory.
        """
        touched = min(self.count, self.per_token * tokens)
        return min(away, 2 * touched if given is None else given)

    def kept(self, tokens: float, away: float, slots: int) -> float:
        """The slots that keep their experts from one pass of so many `tokens` to the next.

        The others are for what is on its way: the experts that a layer chooses and those of the
        next, at most `COMING`. All are kept where all that rest `away` have slots.
        """
        coming = min(COMING, 2 * self.touched(tokens))
        return slots if slots >= away else max(slots - coming, 0)

    def touched(self, tokens: float) -> float:
        """The experts of a layer that so many tokens choose together, as expected if all are chosen
        alike often and each token chooses on its own; see `planning.planned_run`."""
        return self.count * (1 - (1 - min(self.per_token / self.count, 1.0)) ** tokens)


# Which experts of a mixture tokens chose: counted in one run, for plans of later ones.


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
