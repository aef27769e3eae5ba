"""The memory plan: sums by hand, suggestions that fit, and free memory."""

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from helpers.error_cases import refused
from helpers.internals import own_attention
from helpers.selection import examples
from helpers.tiny_models import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.cache_layout import CacheOptions, GroupLayout
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.placement import Placement, parse_percent
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.budget import num_cached
from flexgen_h2o.models import family
from flexgen_h2o.models.registry import from_transformers, published
from flexgen_h2o.planning import memory_rows, planned_run
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.storage.free_memory import (
    MemoryLimits,
    cgroup_free,
    cgroup_limit,
    free_heap_bytes,
    free_memory,
    resident_bytes,
    whole_memory,
)

OPT_30B = published("facebook/opt-30b")
LLAMA_8B = published("meta-llama/Meta-Llama-3-8B")
LOAD = Workload(prompt_len=512, gen_len=32, gpu_batch_size=4, num_gpu_batches=2)
ALL_GPU = (100, 0, 100, 0)


def make_policy(*percent) -> Policy:
    weights, cache, activations = parse_percent(percent)
    return Policy(num_gpu_batches=2, weights=weights, cache=cache, activations=activations)


def memory_plan(*arguments, **options) -> MemoryPlan:
    return MemoryPlan(planned_run.PlannedRun(*arguments, **options))


def make_plan(*percent, load=LOAD, **options):
    return memory_plan(OPT_30B, make_policy(*percent), load, itemsize=2, **options)


def rows(plan) -> dict[str, tuple[int, int, int]]:
    return {row.name: (row.gpu, row.cpu, row.disk) for row in plan.rows}


def test_sums_without_a_gpu():
    plan = make_plan(0, 100, 100, 0)
    table = rows(plan)
    weights = table["weights"][1] + table["embeddings"][1]
    assert weights == pytest.approx(OPT_30B.num_parameters() * 2, rel=1e-9)
    assert table["cache"] == (0, 8 * 543 * OPT_30B.kv_bytes_per_token(2), 0)
    assert table["activations"] == (0, 8 * 512 * 7168 * 2, 0)
    for name in ("weight buffers", "cache buffers", "activation buffers",  # used in place
                 "prompt cache", "cache bookkeeping"):  # not for the full cache
        assert table[name] == (0, 0, 0)
    assert plan.total("gpu") == plan.total("disk") == 0
    assert plan.total("cpu") == sum(row.cpu for row in plan.rows)


def test_layers_with_other_heads_have_caches_of_their_own():
    """Gemma 4: 50 layers keep a window, and 10 cache half of that per token."""
    model, load = published("google/gemma-4-31B"), replace(LOAD, prompt_len=2000)
    window, full = 50 * 1023 * 2 * 16 * 256, 10 * 2031 * 2 * 4 * 512
    for percent, tier in (((0, 100, 0, 100), 1), ((0, 100, 0, 0), 2)):
        plan = memory_plan(model, make_policy(*percent, 100, 0), load, itemsize=2, has_gpu=True)
        assert rows(plan)["cache"][tier] == 8 * 2 * (window + full)
        staged = 1023 * 2 * 16 * 256 + 2031 * 2 * 4 * 512  # of a layer of each kind
        assert rows(plan)["cache buffers"][0] == 3 * 4 * 2 * staged
    plan = memory_plan(model, make_policy(*ALL_GPU), load, itemsize=2, has_gpu=True,
                       cache=CacheOptions(bits=4))
    four_bits = 2 * 50 * 1023 * 16 * (128 + 16) + 2 * 10 * 2031 * 4 * (256 + 32)
    assert rows(plan)["cache"][0] == 8 * four_bits


def test_a_draft_model_has_weights_and_caches():
    small = planned_run.DraftModel(published("facebook/opt-125m"), WeightOptions())
    plain, table = rows(make_plan(0, 100, 100, 0)), rows(make_plan(0, 100, 100, 0, draft=small))
    assert table.pop("draft model") == (0, small.model.num_parameters() * 2, 0)
    hidden = 256 * 768 * 2  # a chunk of the prompt
    cache = 543 * small.model.kv_bytes_per_token(2)
    assert table.pop("draft cache") == (0, 8 * (cache + hidden), 0)
    assert table == plain


def test_a_layer_in_chunks_needs_half_a_layer_and_its_vectors():
    """With one batch in a block: four buffers of an eighth of a layer, more or less."""
    policy = replace(make_policy(0, 0, 100, 0), num_gpu_batches=1)
    load = replace(LOAD, num_gpu_batches=1)
    table = rows(memory_plan(OPT_30B, policy, load, itemsize=2, writes_weights=True))
    layer = OPT_30B.layer_parameters() * 2
    assert 0.4 * layer < table["weight buffers"][1] <= 0.55 * layer
    assert table["weights"] == (0, 48 * 13 * 7168 * 2, 48 * layer)


def test_a_gpu_needs_staging_for_host_data():
    layer = OPT_30B.layer_parameters() * 2
    part = 4 * 543 * OPT_30B.kv_bytes_per_token(2) // OPT_30B.num_layers
    table = rows(make_plan(0, 100, 0, 100, 0, 100, has_gpu=True))
    assert table["weight buffers"] == (2 * layer, 2 * layer, 0)
    assert table["cache buffers"] == (3 * part, 3 * part, 0)
    assert table["activation buffers"] == (3 * 4 * 512 * 7168 * 2, 0, 0)


def test_halves_of_layers_need_buffers_of_the_larger():
    """An MLP of OPT-30B takes two thirds of a layer."""
    policy = replace(make_policy(0, 0, 100, 0), sep_layer=True)
    plan = memory_plan(OPT_30B, policy, LOAD, itemsize=2)
    mlp = (2 * 7168 * 28672 + 28672 + 7168 + 2 * 7168) * 2
    assert rows(plan)["weight buffers"] == (0, 2 * mlp, 0)
    assert 2 * mlp < rows(make_plan(0, 0, 100, 0))["weight buffers"][1]
    rest = {name: row for name, row in rows(plan).items() if name != "weight buffers"}
    whole = rows(make_plan(0, 0, 100, 0))
    assert rest == {name: whole[name] for name in rest}


def test_cache_is_split_by_whole_sequences():
    table = rows(make_plan(100, 0, 30, 30, has_gpu=True))
    assert [size // table["cache"][1] for size in table["cache"]] == [1, 1, 2]


def test_too_large_a_run_is_refused_with_a_fitting_percent():
    """opt-30b with random weights and --percent 0 100 100 0 on 24 GB."""
    plan = make_plan(0, 100, 100, 0, load=replace(LOAD, num_gpu_batches=1), writes_weights=True)
    refused(lambda: plan.check(MemoryLimits(None, 24 * 10**9, 80 * 10**9)), "needs 63.5 GB",
            "24.0 GB free", match=r"--percent [\d .]+ would fit")


@pytest.mark.parametrize(("writes", "limits"), [
    (False, MemoryLimits(None, 10**9, 10**12)),  # not even the buffers
    (True, MemoryLimits(None, 24 * 10**9, 10**6)),  # neither memory nor disk
])
def test_a_run_that_fits_nowhere_is_refused(writes, limits):
    plan = make_plan(0, 100, 100, 0, writes_weights=writes)
    refused(lambda: plan.check(limits), match="no --percent would fit.*gpu-batch-size")


@pytest.mark.parametrize("model", [OPT_30B, published("facebook/opt-125m")])
def test_needed_memory_is_shown_above_free_memory(model):
    """One byte more, in GB or in MB; and no two of its parts that differ read the same."""
    plan = memory_plan(model, make_policy(*ALL_GPU), Workload(1, 1, 1, 1), itemsize=2)
    with pytest.raises(UserError) as caught:
        plan.check(MemoryLimits(None, plan.total("cpu") - 1, 0))
    needs, *parts, free = re.findall(r"([\d.]+) (?:GB|MB|KB|bytes)", str(caught.value))
    assert float(needs) > float(free) and len({needs, free, *parts}) == 5


def test_loaded_weights_are_not_counted_twice():
    plan = make_plan(0, 100, 100, 0)
    left = MemoryLimits(None, plan.total("cpu") - rows(plan)["weights"][1], 0)
    refused(lambda: plan.check(left))
    plan.check(plan.before_loading(left, free_heap=0))
    bare, kept = (plan.before_loading(left, free_heap=kept).cpu_bytes for kept in (0, 7))
    assert kept == bare + 7, "what the allocator keeps of earlier runs is there too"


def test_weights_go_to_disk_first_then_the_cache():
    plan = make_plan(0, 100, 0, 100)
    weights_only = plan.suggest(MemoryLimits(None, 30 * 10**9, 0))
    assert weights_only.cache == Placement(0, 100, 0)
    assert 0 < weights_only.weights.disk < 100
    both = plan.suggest(MemoryLimits(None, 8 * 10**9, 10**12))
    assert both.weights.disk == 100 and both.cache.disk > 0


def test_a_full_disk_sends_weights_back_to_memory():
    plan = make_plan(0, 0, 100, 0, writes_weights=True)
    fitting = plan.suggest(MemoryLimits(None, 50 * 10**9, 40 * 10**9))
    assert fitting is not None and fitting.weights.disk < 100


# Quantized weights. A block of 16 outputs by 64 inputs takes 64 bytes of scales and zero points
# and in 4 bits 512 of codes.

FOUR_BITS = WeightOptions(bits=4)
OPT_30B_LAYER = 7168 * 7168 * 12 * 576 // 1024 + 2 * (4 + 4 + 4 + 1) * 7168
OPT_30B_EMBEDDINGS = (3142 + 129) * 16 * 7168 * 576 // 1024 + 2 * 2 * 7168


def bytes_at_rest(cfg, weights: WeightOptions, itemsize: int) -> int:
    """Bytes of all tensors of a model, each once, from the tensors themselves."""
    specs = family(cfg).weights(cfg)
    tensors = {spec.name: spec.shape for part in (specs.embed, *specs.layers, specs.head)
               for spec in part.values()}
    total = 0
    for shape in tensors.values():
        if len(shape) == 2 and weights.bits != 16:
            total += MatrixLayout(*shape, bits=weights.bits, group=weights.group).nbytes
        else:
            total += torch.Size(shape).numel() * itemsize
    return total


@pytest.mark.parametrize("options", [WeightOptions(), FOUR_BITS, WeightOptions(bits=8),
                                     WeightOptions(bits=4, group=32)])
@pytest.mark.parametrize("key", [*TINY, "opt-350m", "opt-30b", "Llama-3.1-8B", "gpt-neox-20b"])
def test_weights_take_the_bytes_of_their_layouts(key, options):
    cfg = from_transformers(TINY[key](), key) if key in TINY else published(key)
    for itemsize in (2, 4):
        plan = memory_plan(cfg, make_policy(*ALL_GPU), LOAD, itemsize=itemsize, has_gpu=True,
                           weights=options)
        table = rows(plan)
        assert table["weights"][0] + table["embeddings"][0] == bytes_at_rest(cfg, options, itemsize)
        assert table["weight buffers"] == (0, 0, 0)


@pytest.mark.parametrize(("weights", "layer"), [
    (WeightOptions(), OPT_30B.layer_parameters() * 2), (FOUR_BITS, OPT_30B_LAYER)])
def test_weights_on_disk_need_two_layer_buffers(weights, layer):
    table = rows(make_plan(0, 0, 100, 0, weights=weights))
    assert table["weights"] == (0, 0, 0), "the checkpoint or a weight cache has them"
    assert table["weight buffers"] == (0, 2 * layer, 0)
    written = rows(make_plan(0, 0, 100, 0, weights=weights, writes_weights=True))
    assert written["weights"] == (0, 0, 48 * layer)
    if weights.bits == 4:
        assert written["embeddings"] == (0, 0, OPT_30B_EMBEDDINGS)


def test_percent_is_of_quantized_bytes():
    """All weights together: the head's matrix is on the GPU, and the layers make up for it."""
    table = rows(make_plan(50, 25, 100, 0, has_gpu=True, weights=FOUR_BITS, writes_weights=True))
    layers, head = 48 * OPT_30B_LAYER, 50272 * 7168 * 576 // 1024
    total = layers + OPT_30B_EMBEDDINGS
    for tier, share in enumerate((0.5, 0.25, 0.25)):
        assert table["weights"][tier] + table["embeddings"][tier] == pytest.approx(
            share * total, abs=3)
    assert sum(table["weights"]) == pytest.approx(layers, abs=3)
    assert head < table["embeddings"][0] < OPT_30B_EMBEDDINGS
    # Of a layer a little more than half travels, and one tensor more, of four times the hidden
    # size.
    layer = OPT_30B_LAYER * total / (total - head) / 2 + 4 * 7168 * 7168 * 576 // 1024
    assert table["weight buffers"] == (pytest.approx(2 * layer, abs=4),) * 2 + (0,)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_buffer_has_room_for_a_quantized_head(bits):
    """SmolLM2's table is larger than a layer."""
    cfg, options = published("HuggingFaceTB/SmolLM2-135M"), WeightOptions(bits=bits)
    plan = memory_plan(cfg, make_policy(0, 0, 100, 0), LOAD, itemsize=2, weights=options)
    head = MatrixLayout(49152, 576, bits=bits).nbytes
    assert head > planned_run.bytes_at_rest(options, cfg.layer_shapes(), 2)
    assert rows(plan)["weight buffers"] == (0, 2 * head, 0)


@pytest.mark.parametrize(("cfg", "group", "filled"), [(OPT_30B, 64, 28672), (LLAMA_8B, 64, 14336),
                                                      (published("opt-125m"), 1000, 4000)])
def test_workspace_of_products_with_quantized_weights(monkeypatch, cfg, group, filled):
    """256 rows of the widest input, with their sums by group; by thread 128 outputs' sums of 1024
    rows and their weights in pairs, of 2048 inputs or of whole groups and tiles. On a GPU what is
    unpacked."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    panel = 256 * (filled + filled // group)
    thread = 128 * (1024 + (1024 if group == 64 else 2000))
    widest = 3072 if group == 1000 else filled  # of 16 bits, whose groups count as 64
    less = 256 * (widest + widest // 64) + 3 * 128 * (1024 + 1024)
    for has_gpu, tier, extra in ((False, 1, 4 * (panel + 3 * thread - less)), (True, 0, 64 << 20)):
        plain, quantized = (
            rows(memory_plan(cfg, make_policy(*ALL_GPU), LOAD, itemsize=2, has_gpu=has_gpu,
                             weights=options))["workspace"][tier]
            for options in (WeightOptions(), WeightOptions(bits=8, group=group)))
        assert quantized - plain == extra


# What is cached. LLaMA-3-8B has 32 layers of 8 KV heads (32 heads) of 128: a token's key and value
# take 2 * 8 * 128 * 2 = 4096 bytes in a layer. The block has 4 * 2 sequences of 512 + 32 tokens.


def cache_plan(*percent, chunk=None, on_cpu=False, has_gpu=False, selective_fetch=False,
               hot_set=None, **cache):
    policy = replace(make_policy(*percent), prefill_chunk=chunk, cpu_cache_compute=on_cpu,
                     selective_fetch=selective_fetch, hot_set=hot_set)
    if "h2o" in cache:
        cache["h2o"] = H2OConfig(**cache["h2o"])
    return memory_plan(LLAMA_8B, policy, LOAD, itemsize=2, has_gpu=has_gpu,
                       cache=CacheOptions(**cache))


@pytest.mark.parametrize(("h2o", "layer_slots"), [
    ({"heavy_ratio": 0.1}, [102] * 32),
    ({"heavy_ratio": 0.1, "recent_ratio": 0.3}, [51 + 153] * 32),
    ({"heavy_ratio": 0.1, "evict_generated": False}, [102 + 31] * 32),
    ({"heavy_ratio": [0.1] * 31 + [1]}, [102] * 31 + [543]), ({"recent_ratio": 0.25}, [128] * 32),
    ({"heavy_tokens": 300, "recent_tokens": 240}, [540] * 32),
    ({"heavy_tokens": 300, "recent_tokens": 600}, [543] * 32), ({"heavy_ratio": 1}, [543] * 32)])
def test_an_evicting_cache_has_the_slots_of_its_budget(h2o, layer_slots):
    table = rows(cache_plan(*ALL_GPU, has_gpu=True, h2o=h2o))
    assert table["cache"] == (8 * sum(layer_slots) * 4096, 0, 0)
    full = [not H2OConfig(**h2o).is_full_at(layer) for layer in range(32)]
    evicting = sum(s for s, evicts in zip(layer_slots, full, strict=True) if evicts)
    assert table["cache bookkeeping"] == (8 * evicting * 8 * (4 + 4), 0, 0)
    assert table["prompt cache"] == (0, 0, 0)


def test_rolling_positions_are_booked_too():
    h2o = {"heavy_tokens": 40, "recent_tokens": 60, "positions": "rolling"}
    table = rows(cache_plan(0, 0, 0, 0, has_gpu=True, h2o=h2o))
    assert table["cache bookkeeping"] == (8 * 32 * 100 * 8 * 12, 0, 0), "never on disk"
    assert table["cache"] == (0, 0, 8 * 32 * 100 * 4096)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_compressed_cache_takes_its_groups(bits):
    vector = GroupLayout(length=128, bits=bits).nbytes
    assert 128 * bits // 8 < vector < 128 * 2
    table = rows(cache_plan(*ALL_GPU, has_gpu=True, bits=bits))
    assert table["cache"] == (8 * 543 * 32 * 2 * 8 * vector, 0, 0)
    assert table["cache bookkeeping"] == (0, 0, 0)
    mixed = rows(cache_plan(*ALL_GPU, has_gpu=True, bits=bits, key_bits=8))
    keys = GroupLayout(length=128, bits=8).nbytes
    assert mixed["cache"] == (8 * 543 * 32 * 8 * (keys + vector), 0, 0)
    both = rows(cache_plan(*ALL_GPU, has_gpu=True, bits=bits, h2o={"heavy_ratio": 0.1}))
    assert both["cache"] == (8 * 102 * 32 * 2 * 8 * vector, 0, 0)


def test_recall_has_a_hot_set():
    h2o = {"heavy_ratio": 0.1, "recall": True}
    table = rows(cache_plan(0, 0, 0, 0, selective_fetch=True, h2o=h2o))
    assert table["cache"] == (0, 0, 8 * 32 * 68 * 8 * 4096), "68 rows of 8 tokens, 8 KV heads"
    selected = 2 * 54  # of 543 tokens
    numbers = 8 * 4 * (2 * 543 + 2 * selected)
    assert table["hot set"] == (0, 8 * 32 * (4096 * (2 * selected + 16) + numbers), 0)
    assert "hot set" not in rows(cache_plan(0, 0, 0, 0, h2o=h2o))
    half = rows(cache_plan(0, 0, 0, 0, selective_fetch=True, hot_set=0.5, h2o=h2o))
    assert half["hot set"] == (
        0, 8 * 32 * (4096 * (271 + 16) + 8 * 4 * (2 * 543 + 271)), 0), "half of 543 tokens"
    # From host memory it is on the GPU.
    table, plain = (rows(cache_plan(100, 0, 25, 75, has_gpu=True, h2o=h2o, selective_fetch=fetch))
                    for fetch in (True, False))
    numbers = 8 * 4 * (2 * 543 + 4 * selected)
    assert table["hot set"] == (6 * 32 * (4096 * (2 * selected + 1) + numbers), 0, 0)
    assert table["cache"] == plain["cache"] and "hot set" not in plain


def test_cache_buffers_of_the_largest_layer_and_logs():
    ratios = [0.1] * 31 + [0.2]
    table = rows(cache_plan(100, 0, 0, 100, has_gpu=True, h2o={"heavy_ratio": ratios}))
    staging = 3 * 4 * 204 * 4096
    assert table["cache buffers"] == (staging, staging, 0)
    table = rows(cache_plan(100, 0, 50, 0, h2o={"heavy_ratio": 0.1}))
    staging, logs = 3 * 2 * 102 * 4096, 2 * 2 * 16 * 32 * (4096 + 8 * 8)
    assert table["cache buffers"] == (0, staging + logs, 0)


def test_a_cache_that_is_used_on_the_host_is_not_staged():
    """Queries, keys, values and results of new tokens travel: two batches' on the device."""
    h2o = {"heavy_ratio": 0.1}
    table = rows(cache_plan(100, 0, 25, 75, has_gpu=True, on_cpu=True, h2o=h2o))
    token = (2 * 32 + 2 * 8) * 128 * 2
    assert table["cache buffers"] == (2 * 3 * token, 3 * token, 0)
    state = 2 * 102 * 32 * 8 * 8
    assert table["cache bookkeeping"] == (state, 3 * state, 0), "where attention runs"
    disk = rows(cache_plan(100, 0, 0, 50, has_gpu=True, on_cpu=True))
    assert disk["cache buffers"][0] == 3 * 2 * 543 * 4096 + 2 * 2 * token
    assert cache_plan(100, 0, 0, 50, on_cpu=True).rows == cache_plan(100, 0, 0, 50).rows


def test_a_simulation_is_exact_and_where_it_computes():
    plan = cache_plan(100, 0, 0, 0, chunk=64, has_gpu=True,
                      h2o={"heavy_ratio": 0.1, "simulate": True})
    table = rows(plan)
    assert table["cache"] == (8 * 543 * 32 * 2 * 8 * 128 * 4, 0, 0)
    assert table["cache bookkeeping"] == (8 * 543 * 32 * 8 * 8, 0, 0)
    assert table["cache buffers"] == table["prompt cache"] == (0, 0, 0)


# Prompts in chunks


@pytest.mark.parametrize("cache", [{"h2o": {"heavy_ratio": 0.1}}, {"h2o": {"recent_ratio": 0.1}},
                                   {"bits": 4}])
def test_prompts_in_chunks_are_held_until_they_are_cut(cache):
    scores = 8 * 512 * 8 * 32 * 4 if "heavy_ratio" in cache.get("h2o", {}) else 0
    table = rows(cache_plan(100, 0, 25, 25, chunk=64, has_gpu=True, **cache))
    part = 2 * 512 * 32 * 4096
    assert table["prompt cache"] == (part + scores, part, 2 * part)
    whole = rows(cache_plan(100, 0, 25, 25, chunk=512, has_gpu=True, **cache))
    assert whole["prompt cache"] == (0, 0, 0)
    assert whole["cache"] == table["cache"]
    staging, logs = 3 * 3 * 512 * 4096, 2 * 2 * 16 * 32 * (4096 + 8 * 8)
    extra = [b - a for a, b in zip(whole["cache buffers"], table["cache buffers"], strict=True)]
    assert extra == [staging, staging + logs, 0]


def test_the_full_cache_gathers_prompts_itself():
    chunks, whole = (cache_plan(*ALL_GPU, chunk=chunk) for chunk in (64, None))
    assert rows(chunks)["prompt cache"] == (0, 0, 0)
    assert rows(chunks)["cache"] == rows(whole)["cache"]
    assert rows(chunks)["activations"] == (0, 8 * 64 * 4096 * 2, 0)
    assert rows(whole)["activations"] == (0, 8 * 512 * 4096 * 2, 0)
    assert cache_plan(*ALL_GPU, chunk=600).rows == whole.rows


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("cache", [CacheOptions(), CacheOptions(bits=4),
                                   CacheOptions(H2OConfig(heavy_ratio=0.1))])
def test_workspace_of_attention(monkeypatch, has_gpu, cache):
    """Linear in the tokens: a head's keys and values by thread, and a score of a key by task."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)

    def workspace(has_gpu, cache, *load):
        return own_attention(planned_run.PlannedRun(
            LLAMA_8B, make_policy(*ALL_GPU), Workload(*load), 2, has_gpu, False, cache))

    by_thread = 0 if has_gpu else 3 * (128 * 100_000 + 64 * (8 * 128 + 256))
    copies = 0 if cache.is_unquantized_full else 100_000 * 2 * 8 * 128 * 4
    prefill = 4 * (by_thread + (64 + 4 * 32) * 100_000) + copies
    slots = 20_000 if cache.evicts else 100_031
    decode = 4 * (64 + 4 * 32) * (slots + 64 + 2 * 128)
    assert workspace(has_gpu, cache, 100_000, 32, 4, 2) == max(prefill, decode)
    if not cache.evicts:  # decoding takes the attention weights of all heads
        assert workspace(True, cache, 1, 4000, 64, 1) == 4 * (64 + 64 * 32) * (
            4000 + 64 + (2 + 15) * 128)


def test_workspace_of_a_gpu_has_memory_for_the_autotuner(monkeypatch):
    """Triton writes 256 MB to flush the caches, in the middle of a prefill and of a step."""
    for has_gpu, extra in ((True, 256 << 20), (False, 0)):
        sizes = []
        for nbytes in (256 << 20, 0):
            monkeypatch.setattr(memory_rows, "TUNING", nbytes)
            plan = memory_plan(LLAMA_8B, make_policy(*ALL_GPU), LOAD, itemsize=2, has_gpu=has_gpu)
            sizes.append(sum(rows(plan)["workspace"]))
        assert sizes[0] - sizes[1] == extra


def test_workspace_holds_sequences_that_continue():
    """One layer of it at a time: here all but one of 64 sequences, of 4,000 tokens each."""
    load = Workload(prompt_len=1, gen_len=4000, gpu_batch_size=32, num_gpu_batches=2)
    sizes = [rows(memory_plan(LLAMA_8B, replace(make_policy(*ALL_GPU), refill_share=share), load,
                              itemsize=2, has_gpu=True))["workspace"][0] for share in (0.001, 1)]
    attention = 4 * (64 + 32 * 32) * (4000 + 64 + (2 + 15) * 128)
    assert sizes[0] - sizes[1] == 63 * 4000 * 2 * 8 * 128 * 2 - attention


sizes_of_h2o = st.one_of(
    st.none(),
    st.builds(H2OConfig, heavy_ratio=st.floats(0.01, 1), recent_ratio=st.floats(0.01, 1),
              sink_tokens=st.integers(0, 9), evict_generated=st.booleans()),
    st.builds(H2OConfig, heavy_tokens=st.integers(0, 3000), recent_tokens=st.integers(1, 3000),
              positions=st.sampled_from(["original", "rolling"])),
    st.builds(H2OConfig, recent_ratio=st.lists(st.floats(0.01, 1), min_size=32, max_size=32)))


@settings(max_examples=examples(100))
@given(sizes_of_h2o, st.sampled_from([16, 8, 4]), st.none() | st.integers(1, 900),
       st.tuples(*[st.integers(1, 900)] * 2, *[st.integers(1, 9)] * 2), st.booleans())
def test_any_cache_is_between_its_prompt_and_the_full_one(h2o, bits, chunk, lengths, has_gpu):
    load = Workload(*lengths)
    policy = replace(make_policy(100, 0, 20, 30), prefill_chunk=chunk)
    plan, full = (memory_plan(LLAMA_8B, policy, load, itemsize=2, has_gpu=has_gpu, cache=cache)
                  for cache in (CacheOptions(h2o, bits), CacheOptions()))
    assert [row.name for row in plan.rows] == [row.name for row in full.rows]
    assert all(isinstance(n, int) and n >= 0 for table in rows(plan).values() for n in table)
    for tier in ("gpu", "cpu", "disk"):
        assert plan.total(tier) == sum(getattr(row, tier) for row in plan.rows)
    cached, most = (sum(rows(p)["cache"]) for p in (plan, full))
    vector = 256 if bits == 16 else GroupLayout(length=128, bits=bits).nbytes
    cut = sum(num_cached(h2o, layer, load.prompt_len, 0) for layer in range(32))
    sequences = load.gpu_batch_size * load.num_gpu_batches
    assert cut * sequences * 2 * 8 * vector <= cached <= most
    assert most == sequences * (load.prompt_len + load.gen_len - 1) * 32 * 4096


shares = st.integers(0, 20).flatmap(
    lambda gpu: st.integers(0, 20 - gpu).map(lambda cpu: (5 * gpu, 5 * cpu)))
sizes = st.integers(0, 90).map(lambda gigabytes: gigabytes * 10**9)


caches = st.sampled_from([
    CacheOptions(), CacheOptions(bits=4), CacheOptions(H2OConfig(heavy_ratio=0.2)),
    CacheOptions(H2OConfig(heavy_ratio=0.2, simulate=True)), CacheOptions(attn_sparsity=0.3),
    CacheOptions(H2OConfig(heavy_ratio=0.1, recall=True))])


@settings(max_examples=examples(60))
@given(st.tuples(shares, shares, shares), st.one_of(st.none(), sizes), sizes, sizes, st.booleans(),
       caches, st.sampled_from([16, 8, 4]))
def test_a_suggestion_fits_itself(percent, gpu, cpu, disk, writes, cache, bits):
    limits, options = MemoryLimits(gpu, cpu, disk), {
        "has_gpu": gpu is not None, "writes_weights": writes, "cache": cache,
        "weights": WeightOptions(bits)}
    plan = make_plan(*(share for pair in percent for share in pair), **options)
    try:
        plan.check(limits)
        assert not plan.shortfalls(limits)
    except UserError as error:
        fitting = re.search(r"--percent ([\d .]+) would fit", str(error))
        if fitting is None:
            assert "no --percent would fit" in str(error)
            return
        assert not re.search("hh-ratio|-bits", str(error)), "that would change the results"
        make_plan(*map(float, fitting[1].split()), **options).check(limits)


@pytest.mark.parametrize("field", ["prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches"])
def test_a_workload_is_not_empty(field):
    refused(lambda: replace(LOAD, **{field: 0}), match=field)


# Free memory


def group(folder: Path, names, *, limit, used, inactive, active=0, mapped=0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"cache 9\n{names[2]}inactive_file {inactive}\n{names[2]}active_file {active}\n"
        f"{names[3]} {mapped}\nrss 7\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_mapped_file")
V2 = ("memory.max", "memory.current", "", "file_mapped")


def membership(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def test_cgroup_v2_takes_the_tightest_limit_above(tmp_path):
    mount, path = tmp_path / "fs", membership(tmp_path, "0::/a/b\n")
    assert cgroup_free(mount, tmp_path / "none") is cgroup_free(mount, path) is None
    group(mount / "a", V2, limit=1000, used=700, inactive=100)
    group(mount / "a" / "b", V2, limit="max", used=600, inactive=0)
    assert (cgroup_free(mount, path), cgroup_limit(mount, path)) == (400, 1000)
    for high, free in (("max", 400), ("650", 50)):  # above which the kernel slows processes
        (mount / "a" / "b" / "memory.high").write_text(high)
        assert cgroup_free(mount, path) == free


def test_cgroup_v1_and_its_no_limit(tmp_path):
    mount, path = tmp_path / "fs", membership(tmp_path, "5:cpu:/x\n4:memory:/job\n0::/\n")
    group(mount / "memory", V1, limit=3000, used=1000, inactive=0)
    assert cgroup_free(mount, path) == 2000, "the path is the host's: take the root"
    group(mount / "memory", V1, limit=9223372036854771712, used=5, inactive=0)
    group(mount / "memory" / "job", V1, limit=2000, used=500, inactive=50)
    assert cgroup_free(mount, path) == 1550
    (mount / "memory" / "job" / V1[0]).write_text("9223372036854771712")
    assert cgroup_free(mount, path) is cgroup_limit(mount, path) is None


@pytest.mark.parametrize("names, place, line", [
    (V1, "memory", "4:memory:/\n"), (V2, ".", "0::/\n")])
@pytest.mark.parametrize("inactive, active, mapped, free", [
    (300, 0, 0, 1300), (300, 0, 100, 1200), (300, 500, 100, 1300), (300, 50, 100, 1250),
    (300, 0, 400, 1000)])
def test_mapped_code_is_not_free(tmp_path, names, place, line, inactive, active, mapped, free):
    """Mapped pages may be on either list; what is sure to go are inactive ones beyond them."""
    group(tmp_path / place, names, limit=3000, used=2000, inactive=inactive, active=active,
          mapped=mapped)
    assert cgroup_free(tmp_path, membership(tmp_path, line)) == free


def test_free_heap_bytes_are_counted():
    before = resident_bytes()
    assert before > 1 << 20 and free_heap_bytes(before + (1 << 40)) == 0
    assert 0 <= free_heap_bytes(0) <= resident_bytes()


def test_free_and_whole_memory_respect_the_cgroup(tmp_path, monkeypatch):
    free, limit = (f"flexgen_h2o.storage.free_memory.cgroup_{name}" for name in ("free", "limit"))
    monkeypatch.setattr(free, lambda: 12345)
    for name in ("not", 300 * "a"):  # the second one is too long to exist
        limits = free_memory(tmp_path / name / "there", 77)
        assert (limits.gpu_bytes, limits.cpu_bytes) == (77, 12345) and limits.disk_bytes > 0
    monkeypatch.setattr(free, lambda: None)
    assert 0 < free_memory(tmp_path, None).cpu_bytes <= psutil.virtual_memory().total
    monkeypatch.setattr(limit, lambda: 12345)
    limits = whole_memory(tmp_path / "not" / "there", 77)
    assert (limits.gpu_bytes, limits.cpu_bytes) == (77, 12345)
    assert limits.disk_bytes > free_memory(tmp_path, None).disk_bytes
    monkeypatch.setattr(limit, lambda: None)
    assert whole_memory(tmp_path, None).cpu_bytes == psutil.virtual_memory().total
