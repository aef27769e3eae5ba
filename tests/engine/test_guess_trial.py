"""Whether guesses go on after a trial, by the times of steps."""

from __future__ import annotations

import pytest

from flexgen_h2o.engine.decoder import STEPS, GuessTrial


def guesses(guessed: float, without: float, *, steps: int, first: float = 1.0) -> list[bool]:
    """Which of a block's steps guess, if steps take so many seconds."""
    trial, found = GuessTrial(), []
    for step in range(steps):
        found.append(trial.guessing)
        # A step of each kind is slow, for another reason.
        seconds = first if step == 0 else guessed if found[-1] else without
        trial.ended(seconds * (5 if step in (3, 6) else 1))
    return found


@pytest.mark.parametrize(("guessed", "without", "goes_on"), [(0.8, 1.0, True), (1.0, 0.8, False),
                                                            (1.0, 1.0, False)])
def test_the_faster_way_goes_on(guessed, without, goes_on):
    found = guesses(guessed, without, steps=40, first=100.0)
    assert found[: 2 * STEPS + 1] == [False] + [False, True] * STEPS
    assert found[2 * STEPS + 1 :] == [goes_on] * (40 - 2 * STEPS - 1)
