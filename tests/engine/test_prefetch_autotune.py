"""Speculative prefetch goes on after its trial if steps with it are faster."""

import pytest

from flexgen_h2o.engine.decoder import TRIAL_STEPS, PrefetchAutotune


def prefetching_steps(prefetched: float, without: float, *, steps: int, first: float) -> list[bool]:
    """Return which steps of a block prefetch, given the seconds of each step."""
    autotune, enabled = PrefetchAutotune(), []
    for step in range(steps):
        enabled.append(autotune.enabled)
        # One step of each kind is slow for another reason.
        seconds = first if step == 0 else prefetched if enabled[-1] else without
        autotune.record(seconds * (5 if step in (3, 6) else 1))
    return enabled


@pytest.mark.parametrize(("prefetched", "without", "kept"), [
    (0.8, 1.0, True), (1.0, 0.8, False), (1.0, 1.0, False)])
def test_the_faster_kind_of_step_is_kept(prefetched, without, kept):
    enabled = prefetching_steps(prefetched, without, steps=40, first=100.0)
    assert enabled[: 2 * TRIAL_STEPS + 1] == [False] + [False, True] * TRIAL_STEPS
    assert enabled[2 * TRIAL_STEPS + 1 :] == [kept] * (40 - 2 * TRIAL_STEPS - 1)
