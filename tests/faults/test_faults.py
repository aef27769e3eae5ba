"""Calls of the operating system that a job makes fail, one at a time: see `helpers.faults`."""

import pytest
from helpers import selection
from helpers.fault_jobs import JOBS
from helpers.faults import sweep

NAMES = [*JOBS] if selection.every_case else ["generate", "batch", "serve"]


@pytest.fixture(scope="module")
def results(shim, words_model, tmp_path_factory) -> list[dict]:
    """The results of all jobs, for a sample of the points."""
    points = 3 if selection.every_case else 1
    return list(sweep(shim, NAMES, words_model, tmp_path_factory.mktemp("jobs"), points=points,
                      allocations=points, step=1 if selection.every_case else 8))


@pytest.mark.parametrize("job", NAMES)
def test_a_fault_is_one_line_or_changes_nothing(results, job):
    """Nothing hangs, is left behind or is lost, and the same command then runs to its end."""
    points = [point for point in results if point["job"] == job]
    bugs = [f"{point['fault']} {point['number']}: {point['message']}" for point in points
            if point["outcome"] == "bug"]
    assert points and not bugs, "\n\n".join(bugs)
