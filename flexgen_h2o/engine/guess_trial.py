"""Decides whether guesses at what the next layer recalls are worth what they cost."""

from __future__ import annotations

import statistics

STEPS = 4
"""Decode steps with guesses, and as many without, that are compared."""


class GuessTrial:
    """Tries the steps of a block with guesses and without, in turns; goes on with what is faster.

    A guess takes a product, a choice, and reads of what is then not wanted; it spares waiting.
    Which is more depends on the model, the disk and the processor. Tokens do not depend on it. The
    first step, which fills the fast set, does not count.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []

    @property
    def guessing(self) -> bool:
        """True if the step that begins now is one with guesses."""
        if len(self._seconds) <= 2 * STEPS:
            return len(self._seconds) % 2 == 0 and bool(self._seconds)
        without, guessed = self._seconds[1::2], self._seconds[2::2]
        return statistics.median(guessed) < statistics.median(without)

    def ended(self, seconds: float) -> None:
        """Note the time of a step."""
        if len(self._seconds) <= 2 * STEPS:
            self._seconds.append(seconds)
