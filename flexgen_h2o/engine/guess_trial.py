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

    Attributes
    ----------
    guessing : bool
        The step that begins now is one with guesses.
    """

    def __init__(self) -> None:
        self.guessing = False
        self._seconds: list[float] = []

    def ended(self, seconds: float) -> None:
        """Note the time of a step."""
        if len(self._seconds) > 2 * STEPS:
            return
        self._seconds.append(seconds)
        self.guessing = len(self._seconds) % 2 == 0
        if len(self._seconds) > 2 * STEPS:
            without, guessed = self._seconds[1::2], self._seconds[2::2]
            self.guessing = statistics.median(guessed) < statistics.median(without)
