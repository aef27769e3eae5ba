"""benchmarks/studies/machines.py: simulated and measured rows."""

from __future__ import annotations

import pytest
from helpers.programs import program

from flexgen_h2o.planning.pipeline import Network

SMALL = {"models": ("opt-1.3b",), "prompts": (8, 64), "lengths": (64, 16)}


@pytest.fixture(scope="module")
def bench():
    return program("benchmarks/studies/machines.py")


@pytest.fixture(scope="module")
def simulated(bench):
    cluster = bench.Cluster("t4", 2, Network(1e9, 1e-4))
    return list(bench.simulated_rows([cluster], **SMALL))


def measured_rows(bench, cpus: int = 2) -> list[dict[str, object]]:
    """Rows of a machine that does 100 tokens/s, and less in each repeat but the second."""
    rates = {"one process": 100, "pipeline": 150, "replicas": 190}

    def run(_job, way, _processes, repeat):
        return bench.Rate(rates[way] + (-10, 0, 30)[repeat],
                                           4 * (way == "pipeline"))

    job = bench.MeasuredJob()
    return list(bench.measured_rows(job, 3, "", cpus=cpus, run=run))


def test_each_job_has_a_row_for_both_ways_and_one_wins(bench, simulated):
    assert len(simulated) == 2 * 2 * 2  # ways, caches, numbers of prompts
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


def test_medians_stand_beside_as_many_times_one_process(bench):
    one, pipeline, replicas = measured_rows(bench)
    assert [row["tokens_per_s"] for row in (one, pipeline, replicas)] == [100, 150, 190]
    assert [row["ideal_tokens_per_s"] for row in (one, pipeline, replicas)] == [100, 200, 200]
    assert replicas["share_of_ideal"] == 0.95
    assert (one["least_tokens_per_s"], one["most_tokens_per_s"]) == (90, 130)
    assert [row["sent_bytes_per_token"] for row in (one, pipeline)] == [0, 4]
    assert [row["processes"] for row in measured_rows(bench, cpus=4)] == [1, 2, 2, 4, 4]
