"""benchmarks/scenarios.py: rooflines from few layers, and memory groups."""

import subprocess
import sys

import pytest
from helpers.programs import ROOT, benchmark_modules
from helpers.subprocesses import environment

from flexgen_h2o.errors import UserError


@pytest.fixture
def scenarios():
    with benchmark_modules("scenarios") as found:
        yield found.scenarios


@pytest.fixture
def memory_group():
    with benchmark_modules("processes") as found:
        yield found.processes


def test_the_time_of_all_layers_follows_from_few(scenarios):
    assert scenarios.extended((2, 6), (5.0, 13.0), 48) == 5 + 46 * 2
    assert scenarios.extended((1, 4), (3.0, 3.0), 32) == 3, "no time a layer, only the rest"
    assert scenarios.extended((2, 2), (3.0, 3.1), 2) == 3


@pytest.mark.full
def test_a_group_limits_a_child_and_goes(memory_group):
    """Where cgroups may be made, a child in one sees its limit; elsewhere that is one line."""
    try:
        with memory_group.MemoryGroup(256 << 20) as group:
            done = subprocess.run(
                [sys.executable, "-c", "from flexgen_h2o.storage.free_memory import cgroup_free;"
                 "print(cgroup_free())"], preexec_fn=group.enter, capture_output=True, text=True,
                cwd=ROOT, check=True, env=environment())
            peak, folder, kills = group.peak(), group._folder, group.kills()
    except UserError as error:
        assert "no memory cgroup can be made" in str(error)
        pytest.skip(str(error))
    assert 0 < int(done.stdout) < 256 << 20 and 0 < peak <= 256 << 20
    assert not folder.exists() and kills == 0
