"""benchmarks/studies/machines.py: simulated rows."""

from __future__ import annotations

import pytest
from helpers.programs import program

from flexgen_h2o.planning.pipeline import Network


def test_each_job_has_a_row_for_both_ways_and_one_wins():
    bench = program("benchmarks/studies/machines.py")
    cluster = bench.Cluster("t4", 2, Network(1e9, 1e-4))
    simulated = list(bench.simulated_rows([cluster], models=("opt-1.3b",), prompts=(8,),
                                          lengths=(64, 16)))
    assert len(simulated) == 2 * 2  # ways, caches
    for pipeline, replicas in zip(simulated[::2], simulated[1::2], strict=True):
        assert (pipeline["way"], replicas["way"]) == ("pipeline", "replicas")
        assert {pipeline["wins"], replicas["wins"]} == {"true", "false"}
        faster = max(simulated.index(pipeline), simulated.index(replicas),
                     key=lambda place: simulated[place]["tokens_per_s"])
        assert simulated[faster]["wins"] == "true"
        assert pipeline["times_the_other"] == pytest.approx(1 / replicas["times_the_other"])
        # 64 tokens of the prompt and 15 new ones, of 2,048 elements; a token goes back.
        assert pipeline["sent_bytes_per_token"] == 4096 * 79 / 16 + 8
        assert "sent_bytes_per_token" not in replicas
