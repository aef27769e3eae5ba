"""benchmarks/studies/machines.py: its simulation, what it makes of rates, its file."""

from __future__ import annotations

import csv
from dataclasses import replace

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


def test_a_slow_network_is_slow_for_a_pipeline_alone(bench, simulated):
    cluster = bench.Cluster("t4", 2, Network(1e9, 1e-4))
    slow = bench.pair(replace(cluster, network=Network(1e6)), "opt-1.3b", "full",
                                        64, (64, 16))
    sent = 64 * 79 * 4096 / 1e6  # seconds
    assert slow[0]["tokens_per_s"] == pytest.approx(64 * 16 / sent, rel=0.2)
    assert slow[0]["tokens_per_s"] < 64 * 16 / sent
    before = simulated[2:4]  # of 64 prompts
    assert slow[0]["tokens_per_s"] < before[0]["tokens_per_s"]
    assert slow[1]["tokens_per_s"] == before[1]["tokens_per_s"]


def test_medians_stand_beside_as_many_times_one_process(bench):
    one, pipeline, replicas = measured_rows(bench)
    assert [row["tokens_per_s"] for row in (one, pipeline, replicas)] == [100, 150, 190]
    assert [row["ideal_tokens_per_s"] for row in (one, pipeline, replicas)] == [100, 200, 200]
    assert replicas["share_of_ideal"] == 0.95
    assert (one["least_tokens_per_s"], one["most_tokens_per_s"]) == (90, 130)
    assert [row["sent_bytes_per_token"] for row in (one, pipeline)] == [0, 4]
    assert [row["processes"] for row in measured_rows(bench, cpus=4)] == [1, 2, 2, 4, 4]


def test_the_file_keeps_the_other_kind(bench, simulated, tmp_path, monkeypatch):
    path = tmp_path / "machines.csv"
    measured = measured_rows(bench)
    monkeypatch.setattr(bench, "measured_rows", lambda *_, **__: iter(measured))
    monkeypatch.setattr(bench, "simulated_rows", lambda: iter(simulated))
    for only in ("simulated", "measured"):
        bench.main(["--only", only, "--out", str(path)])
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == bench.COLUMNS
    assert [row["kind"] for row in found] == ["measured"] * 3 + ["simulated"] * 8
    assert set().union(*measured, *simulated) <= set(bench.COLUMNS)
    bench.main(["--only", "measured", "--out", str(path)])
    with path.open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 11
