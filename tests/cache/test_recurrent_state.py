"""Recurrent states: on every tier, with any split of prompts and batches, they change nothing."""

import shutil

import pytest
import torch
from helpers.generation import PLACES, make_prompts
from safetensors.torch import save_file

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import family
from flexgen_h2o.models.checkpoint import unstacked
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun


def open_tiny(tiny, policy: Policy | None = None, **options) -> LLM:
    return LLM(str(tiny.folder), dtype="float32", policy=policy or Policy(), progress=False,
               **options)


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
    for actual in scores[1:]:
        assert actual == pytest.approx(scores[0], abs=1e-4)


@pytest.mark.parametrize("place", PLACES)
def test_states_take_the_planned_bytes(tiny_model, tmp_path, place):
    tiny = tiny_model("qwen3_5")
    with open_tiny(tiny, Policy(3, 2, cache=place), offload_dir=tmp_path) as llm:
        llm.generate(make_prompts(96, [5] * 6), max_new_tokens=3, eos_token_id=-1)
        (workspace,) = llm._engine._spares
        held = sum(part.slot_layout.nbytes(part.last - part.first, 1)
                   for part in workspace.states.tiers) * 2 * 3
        plan = MemoryPlan(PlannedRun(llm.model_config, llm.policy, Workload(5, 3, 3, 2), 4))
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
    ({"hidden_act": "gelu"}, "hidden_act")])
def test_unsupported_configs_are_errors(values, words):
    with pytest.raises(UserError, match=words):
        from_transformers({"model_type": "qwen3_5_text", "num_hidden_layers": 2, **values}, "x")
