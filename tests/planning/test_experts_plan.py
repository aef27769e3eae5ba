"""Planning of mixtures of experts: memory, cost and placement."""

from dataclasses import replace

import pytest
from helpers.planning_cases import CPU, FREE, GPU, machine, planned
from helpers.selection import full, full_cases

from flexgen_h2o.cli.plan_text import policy_flags
from flexgen_h2o.config.layers import (
    MAX_EXPERT_LOADS,
    MIN_EXPERT_SLOTS,
    ExpertChoices,
    ExpertsConfig,
)
from flexgen_h2o.config.parallel import Stage
from flexgen_h2o.config.placement import Placement, place_experts
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.registry import published
from flexgen_h2o.planning.cache_cost import RESOURCES, TERMS
from flexgen_h2o.planning.cost import estimate, unit_costs
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.placement_solver import PlacementSolver
from flexgen_h2o.planning.planned_run import ExpertUse
from flexgen_h2o.planning.search import PlanRequest, search
from flexgen_h2o.storage.free_memory import MemoryLimits

QWEN = published("Qwen3-30B-A3B")
MIXTRAL = published("Mixtral-8x7B-v0.1")
EXPERT = 3 * 768 * 2048  # parameters of one of Qwen's
ALL = 48 * 128


def rows(run):
    return {row.name: row for row in MemoryPlan(run).rows}


def test_non_expert_weights_get_the_fastest_tier():
    fast, host = place_experts(10, 90, Placement(25, 75, 0), None)
    assert fast == Placement(100, 0, 0)
    assert host.gpu == pytest.approx(100 * 15 / 90) and host.disk == 0
    fast, host = place_experts(10, 90, Placement(5, 0, 95), None)
    assert (fast.gpu, fast.disk) == (50, 50) and host == Placement(0, 0, 100)
    given = Placement(0, 100, 0)
    assert place_experts(10, 90, Placement(25, 75, 0), given) == (Placement(25, 75, 0), given)
    assert place_experts(10, 0, Placement(25, 75, 0), None)[0] == Placement(25, 75, 0)


def test_experts_and_their_slots_in_the_memory_plan():
    run = planned(weights=(30, 50), model=QWEN, batch=(2, 3), gpu=True)
    table, others = rows(run), QWEN.num_parameters() - ALL * EXPERT
    assert table["weights"].cpu == table["embeddings"].cpu == 0, "all that is not an expert"
    assert table["experts"].gpu == pytest.approx(
        2 * (0.3 * QWEN.num_parameters() - others), rel=1e-6)
    assert table["experts"].cpu == pytest.approx(2 * 0.5 * QWEN.num_parameters(), rel=1e-6)
    slots = 2 * 6 * 8  # what six tokens choose, twice
    assert run.expert_slots == slots
    assert 0 <= table["expert slots"].gpu - slots * 2 * EXPERT < slots * (32 << 10)
    few = replace(run, policy=replace(run.policy, expert_slots=3))
    assert rows(few)["expert slots"].gpu < 4 * 2 * EXPERT
    on_cpu = planned(weights=(0, 100), model=QWEN, gpu=False)
    assert rows(on_cpu)["expert slots"].cpu == 0, "without a GPU they are used where they are"
    assert rows(on_cpu)["experts"].cpu == 2 * ALL * EXPERT
    fewer = rows(planned(model=QWEN, bits=(4, 16), gpu=False))["experts"].cpu
    assert 0.25 < fewer / (2 * ALL * EXPERT) < 0.33


def test_layers_without_experts_are_planned_by_their_own_sizes():
    """Their MLP is of what every token needs, and only the others' experts come and go."""
    mixed = replace(QWEN, dense_layers=(True,) * 12 + (False,) * 36)
    assert (mixed.expert_layers, mixed.slice_layers(0, 12).experts) == (36, None)
    runs = [planned(weights=(0, 100), model=model, batch=(2, 3), gpu=True,
                    experts=Placement(0, 0, 100)) for model in (QWEN, mixed)]
    assert runs[1].num_experts == 36 * 128
    sizes = [2 * (run.model.num_parameters() - run.num_experts * EXPERT) for run in runs]
    held = [sum(rows(run)[name].cpu + rows(run)[name].gpu for name in ("weights", "embeddings"))
             for run in runs]
    assert held == sizes and sizes[1] - sizes[0] > 12 * 2 * 3 * 6000 * 2048
    read = [estimate(GPU, run).step.resources["disk->cpu"] for run in runs]
    assert read[1] == pytest.approx(read[0] * 36 / 48, rel=0.01)


def test_experts_computed_on_the_host_are_not_transferred():
    machines = {True: GPU, False: CPU}
    options = {"weights": (100, 0), "experts": Placement(0, 100, 0), "model": QWEN, "batch": (1, 1)}
    moved, kept = (planned(gpu=True, **options, cpu_expert_compute=host) for host in (False, True))
    assert moved.expert_slots > 0 == kept.expert_slots
    row = rows(kept)["expert slots"]
    assert row.gpu == 0 < row.cpu, "room for what comes down and goes up"
    seconds = [estimate(machines[True], run).step.resources for run in (moved, kept)]
    assert seconds[1]["cpu->gpu"] < seconds[0]["cpu->gpu"] / 50
    assert seconds[1]["cpu attention"] > 0 == seconds[0]["cpu attention"]
    assert seconds[1]["compute"] < seconds[0]["compute"]
    host = machines[True].host_attention
    faster = replace(machines[True], host_attention=replace(host, decode_attention={
        bits: 2 * rate for bits, rate in host.decode_attention.items()}))
    assert estimate(faster, kept).step.resources["cpu attention"] < (
        seconds[1]["cpu attention"])
    without = [estimate(machines[False], planned(gpu=False, **options, cpu_expert_compute=host))
               for host in (False, True)]
    assert without[0] == without[1], "without a GPU it is all the same"
    with pytest.raises(UserError, match="leave --cpu-expert-compute out"):
        estimate(replace(machines[True], host_attention=None), kept)


def test_experts_are_offloaded_first():
    run = planned(model=MIXTRAL, gpu=True, experts=Placement(100, 0, 0))
    limits = MemoryLimits(24 * 10**9, 100 * 10**9, 10**12)
    fitting = MemoryPlan(run).suggest(limits)
    assert fitting.experts is None
    moved = rows(replace(run, policy=fitting))
    assert moved["weights"].cpu == 0 < moved["experts"].cpu
    with pytest.raises(Exception, match="without --expert-percent would fit"):
        MemoryPlan(run).check(limits)


def test_only_touched_experts_are_transferred():
    run = planned(weights=(100, 0), experts=Placement(0, 0, 100), model=QWEN, batch=(1, 1),
                  expert_slots=1, gpu=False)
    hardware = machine(gpu=False, read=1.0)

    def moved(run):
        steps = estimate(hardware, run).step.resources
        return steps["disk->cpu"] / (48 * 2 * EXPERT)

    assert moved(run) == pytest.approx(8, rel=1e-3)
    many = replace(run, workload=replace(run.workload, gpu_batch_size=8, num_gpu_batches=4))
    assert moved(many) == pytest.approx(ExpertsConfig(128, 8, 768).touched(32), rel=1e-3)
    assert 100 < moved(many) < 128
    half = replace(run, policy=replace(run.policy, expert_slots=ALL // 2))
    assert moved(half) == pytest.approx(4, rel=1e-2), "half of them have slots"
    full = replace(run, policy=replace(run.policy, expert_slots=ALL))
    assert moved(full) == 0
    prompt = estimate(hardware, run).prefill.resources["disk->cpu"] / (48 * 2 * EXPERT)
    assert 120 < prompt <= 128


def test_plans_go_by_how_often_experts_are_chosen():
    """Half of the experts take nine of ten choices: they are in memory, or in slots."""
    layer = (72 * 10**9,) * 64 + (8 * 10**9,) * 64
    choices = ExpertChoices((layer,) * 48, 8)
    hot, cold = 8 * 0.9 / 64, 8 * 0.1 / 64
    run = planned(weights=(100, 0), experts=Placement(50, 0, 50), model=QWEN, batch=(4, 1),
                  expert_slots=1, gpu=False, expert_choices=choices)
    hardware = machine(gpu=False, read=1.0)

    def moved(run):
        return estimate(hardware, run).step.resources["disk->cpu"] / (48 * 2 * EXPERT)

    rare, often = (64 * (1 - (1 - p) ** 4) for p in (cold, hot))
    assert rare < moved(run) < 1.05 * rare, "some slots are for experts that are being loaded"
    on_disk = replace(run, policy=replace(run.policy, experts=Placement(0, 0, 100)))
    assert moved(on_disk) == pytest.approx(rare + often, rel=1e-6)
    slots = [moved(replace(on_disk, policy=replace(on_disk.policy, expert_slots=count)))
             for count in (ALL // 4, ALL // 2, ALL - 1)]
    assert rare + often > slots[0] > slots[1] > slots[2] > 0
    assert slots[1] < (rare + often) / 2, "slots keep what is chosen most often"
    both = planned(weights=(100, 0), experts=Placement(0, 50, 50), model=QWEN, batch=(4, 1),
                   expert_slots=1, gpu=True, expert_choices=choices)
    resources = estimate(machine(gpu=True, read=1.0, up=1.0), both).step.resources
    assert resources["disk->cpu"] / (48 * 2 * EXPERT) == pytest.approx(rare, rel=1e-6)
    assert resources["cpu->gpu"] / (48 * 2 * EXPERT) == pytest.approx(rare + often, rel=1e-6)
    uniform = replace(run, policy=replace(run.policy, expert_choices=None))
    kept = (ALL // 2 + 1 - MAX_EXPERT_LOADS) / ALL
    assert moved(uniform) == pytest.approx(run.model.experts.touched(4) * (1 - kept), rel=1e-6)
    assert "--expert-counts" not in policy_flags(run), "they have no file"
    named = replace(choices, source="my counts.json")
    assert policy_flags(replace(run, policy=replace(run.policy, expert_choices=named))).endswith(
        " --expert-counts 'my counts.json'")


def test_texts_with_few_experts_reuse_their_slots():
    """All experts are chosen alike often, but 64 tokens of a text choose no more than 24."""
    layer = (10**9,) * 128
    kept = ExpertChoices((layer,) * 48, 8, texts=48000, text_tokens=48000 * 64,
                         text_experts=48000 * 24)
    run = planned(weights=(100, 0), experts=Placement(30, 0, 70), model=QWEN, batch=(1, 1),
                  expert_slots=2000, gpu=False)
    hardware = machine(gpu=False, read=1.0)
    plain, known = (estimate(hardware, replace(run, policy=replace(run.policy,
                                                                   expert_choices=choices)))
                    for choices in (None, kept))
    assert known.step.resources["disk->cpu"] < 0.01 * plain.step.resources["disk->cpu"]
    assert known.prefill.resources["disk->cpu"] < 0.5 * plain.prefill.resources["disk->cpu"]
    assert replace(run, policy=replace(run.policy, expert_choices=kept)).touched(
        1, 64) == pytest.approx(24, rel=1e-3)


def test_expert_counts_are_sliced_by_stage():
    counts = tuple((60,) * 127 + (layer,) for layer in range(48))
    run = planned(weights=(100, 0), model=QWEN, gpu=False,
                  expert_choices=ExpertChoices(counts, 8, 480, 960, 7200))
    part = run.of_stage(Stage(12, 24, 48), 1)
    assert part.policy.expert_choices == ExpertChoices(counts[12:24], 8, 120, 240, 1800)
    assert part.touched(1, 1) == pytest.approx(8)
    layer = tuple(range(60_000, 124_000, 1000)) * 2
    whole = ExpertChoices((layer,) * 48, 8, 48 * 1000, 48 * 1_464_000, 48 * 20_000)
    uses = [ExpertUse(choices) for choices in (whole, whole.slice_layers(12, 24))]
    assert uses[0].locality == pytest.approx(uses[1].locality)
    frequency = max(uses[0].frequencies)
    assert 8 / 128 < frequency < 8 * max(layer) / sum(layer), "shrunk, not all"
    assert frequency == pytest.approx(max(uses[1].frequencies))


@pytest.mark.parametrize("hardware", [GPU, CPU])
def test_uniform_counts_place_as_no_counts(hardware):
    """And the search knows that experts elsewhere have to come."""
    limits = MemoryLimits(hardware.gpu_bytes, 12 * 10**9, 10**12)
    run = planned(model=QWEN, batch=(4, 2), gpu=hardware.has_gpu, bits=(4, 16))
    equal = ExpertChoices(((10**6,) * 128,) * 48, 8)
    plain, counted = (PlacementSolver(hardware, replace(run, policy=replace(
        run.policy, expert_choices=choices)), limits) for choices in (None, equal))
    assert counted.seconds == pytest.approx(plain.seconds, rel=1e-4)
    assert counted.best().policy == replace(plain.best().policy, expert_choices=equal)
    steps = unit_costs(hardware, replace(run, policy=replace(run.policy, expert_choices=equal)))[1]
    on_disk = [step.seconds[RESOURCES.index("disk->cpu"), TERMS.index(("weights", "disk"))]
               for step in steps]
    assert max(on_disk) > 0


def test_each_routed_row_has_a_fixed_cost():
    """Of 32 tokens in the layers alone; each has gone through 8 experts besides."""
    run = planned(model=QWEN, batch=(8, 4), gpu=False, experts=Placement(100, 0, 0))
    compute = replace(FREE, elementwise=2e9)
    seconds = estimate(machine(compute, gpu=False), run).step.resources["compute"]
    assert seconds == pytest.approx(48 * 2 * 32 * 2048 * (1 + 8))


def test_resident_slots_exclude_loads_in_flight():
    experts = ExpertsConfig(128, 8, 768)
    assert experts.resident_slots(1, 1000, 100) == pytest.approx(100 - 16)
    assert experts.resident_slots(0.5, 1000, 100) > 100 - 16, "half a token chooses fewer"
    assert experts.resident_slots(32, 1000, 100) == 100 - MAX_EXPERT_LOADS
    assert experts.resident_slots(32, 1000, 10) == 0
    assert experts.resident_slots(32, 100, 100) == 100, "nothing has to come"


@pytest.mark.parametrize("size", [1, 32])
def test_experts_on_disk_share_one_pool_of_slots(size):
    limits = MemoryLimits(None, 20 * 10**9, 10**12)
    run = planned(model=QWEN, batch=(size, 1), gpu=False, weights=(100, 0))
    best = PlacementSolver(CPU, run, limits).best()
    pooled = ALL * (100 - best.policy.experts.disk) / 100
    assert best.policy.expert_slots is None and pooled > ALL / 5
    assert best.expert_slots == int(pooled) + QWEN.experts.slots(size, ALL)
    assert rows(best)["experts"].gpu == rows(best)["experts"].cpu == 0
    assert rows(best)["expert slots"].cpu == best.expert_slots * best.slot_bytes
    beside = planned(model=QWEN, gpu=True, experts=Placement(20, 30, 50))
    assert beside.expert_slots == QWEN.experts.slots(beside.sequences, ALL)
    assert rows(beside)["experts"].gpu > 0, "host memory has copies for the GPU"
    alone = planned(model=QWEN, gpu=True, experts=Placement(20, 0, 80))
    assert alone.expert_slots == beside.expert_slots + ALL // 5


@pytest.mark.parametrize(("gpu", "cpu"), [(10, 70), *full_cases((16, 60))])
def test_few_sequences_get_slots_for_half_of_a_gpu(gpu, cpu):
    hardware, tight = GPU, MemoryLimits(gpu * 10**9, cpu * 10**9, 10**12)
    ample = MemoryLimits(10**12, 10**12, 10**12)

    def best(size, limits=tight, **policy):
        run = planned(model=QWEN, batch=(size, 1), gpu=True, **policy)
        solved = PlacementSolver(hardware, run, limits).best()
        assert not MemoryPlan(solved).shortfalls(limits)
        return solved

    few, many, given = best(4), best(64), best(4, expert_slots=50)
    resident = ALL * few.policy.experts.gpu / 100
    assert few.expert_slots == few.policy.expert_slots == pytest.approx(
        resident, abs=3 * ALL / 100), "but for whole percents"
    assert f"--expert-slots {few.expert_slots}" in policy_flags(few)
    assert many.policy.expert_slots is None, "nearly all are needed in each step"
    assert given.policy.expert_slots == 50 and given.policy.experts.gpu > few.policy.experts.gpu
    assert estimate(hardware, few).step.seconds == pytest.approx(
        estimate(hardware, given).step.seconds, rel=0.05), "none is taken to be needed more often"
    assert best(4, ample).policy.expert_slots is None, "all stay"


@pytest.mark.parametrize("hardware", [CPU, *full(GPU)])
def test_a_block_gets_fewer_slots_where_memory_is_short(hardware):
    """So that an expert comes once for all sequences, and not once for each small block."""
    memory = MemoryLimits(3 * 10**9 if hardware.has_gpu else None, 3 * 10**9, 10**12)

    def best(policy=None, **sizes):
        request = PlanRequest(model=QWEN, policy=policy or Policy(), prompt_len=64, gen_len=64,
                              itemsize=2, prompts=32, **sizes)
        return search(hardware, request, memory)[0].run

    run = best()
    assert run.sequences == 32 and not MemoryPlan(run).shortfalls(memory)
    usual = QWEN.experts.slots(32, ALL)
    assert MIN_EXPERT_SLOTS <= run.policy.expert_slots < usual
    larger = replace(run, policy=replace(run.policy, experts=Placement(0, 0, 100),
                                         weights=Placement(0, 0, 100), expert_slots=usual))
    assert MemoryPlan(larger).shortfalls(memory), "the usual slots do not fit"
    given = best(Policy(expert_slots=usual // 8), gpu_batch_size=32, num_gpu_batches=1)
    assert given.policy.expert_slots == usual // 8


@pytest.mark.parametrize("hardware", [GPU, CPU])
def test_auto_places_experts_by_themselves(hardware):
    limits = MemoryLimits(hardware.gpu_bytes, 30 * 10**9, 10**12)
    run = planned(model=QWEN, batch=(4, 2), gpu=hardware.has_gpu)
    best = PlacementSolver(hardware, run, limits).best()
    assert best.policy.weights == Placement(100, 0, 0)
    assert best.policy.experts != Placement(100, 0, 0)
    assert not MemoryPlan(best).shortfalls(limits)
    assert "--expert-percent " in policy_flags(best)
    worse = replace(best, policy=replace(best.policy, experts=Placement(0, 0, 100)))
    assert estimate(hardware, best).seconds < estimate(hardware, worse).seconds
    choices = search(hardware, PlanRequest(
        model=QWEN, prompt_len=64, gen_len=64, itemsize=2, gpu_batch_size=4, num_gpu_batches=1),
        limits)
    assert choices[0].run.policy.experts is not None
    assert len(unit_costs(hardware, best)) == 2
