"""Recurrent states: on every tier, with any split of prompts and batches, they change nothing."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import selection
from helpers.generation import PLACES, answers, make_prompts, open_llm, transformers_tokens
from safetensors.torch import save_file

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import family
from flexgen_h2o.models.checkpoint import unstacked
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning.memory_plan import memory_plan

LENGTHS = [13, 4, 1, 9, 6, 16, 2, 8]
NEW = [2, 9, 5, 1, 20, 4, 11, 7]
CACHES = {
    "full": {},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "by layer": {"h2o": H2OConfig(heavy_ratio=[0.5, 0.1, 0.5, 0.5, 0.2])},
    "rolling": {"h2o": H2OConfig(heavy_tokens=5, recent_tokens=4, positions="rolling")},
    "inside prompts": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=6)},
    "recall": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
    "4 bits, h2o": {"cache_bits": 4, "h2o": H2OConfig(heavy_ratio=0.15)},
    "simulated": {"h2o": H2OConfig(heavy_ratio=0.15, simulate=True)},
}
POLICIES = [(PLACES[0], (2, 1), 0.01, None), (PLACES[1], (3, 2), 0.5, 5),
            (PLACES[2], (2, 2), 0.3, None), (PLACES[3], (4, 1), 0.01, 5),
            (PLACES[0], (8, 1), 0.5, 5)]


def open_tiny(tiny, policy: Policy | None = None, **options) -> LLM:
    return LLM(str(tiny.folder), dtype="float32", policy=policy or Policy(), progress=False,
               **options)


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_do_not_depend_on_blocks_and_tiers(tiny_model, tmp_path, device, cache):
    """Sequences continue in later blocks; prompts come whole and in chunks."""
    tiny = tiny_model("qwen3_5")
    prompts = make_prompts(96, LENGTHS)
    params = [SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=False) for new in NEW]
    with open_tiny(tiny, Policy(gpu_batch_size=1, refill_share=1), **CACHES[cache]) as llm:
        alone = [out.token_ids for out in llm.generate(prompts, params)]
    if cache == "full":
        assert alone == [transformers_tokens(tiny, [prompt], new)[0]
                         for prompt, new in zip(prompts, NEW, strict=True)]
    number = [*CACHES].index(cache)
    policies = POLICIES if selection.every_case else [POLICIES[number % 5],
                                                      POLICIES[(number + 2) % 5]]
    for place, (size, batches), refill, chunk in policies:
        if cache == "inside prompts":
            chunk = None  # prompts come in chunks of prompt_chunk
        policy = Policy(size, batches, cache=place, refill_share=refill, prefill_chunk=chunk)
        with open_tiny(tiny, policy, offload_dir=tmp_path, **CACHES[cache]) as llm:
            assert [out.token_ids for out in llm.generate(prompts, params)] == alone


@pytest.mark.parametrize("cache", ["full", "h2o"])
def test_shared_prompts_and_prefixes(tiny_model, tmp_path, cache):
    """Equal prompts are computed once, and so is a long common prefix."""
    tiny = tiny_model("qwen3_next")
    common, *ends = make_prompts(96, [SHARED_PREFIX + 3, 5, 9, 1])
    prompts = [common + end for end in ends]
    prompts = [prompts[0], *prompts, prompts[2], ends[1]]
    with open_tiny(tiny, Policy(gpu_batch_size=1), **CACHES[cache]) as llm:
        alone = [llm.generate([prompt], max_new_tokens=6, eos_token_id=-1)[0].token_ids
                 for prompt in prompts]
    for place in (PLACES[0], PLACES[3]):
        with open_tiny(tiny, Policy(gpu_batch_size=6, cache=place), offload_dir=tmp_path,
                       **CACHES[cache]) as llm:
            outputs = llm.generate(prompts, max_new_tokens=6, eos_token_id=-1)
        assert [out.token_ids for out in outputs] == alone


@pytest.mark.parametrize("chunk", [None, 4])
def test_turns_of_a_stream_are_one_text(tiny_model, chunk):
    tiny = tiny_model("qwen3_5")
    turns = make_prompts(96, [7, 1, 13, 2])
    for place in (PLACES[0], PLACES[2]):
        with open_llm(tiny, chunk=chunk, cache=place) as llm:
            found = answers(llm, turns, 6, max_tokens=100)
        text = []
        for turn, answer in zip(turns, found, strict=True):
            text += turn
            assert answer == transformers_tokens(tiny, [text], 6)[0]
            text += answer


@pytest.mark.parametrize("key", ["qwen3_next", "qwen3_5"])
def test_parts_of_fused_matrices_are_quantized(tiny_model, tmp_path, key):
    """As in a checkpoint that has them apart, in memory and on disk."""
    tiny, pair = tiny_model(key), tuple(make_prompts(96, [20, 9]))
    config = from_transformers(tiny.config, key)
    with unstacked(open_checkpoint(tiny.folder), family(config).views(config)) as checkpoint:
        parts = {name: torch.empty(checkpoint.info(name).shape) for name in checkpoint.names()}
        for name, part in parts.items():
            checkpoint.read(name, part)
    apart = tmp_path / "apart"
    apart.mkdir()
    save_file(parts, apart / "model.safetensors")
    shutil.copy(tiny.folder / "config.json", apart)
    places = [(apart, Placement(100, 0, 0)), (tiny.folder, Placement(100, 0, 0)),
              (tiny.folder, Placement(0, 0, 100))]
    scores = []
    for folder, place in places:
        with LLM(str(folder), dtype="float32", policy=Policy(weights=place), weight_bits=4,
                 offload_dir=tmp_path, weight_cache=None) as llm:
            scores.append(llm.loglikelihood([pair])[0])
    for found in scores[1:]:
        assert found == pytest.approx(scores[0], abs=1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_states_take_the_planned_bytes(tiny_model, tmp_path, place):
    tiny = tiny_model("qwen3_5")
    with open_tiny(tiny, Policy(3, 2, cache=place), offload_dir=tmp_path) as llm:
        llm.generate(make_prompts(96, [5] * 6), max_new_tokens=3, eos_token_id=-1)
        (workspace,) = llm._engine._spares
        held = sum(part.slot_layout.nbytes(part.last - part.first, 1)
                   for part in workspace.states.tiers) * 2 * 3
        plan = memory_plan(llm.model_config, llm.policy, Workload(5, 3, 3, 2), itemsize=4)
    rows = {row.name: row for row in plan.rows}
    states = rows["recurrent states"]
    assert states.gpu + states.cpu + states.disk == held
    assert bool(rows["state buffers"].cpu) == (place.disk > 0)


def test_drafts_are_refused(tiny_model):
    with pytest.raises(UserError, match="recurrent layers, whose states cannot take back drafts"):
        LLM(str(tiny_model("qwen3_5").folder), policy=Policy(speculate="ngram"))


@pytest.mark.parametrize("values, words", [
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must say"),
    ({"layer_types": ["linear_attention"] * 2}, "without any layer of full attention"),
    ({"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "value heads of linear attention"),
    ({"hidden_act": "gelu"}, "hidden_act"),
])
def test_configs_that_are_refused(values, words):
    with pytest.raises(UserError, match=words):
        from_transformers({"model_type": "qwen3_5_text", "num_hidden_layers": 2, **values}, "x")
