"""Decode steps as programs beside decode steps operation by operation: the same, and when."""

from types import SimpleNamespace

import pytest
import torch
from helpers.kernel_cases import BUILT
from helpers.tiny_models import TINY
from llm.test_llm import make_prompts

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
                                          fetch_chosen=True),
                         "h2o": H2OConfig(heavy_ratio=0.1, recall=True)},
    "sparse": {"attn_sparsity": 0.5},
    "simulated": {"h2o": H2OConfig(heavy_ratio=0.2, simulate=True)},
    "a policy of PyTorch's": {"h2o": H2OConfig(heavy_ratio=0.2, score="caote")},
    "blocks": {"policy": Policy(gpu_batch_size=2, num_gpu_batches=2)},
    "fetched layers": {"policy": Policy(gpu_batch_size=5, weights=Placement(93, 0, 7))},
}


BRANCHES = ("opt_350m_style", "opt_no_bias", "mistral_window", "qwen3", "phi3_longrope", "gemma2",
            "granite", "olmo2", "stablelm_12b", "neox", "neox_sequential")
"""Models that differ in what a captured step does; --all goes through all of them."""


@pytest.fixture
def programs(monkeypatch):
    """Counts the runs of programs."""
    counted = SimpleNamespace(runs=0)
    run = CapturedCalls.replay

    def counts(self):
        counted.runs += 1
        run(self)

    monkeypatch.setattr(CapturedCalls, "replay", counts)
    return counted


def generated(folder, tmp_path, *, dtype, new=12, **options):
    """Token ids, and the log-probabilities of the likeliest at each place."""
    prompts = make_prompts(96, LENGTHS)
    params = SamplingParams(max_new_tokens=new, eos_token_id=-1, logprobs=3)
    with LLM(str(folder), dtype=dtype, offload_dir=str(tmp_path),
             **{"policy": Policy(gpu_batch_size=5)} | options) as llm:
        outputs = llm.generate(prompts, params)
    return ([out.token_ids for out in outputs],
            torch.tensor([[list(dict(place.top).values()) for place in out.log_probs]
                          for out in outputs]))


def beside(monkeypatch, programs, why, *arguments, **options):
    """What a run gives with programs or without (`why` not)."""
    monkeypatch.setattr(captured_step, "capture_obstacle", lambda *_, **__: why)
    programs.runs = 0
    found = generated(*arguments, **options)
    assert (programs.runs > 0) == (why is None)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_programs_change_nothing(tiny_model, tmp_path, monkeypatch, programs, name):
    """In float32, which they could do but are not used for: no rounding hides a difference."""
    options = OPTIONS[name]
    arguments = tiny_model("llama").folder, tmp_path
    tokens, log_probs = beside(monkeypatch, programs, None, *arguments, dtype="float32", **options)
    expected = beside(monkeypatch, programs, "not now", *arguments, dtype="float32", **options)
    assert tokens == expected[0]
    torch.testing.assert_close(log_probs, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recall", [False, True])
@pytest.mark.parametrize("model", [
    model if model in BRANCHES else pytest.param(model, marks=pytest.mark.full) for model in TINY])
def test_every_family_and_branch(tiny_model, tmp_path, monkeypatch, programs, model, recall):
    arguments = tiny_model(model).folder, tmp_path
    options = {"dtype": "float32", "h2o": H2OConfig(heavy_ratio=0.15, recall=recall)}
    tokens, log_probs = beside(monkeypatch, programs, None, *arguments, **options)
    expected = beside(monkeypatch, programs, "not now", *arguments, **options)
    assert tokens == expected[0]
    torch.testing.assert_close(log_probs, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["opt", "llama", "neox"])
def test_bfloat16(isa, tiny_model, tmp_path, monkeypatch, programs, model):
    """The first decode step: later ones may go on from another token."""
    arguments = tiny_model(model).folder, tmp_path
    (tokens, found), (others, expected) = (
        beside(monkeypatch, programs, why, *arguments, dtype="bfloat16", new=2)
        for why in (None, "not now"))
    assert [each[0] for each in tokens] == [each[0] for each in others]  # out of one prefill
    torch.testing.assert_close(found[:, 1], expected[:, 1], rtol=0, atol=0.15)


def test_a_forward_pass_runs_each_layer_once(tiny_model, tmp_path, programs):
    generated(tiny_model("llama").folder, tmp_path, dtype="bfloat16", new=4)
    assert programs.runs == 3 * 3


@pytest.mark.parametrize("model", ["qwen2_moe", "qwen3_moe"])
def test_the_attention_of_mixtures(tiny_model, tmp_path, monkeypatch, programs, model):
    """Before the router; the experts may be elsewhere."""
    arguments = tiny_model(model).folder, tmp_path
    for policy in (Policy(gpu_batch_size=5),
                   Policy(gpu_batch_size=2, num_gpu_batches=2, experts=Placement(20, 0, 80))):
        options = {"dtype": "float32", "h2o": H2OConfig(heavy_ratio=0.15), "policy": policy}
        tokens, log_probs = beside(monkeypatch, programs, None, *arguments, **options)
        expected = beside(monkeypatch, programs, "not now", *arguments, **options)
        assert tokens == expected[0]
        torch.testing.assert_close(log_probs, expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("why, options", [
    ("PyTorch's, bit by bit", {"dtype": "float32"}),
    ("steps of their own", {"policy": Policy(sep_layer=True)}),
    ("hidden states", {"policy": Policy(activations=Placement(0, 0, 100))}),
])
def test_what_is_not_bound_and_why(tiny_model, tmp_path, programs, caplog, why, options):
    with caplog.at_level("DEBUG", logger=captured_step.__name__):
        generated(tiny_model("llama").folder, tmp_path, **{"dtype": "bfloat16"} | options)
    assert programs.runs == 0
    assert why in caplog.text


def test_without_kernels_nothing_is_bound(tiny_model, tmp_path, programs, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    generated(tiny_model("opt").folder, tmp_path, dtype="bfloat16", new=3)
    assert programs.runs == 0


def test_layers_that_are_fetched_go_their_way(tiny_model, tmp_path, programs):
    """Of three layers, those on disk are computed operation by operation."""
    policy = Policy(gpu_batch_size=5, weights=Placement(93, 0, 7))
    generated(tiny_model("llama").folder, tmp_path, dtype="bfloat16", new=4, policy=policy)
    assert 0 < programs.runs < 3 * 3
