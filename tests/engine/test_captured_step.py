"""Captured decode steps against decode steps operation by operation, and when they are used."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers.generation import make_prompts, token_ids
from helpers.kernel_cases import BUILT
from helpers.selection import full_cases
from helpers.tiny_models import TINY

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.engine import captured_step
from flexgen_h2o.kernels.cpu.library import CapturedCalls

pytestmark = [BUILT, pytest.mark.usefixtures("on_cpu")]

LENGTHS = [9, 17, 2, 23, 5]
OPTIONS = {
    "full": {},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "rolling, sinks": {"h2o": H2OConfig(heavy_tokens=4, recent_tokens=5, sink_tokens=1,
                                        positions="rolling")},
    "decay, some evict": {"h2o": H2OConfig(heavy_tokens=6, recent_tokens=5, score="decay")},
    "recall": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
    "recall of the text, 8 bits": {"cache_bits": 8, "h2o": H2OConfig(
        heavy_ratio=0.1, budget_of="text", recall=True)},
    "recall, budgets by layer": {"h2o": H2OConfig(
        heavy_ratio=(0.1, 1.0, 0.2), recent_ratio=(0.1, 1.0, 0.2), recall=True, index_bits=2)},
    "4 bits": {"weight_bits": 4, "cache_bits": 4, "h2o": H2OConfig(heavy_ratio=0.2)},
    "8 and 4 bits": {"key_bits": 8, "value_bits": 4, "h2o": H2OConfig(heavy_ratio=0.2)},
    "recall, 8 and 4 bits": {"key_bits": 8, "value_bits": 4,
                             "h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
    "cache on disk": {"policy": Policy(gpu_batch_size=5, cache=Placement(50, 0, 50))},
    "h2o on disk": {"policy": Policy(gpu_batch_size=2, num_gpu_batches=3,
                                     cache=Placement(0, 0, 100)),
                    "h2o": H2OConfig(heavy_ratio=0.15)},
    "recall from disk": {"policy": Policy(gpu_batch_size=5, cache=Placement(0, 0, 100),
                                          selective_fetch=True),
                         "h2o": H2OConfig(heavy_ratio=0.1, recall=True)},
    "sparse": {"attn_sparsity": 0.5},
    "simulated": {"h2o": H2OConfig(heavy_ratio=0.2, simulate=True)},
    "a policy of PyTorch's": {"h2o": H2OConfig(heavy_ratio=0.2, score="caote")},
    "blocks": {"policy": Policy(gpu_batch_size=2, num_gpu_batches=2)},
    "fetched layers": {"policy": Policy(gpu_batch_size=5, weights=Placement(93, 0, 7))}}


BRANCHES = ("opt_350m_style", "opt_no_bias", "mistral_window", "qwen3", "phi3_longrope", "gemma2",
            "gemma4", "granite", "olmo2", "stablelm_12b", "neox", "neox_sequential")
"""Models whose captured steps differ."""


@pytest.fixture
def programs(monkeypatch):
    """Count the replays of captured steps."""
    counted = SimpleNamespace(runs=0)
    run = CapturedCalls.replay

    def counts(self):
        counted.runs += 1
        run(self)

    monkeypatch.setattr(CapturedCalls, "replay", counts)
    return counted


def generated(folder, tmp_path, *, dtype, new=8, **options):
    """Token ids, and the log-probabilities of the likeliest at each place."""
    prompts = make_prompts(96, LENGTHS)
    params = SamplingParams(max_new_tokens=new, eos_token_id=-1, logprobs=3)
    with LLM(str(folder), dtype=dtype, offload_dir=str(tmp_path),
             **{"policy": Policy(gpu_batch_size=5)} | options) as llm:
        outputs = llm.generate(prompts, params)
    return (token_ids(outputs),
            torch.tensor([[list(dict(place.top).values()) for place in out.log_probs]
                          for out in outputs]))


def both(monkeypatch, programs, *arguments, **options):
    """Return the results of a run with captured steps, and without them."""
    results = []
    for obstacle in (None, "not now"):
        monkeypatch.setattr(captured_step, "capture_obstacle", lambda *_, why=obstacle, **__: why)
        programs.runs = 0
        results.append(generated(*arguments, **options))
        assert (programs.runs > 0) == (obstacle is None)
    return results


@pytest.mark.parametrize(("model", "options"), [
    *(("llama", options) for options in OPTIONS.values()),
    *((model, {"h2o": H2OConfig(heavy_ratio=0.15, recall=recall)})
      for recall, model in zip(itertools.cycle((False, True)), BRANCHES)),
    *full_cases(*((model, {"h2o": H2OConfig(heavy_ratio=0.15, recall=recall)})
                  for model in TINY for recall in (False, True))),
    *((model, {"h2o": H2OConfig(heavy_ratio=0.15), "policy": policy})
      for model, policy in (("qwen2_moe", Policy(gpu_batch_size=5)),
                            ("qwen3_moe", Policy(gpu_batch_size=2, num_gpu_batches=2,
                                                 experts=Placement(20, 0, 80)))))])
def test_captured_steps_give_the_same_tokens(tiny_model, tmp_path, monkeypatch, programs, model,
                                             options):
    """In float32, where they are not used otherwise: no rounding hides a difference."""
    (tokens, log_probs), (expected, others) = both(
        monkeypatch, programs, tiny_model(model).folder, tmp_path, dtype="float32", **options)
    assert tokens == expected
    torch.testing.assert_close(log_probs, others, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["opt", "llama", "neox"])
def test_captured_steps_in_bfloat16(isa, tiny_model, tmp_path, monkeypatch, programs, model):
    """The first decode step: later ones may go on from another token."""
    (tokens, results), (others, expected) = both(
        monkeypatch, programs, tiny_model(model).folder, tmp_path, dtype="bfloat16", new=2)
    assert [ids[0] for ids in tokens] == [ids[0] for ids in others]  # out of one prefill
    torch.testing.assert_close(results[:, 1], expected[:, 1], rtol=0, atol=0.15)


def test_a_step_replays_each_layer_once(tiny_model, tmp_path, programs):
    generated(tiny_model("llama").folder, tmp_path, dtype="bfloat16", new=4)
    assert programs.runs == 3 * 3


@pytest.mark.parametrize("why, options", [
    ("PyTorch's operations", {"dtype": "float32"}),
    ("separate units", {"policy": Policy(sep_layer=True)}),
    ("hidden states", {"policy": Policy(activations=Placement(0, 0, 100))})])
def test_ineligible_steps_are_not_captured(tiny_model, tmp_path, programs, caplog, why, options):
    with caplog.at_level("DEBUG", logger=captured_step.__name__):
        generated(tiny_model("llama").folder, tmp_path, **{"dtype": "bfloat16"} | options)
    assert programs.runs == 0
    assert why in caplog.text


def test_nothing_is_captured_without_kernels(tiny_model, tmp_path, programs, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    generated(tiny_model("opt").folder, tmp_path, dtype="bfloat16", new=3)
    assert programs.runs == 0


def test_fetched_layers_are_not_captured(tiny_model, tmp_path, programs):
    """Of three layers, those on disk are computed operation by operation."""
    policy = Policy(gpu_batch_size=5, weights=Placement(93, 0, 7))
    generated(tiny_model("llama").folder, tmp_path, dtype="bfloat16", new=4, policy=policy)
    assert 0 < programs.runs < 3 * 3
