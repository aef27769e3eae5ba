"""Plans for pipeline ranks: layers by time, memory of each rank, and the block."""

from dataclasses import replace

import pytest
from helpers import planning_cases
from helpers.error_cases import refused

from flexgen_h2o.commands import generate
from flexgen_h2o.config.parallel import balance_layers
from flexgen_h2o.models.registry import published
from flexgen_h2o.planning.cost import estimate
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun
from flexgen_h2o.planning.search import (
    PlanRequest,
    estimate_pipeline,
    layer_seconds,
    predict_pipeline,
    rank_runs,
    search_pipeline,
)
from flexgen_h2o.storage.free_memory import MemoryLimits

HARDWARE = planning_cases.CPU
ROOM = MemoryLimits(None, 1 << 50, 1 << 50)
TIED, LARGE = published("opt-125m"), published("opt-30b")


def run_of(model, **options) -> PlannedRun:
    return planning_cases.planned(batch=(4, 6), lengths=(64, 16), gpu=False, model=model, **options)


def test_layer_times_sum_to_the_whole_model():
    run = run_of(TIED)
    seconds = layer_seconds(HARDWARE, replace(run, workload=replace(
        run.workload, num_gpu_batches=1)), 2)
    whole = estimate(HARDWARE, replace(run, workload=replace(run.workload, num_gpu_batches=1)))
    assert sum(seconds) == pytest.approx(whole.seconds)
    assert len(seconds) == TIED.num_layers and len(set(seconds[1:-1])) == 1
    assert seconds[-1] > 2 * seconds[1]  # a small model's head is as much as layers


def test_a_rank_with_a_large_head_gets_fewer_layers():
    small = predict_pipeline(HARDWARE, run_of(TIED), 3, ROOM, None).bounds
    assert small[3] - small[2] < small[1] and small[3] - small[2] < small[2] - small[1]
    assert predict_pipeline(HARDWARE, run_of(LARGE), 4, ROOM, None).bounds == (0, 12, 24, 36, 48)


def test_one_rank_takes_as_long_as_no_pipeline():
    run = run_of(TIED)
    one, alone = estimate_pipeline((0, TIED.num_layers), HARDWARE, run), estimate(HARDWARE, run)
    assert (one.prefill.seconds, one.step.seconds, one.generated) == pytest.approx(
        (alone.prefill.seconds, alone.step.seconds, alone.generated))


def test_ranks_share_the_time_and_fill_the_pipeline_once():
    run = run_of(LARGE)
    alone, two = estimate(HARDWARE, run), estimate_pipeline((0, 24, 48), HARDWARE, run)
    assert two.step.seconds == pytest.approx(alone.step.seconds / 2, rel=0.1)
    assert alone.prefill.seconds / 2 < two.prefill.seconds < alone.prefill.seconds * 0.7
    # One batch is on one rank at a time.
    single = replace(run, workload=replace(run.workload, num_gpu_batches=1))
    assert estimate_pipeline((0, 24, 48), HARDWARE, single).step.seconds == pytest.approx(
        estimate(HARDWARE, single).step.seconds)


def test_fetched_weights_are_loaded_for_each_group():
    run = run_of(LARGE, weights=planning_cases.ON_DISK)
    first, _ = rank_runs(run, (0, 24, 48))
    assert first.groups == 2
    once = estimate(HARDWARE, replace(first, groups=1))
    twice = estimate(HARDWARE, first)
    assert twice.step.resources["disk->cpu"] == pytest.approx(
        2 * once.step.resources["disk->cpu"], rel=1e-4)  # but the rows of the embedding
    assert twice.step.resources["compute"] == pytest.approx(once.step.resources["compute"])
    assert rank_runs(run_of(LARGE), (0, 24, 48))[0].groups == 4


def test_rank_memory_sums_to_the_whole_model():
    def rows(run):
        return {row.name: row.cpu for row in MemoryPlan(run).rows}

    run = run_of(TIED)
    whole, parts = rows(run), list(map(rows, rank_runs(run, (0, 4, 8, 12))))
    for name in ("weights", "cache"):
        assert sum(part[name] for part in parts) == whole[name]
    table = TIED.vocab_size * TIED.embed_dim * run.itemsize
    assert sum(part["embeddings"] for part in parts) == whole["embeddings"] + table
    assert parts[1]["embeddings"] == 0
    sizes = [part["message buffers"] for part in parts]
    batch = 4 * 64 * TIED.hidden_size * run.itemsize
    assert sizes == [batch, 3 * batch, 2 * batch]  # six groups: of one batch each
    assert "message buffers" not in whole


def test_a_search_proposes_plans_that_fit_each_rank():
    limits = MemoryLimits(None, 24 << 30, 200 << 30)
    request = PlanRequest(model=LARGE, prompt_len=64, gen_len=16, itemsize=2, prompts=64)
    plans = search_pipeline(HARDWARE, request, 4, limits)
    for plan in plans:
        assert plan.bounds[-1] == 48 and len(plan.bounds) == 5
        for part in rank_runs(plan.candidate.run, plan.bounds):
            assert not MemoryPlan(part).shortfalls(limits)
        assert plan.candidate.sequences == 64
    rates = [plan.candidate.tokens_per_second for plan in plans]
    assert rates == sorted(rates, reverse=True)
    one = search_pipeline(HARDWARE, request, 1, limits)[0].candidate
    assert rates[0] > 2 * one.tokens_per_second
    refused(lambda: search_pipeline(HARDWARE, request, 2, MemoryLimits(None, 1 << 20, 1 << 20)),
            "the run does not fit")


def test_a_search_leaves_room_for_messages():
    """Hidden states of prompts fill a small GPU to the brim: those on their way count, too."""
    gpu = planning_cases.GPU
    limits = MemoryLimits(6 << 30, gpu.cpu_bytes, gpu.disk_bytes)
    request = PlanRequest(model=LARGE, prompt_len=512, gen_len=16, itemsize=2, prompts=256)
    plans = search_pipeline(gpu, request, 4, limits)
    assert len(plans) > 1
    assert plans[0].candidate.run.workload.num_gpu_batches >= 4


def test_stages_fall_back_to_equal_layer_counts():
    run = run_of(TIED)
    times = predict_pipeline(HARDWARE, run, 3, ROOM, None).bounds
    parts = [max(MemoryPlan(part).total("cpu") for part in rank_runs(run, bounds))
             for bounds in (times, balance_layers([1.0] * 12, 3))]
    if parts[1] < parts[0]:
        limits = MemoryLimits(None, parts[1], 1 << 50)
        assert predict_pipeline(HARDWARE, run, 3, limits, None).bounds == (0, 4, 8, 12)
    refused(lambda: predict_pipeline(HARDWARE, run, 3, MemoryLimits(None, min(parts) // 2, 1 << 50),
                                None), "host memory: needs")
    refused(lambda: predict_pipeline(HARDWARE, run, 13, ROOM, None),
            "12 layers, too few for 13 ranks")


def test_a_plan_for_another_machine_shows_each_rank(capsys):
    argv = ["--model", "opt-30b", "--path", "_DUMMY_", "--plan-only", "--pipeline-parallel", "4",
            "--hardware", "configs/hardware/t4.yaml", "--prompt-len", "32", "--gen-len", "4",
            "--percent", "0", "100", "100", "0", "--num-gpu-batches", "8"]
    assert generate.main(argv) == 0
    printed = capsys.readouterr().out
    assert "rank 0       layers 0 to 11, device memory" in printed
    assert "rank 3       layers 36 to 47, device memory" in printed
