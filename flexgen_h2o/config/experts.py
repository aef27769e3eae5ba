"""The mixture of experts of a model: its sizes, and how many experts tokens choose together."""

from __future__ import annotations

from dataclasses import dataclass

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
        alike often and each token chooses on its own; see `planning.expert_use`."""
        return self.count * (1 - (1 - min(self.per_token / self.count, 1.0)) ** tokens)
