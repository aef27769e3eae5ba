"""The planner: what it chooses against all there is to choose from, its flags, and a plan printed.

Machines are fake, also where a run would measure its own.
"""

import itertools
import json
import re
import shlex
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import fake_llm, selection
from helpers.error_cases import refused
from helpers.gguf_cases import make
from helpers.planning_cases import BITS, CPU, FREE, GPU, OPT, machine, planned, roofline
from helpers.read_back import read_csv
from helpers.selection import examples, full
from helpers.subprocesses import environment
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flexgen_h2o.cli import planner
from flexgen_h2o.cli.launch import workload
from flexgen_h2o.cli.plan_text import plan_sentences, plan_text, policy_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import load_yaml, parse_size
from flexgen_h2o.commands import generate
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.placement import PLACED, Placement
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.registry import published
from flexgen_h2o.outputs import Output
from flexgen_h2o.planning.hardware import Hardware, save_hardware
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.search import TIE_RATIO, PlanRequest, _rank_candidates, predict, search
from flexgen_h2o.storage.free_memory import MemoryLimits

GB = 10**9
ANYTHING = {"weights": tuple(map(WeightOptions, BITS)),
            "caches": tuple(CacheOptions(None, bits) for bits in BITS)}


def limits_of(hardware: Hardware) -> MemoryLimits:
    return MemoryLimits(hardware.gpu_bytes, hardware.cpu_bytes, hardware.disk_bytes)


def find(hardware: Hardware, **request):
    request = {"model": OPT, "prompt_len": 64, "gen_len": 16, "itemsize": 2} | request
    return search(hardware, PlanRequest(**request), limits_of(hardware))


def batches(choice) -> tuple[int, int]:
    return choice.run.workload.gpu_batch_size, choice.run.workload.num_gpu_batches


REASONS = {
    "keeps more bits": lambda run: -(run.weights.bits + run.cache.bits),
    "attends where all else is computed": lambda run: run.policy.cpu_cache_compute,
    "has a smaller block": lambda run: run.workload.gpu_batch_size * run.workload.num_gpu_batches,
    "cuts a block into fewer batches": lambda run: run.workload.num_gpu_batches}


def printed_reasons(hardware: Hardware, choices) -> set[str]:
    """Return the reasons printed for alternatives that are faster than the choice; all are true."""
    text = plan_text(hardware, choices, limits_of(hardware))
    alternatives = [line for line in text.splitlines() if line.startswith("or ")]
    reasons = set()
    for line, other in zip(alternatives, choices[1:], strict=False):
        reason = re.search(r" \(within 2%, and the policy above (.*)\): --percent", line)
        assert (reason is not None) == (other.tokens_per_second > choices[0].tokens_per_second)
        if reason:
            assert REASONS[reason[1]](choices[0].run) < REASONS[reason[1]](other.run)
            reasons.add(reason[1])
    return reasons


# The search

machines = st.builds(
    lambda gpu, small, cpu, rates: Hardware(
        "drawn", int(small * GB) if gpu else None, int(cpu * GB), 40 * GB,
        {link: rate * GB for link, rate in zip(GPU.links, rates, strict=True)
         if gpu or "gpu" not in link},
        (GPU if gpu else CPU).compute, GPU.host_attention if gpu else None),
    st.booleans(), st.floats(0.5, 6), st.floats(1, 12), st.tuples(*[st.floats(0.3, 30)] * 4))
requests = st.fixed_dictionaries({
    "model": st.sampled_from([published(name) for name in ("opt-1.3b", "pythia-410m",
                                                           "SmolLM2-135M")]),
    "prompt_len": st.sampled_from([32, 300, 1024]),
    "gen_len": st.sampled_from([1, 8, 64]),
    "prompts": st.none() | st.integers(1, 90),
    "policy": st.builds(Policy, overlap=st.booleans(), cpu_cache_compute=st.booleans(),
                        prefill_chunk=st.none() | st.just(100)),
    "caches": st.sampled_from([
        (CacheOptions(),), (CacheOptions(H2OConfig(heavy_ratio=0.1)),), (CacheOptions(bits=4),)]),
    "written_bits": st.sampled_from([frozenset(), frozenset(BITS)]),
    "goal": st.sampled_from(["throughput", "throughput", "latency"])})


@settings(max_examples=examples(20))
@given(machines, requests, st.tuples(*[st.none() | st.integers(1, 9)] * 2))
def test_proposed_policies_fit_and_keep_given_values(hardware, request, given_sizes):
    size, count = given_sizes
    limits = limits_of(hardware)
    try:
        choices = find(hardware, **request, gpu_batch_size=size, num_gpu_batches=count)
    except UserError as error:
        assert re.search("needs .* [GM]B free", str(error))
        return
    for choice in choices:
        run, load = choice.run, choice.run.workload
        assert MemoryPlan(run).shortfalls(limits) == ()
        for kind in PLACED:
            placement = getattr(run.policy, kind)
            assert all(share == int(share) for share in (placement.gpu, placement.cpu))
            assert hardware.has_gpu or placement.cpu == 0
        wanted = request["policy"]
        assert replace(run.policy, weights=wanted.weights, cache=wanted.cache,
                       activations=wanted.activations, gpu_batch_size=4, num_gpu_batches=1,
                       cpu_cache_compute=wanted.cpu_cache_compute) == wanted
        assert run.policy.gpu_batch_size == (size or load.gpu_batch_size)
        assert run.policy.num_gpu_batches == (count or load.num_gpu_batches)
        assert run.policy.cpu_cache_compute or not wanted.cpu_cache_compute
        if request["prompts"] is not None:
            last = load.gpu_batch_size * (load.num_gpu_batches - 1)
            assert max(load.gpu_batch_size, last + 1) <= request["prompts"], "an empty batch"
    rates = [choice.tokens_per_second for choice in choices]
    assert rates[0] >= TIE_RATIO * max(rates) and rates[1:] == sorted(rates[1:], reverse=True)
    printed_reasons(hardware, choices)
    assert len({(policy_flags(choice.run), batches(choice)) for choice in choices}) == len(choices)


@settings(max_examples=examples(15))
@given(machines, requests, st.sampled_from(["gpu", "cpu", "disk", *GPU.links]),
       st.sampled_from([1.05, 1.5, 4]))
def test_more_resources_never_lower_throughput(hardware, request, part, factor):
    if not selection.every_case:
        # A search over all batch sizes takes seconds.
        request |= {"gpu_batch_size": 8, "num_gpu_batches": 2}
    try:
        before = find(hardware, **request)
    except UserError:
        assume(False)
    if part in hardware.links:
        better = replace(hardware, links=hardware.links | {part: hardware.links[part] * factor})
    else:
        held = getattr(hardware, f"{part}_bytes", None)
        assume(held is not None)
        better = replace(hardware, **{f"{part}_bytes": int(held * factor)})
    after = find(better, **request)
    for rate in (lambda choices: choices[0].tokens_per_second * (1 + 1 / 100),
                 lambda choices: max(choice.tokens_per_second for choice in choices)):
        assert rate(after) >= 0.98 * rate(before)


def brute_force(hardware: Hardware, request: PlanRequest) -> float:
    """Most tokens/s over a coarse grid of placements and the batch sizes of the request."""
    step = 25 if selection.every_case else 50
    shares = [(g, c, 100 - g - c) for g in range(0, 101, step) for c in range(0, 101 - g, step)
              if hardware.has_gpu or c == 0]
    most = 0.0
    hosts = (False, True) if hardware.has_gpu else (False,)
    for size, host in itertools.product(request.sizes(), hosts):
        for count in request.counts(size):
            run = planned(batch=(size, count), lengths=(request.prompt_len, request.gen_len),
                          gpu=hardware.has_gpu, model=request.model, cpu_cache_compute=host,
                          overlap=request.policy.overlap, h2o=request.caches[0].h2o)
            for places in itertools.product(shares, shares, [(100, 0, 0), (0, 100, 0)]):
                policy = replace(run.policy, **{
                    kind: Placement(*place) for kind, place in zip(PLACED, places, strict=True)})
                one = replace(run, policy=policy)
                if not MemoryPlan(one).shortfalls(limits_of(hardware)):
                    most = max(most, predict(hardware, one, request.prompts).tokens_per_second)
    return most


@settings(max_examples=examples(12))
@given(machines, st.sampled_from([(1, 1), (3, 4), (8, 2), (32, 1)]), st.sampled_from([8, 128]),
       st.none() | st.just(7), st.booleans(), st.sampled_from([None, H2OConfig(heavy_ratio=0.1)]))
def test_search_is_close_to_brute_force(hardware, batch, gen_len, prompts, overlap, h2o):
    request = PlanRequest(model=published("opt-1.3b"), prompt_len=300, gen_len=gen_len, itemsize=2,
                          prompts=prompts, policy=Policy(overlap=overlap), gpu_batch_size=batch[0],
                          num_gpu_batches=batch[1], caches=(CacheOptions(h2o),))
    most = brute_force(hardware, request)
    assume(most > 0)
    rate = search(hardware, request, limits_of(hardware))[0].tokens_per_second
    assert rate >= 0.9 * most


@pytest.mark.parametrize("lengths", [(128, 512), *full((512, 128))])
@pytest.mark.parametrize("memory", [2.0, *full(1.6, 2.4)])
def test_weights_and_cache_share_little_memory_optimally(memory, lengths):
    """Buffers of a cache come whole or not at all: no straight line leads to the best placement."""
    small = replace(CPU, cpu_bytes=int(memory * GB), interference=0.05, read_interference=0.6)
    request = PlanRequest(model=published("opt-1.3b"), prompt_len=lengths[0], gen_len=lengths[1],
                          itemsize=2, gpu_batch_size=4, num_gpu_batches=1)
    rates = []
    for weights, cache in itertools.product(range(0, 101, 2), range(0, 101, 25)):
        run = planned((weights, 0), (cache, 0), batch=(4, 1), lengths=lengths, gpu=False,
                      model=request.model)
        if not MemoryPlan(run).shortfalls(limits_of(small)):
            rates.append(predict(small, run).tokens_per_second)
    rate = search(small, request, limits_of(small))[0].tokens_per_second
    assert rate >= 0.99 * max(rates)


@pytest.mark.parametrize("memory", [2.0, *full(1.6, 2.4)])
def test_few_prompts_are_split_optimally(memory):
    """In one batch, whose weights come in chunks, or in several, which share whole layers."""
    small = replace(CPU, cpu_bytes=int(memory * GB), interference=0.05, read_interference=0.6)
    request = {"model": published("opt-1.3b"), "prompt_len": 128, "gen_len": 512, "prompts": 4}
    most = max(find(small, **request, gpu_batch_size=size, num_gpu_batches=4 // size)[0]
               .tokens_per_second for size in (1, 2, 4))
    assert find(small, **request)[0].tokens_per_second >= TIE_RATIO * most


@pytest.mark.full
def test_batch_sizes_are_close_to_brute_force():
    small = replace(GPU, gpu_bytes=2 * GB, cpu_bytes=5 * GB)
    for hardware in (small, replace(CPU, cpu_bytes=3 * GB)):
        request = {"model": published("opt-1.3b"), "prompt_len": 300, "gen_len": 32}
        chosen = find(hardware, **request)[0].tokens_per_second
        most = 0.0
        for batch in itertools.product((1, 4, 16, 32, 48, 96, 192), (1, 2, 4, 8, 16)):
            try:
                plans = find(hardware, **request, gpu_batch_size=batch[0], num_gpu_batches=batch[1])
            except UserError:
                continue
            most = max(most, plans[0].tokens_per_second)
        assert chosen >= 0.97 * most > 0


def test_a_model_that_fits_stays_on_the_device():
    """However large the disk: its bytes need more than 64 bits."""
    for hardware in (replace(GPU, host_attention=None, disk_bytes=10**24), CPU):
        policy = find(hardware, gpu_batch_size=8)[0].run.policy
        assert all(getattr(policy, kind) == Placement(100, 0, 0) for kind in PLACED)


def test_host_attention_beside_the_gpu_is_faster():
    """But where it hardly matters, attention is where all else is computed."""
    even = replace(GPU, host_attention=replace(GPU.host_attention, head_seconds=1e-7,
                                               decode_attention=dict.fromkeys(BITS, 2e11)))
    long = {"prompt_len": 1000, "gen_len": 1000, "gpu_batch_size": 64, "num_gpu_batches": 2}
    both = find(even, **long)[0]
    assert both.run.policy.cpu_cache_compute and 20 <= both.run.policy.cache.cpu <= 80
    alone = find(replace(even, host_attention=None), **long)[0]
    assert both.tokens_per_second > 1.2 * alone.tokens_per_second
    choices = find(even, **long | {"gen_len": 2})
    assert not choices[0].run.policy.cpu_cache_compute
    assert printed_reasons(even, choices) == {"attends where all else is computed"}


def test_large_models_share_each_load_among_batches():
    choice = find(GPU, model=published("opt-30b"), prompt_len=512, gen_len=32,
                  written_bits=frozenset(BITS))[0]
    assert choice.run.policy.weights.cpu + choice.run.policy.weights.disk > 50
    assert choice.run.workload.num_gpu_batches > 2
    one, *_ = find(GPU, model=published("opt-30b"), prompt_len=512, gen_len=32, gpu_batch_size=1,
                   num_gpu_batches=1)
    assert choice.tokens_per_second > 10 * one.tokens_per_second


def test_among_equals_the_smallest_block_wins():
    """ComputeRates in proportion to rows: larger batches gain next to nothing."""
    slow = machine(replace(FREE, linear={16: {1: 1.0}}, layer_seconds=1e-5), gpu=False)
    choices = find(slow)
    assert batches(choices[0]) == (1, 1)
    assert printed_reasons(slow, choices) == {"has a smaller block"}
    fixed = replace(FREE, layer_seconds=1e-3)
    best = find(machine(fixed, gpu=False))[0]
    assert batches(best)[0] > 100 and batches(best)[1] == 1


def test_of_equal_blocks_the_one_of_the_fewest_batches_wins():
    """Four batches of 6 are a little faster than one of 24, within what predictions are worth."""
    slow = machine(replace(FREE, linear={16: {6: 6.0, 24: 24.2}}, layer_seconds=1e-9), gpu=False)
    one, four = (find(slow, gpu_batch_size=24 // count, num_gpu_batches=count)[0]
                 for count in (1, 4))
    assert one.tokens_per_second < four.tokens_per_second < one.tokens_per_second / TIE_RATIO
    assert _rank_candidates([four, one]) == [one, four]
    assert printed_reasons(slow, [one, four]) == {"cuts a block into fewer batches"}


def test_all_prompts_count_and_not_full_blocks_alone():
    choice = find(GPU, prompts=10)[0]
    assert batches(choice) == (10, 1) and choice.sequences == 10
    # Ten prompts in blocks of four, each as long as another: three times a block.
    fixed = machine(replace(FREE, layer_seconds=1.0), gpu=False)
    run = planned(batch=(4, 1), gpu=False)
    assert predict(fixed, run, 10).seconds == pytest.approx(3 * predict(fixed, run).seconds)
    assert predict(fixed, run, 10).tokens_per_second == pytest.approx(
        predict(fixed, run).tokens_per_second * 10 / 12)


def test_the_goal_latency_is_a_single_sequence():
    latency = find(GPU, goal="latency")
    assert {batches(choice) for choice in latency} == {(1, 1)}
    throughput = find(GPU, gpu_batch_size=32)[0]
    assert latency[0].seconds < throughput.seconds
    assert latency[0].tokens_per_second < throughput.tokens_per_second
    given = find(GPU, goal="latency", gpu_batch_size=8, prompts=5)
    assert batches(given[0]) == (5, 1) and given[0].run.policy.gpu_batch_size == 8


def test_compression_is_chosen_only_where_it_gains():
    tight = replace(GPU, gpu_bytes=3 * GB, links={link: GB for link in GPU.links})
    options = {"model": published("opt-6.7b"), "prompt_len": 300, "gpu_batch_size": 16,
               "num_gpu_batches": 2}
    plain, packed = find(tight, **options)[0], find(tight, **options, **ANYTHING)[0]
    assert packed.run.weights.bits == 4
    assert packed.tokens_per_second > 2 * plain.tokens_per_second
    same = roofline(1, 100)
    same = replace(same, linear=dict.fromkeys(BITS, same.linear[16]),
                   decode_attention=dict.fromkeys(BITS, same.decode_attention[16] * 100))
    choices = find(replace(CPU, compute=same), gpu_batch_size=4, num_gpu_batches=1, **ANYTHING)
    assert (choices[0].run.weights.bits, choices[0].run.cache.bits) == (16, 16)
    assert printed_reasons(CPU, choices) == {"keeps more bits"}


def test_slow_disk_is_not_used_for_tiny_gains():
    """A disk so slow that it could take a thousandth of the load."""
    slow = replace(GPU, links=GPU.links | {"disk->cpu": GB // 100})
    choice = find(slow, model=published("opt-30b"), prompt_len=512, gen_len=32,
                  gpu_batch_size=16)[0]
    assert all(getattr(choice.run.policy, kind).disk == 0 for kind in PLACED)


# The plan as text


@settings(max_examples=examples(60))
@given(st.tuples(*[st.integers(0, 20).flatmap(
    lambda gpu: st.tuples(st.just(5 * gpu), st.integers(0, 20 - gpu).map(lambda c: 5 * c)))] * 3),
    st.tuples(*[st.integers(1, 64)] * 2), st.tuples(*[st.sampled_from(BITS)] * 2),
    st.tuples(*[st.booleans()] * 3), st.none() | st.integers(1, 50))
def test_flags_are_read_back_as_the_same_policy(percent, batch, bits, switches, chunk):
    host, overlap, pin = switches
    run = planned(*percent, batch=batch, bits=bits, cpu_cache_compute=host, overlap=overlap,
                  pin_weight=pin, prefill_chunk=chunk)
    config = generate.parse_args(shlex.split(policy_flags(run)))
    assert config.policy() == run.policy
    assert (config.resolved_weight_bits, config.resolved_cache_bits) == bits
    mixed = replace(run, cache=CacheOptions(key_bits=8, value_bits=4))
    assert generate.parse_args(shlex.split(policy_flags(mixed))).cache() == mixed.cache


def test_plan_text_shows_bound_and_alternatives():
    choices = find(GPU, model=published("opt-30b"), prompt_len=512, gen_len=32, gpu_batch_size=16)
    lines = plan_text(GPU, choices, limits_of(GPU)).splitlines()
    assert lines[1].endswith(policy_flags(choices[0].run))
    assert f"{choices[0].tokens_per_second:.4g} tokens/s" in lines[2]
    for line, phase in zip(lines[3:5], ("prefill", "step"), strict=True):
        cost = getattr(choices[0].estimate, phase)
        assert f"{cost.seconds:.4g} s a block, bound by {cost.binding} (" in line
    assert len(lines) == 9 and all(re.match(r"or +[\d.]+ tokens/s", line) for line in lines[6:])
    short = plan_text(CPU, find(CPU, gen_len=1, gpu_batch_size=4), limits_of(CPU))
    assert "decode" not in short and "device" not in short


# Recall in place of a full cache

HOST_BOUND = {"model": "opt-30b", "prompt_len": 1900, "percent": (0, 50, 0, 100, 100, 0),
              "gpu_batch_size": 4, "num_gpu_batches": 2, "cpu_cache_compute": True}
"""A cache that the CPU beside a GPU attends over, which is all that the time goes into."""


def test_plan_in_words_has_placements_budget_and_flags():
    run = planned((20, 30), (0, 100), gpu=True, bits=(4, 16), h2o=H2OConfig(heavy_ratio=0.1))
    plan = MemoryPlan(run)
    text = "\n".join(plan_sentences(plan, limits_of(GPU)))
    assert "20 % in GPU memory, 30 % in host memory, 50 % on disk" in text and "4 bits" in text
    assert "KV cache: in host memory; at most 12 tokens" in text and policy_flags(run) in text
    assert plan.held()["disk"] > 0 == plan.total("disk")  # weights are read from the checkpoint
    full = plan_sentences(MemoryPlan(planned(gpu=False, lengths=(99, 1))), limits_of(CPU))
    assert "KV cache: in memory; no token is evicted." in full


def plan_of(tmp_path: Path, hardware: Hardware, **flags) -> planner.Plan:
    """The plan of a run on a machine in a file."""
    save_hardware(hardware, tmp_path / "x.yaml")
    config = RunConfig(**{"path": "_DUMMY_", "hardware": str(tmp_path / "x.yaml"),
                          "plan_only": True} | flags)
    return planner.plan(config, workload(config, ()), config.num_prompts)


def test_recall_is_proposed_for_an_offloaded_cache(tmp_path):
    slow = replace(GPU, host_attention=replace(GPU.host_attention, decode_attention={
        16: 1e9, 8: 1e9, 4: 1e9}))
    plan = plan_of(tmp_path, slow, **HOST_BOUND)
    faster = plan_of(tmp_path, slow, **HOST_BOUND, hh_ratio=0.1, recall=True)
    assert plan.recall.candidate == faster.best and faster.recall is None
    assert faster.best.tokens_per_second > plan.best.tokens_per_second
    line, = (line for line in plan.text.splitlines() if line.startswith("recall"))
    assert f"--hh-ratio 0.1 --recall: {faster.best.tokens_per_second:.4g} tokens/s" in line
    assert plan.config.h2o() is None and not plan.best.run.cache.recalls, "proposed, not done"
    on_device = {"percent": (0, 50, 100, 0, 100, 0), "gpu_batch_size": 1, "num_gpu_batches": 1}
    for other in (on_device, {"hh_ratio": 0.1}, {"attn_sparsity": 0.5}, {"eviction": "full"}):
        assert plan_of(tmp_path, slow, **HOST_BOUND | other).recall is None, other
    # Also beside a policy that was searched.
    searched = plan_of(tmp_path, replace(GPU, gpu_bytes=4 * GB), model="opt-1.3b", prompt_len=1900,
                       percent="auto", gpu_batch_size=16, num_gpu_batches=4)
    assert searched.best.run.policy.cpu_cache_compute and searched.best.run.policy.cache.cpu > 50
    assert searched.recall.candidate.tokens_per_second > searched.best.tokens_per_second


def test_from_disk_recall_is_proposed_where_it_reads_less(tmp_path):
    """Of a short prompt reading ahead on a guess costs more than it hides."""
    disk = {"model": "opt-1.3b", "percent": (100, 0, 0, 0, 100, 0)}
    assert plan_of(tmp_path, CPU, **disk, prompt_len=300).recall is None
    for options in ({"prompt_len": 300, "overlap": False}, {"prompt_len": 1900}):
        plan = plan_of(tmp_path, CPU, **disk, **options)
        assert plan.recall.flags == "--hh-ratio 0.1 --recall --selective-fetch"
        assert plan.recall.candidate.run.recalls_from_disk


def test_selective_fetch_without_effect_is_dropped(tmp_path):
    recall = {"model": "opt-125m", "hh_ratio": 0.1, "recall": True, "selective_fetch": True,
              "percent": "auto", "num_prompts": 4}
    for hardware in (CPU, GPU):
        plan = plan_of(tmp_path, hardware, **recall)
        assert "--selective-fetch has no effect" in plan.text
        assert not plan.config.selective_fetch
        assert "--selective-fetch" not in plan.text.splitlines()[1]
    recall["percent"] = (100, 0, 0, 100, 100, 0)
    plan = plan_of(tmp_path, GPU, **recall)
    whole = plan_of(tmp_path, GPU, **recall | {"selective_fetch": False})
    links = [one.best.estimate.step.resources["cpu->gpu"] for one in (plan, whole)]
    assert plan.config.selective_fetch and 0 < links[0] < links[1]
    refused(lambda: plan_of(tmp_path, GPU, **recall | {"percent": (100, 0, 50, 0, 100, 0)}),
            "no part of the cache is in host memory")


# Flags


@pytest.mark.parametrize(("text", "expected"), [("6GB", 6 * GB), ("1.5GiB", 3 << 29), ("7", 7),
                                                (7, 7), ("2 kb", 2000), ("9b", 9),
                                                (2.5e9, 2_500_000_000), (" 4 GiB ", 4 << 30)])
def test_sizes(text, expected):
    assert parse_size("--memory-limit", text) == expected
    assert RunConfig(memory_limit=text).memory_limit == expected


@pytest.mark.parametrize("text", ["", "GB", "6G", "-6GB", "0", -1, True, None, [6], "1e9",
                                  float("inf"), "0.0001KB"])
def test_bad_sizes(text):
    refused(lambda: parse_size("--device-memory-limit", text), match="--device-memory-limit")


AUTO = ["--percent", "auto"]


@pytest.mark.parametrize(("argv", "words"), [
    (["--goal", "speed", *AUTO], "throughput, latency"), (["--goal", "latency"], "--percent auto"),
    (["--allow-compression"], "add --percent auto"), (["--recalibrate"], "--plan-only"),
    (["--allow-compression", *AUTO, "--weight-bits", "8", "--compress-cache"], "leave one of them"),
    (["--recalibrate", *AUTO, "--plan-only", "--hardware", "x.yaml"], "with --hardware"),
    (["--hardware", "x.yaml", *AUTO], "add --plan-only"),
    (["--hardware", "x.yaml", "--plan-only", "--device", "cuda"], "--device has no effect"),
    (["--device", "cpu", "--device-memory-limit", "6GB"], "give --memory-limit"),
    (["--plan-only", "--csv", "r.csv"], "--csv has no effect"),
    (["--plan-only", "--log-file", "l.log"], "--log-file has no effect"),
    (["--percent", "auto", "100"], "4 or 6 numbers")])
def test_bad_flags(refuses_flags, argv, words):
    refuses_flags(generate.main, argv if "--log-file" in argv else [*argv, "--no-log"], words)


# From end to end


class FakeLLM(fake_llm.FakeLLM):
    """Remembers its options and prompts; generates nothing."""

    vocab_size = 50

    def __init__(self, model, **options):
        self.options = options
        FakeLLM.opened.append(self)

    def generate(self, prompts, **options):
        self.prompts = prompts
        return [Output(None, [1], [2], None, "length") for _ in prompts]

    stats = property(lambda self: fake_llm.run_stats())


@pytest.fixture
def calibrations(monkeypatch, tmp_path) -> list[tuple]:
    """An empty folder, a fake engine and `CPU` as this machine; the calls that measure it."""
    monkeypatch.chdir(tmp_path)
    FakeLLM.replace(monkeypatch)
    calls = []

    def calibrate(device, offload_dir, *, recalibrate=False, progress):
        calls.append((offload_dir, recalibrate))
        progress("disk")
        return CPU

    monkeypatch.setitem(sys.modules, "flexgen_h2o.planning.calibrate",
                        types.SimpleNamespace(load_or_calibrate=calibrate,
                                              by_measured_rates=lambda device, folder: folder))
    monkeypatch.setattr(planner, "free_memory", lambda folder, device: limits_of(CPU))
    return calls


OF_TEXTS = ["--model", "opt-1.3b", "--path", "_DUMMY_", "--device", "cpu", *AUTO, "--gen-len", "16"]
RUN = [*OF_TEXTS, "--prompt-len", "64"]


def shown_flags(out: str) -> str:
    """The flags of the policy, which a shell reads as one line."""
    return re.search(r"^policy +(--percent .*)$", out.replace("\\\n", " "), re.MULTILINE)[1]


def test_predictions_are_in_the_results(calibrations, capsys):
    assert generate.main([*RUN, "--csv", "c.csv", "--no-log", "--num-prompts", "5"]) == 0
    (llm,) = FakeLLM.opened
    load = llm.options["workload"]
    assert len(llm.prompts) == 5 and load.gpu_batch_size * load.num_gpu_batches <= 6
    (row,) = read_csv("c.csv")
    seconds = [float(row[f"predicted_{phase}_seconds"]) for phase in ("prefill", "decode")]
    out = capsys.readouterr().out
    total = re.search(r"^predicted .*tokens/s, (\S+) s for 5 sequences", out, re.MULTILINE)[1]
    assert float(total) == pytest.approx(sum(seconds), rel=1e-3)
    shown = re.search(r"^predicted +(\S+) \+ (\S+) s", out, re.MULTILINE)
    assert [*map(float, shown.groups())] == pytest.approx(seconds, abs=1e-3)


def test_a_run_plans_first_and_saves_its_policy(calibrations, capsys, tmp_path):
    assert generate.main([*RUN, "--output", "o.jsonl", "--recalibrate", "--memory-limit", "2GB",
                          "--offload-dir", "there", "--goal", "latency"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "measuring disk\n" and calibrations == [("there", True)]
    line = shown_flags(captured.out)
    (llm,) = FakeLLM.opened
    assert llm.options["policy"] == generate.parse_args(line.split()).policy()
    policy, load = llm.options["policy"], llm.options["workload"]
    assert policy.weights.disk > 0, "2 GB are too little for 2.6 GB of weights"
    assert (load.gpu_batch_size, load.num_gpu_batches) == (1, 1) and len(llm.prompts) == 1
    assert llm.options["memory_limit"] == 2 * GB and llm.options["device_memory_limit"] is None
    saved = RunConfig.from_mapping(load_yaml(tmp_path / "o.jsonl.config.yaml"))
    assert saved.policy() == policy and saved.goal == "throughput" and not saved.recalibrate
    assert (saved.gpu_batch_size, saved.num_gpu_batches) == (1, 1)
    names = [path.name for path in tmp_path.iterdir()]
    log = next(name for name in names if name.endswith(".log"))
    assert f"-gbs1-ngbs1-prompt64-gen16-percent-{policy.weights.gpu:g}-0-" in log
    assert not any("auto" in name for name in names)


@pytest.mark.parametrize(("slots", "given"), [((), None), (("--expert-slots", "50"), 50)])
def test_planned_experts_reach_the_run(calibrations, capsys, slots, given):
    argv = ["--model", "Qwen3-30B-A3B", "--weight-bits", "4", "--memory-limit", "12GB", *slots]
    assert generate.main([*RUN, *argv, "--goal", "latency", "--no-log"]) == 0
    line = shown_flags(capsys.readouterr().out)
    (llm,) = FakeLLM.opened
    policy = llm.options["policy"]
    shown = generate.parse_args(line.split()).policy()
    assert shown.experts.gpu == pytest.approx(policy.experts.gpu, rel=1e-4)
    assert replace(shown, experts=policy.experts) == policy
    assert policy.expert_slots == given and 0 < policy.experts.disk < 100


def test_prompts_bound_the_block(calibrations, capsys):
    Path("p.txt").write_text("a prompt\n" * 5 + "the longest prompt of them\n")
    assert generate.main([*OF_TEXTS, "--prompts", "p.txt", "--no-log", "--verbose", "0"]) == 0
    (llm,) = FakeLLM.opened
    load = llm.options["workload"]
    assert (load.prompt_len, load.gpu_batch_size * load.num_gpu_batches) == (26 // 3 + 1, 6)
    assert len(llm.prompts) == 6 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("bits", "expected"), [
    (("--key-bits", "8", "--value-bits", "4"), {"key_bits": 8, "value_bits": 4}),
    (("--cache-bits", "8"), {"cache_bits": 8})])
def test_given_batch_sizes_and_bits_are_kept(calibrations, bits, expected):
    argv = ["--gpu-batch-size", "5", "--num-gpu-batches", "3", "--no-log", *bits,
            "--allow-compression", "--memory-limit", "2GB"]
    assert generate.main([*RUN, *argv]) == 0
    (llm,) = FakeLLM.opened
    policy = llm.options["policy"]
    assert (policy.gpu_batch_size, policy.num_gpu_batches, len(llm.prompts)) == (5, 3, 15)
    assert {name: llm.options[name] for name in expected} == expected
    assert llm.options["weight_bits"] in BITS


def test_errors_come_before_calibration(calibrations, capsys):
    for argv in (["--output", "none/x"], ["--log-file", "none/x"], ["--prompts", "none.txt"],
                 ["--hh-ratio", "0.1", "0.2"], ["--path", "none"], ["--prompt-len", "3000"],
                 ["--device-memory-limit", "6GB"]):
        assert generate.main([*OF_TEXTS, *argv]) == 2
        captured = capsys.readouterr()
        assert (calibrations, captured.out) == ([], "") and captured.err.count("\n") == 1, argv
    assert not FakeLLM.opened


def test_a_fixed_policy_is_predicted(calibrations, capsys):
    argv = [word for word in RUN if word not in AUTO] + ["--percent", "0", "100", "100", "0"]
    assert generate.main([*argv, "--plan-only", "--gpu-batch-size", "7"]) == 0
    out = capsys.readouterr().out
    assert "--percent 0 100 100 0 100 0 --gpu-batch-size 7 --num-gpu-batches 1" in out
    run = planned(weights=(0, 100), batch=(7, 1), lengths=(64, 16), gpu=False,
                  model=published("opt-1.3b"))
    assert f"{predict(CPU, run).tokens_per_second:.4g} tokens/s" in out and "\nor " not in out
    assert list(Path().iterdir()) == [] and not FakeLLM.opened
    assert generate.main([*argv, "--plan-only", "--memory-limit", "1GB"]) == 2
    assert "would fit" in capsys.readouterr().err


WITHOUT_TORCH = """
import json, sys
for name in ("torch", "transformers", "safetensors", "huggingface_hub", "gguf"):
    sys.modules[name] = None  # importing it fails
from flexgen_h2o import flex_opt
for argv in json.loads(sys.argv[1]):
    print("exit status", flex_opt.main(argv))
"""


def test_another_machine_is_planned_for_without_torch(tmp_path):
    save_hardware(GPU, tmp_path / "x.yaml")
    (tmp_path / "config.json").write_text('{"model_type": "opt", "hidden_size": 64, '
                                          '"num_attention_heads": 4, "ffn_dim": 128}')
    _, source = make("llama", tmp_path, random={"attn_q": "Q8_0", "ffn_up": "Q4_1"})
    plan = ["--plan-only", "--hardware", "x.yaml", "--model"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, json.dumps([
        [*plan, "opt-30b", *AUTO, "--hh-ratio", "0.1", "--gpu-batch-size", "8",
         "--num-gpu-batches", "2"],
        [*plan, str(tmp_path), "--prompt-len", "9"], [*plan, str(source), "--prompt-len", "9"],
        [*plan, "someone/unknown"]])], text=True, cwd=tmp_path, capture_output=True,
        env=environment())
    named, folder, gguf, unknown, rest = re.split(r"exit status \d\n", done.stdout)
    assert re.findall(r"exit status (\d)", done.stdout) == ["0", "0", "0", "2"], done.stderr
    assert "opt-30b on a GPU, 512 + 32 tokens" in named and "bound by" in named
    sizes = re.search(r"device memory ([\d.]+) of 16.0 GB, host memory ([\d.]+) of 64.0 GB", named)
    assert 8 < float(sizes[1]) <= 16 and 8 < float(sizes[2]) <= 64
    assert f"{tmp_path} on a GPU, 9 + 32 tokens" in " ".join(folder.split())
    assert f"{source} on a GPU, 9 + 32 tokens" in " ".join(gguf.split())
    assert (unknown, rest) == ("", "")
    assert "'someone/unknown' is none of them" in done.stderr and done.stderr.count("\n") == 1


def test_the_memory_limit_of_a_planned_machine(tmp_path):
    options = {"model": "opt-125m", "device_memory_limit": "5GB"}
    plan = plan_of(tmp_path, GPU, percent=(0, 100, 100, 0), **options)
    assert "of 5.0 GB, host memory" in plan.text
    refused(lambda: plan_of(tmp_path, CPU, **options), "has no GPU")


def test_plan_flags_have_the_bits_that_were_given(tmp_path):
    _, source = make("llama", tmp_path, random={"attn_q": "Q8_0", "ffn_up": "Q4_1"})
    for bits in ({}, {"weight_bits": 16}, {"weight_bits": 8}):
        plan = plan_of(tmp_path, GPU, path=None, model=str(source), prompt_len=9, **bits)
        assert ("--weight-bits" in plan.text) == bool(bits)


@pytest.mark.parametrize(("flags", "speculates"), [
    ({}, True), ({"speculate": "none"}, False), ({"num_prompts": 2}, False),
    ({"hh_ratio": 0.2}, True), ({"percent": (0, 0, 100, 0, 100, 0)}, False),
    ({"model": "facebook/opt-1.3b"}, False), ({"model": "allenai/OLMoE-1B-7B-0924"}, False)])
def test_a_plan_drafts_where_weights_come_from_disk(tmp_path, flags, speculates):
    """For one dense sequence, unless flags say otherwise."""
    few = replace(CPU, cpu_bytes=4 * GB, compute=roofline(20, 200))
    flags = {"model": "facebook/opt-6.7b", "num_prompts": 1, "percent": "auto"} | flags
    plan = plan_of(tmp_path, few, **flags)
    assert (plan.config.speculate == "ngram") == speculates
    assert ("--speculate ngram" in policy_flags(plan.best.run)) == speculates
    assert (plan.best.run.policy.draft_tokens == 8) == speculates


def test_a_plan_counts_the_time_and_memory_of_a_draft_model(tmp_path):
    flags = {"model": "facebook/opt-6.7b", "percent": (0, 0, 100, 0, 100, 0), "gpu_batch_size": 1}
    shares, hosts = [], []
    for draft in ({"speculate": "ngram"}, {"draft_model": "facebook/opt-125m"},
                  {"draft_model": "facebook/opt-1.3b"}):
        plan = plan_of(tmp_path, replace(CPU, compute=roofline(20, 200)), **flags | draft)
        shares.append(float(re.search(r"pays if more than ([\d.e+-]+) %", plan.text)[1]))
        hosts.append(MemoryPlan(plan.best.run).total("cpu"))
    assert shares == sorted(set(shares)) and hosts == sorted(set(hosts))


def test_a_plan_has_the_layer_for_multi_token_prediction(tmp_path):
    """The plan counts an embedding and a head of the layer only if the model's are on disk."""
    rows = []
    for percent in ((0, 0, 100, 0, 100, 0), (100, 0, 100, 0, 100, 0)):
        plan = plan_of(tmp_path, replace(CPU, cpu_bytes=400 * GB), model="zai-org/GLM-4.5-Air",
                       speculate="mtp", percent=percent, gpu_batch_size=1)
        assert "pays if more than" in plan.text and "--speculate mtp" in plan.text
        rows.append({row.name: row.cpu for row in MemoryPlan(plan.best.run).rows})
    layer = rows[1]["draft model"]
    assert layer == pytest.approx(2 * 2.375e9, rel=0.001)
    assert rows[0]["draft model"] - layer == pytest.approx(2 * 2 * 151552 * 4096, rel=1e-4)
    refused(lambda: plan_of(tmp_path, CPU, model="moonshotai/Kimi-K2-Instruct", speculate="mtp"),
            "no layers for multi-token prediction")
