"""The cost model: cases by hand, and its bytes against the engine's transfers."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.internals import open_devices
from helpers.planning_cases import ALL_HERE, FREE, ON_DISK, ON_HOST, OPT, machine, planned
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.llm import LLM
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.planning.cost import estimate, interpolate
from flexgen_h2o.planning.hardware import HostAttentionRates, RecallRates
from flexgen_h2o.planning.planned_run import bytes_at_rest

LAYER = OPT.layer_parameters() * 2  # bytes
MATRICES = 12 * 768 * 768  # weights of a layer's matrices
HEAD = 50272 * 768 * 2
ROW = 768 * 2  # bytes of a hidden state
SLOT = 2 * 12 * 64 * 2  # bytes of a key and a value of all heads


def seconds(hardware, run) -> tuple[float, float]:
    """Estimated seconds of prefill and of a step."""
    cost = estimate(hardware, run)
    return cost.prefill.seconds, cost.step.seconds


# Weights


def test_host_weights_are_transferred_once_a_pass():
    run = planned(weights=ON_HOST, batch=(4, 3))
    cost = estimate(machine(up=2.0), run)
    # Of the embeddings only the rows travel that are looked up: of the prompts, or new tokens.
    assert cost.prefill.seconds == pytest.approx((12 * LAYER + HEAD + 3 * 4 * 64 * ROW) / 2)
    assert cost.step.seconds == pytest.approx((12 * LAYER + HEAD + 3 * 4 * ROW) / 2)
    assert cost.prefill.binding == cost.step.binding == "cpu->gpu"
    assert cost.steps == 8 and cost.generated == 12 * 9
    assert cost.tokens_per_second == pytest.approx(
        108 / (cost.prefill.seconds + 8 * cost.step.seconds))


@pytest.mark.parametrize(("read", "up", "binding"), [(1.0, 3.0, "disk->cpu"),
                                                     (3.0, 1.0, "cpu->gpu")])
def test_weights_on_disk_beside_a_gpu_use_both_links(read, up, binding):
    cost = estimate(machine(read=read, up=up), planned(weights=ON_DISK))
    assert cost.step.seconds == pytest.approx(12 * LAYER + HEAD + 4 * ROW)
    assert cost.step.binding == binding
    assert cost.step.resources["disk->cpu"] == pytest.approx(cost.step.resources["cpu->gpu"]
                                                              * up / read)


@pytest.mark.parametrize(("weights", "gpu", "expected"), [
    (ON_HOST, False, 0), (ON_DISK, False, 12 * LAYER + HEAD + 4 * ROW),
    ((50, 50), True, (12 * LAYER + HEAD + 4 * ROW) / 2)])
def test_weights_in_memory_are_not_transferred(weights, gpu, expected):
    step = estimate(machine(gpu=gpu), planned(weights=weights, gpu=gpu)).step
    assert step.seconds == pytest.approx(expected, abs=1)


def test_quantized_weights_are_transferred_quantized():
    cost = estimate(machine(), planned(weights=ON_HOST, bits=(4, 16)))
    options = WeightOptions(4)
    layer = bytes_at_rest(options, OPT.layer_shapes(), 2)
    assert layer < 0.3 * LAYER
    assert cost.step.seconds == pytest.approx(
        12 * layer + options.matrix_bytes((50272, 768), 2) + 4 * ROW)


def test_a_prompt_in_chunks_loads_the_weights_for_each():
    whole, chunks = (estimate(machine(), planned(weights=ON_HOST, prefill_chunk=chunk))
                     for chunk in (None, 16))
    tokens = 4 * 64 * ROW
    assert chunks.prefill.seconds - tokens == pytest.approx(4 * (whole.prefill.seconds - tokens))
    assert chunks.step == whole.step


@pytest.mark.parametrize(("batch", "prompt", "trips"), [((5, 1), 512, 2), ((1, 1), 5000, 3),
                                                        ((5, 2), 512, 1)])
def test_weight_chunks_reload_for_each_2048_rows(batch, prompt, trips):
    """Where batches share them they do not."""
    run = planned(weights=ON_DISK, batch=batch, lengths=(prompt, 2), gpu=False)
    rows = batch[0] * batch[1] * prompt
    assert estimate(machine(gpu=False), run).prefill.seconds == pytest.approx(
        trips * 12 * LAYER + HEAD + rows * ROW)


@pytest.mark.parametrize(("batches", "read_ahead"), [(1, 3 / 8), (2, 1)])
def test_few_chunks_are_read_while_attention_goes_on(batches, read_ahead):
    """A layer's attention takes as long as reading its weights."""
    compute = replace(FREE, head_seconds=LAYER / (4 * 12 * batches))
    run = planned(weights=ON_DISK, batch=(4, batches), gpu=False)
    step = estimate(machine(compute, gpu=False), run).step.seconds
    assert step == pytest.approx(12 * LAYER * (2 - read_ahead) + HEAD + 4 * batches * ROW, rel=1e-3)


# Compute


def test_compute_bound():
    """0.5 s for matmuls of up to 8 rows with a billion weights, in proportion from there on."""
    compute = replace(FREE, linear={16: {1: 0.5, 8: 0.5}, 4: {1: 6.0}}, elementwise=3.0,
                      layer_seconds=0.01, logit_seconds=7.0)
    prefill, step = seconds(machine(compute), planned(batch=(4, 2)))
    head = 0.5 * 50272 * 768 / 1e9 + 7 * 4 * 50272 / 1e9
    rest = 3 * 4 * 768 / 1e9 + 0.01
    assert step == pytest.approx(2 * (12 * (0.5 * MATRICES / 1e9 + rest) + head))
    rest = 3 * 256 * 768 / 1e9 + 0.01
    assert prefill == pytest.approx(2 * (12 * (0.5 * 256 / 8 * MATRICES / 1e9 + rest) + head))
    assert estimate(machine(compute), planned()).step.binding == "compute"
    rates = machine(replace(FREE, linear={16: {1: 2.0}, 4: {1: 6.0}}))
    plain, quantized = (seconds(rates, planned(bits=(bits, 16)))[1] for bits in (16, 4))
    assert quantized == pytest.approx(3 * plain)
    cost = estimate(rates, planned(lengths=(64, 1)))
    assert cost.steps == 0 and cost.seconds == cost.prefill.seconds


@pytest.mark.parametrize(("batch", "prompt", "gpu", "chunks"), [
    (4, 512, False, 1), (5, 512, False, 2), (3, 1500, False, 3), (8, 512, True, 1),
    (33, 512, True, 2), (2, 5000, False, 2)])
def test_a_prefill_goes_through_a_layer_in_chunks(batch, prompt, gpu, chunks):
    """Of 2048 rows on a CPU, of 16384 on a GPU, cut between sequences."""
    compute = replace(FREE, layer_seconds=1.0)
    prefill, step = seconds(machine(compute, gpu=gpu),
                            planned(batch=(batch, 2), lengths=(prompt, 2), gpu=gpu))
    assert (prefill, step) == (pytest.approx(2 * 12 * chunks), pytest.approx(2 * 12))


@pytest.mark.parametrize(("h2o", "rate", "query"), [
    (None, 1000, 1), (H2OConfig(heavy_ratio=0.1), 250, 3), (H2OConfig(recent_ratio=0.1), 1000, 1),
    (H2OConfig(heavy_ratio=[0.1] * 6 + [1] * 6), 1 / (0.5 / 250 + 0.5 / 1000), 2)])
def test_prefill_attention_is_causal_and_slower_with_scores(h2o, rate, query):
    run = planned(batch=(3, 1), h2o=h2o)
    compute = replace(FREE, prefill_attention={"plain": 1000.0, "scored": 250.0})
    flops = 12 * 4 * 64 * 12 * 64 * 65 / 2  # layers, sequences' own: 4 x 64 for each head and pair
    assert seconds(machine(compute), run)[0] == pytest.approx(3 * flops / rate)
    compute = replace(FREE, query_seconds={"plain": 1.0, "scored": 3.0})
    prefill, step = seconds(machine(compute), run)
    assert prefill == pytest.approx(3 * 12 * 64 * 12 * query) and step < 1e-3


@pytest.mark.parametrize(("h2o", "kept"), [(None, 64), (H2OConfig(heavy_ratio=0.25), 32)])
def test_kept_prompt_tokens_are_written_to_the_cache(h2o, kept):
    compute = replace(FREE, caching={16: 1e9, 8: 2e9, 4: 5e9})
    for bits, factor in ((16, 1), (4, 5)):
        prefill, step = seconds(machine(compute), planned(batch=(3, 2), h2o=h2o, bits=(16, bits)))
        assert prefill == pytest.approx(6 * 12 * kept * 2 * 768 * factor)
        assert step < 1e-3
    mixed = replace(planned(batch=(3, 2)), cache=CacheOptions(h2o, key_bits=8, value_bits=4))
    assert seconds(machine(compute), mixed)[0] == pytest.approx(6 * 12 * kept * 768 * (2 + 5))
    on_host = planned(batch=(3, 2), h2o=h2o, cache=ON_HOST, cpu_cache_compute=True)
    assert seconds(machine(replace(compute, caching={16: 1e15})), on_host)[0] < 1e9


@pytest.mark.parametrize(("h2o", "attended"), [
    (None, sum(range(65, 73)) / 8),  # eight steps, each over one token more, itself included
    (H2OConfig(heavy_ratio=0.25), 33),  # 16 heavy, 16 recent, and the new one beside them
    (H2OConfig(heavy_ratio=0.25, evict_generated=False), sum(range(33, 41)) / 8),
    (H2OConfig(heavy_tokens=34, recent_tokens=34), (65 + 66 + 67 + 68 + 4 * 69) / 8),
    (H2OConfig(heavy_ratio=[0.25] * 6 + [1] * 6), (33 + 68.5) / 2)])
def test_decode_attention_reads_the_cache(h2o, attended):
    compute = replace(FREE, decode_attention={16: 1000.0, 8: 1.0, 4: 1.0}, head_seconds=0.125)
    _, step = seconds(machine(compute), planned(batch=(4, 2), h2o=h2o))
    assert step == pytest.approx(12 * 8 * (attended * SLOT / 1000 + 12 * 0.125))


# What runs side by side


def test_overlap_takes_the_largest_and_without_it_all_add_up():
    compute = replace(FREE, layer_seconds=LAYER / 2)
    for overlap, layer in ((True, LAYER), (False, 1.5 * LAYER)):
        run = planned(weights=ON_HOST, overlap=overlap)
        _, step = seconds(machine(compute), run)
        assert step == pytest.approx(12 * layer + HEAD + 4 * ROW)
    # Layer by layer: what bounds them need not bound the head.
    _, step = seconds(machine(replace(compute, layer_seconds=2 * LAYER)), planned(weights=ON_HOST))
    assert step == pytest.approx(12 * 2 * LAYER + HEAD + 4 * ROW)


@pytest.mark.parametrize(("options", "itemsize", "layer"), [
    ({}, 2, 0.5), ({"weights": (50, 0)}, 2, 1.75), ({}, 4, 3.0), ({"sep_layer": True}, 2, 3.0),
    ({"activations": (0, 0)}, 2, 3.0)])
def test_captured_decode_steps_cost_less(options, itemsize, layer):
    """Of layers in memory; prompts take what an unbound layer does."""
    hardware = machine(replace(FREE, layer_seconds=3.0, captured_layer_seconds=0.5), gpu=False,
                       read=1e30, write=1e30)
    run = replace(planned(batch=(4, 2), gpu=False, **options), itemsize=itemsize)
    prefill, step = seconds(hardware, run)
    assert step == pytest.approx(12 * 2 * layer)
    assert prefill == pytest.approx(12 * 2 * 3.0)


def test_host_attention_overlaps_the_gpu_with_two_batches():
    compute = replace(FREE, layer_seconds=3.0)
    host = HostAttentionRates({16: SLOT * 68.5 / 2}, head_seconds=1 / 24)  # 2.5 s a sequence
    hardware = machine(compute, host=host, up=1e30, down=1e30)
    for batches, layer in ((1, 3 + 4 * 2.5), (2, 2 * 4 * 2.5)):
        run = planned(cache=ON_HOST, batch=(4, batches), cpu_cache_compute=True)
        assert seconds(hardware, run)[1] == pytest.approx(12 * layer)
        assert estimate(hardware, run).step.binding == "cpu attention"
    half = planned(cache=(50, 50), batch=(4, 2), cpu_cache_compute=True)
    assert seconds(hardware, half)[1] == pytest.approx(12 * 2 * 2 * 2.5)


def test_a_machine_that_says_nothing_of_its_cpu_is_refused():
    hardware = replace(machine(), host_attention=None)
    with pytest.raises(UserError, match="by hand .* leave --cpu-cache-compute out"):
        estimate(hardware, planned(cpu_cache_compute=True))


def test_rates_between_the_measured_rows():
    for rows, expected in ((1, 2.0), (4, 2.0), (8, 4.0), (16, 8.0), (32, 16.0), (1600, 800.0)):
        assert interpolate({4: 2.0, 16: 8.0}, rows) == pytest.approx(expected)


# Cache and activations


def test_a_disk_cache_is_read_whole_and_written_in_batches():
    cost = estimate(machine(gpu=False), planned(cache=ON_DISK, gpu=False, batch=(4, 2)))
    whole = 12 * 8 * 72 * SLOT
    assert cost.step.resources["disk->cpu"] == pytest.approx(whole)
    assert cost.step.resources["cpu->disk"] == pytest.approx(whole / 16)
    assert cost.prefill.resources["cpu->disk"] == pytest.approx(whole)
    assert cost.prefill.resources["disk->cpu"] == 0


@pytest.mark.parametrize(("cache", "share"), [(ON_DISK, 1), ((50, 0), 0.5), (ALL_HERE, 0)])
def test_compute_waits_for_cache_fetch_overhead(cache, share):
    """For each layer and batch, and each sequence and head of it, whatever the bytes."""
    hardware = replace(machine(gpu=False, read=1e30, write=1e30), fetch_seconds=2.0,
                       fetch_head_seconds=0.25)
    cost = estimate(hardware, planned(cache=cache, gpu=False, batch=(4, 3)))
    assert cost.step.seconds == pytest.approx(12 * 3 * (2 + 4 * 12 / 4) * share, abs=1e-6)
    assert cost.prefill.seconds == pytest.approx(0, abs=1e-6)


RECALL = H2OConfig(heavy_ratio=0.125, recall=True)  # 16 of 64 tokens


def test_recall_reads_missing_and_writes_new_tokens_once():
    """A missing token in 32 KB, on average, of 128 tokens of a head, and in a record of 4 KB: reads
    take 1 - exp(-1 - 1 / 8) of the time for the whole cache."""
    whole = 12 * 8 * 68.5 * SLOT
    taken = 1 - math.exp(-1.125)
    held = 2 * 18 / 68.5  # twice the selected tokens
    missing = RecallRates(miss_factor=68.5 / 16 / 128 * held**0.5 / (1 - held) ** 1.5,
                          fetch_overhead=2)
    for overlap in (False, True):
        run = planned(cache=ON_DISK, gpu=False, batch=(4, 2), h2o=RECALL, selective_fetch=True,
                      overlap=overlap)
        hardware = replace(machine(gpu=False, read=1.0, write=1e30), recall=missing)
        step = estimate(hardware, run).step
        assert step.resources["disk->cpu"] == pytest.approx(whole * taken)
        assert step.resources["cpu->disk"] * 1e30 == pytest.approx(12 * 8 * SLOT)
        attending = replace(hardware, compute=replace(FREE, layer_seconds=1e5))
        # Compute waits for the selected tokens.
        waits = 12 * 2 * (1 + 2) * 1e5 + whole * taken
        assert estimate(attending, run).step.seconds == pytest.approx(
            max(waits, step.seconds), rel=1e-6)


@pytest.mark.parametrize(("sequences", "share"), [(1, 1.0), (4, 0.5)])
def test_recall_reads_overlap_attention_of_half_a_batch(sequences, share):
    """As long as that takes longer than attention; one sequence waits for all of it."""
    compute = replace(FREE, head_seconds=1e5)
    hardware = replace(machine(compute, gpu=False, read=1.0, write=1e30),
                       recall=RecallRates(call_overhead=2, fetch_overhead=0))
    run = planned(cache=ON_DISK, gpu=False, batch=(sequences, 1), h2o=RECALL, selective_fetch=True)
    attention = 12 * sequences * 12 * 2 * 1e5
    for rate, longer in ((1e-3, True), (1e30, False)):
        links = {**hardware.links, "disk->cpu": rate}
        step = estimate(replace(hardware, links=links), run).step
        reading = step.resources["disk->cpu"]
        assert (reading > attention) == longer
        assert step.seconds == pytest.approx(
            attention + max(0.0, reading - (1 - share) * attention), rel=1e-6)


def test_recall_on_a_cpu_scans_the_index():
    """64 numbers of 4 bits, two scales and zero points of each of 12 heads; chosen records take 4
    times as long."""
    compute = replace(FREE, decode_attention={16: 1000.0, 8: 1.0, 4: 1.0}, head_seconds=0.125)
    costs = RecallRates(index_cost=2, gather_cost=4, call_overhead=3)
    run = planned(batch=(4, 2), h2o=RECALL, gpu=False)
    index, chosen = 12 * 40 * 68.5, 16 * SLOT
    expected = 12 * 8 * ((2 * index + 4 * chosen) / 1000 + 3 * 12 * 0.125)
    hardware = replace(machine(compute, gpu=False), recall=costs)
    assert estimate(hardware, run).step.seconds == pytest.approx(expected)
    whole = 12 * 8 * (68.5 * SLOT / 1000 + 12 * 0.125)
    beside = replace(machine(compute, host=HostAttentionRates(
        compute.decode_attention, compute.head_seconds), up=1e30, down=1e30), recall=costs)
    on_host = {"cache": ON_HOST, "cpu_cache_compute": True}
    for options, seconds in (({}, whole), (on_host, expected)):
        step = estimate(beside, planned(batch=(4, 2), h2o=RECALL, **options)).step
        assert step.seconds == pytest.approx(seconds)


def test_a_gpu_waits_only_for_recalled_host_tokens():
    hardware = machine(replace(FREE, layer_seconds=1e3), up=1.0, down=1e30)
    whole, recalled = (estimate(hardware, planned(cache=ON_HOST, batch=(4, 2), h2o=h2o)).step
                       for h2o in (None, RECALL))
    chosen = 12 * 8 * 16 * SLOT
    assert recalled.resources["cpu->gpu"] == pytest.approx(chosen)
    assert recalled.seconds == pytest.approx(chosen + 12 * 2 * 1e3)
    assert whole.seconds == pytest.approx(whole.resources["cpu->gpu"])
    assert whole.resources["cpu->gpu"] > 4 * chosen


def test_layers_without_recall_cost_full_reads():
    ratios = [0.125] * 6 + [1.0] * 6
    recall = H2OConfig(heavy_ratio=ratios, recent_ratio=ratios, recall=True)
    recalled, none, half = (
        estimate(machine(gpu=False), planned(cache=ON_DISK, gpu=False, h2o=h2o, overlap=False,
                                             selective_fetch=h2o is not None)
                 ).step.resources["disk->cpu"] for h2o in (RECALL, None, recall))
    none *= 68.5 / 72  # it is read in slots
    assert half == pytest.approx((recalled + none) / 2)


def test_a_full_cache_travels_as_far_as_it_is_filled():
    """And of 64 slots more, which it is given at a time, the half."""
    cost = estimate(machine(gpu=False), planned(cache=ON_DISK, gpu=False, lengths=(64, 512)))
    assert cost.step.resources["disk->cpu"] == pytest.approx(12 * 4 * (64 + 256 + 32) * SLOT)
    assert cost.prefill.resources["cpu->disk"] == pytest.approx(12 * 4 * (64 + 64) * SLOT)
    evicting = planned(cache=ON_DISK, gpu=False, lengths=(64, 512), h2o=H2OConfig(heavy_ratio=0.25))
    cost = estimate(machine(gpu=False), evicting)
    assert cost.step.resources["disk->cpu"] == pytest.approx(12 * 4 * 32 * SLOT)


@pytest.mark.parametrize(("cache", "offloaded"), [((100, 0), 0), ((90, 10), 0), ((70, 30), 1),
                                                  ((0, 100), 4)])
def test_a_share_of_the_cache_is_whole_sequences(cache, offloaded):
    cost = estimate(machine(), planned(cache=cache))
    assert cost.step.resources["cpu->gpu"] == pytest.approx(12 * offloaded * 72 * SLOT)
    assert cost.step.resources["gpu->cpu"] == pytest.approx(12 * offloaded * SLOT)


# Against the engine. A test model whose layers are many pages, so that rounding to them is little.

LONG = {"lengths": (64, 34)}  # twice the tokens that wait in memory for a write to disk
HEAVY = H2OConfig(heavy_ratio=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import OPTConfig

    path = tmp_path_factory.mktemp("model")
    OPTConfig(vocab_size=500, hidden_size=256, num_hidden_layers=3, num_attention_heads=4,
              ffn_dim=1024, max_position_embeddings=128, word_embed_proj_dim=256
              ).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", [LazyDevice, PoisonedDevice])
@pytest.mark.parametrize(("placed", "options"), [
    ((ON_DISK, ON_DISK, ON_HOST), {}),
    ((ALL_HERE, (25, 25), ALL_HERE), {"h2o": HEAVY, "prefill_chunk": 16}),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ((ON_HOST, ALL_HERE, ALL_HERE), {}),
        ((ON_DISK, ALL_HERE, ALL_HERE), {"overlap": False}),
        ((ALL_HERE, ON_DISK, ALL_HERE), {"bits": (16, 4), "prefill_chunk": 16}),
        ((ALL_HERE, (0, 50), ALL_HERE), {"h2o": HEAVY, "cpu_cache_compute": True}),
        ((ON_DISK, ALL_HERE, ALL_HERE), {"prefill_chunk": 16}),
        # A new token's rows are less than a page.
        ((ALL_HERE, ON_HOST, ON_DISK), {"lengths": (64, 2)}),
        ((ALL_HERE, (25, 25), ALL_HERE), {"h2o": HEAVY}),
        ((ALL_HERE, ON_HOST, ALL_HERE), {"bits": (16, 4)}),
        ((ALL_HERE, (25, 25), ALL_HERE), {"prefill_chunk": 16})))])
def test_the_engine_moves_the_bytes_that_the_model_counts(folder, tmp_path, monkeypatch, kind,
                                                          placed, options):
    open_devices(monkeypatch, kind)
    prompts = [[(7 * i * j + i) % 500 for i in range(64)] for j in range(8)]
    run = planned(*placed, batch=(4, 2), gpu=kind is LazyDevice, **LONG | options)
    with torch.inference_mode(), LLM(
            str(folder), path="_DUMMY_", dtype="float16", policy=run.policy, h2o=run.cache.h2o,
            cache_bits=run.cache.bits, progress=False, offload_dir=str(tmp_path)) as llm:
        llm.generate(prompts, max_new_tokens=run.workload.gen_len, eos_token_id=-1)
        moved = {link: nbytes for link, (nbytes, _) in llm.stats.links.items()}
        cost = estimate(machine(gpu=run.has_gpu), replace(run, model=llm.model_config))
    counted = {link: cost.prefill.resources[link] + cost.steps * cost.step.resources[link]
               for link in LINKS}
    if run.attends_on_host:
        # The engine does not record the prompts that go down to be cut; of q, k, v it does.
        moved["gpu->cpu"] += 3 * 8 // 2 * 64 * 2 * 256 * 2
    for link, nbytes in counted.items():
        assert nbytes == pytest.approx(moved.get(link, 0), rel=0.08, abs=1e5), link


def test_sparse_attention_leaves_values_in_host_memory():
    run = planned(cache=ON_HOST)
    sparse = replace(run, cache=replace(run.cache, attn_sparsity=0.5))
    full, few = (estimate(machine(), case).step.resources for case in (run, sparse))
    assert few["cpu->gpu"] == pytest.approx(0.75 * full["cpu->gpu"]) and full["cpu->gpu"] > 0
    assert few["gpu->cpu"] == full["gpu->cpu"]


def test_concurrent_resources_interfere():
    """A share of the other resources' time is added to that of the busiest one."""
    compute = replace(FREE, layer_seconds=LAYER / 4.0)
    run, free = planned(weights=ON_DISK, gpu=False), machine(compute, gpu=False)
    alone, beside = (estimate(replace(free, interference=share), run).step for share in (0, 0.25))
    assert beside.resources == alone.resources and beside.binding == "disk->cpu"
    assert beside.seconds == pytest.approx(alone.seconds + 0.25 * alone.resources["compute"])


@pytest.mark.parametrize("compute_over_reading", [0.25, 4.0])
def test_reading_slows_compute_more_than_compute_slows_reading(compute_over_reading):
    """A step takes as long as the slower of the two, with its own share of the other's time."""
    compute = replace(FREE, layer_seconds=LAYER * compute_over_reading)
    run = planned(weights=ON_DISK, gpu=False)
    hardware = replace(machine(compute, gpu=False), interference=0.25, read_interference=0.75)
    step = estimate(hardware, run).step
    layers, rest = 12 * LAYER, HEAD + 4 * ROW  # the head computes nothing
    computing = 12 * LAYER * compute_over_reading
    assert step.seconds == pytest.approx(
        rest + max(layers + 0.25 * computing, computing + 0.75 * layers))


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([0, 30, 100]), st.booleans())
def test_interference_lies_between_overlap_and_taking_turns(share, reading, kept, overlap):
    compute = replace(FREE, layer_seconds=LAYER / 3)
    run = planned(weights=(kept, 0), cache=ON_DISK, gpu=False, overlap=overlap)
    free = machine(compute, gpu=False)
    beside, alone, turns = (estimate(hardware, case).seconds for hardware, case in (
        (replace(free, interference=share, read_interference=reading), run), (free, run),
        (free, replace(run, policy=replace(run.policy, overlap=False)))))
    assert alone * (1 - 1e-9) <= beside <= turns * (1 + 1e-9)
