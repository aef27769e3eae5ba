"""Layers that attend to a window: transformers' tokens, H2O's definition, caches of its size."""

from dataclasses import replace

import pytest
from engine.test_pipeline import tokens as tokens_of_ranks
from helpers.error_cases import refused
from helpers.generation import NEW, make_prompts, tokens, transformers_tokens
from helpers.internals import change_configs
from helpers.selection import full

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import add_windows
from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.budget import Budget, budget, num_cached, num_slots
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun, layer_slots

WINDOW = 7  # of the tiny model, in all of its layers
LENGTHS = [6, 7, 8, 19, 1]  # around the window, and far longer
MIXED = (AttentionVariant(window=5, softcap=1.5), AttentionVariant(scale=0.2),
         AttentionVariant(window=9))
SMALL = H2OConfig(heavy_tokens=2)


@pytest.fixture(scope="module")
def tiny(tiny_model):
    return tiny_model("mistral_window")


@pytest.fixture
def mixed(monkeypatch):
    """Models are of `MIXED` variants of attention in place of their own."""
    change_configs(monkeypatch, lambda config: replace(config, attention=MIXED))


def test_the_cache_has_the_slots_of_the_window(tiny):
    prompts = make_prompts(120, [40, 3])
    with LLM(str(tiny.folder), policy=Policy(gpu_batch_size=2), dtype="float32") as llm:
        llm.generate(prompts, max_new_tokens=20)
        slots = 2 * (WINDOW - 1)  # a new token is beside them, and takes one of theirs
        assert llm.stats.kv_cache_bytes == slots * llm.model_config.kv_bytes_per_token(4)


@pytest.mark.parametrize("h2o", [
    None, SMALL, replace(SMALL, positions="rolling"),
    replace(SMALL, recent_tokens=2, prompt_chunk=3), H2OConfig(heavy_ratio=0.1, budget_of="text"),
    *full(H2OConfig(heavy_ratio=0.2), replace(SMALL, evict_generated=False))], ids=str)
def test_layers_of_several_forms_equal_the_simulation(tiny_model, mixed, h2o):
    tiny = tiny_model("llama")
    prompts = make_prompts(120, LENGTHS)
    simulated = replace(h2o or H2OConfig(), simulate=True)
    expected = tokens(tiny, prompts, h2o=simulated, gpu_batch_size=1)
    assert tokens(tiny, prompts, h2o=h2o) == expected
    assert expected != transformers_tokens(tiny, prompts, NEW)


def test_ranks_have_the_windows_of_their_layers(tiny_model, mixed):
    prompts = make_prompts(120, LENGTHS)
    folder = tiny_model("llama").folder
    for h2o in (None, SMALL):
        options = {"h2o": h2o, "policy": Policy(gpu_batch_size=2, num_gpu_batches=2)}
        assert tokens_of_ranks(folder, prompts, ranks=2, bounds=(0, 1, 3), **options) == (
            tokens_of_ranks(folder, prompts, **options))


# Sizes


def test_budgets_on_window_layers():
    variants = (AttentionVariant(window=8), AttentionVariant())
    alone = add_windows(None, variants)
    assert [budget(alone, layer, 50) for layer in (0, 1)] == [Budget(0, 7), None]
    assert [num_slots(alone, 0, *size) for size in ((3, 2), (3, 4), (3, 9), (50, 1))] == [5, 7, 7,
                                                                                          7]
    assert alone.without_windows().is_full and not alone.is_full and not alone.scored

    def of(layer=0, **options):
        return budget(add_windows(H2OConfig(**options), variants), layer, 50)

    assert of(heavy_tokens=2) == of(1, heavy_tokens=2) == Budget(2, 2)
    assert of(heavy_tokens=2, sink_tokens=1) == Budget(3, 2)  # the window leaves the first token
    assert of(1, heavy_tokens=2, sink_tokens=1) == Budget(2, 2, 1)
    assert of(recent_tokens=3, sink_tokens=1) == Budget(0, 4)
    assert of(heavy_tokens=4) == of(heavy_ratio=0.1) == of(heavy_ratio=1.0) == Budget(0, 7)
    assert of(heavy_tokens=2, evict_generated=False) == Budget(0, 7)
    prompts_only = add_windows(H2OConfig(heavy_tokens=2, evict_generated=False), variants)
    assert [num_cached(prompts_only, layer, 50, 9) for layer in (0, 1)] == [7, 13]
    assert add_windows(alone, variants) == alone and add_windows(alone, variants[1:]).is_full
    assert add_windows(None, variants[1:]) is None


def test_the_memory_plan_knows_slots_by_layer(tiny):
    with LLM(str(tiny.folder), dtype="float32") as llm:
        config = llm.model_config
    one = replace(config, attention=(AttentionVariant(window=7), *(AttentionVariant(),) * 2))
    load = Workload(100, 29, 1, 1)
    none = replace(config, attention=())
    plans = [MemoryPlan(PlannedRun(model, Policy(), load, itemsize=4))
             for model in (config, one, none)]
    held = [layer_slots(plan.run.cache, plan.run.model, load) for plan in plans]
    assert held == [(6, 6, 6), (6, 128, 128), (128, 128, 128)]
    caches = [next(row.cpu for row in plan.rows if row.name == "cache") for plan in plans]
    assert caches == [sum(slots) * caches[2] // 384 for slots in held]
    # Chunks go through the window: no prompt is held whole.
    chunks = PlannedRun(config, Policy(prefill_chunk=10), load, itemsize=4)
    chunked = MemoryPlan(chunks)
    assert not chunked.run.gathers_prompts and chunked.run.evicts_chunks
    packed = MemoryPlan(replace(chunks, cache=CacheOptions(bits=4)))
    assert packed.run.gathers_prompts


def test_options_that_windows_do_not_support(tiny):
    with pytest.raises(UserError, match="layers of this model attend to a window: leave it out"):
        LLM(str(tiny.folder), attn_sparsity=0.5)
    with LLM(str(tiny.folder)) as llm:
        refused(lambda: llm.probe([([1, 2], [3])], lambda *_: None), match="probe supports only")
        refused(lambda: llm.generate([[5] * 250], max_new_tokens=20), match="256 positions")
